"""The functions and arguments of the streaming SQuAD scripts that people have (MemXLNet's), on top of `prepare`.

    configure_memory_tokens(tokenizer, memory_num_tokens=16)
    process_and_cache_dataset(dataset_name=..., split=..., cache_dir=..., tokenizer=tokenizer)     -> number of windows
    dataset = create_dataset_from_cache(...)                                                       -> a CachedDataset
    for steps in create_dataloader(dataset, batch_size=8): ...                                     -> time steps

A cache folder is named by everything that changes features; data that changed is processed again, and old features are
never returned. `doc_stride` is the overlap of two windows. Work is always streamed and lazy, so `use_streaming`,
`use_lazy_loading` and `streaming_chunk_size` change nothing.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from milldam.errors import ConfigError, StoreError
from milldam.files import hash_bytes, write_file
from milldam.input_files import NO_INPUT, add_input, is_address
from milldam.qa.batches import COLUMNS, DocumentSamples, Selection, Strategy, TimeSteps, WindowSamples
from milldam.qa.job import prepare
from milldam.qa.records import list_files
from milldam.qa.spans import stretches
from milldam.qa.store import FeatureStore
from milldam.qa.template import READ, WRITE, add_memory_tokens
from milldam.qa.windows import VERSION, facts_beside
from milldam.stores.kinds import TABLE
from milldam.tokenizers.loading import load_tokenizer

_TEXTS = ("question", "context", "chosen_answer_text", "chosen_answer_char_span")


def configure_memory_tokens(tokenizer: Any, memory_num_tokens: int) -> dict[str, list[int]]:
    """Add [MEM_READ_i] and [MEM_WRITE_i] to a tokenizer of transformers or tokenizers; their ids.

    Everything processed with it afterwards has them in every window. Give the model's embeddings room for them:
    `model.resize_token_embeddings(len(tokenizer))`.
    """
    backend = _backend(tokenizer)
    if (count := _memory_count(backend)) > memory_num_tokens:
        raise ConfigError(f"memory_num_tokens: {memory_num_tokens}; the tokenizer has {count} already.")
    if backend is not tokenizer:  # by its own method, so that the wrapper knows them too
        names = [name.format(i) for name in (READ, WRITE) for i in range(memory_num_tokens)]
        tokenizer.add_tokens(names, special_tokens=True)
    ids = add_memory_tokens(_backend(tokenizer), memory_num_tokens)
    return {"mem_read_ids": list(ids.read), "mem_write_ids": list(ids.write)}


def _backend(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "token_to_id"):
        raise ConfigError(
            f"tokenizer: {type(tokenizer).__name__} is not a fast tokenizer. Load it with transformers' "
            "AutoTokenizer.from_pretrained or tokenizers.Tokenizer.from_file, and pass that."
        )
    return backend


def _memory_count(tokenizer: Any) -> int:
    count = 0
    while tokenizer.token_to_id(READ.format(count)) is not None:
        count += 1
    return count


_DEFAULTS = {"tokenizer": None, "max_examples": None, "max_seq_length": 384, "doc_stride": 128, "max_n_segs": None}
_WITHOUT_EFFECT = {"use_streaming", "use_lazy_loading", "streaming_chunk_size"}


def process_and_cache_dataset(
    dataset_name: str | Path,
    split: str = "train",
    cache_dir: str | Path = "./.cache",
    max_memory_gb: float = 8.0,
    workers: int | None = None,
    **settings: Any,
) -> int:
    """Make the windows of a dataset, unless they are there, and return their number. Resumes if it was interrupted.

    `settings`: tokenizer (needed), max_examples, max_seq_length, doc_stride, max_n_segs.
    """
    folder, options = _cached(dataset_name, split, Path(cache_dir), settings)
    memory = f"{round(1000 * max_memory_gb)}MB"
    return len(prepare(dataset_name, folder, split=split, memory=memory, workers=workers, **options))


def create_dataset_from_cache(
    dataset_name: str | Path, split: str = "train", cache_dir: str | Path = "./.cache", **settings: Any
) -> CachedDataset:
    """Open what `process_and_cache_dataset` made with the same arguments; nothing is loaded."""
    folder, _ = _cached(dataset_name, split, Path(cache_dir), settings)
    dataset = CachedDataset(folder) if (folder / TABLE.manifest).exists() else None
    state, name = NO_INPUT, str(dataset_name)
    if dataset is not None and (Path(name).exists() or is_address(name) or glob.has_magic(name)):
        for file in list_files([name], split):
            state = add_input(state, file.path, file.size, file.version)
        dataset = dataset if dataset.manifest.input == state else None
    if dataset is None:
        raise StoreError(
            f"{folder}: no features of {name} ({split}), as it is now, with these settings and this tokenizer. "
            "Call process_and_cache_dataset with the same arguments first."
        )
    return dataset


def _cached(name: str | Path, split: str, cache: Path, settings: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The folder for features, named by what decides them, and the options of `prepare`. Saves the tokenizer."""
    unknown = settings.keys() - _DEFAULTS.keys() - _WITHOUT_EFFECT
    if unknown or settings.get("tokenizer") is None:
        raise ConfigError(f"Unknown: {', '.join(sorted(unknown))}." if unknown else "A tokenizer is needed.")
    settings = _DEFAULTS | settings
    tokenizer = settings["tokenizer"]
    if isinstance(tokenizer, str | os.PathLike):
        text, facts = load_tokenizer(str(tokenizer)).json, facts_beside(str(tokenizer))
    else:
        values = {name: getattr(tokenizer, name, None) for name in ("padding_side", "pad_token", "cls_token")}
        text, facts = _backend(tokenizer).to_str(), {name: str(one) for name, one in values.items() if one is not None}
    # Calls of a transformers tokenizer leave truncation and padding in it, which change nothing here.
    plain = tokenizers.Tokenizer.from_str(text)
    plain.no_truncation()
    plain.no_padding()
    digest = hash_bytes(json.dumps([plain.to_str(), facts]).encode("utf-8", "surrogatepass"))[:16]
    saved = cache / "tokenizers" / digest
    saved.mkdir(parents=True, exist_ok=True)
    write_file(saved / "tokenizer_config.json", json.dumps(facts).encode())
    write_file(saved / "tokenizer.json", plain.to_str().encode("utf-8", "surrogatepass"))
    options = {one: settings[one] for one in ("max_examples", "max_seq_length")} | {"overlap": settings["doc_stride"]}
    options |= {"max_segments": settings["max_n_segs"], "memory_tokens": _memory_count(plain)}
    key = hash_bytes(json.dumps([VERSION, str(name), split, digest, options]).encode())[:16]
    folder = re.sub(r"[^\w.-]+", "_", f"{Path(name).name}-{split}")[:80]
    return cache / f"{folder}-{key}", options | {"tokenizer": saved}


class CachedDataset(FeatureStore):
    """A store whose windows come with the texts of their example, as tensors if torch is installed.

    `offset_mapping` covers what the tokens stand for, so that the context from the start of the answer's first token to
    the end of its last one is the answer.
    """

    def __getitem__(self, number: int) -> dict[str, Any]:
        window = super().__getitem__(number)
        numbers = np.array([range(len(self))[number]])
        window |= {name: value[0] for name, value in self.texts(self.rows(numbers, ("example",))["example"]).items()}
        window["offset_mapping"] = stretches(self, numbers)[0]
        window |= {name: np.array(window[name]) for name in ("start_positions", "end_positions")}
        return _tensors(window)

    def texts(self, examples: Any) -> dict[str, Any]:
        """The texts of some examples, by name."""
        rows = [self.example(number) for number in examples.tolist()]
        texts = {name: [one[name] for one in rows] for name in _TEXTS} | {"example_id": [one["id"] for one in rows]}
        spans = [span or (-1, -1) for span in texts["chosen_answer_char_span"]]
        return texts | {"chosen_answer_char_span": np.array(spans, np.int64).reshape(-1, 2)}


def _tensors(batch: dict[str, Any]) -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return batch
    import torch

    return {name: torch.from_numpy(one) if isinstance(one, np.ndarray) else one for name, one in batch.items()}


def create_dataloader(
    dataset: CachedDataset,
    batch_size: int,
    shuffle: bool = True,
    num_workers: int = 0,
    use_time_step_major: bool = True,
    max_segments: int | None = None,
    segment_selection_strategy: Strategy = "answer_centered",
    epoch_seed: int = 0,
    **options: Any,
) -> CachedBatches:
    """Batches of a cached dataset: a list over time steps, each a dict; or, not time-step-major, a dict of windows.

    `num_workers`: more than 0: a thread makes batches ahead. `options`: those of `batches`, such as rank, world_size.
    """
    columns, selection = (*COLUMNS, "offset_mapping"), None
    if max_segments is not None:
        selection = Selection(strategy=segment_selection_strategy, max_segments=max_segments, seed=epoch_seed)
    samples: Any = DocumentSamples(dataset, selection=selection, columns=columns)
    if not use_time_step_major:
        samples = WindowSamples(dataset, columns=columns)
    options = {"shuffle": shuffle, "seed": epoch_seed, "prefetch": 2 * num_workers} | options
    return CachedBatches(dataset, samples.batches(batch_size, **options))


class CachedBatches:
    """Every loop is another epoch. Steps come with the texts of their rows, also after a document has ended."""

    def __init__(self, dataset: CachedDataset, batches: Any) -> None:
        self._dataset, self.batches = dataset, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            is_steps = isinstance(batch, TimeSteps)
            texts = self._dataset.texts(batch.examples if is_steps else batch["example"])
            texts["example_ids"] = texts["example_id"]
            steps = []
            for step in batch if is_steps else [batch | {"document_mask": batch["window"] >= 0}]:
                there = step["document_mask"]
                step["offset_mapping"][there] = stretches(self._dataset, step["window"][there])
                steps.append(_tensors({name: column for name, column in step.items() if name != "example"} | texts))
            yield steps if is_steps else steps[0]
