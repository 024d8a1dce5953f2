"""Batches of windows as tensors: plain ones, time steps and lanes. Needs torch, when it is called."""

from __future__ import annotations

from typing import Any


def to_tensors(batch: Any, device: Any = None) -> Any:
    """The same batch with tensors for arrays, on a device when one is named; a list of steps stays a list.

    On the CPU they share the arrays' memory, without a copy. For all batches of a loader: `milldam.torch.tensors`.

    >>> for steps in DocumentSamples(store).batches(8):                                     # doctest: +SKIP
    ...     for step in to_tensors(steps, "cuda"): ...
    """
    import torch

    from milldam.torch.tensors import converted

    return converted(batch, lambda array: torch.from_numpy(array).to(device or "cpu"))
