"""Datasets -> features in a cache folder that is named by everything that decides them."""

from __future__ import annotations

import glob
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, StoreError
from milldam.files import NewFile, hash_bytes
from milldam.qa.compat.loading import SquadDataset
from milldam.qa.compat.tokenizers import CachedTokenizer
from milldam.qa.sources import Example
from milldam.qa.windows import VERSION
from milldam.stores.features.manifest import NAME

log = logging.getLogger("milldam")


def process_and_cache_dataset(
    dataset_name: str | Path,
    split: str = "train",
    cache_dir: str | Path = "./.cache",
    max_examples: int | None = None,
    max_seq_length: int = 384,
    doc_stride: int = 128,
    streaming_chunk_size: int = 1000,
    tokenizer: Any = None,
    max_n_segs: int | None = None,
    use_streaming: bool = True,
    max_memory_gb: float = 8.0,
    workers: int | None = None,
) -> int:
    """Make the windows of a dataset, unless they are there; how many there are.

    dataset_name   a file, folder, glob or address (SQuAD's JSON; HF's flat form as jsonl, parquet, a dataset on disk),
                   or a name on the Hub
    tokenizer      a fast tokenizer of transformers, a tokenizers.Tokenizer, or the path of one

    Interrupted, it resumes when it is called again.
    """
    from milldam.qa.job import prepare

    _require_sizes(streaming_chunk_size, max_memory_gb)
    cached = CachedTokenizer(tokenizer)
    settings = {"max_examples": max_examples, "max_seq_length": max_seq_length}
    settings |= {"doc_stride": doc_stride, "max_n_segs": max_n_segs}
    folder = _folder(Path(cache_dir), str(dataset_name), split, cached, settings)
    made = prepare(
        dataset_name,
        folder,
        tokenizer=cached.saved(Path(cache_dir)),
        split=split,
        max_examples=max_examples,
        max_seq_length=max_seq_length,
        overlap=doc_stride,
        memory_tokens=cached.memory_tokens,
        max_segments=max_n_segs,
        memory=f"{round(1000 * max_memory_gb)}MB",
        workers=workers,
    )
    return len(made)


def create_dataset_from_cache(
    dataset_name: str | Path,
    split: str = "train",
    cache_dir: str | Path = "./.cache",
    max_examples: int | None = None,
    max_seq_length: int = 384,
    doc_stride: int = 128,
    max_n_segs: int | None = None,
    tokenizer: Any = None,
    use_lazy_loading: bool = True,
    streaming_chunk_size: int = 1000,
) -> SquadDataset:
    """Open what `process_and_cache_dataset` made with the same arguments; nothing is loaded."""
    settings = {"max_examples": max_examples, "max_seq_length": max_seq_length}
    settings |= {"doc_stride": doc_stride, "max_n_segs": max_n_segs}
    folder = _folder(Path(cache_dir), str(dataset_name), split, CachedTokenizer(tokenizer), settings)
    if not (folder / NAME).exists():
        raise _missing(folder, str(dataset_name), split, settings)
    return SquadDataset(folder)


def _folder(cache: Path, dataset: str, split: str, tokenizer: CachedTokenizer, settings: dict[str, Any]) -> Path:
    known = {"version": VERSION, "split": split, "input": _identity(dataset, split), "tokenizer": tokenizer.hash}
    digest = hash_bytes(json.dumps(known | settings, sort_keys=True).encode())
    name, part = re.sub(r"[^\w.-]+", "_", Path(dataset).name or "data"), re.sub(r"[^\w-]+", "_", split)
    return cache / f"{name[:60]}-{part}-{digest[:16]}"


def _identity(dataset: str, split: str) -> str:
    """Changes when the data does; a dataset on the Hub is known by its name."""
    from milldam.input_files import InputState, is_address
    from milldam.qa.records import list_files

    if not (Path(dataset).exists() or glob.has_magic(dataset) or is_address(dataset)):
        return dataset
    state = InputState()
    for file in list_files([dataset], split):
        state.add(file.path, file.size, file.version)
    return json.dumps(state.as_json(), sort_keys=True)


def _missing(folder: Path, dataset: str, split: str, settings: dict[str, Any]) -> StoreError:
    cache, stem = folder.parent, folder.name.rpartition("-")[0]
    others = sorted(path.name for path in cache.glob(f"{stem}-*") if path.is_dir())
    there = f"\nMade with other arguments, or from other data: {', '.join(others[:5])}" if others else ""
    given = ", ".join(f"{name}={value}" for name, value in settings.items())
    return StoreError(
        f"{cache}: no features of {dataset} ({split}) with {given} and this tokenizer. Call process_and_cache_dataset "
        f"with the same arguments first.{there}"
    )


def _require_sizes(streaming_chunk_size: int, max_memory_gb: float) -> None:
    if streaming_chunk_size < 1:
        raise ConfigError(f"streaming_chunk_size: {streaming_chunk_size}; use 1 or more.")
    if not max_memory_gb > 0:
        raise ConfigError(f"max_memory_gb: {max_memory_gb}; use more than 0.")


class StreamingSquadProcessor:
    """Examples to windows, with a method to override: `process_example`.

    >>> class Lower(StreamingSquadProcessor):                                                     # doctest: +SKIP
    ...     def process_example(self, example):
    ...         return example | {"question": example["question"].lower()}
    >>> processor = Lower(tokenizer)                                                              # doctest: +SKIP
    >>> processor.process_dataset_streaming("train-v2.0.json", "train", cache_manager=None)       # doctest: +SKIP
    131823
    >>> dataset = processor.dataset                                                               # doctest: +SKIP

    Where it is overridden, what it gives is written beside the features first, as JSON lines: it can be looked at, the
    workers need not know the class, and the features are named by it, so that a changed method makes new ones.
    """

    workers: int | None = None

    def __init__(
        self,
        tokenizer: Any,
        max_seq_length: int = 384,
        doc_stride: int = 128,
        streaming_chunk_size: int = 1000,
        max_memory_gb: float = 8.0,
    ) -> None:
        _require_sizes(streaming_chunk_size, max_memory_gb)
        self.tokenizer, self.max_seq_length, self.doc_stride = tokenizer, max_seq_length, doc_stride
        self.max_memory_gb = max_memory_gb
        self._dataset: SquadDataset | None = None

    def process_example(self, example: dict[str, Any]) -> dict[str, Any] | None:
        """An example in HF's flat form, as it is to be used; None: not at all."""
        return example

    @property
    def dataset(self) -> SquadDataset:
        """What was processed last."""
        if self._dataset is None:
            raise StoreError("Nothing was processed yet: call process_dataset_streaming first.")
        return self._dataset

    def process_dataset_streaming(
        self,
        dataset_name: str | Path,
        split: str = "train",
        max_examples: int | None = None,
        cache_manager: Any = None,
        max_n_segs: int | None = None,
    ) -> int:
        """Make the windows of a dataset, unless they are there; how many there are.

        `cache_manager`: anything with a `cache_dir`; None: ./.cache
        """
        cache = "./.cache" if cache_manager is None else getattr(cache_manager, "cache_dir", None)
        if not isinstance(cache, str | Path):
            raise ConfigError(
                f"cache_manager: {type(cache_manager).__name__} has no cache_dir, where features would go."
            )
        if type(self).process_example is not StreamingSquadProcessor.process_example:
            dataset_name = _processed(self.process_example, str(dataset_name), split, max_examples, Path(cache))
        given = {"dataset_name": dataset_name, "split": split, "cache_dir": cache, "tokenizer": self.tokenizer}
        given |= {"max_examples": max_examples, "max_n_segs": max_n_segs}
        given |= {"max_seq_length": self.max_seq_length, "doc_stride": self.doc_stride}
        count = process_and_cache_dataset(**given, max_memory_gb=self.max_memory_gb, workers=self.workers)
        self._dataset = create_dataset_from_cache(**given)
        return count


def _processed(
    process: Callable[[dict[str, Any]], dict[str, Any] | None],
    dataset: str,
    split: str,
    max_examples: int | None,
    cache: Path,
) -> Path:
    """Examples as a method makes them, in a file that is named by its content; one example is held at a time."""
    from milldam.qa.sources import examples_of

    cache.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w-]+", "_", Path(dataset).stem or "data")[:60]
    left_out: list[str] = []
    count = 0
    with NewFile(cache / f"{name}-{split}.processed.jsonl") as new:
        for example in examples_of(dataset, split=split, on_reject=lambda reject: left_out.append(reject.reason)):
            made = process(_flat(example))
            if made is None:
                continue
            new.write(json.dumps(made).encode() + b"\n")
            count += 1
            if count == max_examples:
                break
        content = new.commit()["xxh3"]
    if left_out:
        log.warning("%s: %d records are not examples and were left out", dataset, len(left_out))
    path = new.path.with_name(f"{name}-{content[:16]}.jsonl")
    if path.exists():
        # The older one has the date that the features know it by.
        new.path.unlink()
        return path
    return new.path.rename(path)


def _flat(example: Example) -> dict[str, Any]:
    answers = {
        "text": [answer.text for answer in example.answers],
        "answer_start": [answer.start for answer in example.answers],
    }
    texts = {"id": example.id, "title": example.title, "context": example.context, "question": example.question}
    return texts | {"answers": answers}
