"""Names and arguments of the streaming SQuAD processors that people have (MemXLNet's), on top of `prepare`.

    configure_memory_tokens(tokenizer, memory_num_tokens=16)
    process_and_cache_dataset(dataset_name=..., split=..., cache_dir=..., tokenizer=tokenizer)     -> number of windows
    dataset = create_dataset_from_cache(...)                                                       -> a SquadDataset
    for steps in create_dataloader(dataset, batch_size=8): ...                                     -> time steps

A cache folder is named by everything that changes features (data, split, settings, tokenizer): with other arguments,
other features are made or missed, never old ones returned. `doc_stride` is the overlap of two windows, as in fast
tokenizers. There is one way to work, streamed and lazy, so `use_streaming`, `use_lazy_loading` and
`streaming_chunk_size` change nothing. `max_memory_gb` bounds what preparing takes.

caching       tokenizers on disk, datasets -> cached features
loading       cached features -> batches
"""

from __future__ import annotations

from milldam.qa.compat.caching import (
    StreamingSquadProcessor,
    configure_memory_tokens,
    create_dataset_from_cache,
    process_and_cache_dataset,
)
from milldam.qa.compat.loading import FeatureLoader, SquadDataset, create_dataloader

__all__ = [
    "FeatureLoader",
    "SquadDataset",
    "StreamingSquadProcessor",
    "configure_memory_tokens",
    "create_dataloader",
    "create_dataset_from_cache",
    "process_and_cache_dataset",
]
