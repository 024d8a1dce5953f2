"""Datasets -> features in a cache folder that is named by everything that decides them; with tokenizers as scripts have
them (of transformers or tokenizers, or paths): memory tokens added, files on disk.
"""

from __future__ import annotations

import glob
import itertools
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, StoreError
from milldam.files import NewFile, hash_bytes, write_file
from milldam.qa.compat.loading import SquadDataset
from milldam.qa.sources import Example
from milldam.qa.template import READ, WRITE, add_memory_tokens
from milldam.qa.windows import VERSION
from milldam.stores.features.manifest import NAME

_FACTS = ("padding_side", "pad_token", "cls_token")
_MEMORY_IDS = {"mem_read_ids": READ, "mem_write_ids": WRITE}


def configure_memory_tokens(tokenizer: Any, memory_num_tokens: int) -> dict[str, list[int]]:
    """Add [MEM_READ_i] and [MEM_WRITE_i] to a tokenizer of transformers or tokenizers.

    Gives their ids: {"mem_read_ids": [...], "mem_write_ids": [...]}.

    What is processed with the tokenizer afterwards has them in every window. The model's embeddings must have room:
    `model.resize_token_embeddings(len(tokenizer))`.
    """
    if memory_num_tokens < 0:
        raise ConfigError(f"memory_num_tokens: {memory_num_tokens}; use 0 or more.")
    if isinstance(tokenizer, str | os.PathLike):
        raise ConfigError(
            f"tokenizer: {os.fspath(tokenizer)} is a path. The tokens are added to a tokenizer in memory: load it with "
            "transformers' AutoTokenizer.from_pretrained or tokenizers.Tokenizer.from_file, and pass that."
        )
    backend = _backend(tokenizer)
    there = memory_count(backend)
    if there > memory_num_tokens:
        raise ConfigError(
            f"memory_num_tokens: {memory_num_tokens}; the tokenizer has {there} memory tokens already. Load it again."
        )
    names = {kind: [name.format(i) for i in range(memory_num_tokens)] for kind, name in _MEMORY_IDS.items()}
    if backend is tokenizer:
        add_memory_tokens(tokenizer, memory_num_tokens)
    else:
        from tokenizers import AddedToken

        # By its own method, so that the wrapper knows of them too.
        added = [AddedToken(name, normalized=False, special=True) for name in itertools.chain(*names.values())]
        tokenizer.add_tokens(added, special_tokens=True)
    backend = _backend(tokenizer)
    return {kind: [int(backend.token_to_id(name)) for name in named] for kind, named in names.items()}


def _backend(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` in it."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "token_to_id") or not hasattr(backend, "to_str"):
        raise ConfigError(
            f"tokenizer: {type(tokenizer).__name__} has no offsets. Give a fast tokenizer of transformers, a "
            "tokenizers.Tokenizer, or the path of one."
        )
    return backend


def memory_count(tokenizer: Any) -> int:
    """How many memory tokens a `tokenizers.Tokenizer` has of each kind."""
    count = 0
    while None not in (tokenizer.token_to_id(READ.format(count)), tokenizer.token_to_id(WRITE.format(count))):
        count += 1
    return count


class CachedTokenizer:
    """A tokenizer as it is put on disk, where workers find it: of transformers or tokenizers, or the path of one."""

    def __init__(self, given: Any) -> None:
        import tokenizers

        from milldam.qa.windows import facts_beside
        from milldam.tokenizers.loading import load_tokenizer

        if given is None:
            raise ConfigError("tokenizer: none given. Windows can't be made, nor found again, without it.")
        if isinstance(given, str | Path):
            # Loaded first: what lies beside a name on the Hub may come with it.
            text, self._facts = load_tokenizer(str(given)).json, facts_beside(str(given))
        else:
            told = {name: getattr(given, name, None) for name in _FACTS}
            text, self._facts = (
                _backend(given).to_str(),
                {name: str(one) for name, one in told.items() if one is not None},
            )
        # Whoever calls a tokenizer of transformers leaves truncation and padding in it: they are not part of it.
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._json, self.memory_tokens = tokenizer.to_str(), memory_count(tokenizer)
        self.hash = hash_bytes(json.dumps([self._json, self._facts]).encode("utf-8", "surrogatepass"))

    def saved(self, cache: Path) -> Path:
        folder = cache / "tokenizers" / self.hash[:16]
        if not (folder / "tokenizer.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / "tokenizer_config.json", json.dumps(self._facts).encode())
            write_file(folder / "tokenizer.json", self._json.encode("utf-8", "surrogatepass"))
        return folder


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
    cached, cache = CachedTokenizer(tokenizer), Path(cache_dir)
    settings = _settings(max_examples, max_seq_length, doc_stride, max_n_segs)
    made = prepare(
        dataset_name,
        _folder(cache, str(dataset_name), split, cached, settings),
        tokenizer=cached.saved(cache),
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
    settings = _settings(max_examples, max_seq_length, doc_stride, max_n_segs)
    folder = _folder(Path(cache_dir), str(dataset_name), split, CachedTokenizer(tokenizer), settings)
    if not (folder / NAME).exists():
        raise _missing(folder, str(dataset_name), split, settings)
    return SquadDataset(folder)


def _settings(*values: int | None) -> dict[str, int | None]:
    """What decides the features of a dataset, beside its split and tokenizer."""
    return dict(zip(("max_examples", "max_seq_length", "doc_stride", "max_n_segs"), values, strict=True))


def _folder(cache: Path, dataset: str, split: str, tokenizer: CachedTokenizer, settings: dict[str, Any]) -> Path:
    known = {"version": VERSION, "split": split, "input": _identity(dataset, split), "tokenizer": tokenizer.hash}
    digest = hash_bytes(json.dumps(known | settings, sort_keys=True).encode())
    name, part = re.sub(r"[^\w.-]+", "_", Path(dataset).name or "data"), re.sub(r"[^\w-]+", "_", split)
    return cache / f"{name[:60]}-{part}-{digest[:16]}"


def _identity(dataset: str, split: str) -> str:
    """Changes when the data does; a dataset on the Hub is known by its name."""
    from milldam.input_files import is_address
    from milldam.qa.records import input_state

    if not (Path(dataset).exists() or glob.has_magic(dataset) or is_address(dataset)):
        return dataset
    return json.dumps(input_state([dataset], split), sort_keys=True)


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
