"""A checkpoint that the examples beside it share: model, optimizer, where the data stands, and the step."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from milldam.torch import TensorBatches


def save(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, batches: TensorBatches, step: int) -> None:
    """Whole or not at all: a run that is killed while it saves keeps the checkpoint before."""
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": batches.state_dict()}
    torch.save({"step": step, **states}, f"{path}.new")
    Path(f"{path}.new").replace(path)


def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, batches: TensorBatches) -> int:
    """Everything as it was; the step it was saved at."""
    found = torch.load(path, map_location=next(model.parameters()).device)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    batches.load_state_dict(found["data"])
    return found["step"]
