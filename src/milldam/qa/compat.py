"""The functions and arguments of the streaming SQuAD scripts that people have (MemXLNet's), on top of `prepare`.

    configure_memory_tokens(tokenizer, memory_num_tokens=16)
    process_and_cache_dataset(dataset_name=..., split=..., cache_dir=..., tokenizer=tokenizer)     -> number of windows
    dataset = create_dataset_from_cache(...)                                                       -> a FeatureStore
    for steps in create_dataloader(dataset, batch_size=8): ...                                     -> time steps

A cache folder is named by everything that changes features. Both functions bring it up to date, so that old features
are never returned. Work is always streamed and lazy: `use_streaming`, `use_lazy_loading` and `streaming_chunk_size`
change nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError
from milldam.files import hash_bytes, write_file
from milldam.qa.batches import COLUMNS, DocumentSamples, Selection, Strategy, WindowSamples
from milldam.qa.job import prepare
from milldam.qa.store import FeatureStore
from milldam.qa.template import READ, WRITE, add_memory_tokens
from milldam.tokenizers.loading import Tokenizer, load_tokenizer


def configure_memory_tokens(tokenizer: Any, memory_num_tokens: int) -> dict[str, list[int]]:
    """Add [MEM_READ_i] and [MEM_WRITE_i] to a fast tokenizer of transformers or tokenizers; their ids.

    Everything processed with it afterwards has them in every window. Give the model's embeddings room for them:
    `model.resize_token_embeddings(len(tokenizer))`.
    """
    if hasattr(tokenizer, "backend_tokenizer"):  # by its own method, so that the wrapper knows them too
        names = [name.format(i) for name in (READ, WRITE) for i in range(memory_num_tokens)]
        tokenizer.add_tokens(names, special_tokens=True)
    ids = add_memory_tokens(getattr(tokenizer, "backend_tokenizer", tokenizer), memory_num_tokens)
    return {"mem_read_ids": list(ids.read), "mem_write_ids": list(ids.write)}


def process_and_cache_dataset(
    dataset_name: str | Path, split: str = "train", cache_dir: str | Path = "./.cache", **settings: Any
) -> int:
    """Make the windows of a dataset, unless they are there, and return their number. Resumes if it was interrupted.

    `settings`: those of `create_dataset_from_cache`.
    """
    return len(create_dataset_from_cache(dataset_name, split, cache_dir, **settings))


def create_dataset_from_cache(
    dataset_name: str | Path,
    split: str = "train",
    cache_dir: str | Path = "./.cache",
    *,
    tokenizer: Any,
    max_examples: int | None = None,
    max_seq_length: int = 384,
    doc_stride: int = 128,
    max_n_segs: int | None = None,
    max_memory_gb: float = 8.0,
    workers: int | None = None,
    use_streaming: bool = True,
    use_lazy_loading: bool = True,
    streaming_chunk_size: int = 1000,
) -> FeatureStore:
    """Open the windows of a dataset; nothing is loaded. `doc_stride`: the overlap of two windows."""
    if isinstance(tokenizer, str | os.PathLike):
        loaded = load_tokenizer(str(tokenizer))
    else:
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(backend, "to_str"):
            raise ConfigError(f"tokenizer: {type(tokenizer).__name__} is no fast tokenizer; AutoTokenizer loads one.")
        of_wrapper = {"cls": "cls_token", "pad": "pad_token", "padding_side": "padding_side"}
        named = {name: getattr(tokenizer, attribute, None) for name, attribute in of_wrapper.items()}
        loaded = Tokenizer("", backend.to_str(), named).load()
    plain, named = loaded.huggingface, loaded.named
    facts = {"cls_token": named.get("cls"), "pad_token": named.get("pad"), "padding_side": named.get("padding_side")}
    digest = hash_bytes(json.dumps([plain.to_str(), facts]).encode("utf-8", "surrogatepass"))[:16]
    saved = Path(cache_dir) / "tokenizers" / digest
    saved.mkdir(parents=True, exist_ok=True)
    write_file(saved / "tokenizer_config.json", json.dumps(facts).encode())
    write_file(saved / "tokenizer.json", plain.to_str().encode("utf-8", "surrogatepass"))
    options: dict[str, Any] = {"max_examples": max_examples, "max_seq_length": max_seq_length, "overlap": doc_stride}
    memory = sum(plain.token_to_id(READ.format(number)) is not None for number in range(plain.get_vocab_size()))
    options |= {"max_segments": max_n_segs, "memory_tokens": memory}
    key = hash_bytes(json.dumps([str(dataset_name), split, digest, options]).encode())[:16]
    name = re.sub(r"[^\w.-]+", "_", f"{Path(dataset_name).name}-{split}")[:80]
    limits: dict[str, Any] = {"memory": f"{round(1000 * max_memory_gb)}MB", "workers": workers, "split": split}
    return prepare(dataset_name, Path(cache_dir) / f"{name}-{key}", tokenizer=saved, **limits, **options)


def create_dataloader(
    dataset: FeatureStore,
    batch_size: int,
    shuffle: bool = True,
    num_workers: int = 0,
    use_time_step_major: bool = True,
    max_segments: int | None = None,
    segment_selection_strategy: Strategy = "answer_centered",
    epoch_seed: int = 0,
    **options: Any,
) -> Any:
    """Batches of a dataset: a list over time steps, each a dict; or, not time-step-major, a dict of windows. Tensors
    if torch is installed. Every loop is another epoch.

    `num_workers`: more than 0: a thread makes batches ahead. `options`: those of `batches`, such as rank, world_size.
    """
    columns, selection = (*COLUMNS, "offset_mapping"), None
    if max_segments is not None:
        selection = Selection(strategy=segment_selection_strategy, max_segments=max_segments, seed=epoch_seed)
    samples: Any = DocumentSamples(dataset, selection=selection, columns=columns)
    if not use_time_step_major:
        samples = WindowSamples(dataset, columns=columns)
    options = {"shuffle": shuffle, "seed": epoch_seed, "prefetch": 2 * num_workers} | options
    batches = samples.batches(batch_size, **options)
    if importlib.util.find_spec("torch") is None:
        return batches
    from milldam.torch import tensors

    return tensors(batches)
