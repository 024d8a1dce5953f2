"""Samples -> tensors: batches straight to a device, and datasets for torch's DataLoader. Needs torch.

    for x, y in tensors(store.windows(1024).batches(16), device="cuda"): ...         no DataLoader; the quickest
    DataLoader(BatchDataset(store.windows(1024), 16), batch_size=None, num_workers=2)   whole batches, made by workers
    DataLoader(MapDataset(store.windows(1024)), batch_size=16, shuffle=True)         for those who bring a sampler

Tokens come as int64, whatever they are stored as. Datasets pickle as what they were made from, so a worker that is
started copies nothing. Reading is so cheap that worker processes make it slower: a batch that crosses a process border
costs more than to make it. They are here for loops that ask for a DataLoader.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError('milldam.torch needs torch: pip install "milldam[torch]"', name="torch") from None

from milldam.torch.datasets import BatchDataset, MapDataset
from milldam.torch.tensors import TensorBatches, tensors

__all__ = ["BatchDataset", "MapDataset", "TensorBatches", "tensors"]
