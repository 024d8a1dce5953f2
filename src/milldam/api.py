"""The library's verbs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, overload

from milldam.errors import ConfigError, Setting
from milldam.files import in_home
from milldam.loader.stores import Store
from milldam.memory import release, usage
from milldam.stores.kinds import TOKENS, store_kind

if TYPE_CHECKING:
    import numpy.typing as npt

    from milldam.choices import ChatForm, Documents, Encoder, Executor, InputFormat, InvalidUtf8, SpecialText
    from milldam.formats.foreign import ForeignFile
    from milldam.loader.feeds import Feed
    from milldam.stores.table.reader import Table

log = logging.getLogger("milldam")
Texts: TypeAlias = "Iterable[str | Mapping[str, object]] | Callable[[], Iterable[str | Mapping[str, object]]] | Table"
"""Texts or rows that a program holds or makes: frames, tables, datasets, lists of dicts, iterators, functions."""


class TextOptions(TypedDict, total=False):
    """Those options of `tokenize` that a feed has too."""

    text_column: str | None
    documents: Documents
    separator: str | None
    input_format: InputFormat | None
    bos: str
    eos: str
    special_text: SpecialText
    invalid_utf8: InvalidUtf8
    max_document_bytes: str | int
    strict: bool
    chat: bool | Mapping[str, object]
    chat_template: str | Path | None
    chat_form: ChatForm | None
    train_on: str | Sequence[str] | None
    shard_size: str | int | None
    memory: str | int | None
    workers: int | None
    encoder: Encoder


class StoreOptions(TypedDict, total=False):
    """How a store is opened: a split of it; at an address, the cache of its shards and options for fsspec."""

    split: str | None
    cache: str | int | None
    cache_dir: str | Path | None
    storage_options: Mapping[str, object] | None


@overload
def open(path: str | Path, **options: Unpack[StoreOptions]) -> Store: ...
@overload
def open(path: str | Path, *, units: Literal[True], **options: Unpack[StoreOptions]) -> Feed: ...
@overload
def open(
    path: str | Path | Sequence[str | Path],
    *,
    store: str | Path,
    tokenizer: str | Path | None = None,
    split: str | None = None,
    **options: Unpack[TextOptions],
) -> Feed: ...
@overload
def open(
    path: Mapping[str, object],
    *,
    split: str | None = None,
    memory: str | int | None = None,
    workers: int | None = None,
) -> Feed: ...
@overload
def open(path: str | Path, *, dtype: npt.DTypeLike) -> ForeignFile: ...
def open(
    path: str | Path | Sequence[str | Path] | Mapping[str, object],
    *,
    split: str | None = None,
    units: bool = False,
    dtype: npt.DTypeLike | None = None,
    cache: str | int | None = None,
    cache_dir: str | Path | None = None,
    storage_options: Mapping[str, object] | None = None,
    **text: Any,
) -> Store | Feed | Table | ForeignFile:
    """Open a store, or anything else that can be trained on, in milliseconds and a few megabytes at any size.

    a folder with milldam.json      a store
    a folder with milldam-table.json  a table that `milldam.map` or `milldam qa` made
    X.npy                           a 1-D array of integers
    X.bin and X.idx, or X           a file pair of Megatron-LM
    X.bin alone                     nanoGPT: uint16, or `dtype`; llm.c, recognised by its header
    corpus.txt, other input         what was made from it and lies beside it: corpus.milldam, corpus.npy
    s3://bucket/corpus.milldam      a store at an fsspec address: shards are fetched when they are used, into at most
                                    `cache` bytes ("10GB") of `cache_dir`; `storage_options` go to fsspec
    text, with `tokenizer=` and `store=`  a `Feed`: batches come while the store is written in the background; files,
                                    folders, globs, addresses, datasets as for `tokenize`, with its options
    config.yaml, or a dict          the same, with the settings of `preprocess`, such as cleaning and filters

    Type checkers expect a store of a path without further arguments; `milldam.Table` opens a table alone.

    `units`: open a store as a `Feed`, with the batches of training straight from its text: units in random order, and
    the samples of a group of units shuffled together.

    If the path is an input, the result must have been made from it as it is now: a stale one is refused, and the one
    that is used is logged. Only a `Feed` tokenizes.

    >>> milldam.open("corpus.milldam")
    Store('corpus.milldam': 91 documents, 23,862 tokens, uint16)
    >>> with milldam.open("data/*.jsonl", tokenizer="tokenizer/", store="data.milldam") as feed:
    ...     x, y = next(iter(feed.windows(128).batches(16, seed=0)))
    >>> x.shape
    (16, 128)
    """
    from milldam.feeding import is_raw

    path = in_home(path) if isinstance(path, str | Path) else path
    if is_raw(path, text):
        return _open_feed(path, split, text)
    for name in text:
        raise ConfigError(f"{name}: only for text that becomes tokens while training runs: name tokenizer= and store=.")
    if not isinstance(path, str | Path):
        raise ConfigError(f"{path!r}: several inputs are text: name tokenizer= and store=.")
    choices = {"dtype": dtype, "cache": cache, "cache_dir": cache_dir, "storage_options": storage_options}
    chosen: dict[str, Any] = {name: value for name, value in choices.items() if value is not None}
    opened: Any
    stored = store_kind(path)
    if stored is TOKENS and not chosen:
        opened = Store(path, split=split)
    elif stored is not None and stored is not TOKENS:
        for name in chosen if split is None else ("split", *chosen):
            raise ConfigError(f"{path}: {stored.phrase} has no {name} to choose. Leave it out.")
        from milldam.stores.table.reader import Table

        opened = Table(path)
    else:
        from milldam.loader.opening import open_data

        opened = open_data(path, split=split, **chosen)
    if not units:
        return opened  # type: ignore[no-any-return]
    from milldam.loader.feeds import Feed
    from milldam.loader.unit_order import FinishedParts

    if not isinstance(opened, Store):
        raise ConfigError(f"{opened!r}: only token stores have units. Leave units out.")
    return Feed(FinishedParts(Store(opened.place)), split=opened.split_name)


def _open_feed(inputs: Any, split: str | None, text: dict[str, Any]) -> Feed:
    """A feed of text, by options or by a configuration."""
    from milldam.config.loading import load_config, read_config
    from milldam.feeding import is_config
    from milldam.feeding.growing import open_parts
    from milldam.feeding.making import Order
    from milldam.files import read_sealed
    from milldam.input_files import RUN_FOLDER
    from milldam.loader.feeds import Feed
    from milldam.pipeline.starting import tokenize_config, tokenize_settings

    tokenizer, store = text.get("tokenizer"), text.pop("store", None)
    if is_config(inputs):
        chosen = {name: value for name, value in text.items() if value is not None}
        chosen |= {} if store is None else {"out": str(store)}
        read = read_config(inputs, (), chosen)
        for note in read.notes:
            log.info(note)
        out = read.data.get("out")
        if not isinstance(out, str):
            raise ConfigError(
                Setting("store"), ": missing. Name the folder for the tokens; in the file its key is out."
            )
        # A run of `milldam preprocess`, whose default drops duplicates, may have begun the store.
        plan = read_sealed(Path(out) / RUN_FOLDER / "plan.json")
        if "dedup" not in read.data and not (plan and plan["settings"].get("dedup")):
            log.warning("%s: a feed drops no duplicates. `milldam preprocess` does.", out)
            chosen["dedup"] = "off"
            read = read_config(inputs, (), chosen)
        order = Order(Path(in_home(out)), partial(load_config, inputs, (), chosen), read.data, report=True)
    elif tokenizer is None:
        raise ConfigError(Setting("tokenizer"), ": missing. Text needs one: a folder, file or Hub name.")
    elif store is None:
        raise ConfigError(Setting("store"), ": missing. Name the folder for the tokens of the text.")
    else:
        del text["tokenizer"]
        options = (inputs, Path(in_home(store)), tokenizer, text)
        order = Order(options[1], partial(tokenize_config, *options), tokenize_settings(*options), report=False)
    parts = open_parts(order)
    try:
        return Feed(parts, split=split)
    except ConfigError:
        parts.close()
        raise


def tokenize(
    inputs: str | Path | Sequence[str | Path] | Texts,
    out: str | Path,
    *,
    tokenizer: str | Path,
    text_column: str | None = None,
    documents: Documents = "file",
    separator: str | None = None,
    input_format: InputFormat | None = None,
    bos: str = "none",
    eos: str = "auto",
    special_text: SpecialText = "special",
    invalid_utf8: InvalidUtf8 = "reject",
    max_document_bytes: str | int = "32MiB",
    strict: bool = False,
    chat: bool | Mapping[str, object] = False,
    chat_template: str | Path | None = None,
    chat_form: ChatForm | None = None,
    train_on: str | Sequence[str] | None = None,
    decontaminate: str | Mapping[str, object] | Sequence[str | Mapping[str, object]] = (),
    limit: int | None = None,
    shard_size: str | int | None = None,
    memory: str | int | None = None,
    workers: int | None = None,
    encoder: Encoder = "auto",
    executor: Executor = "local",
    address: str | None = None,
    overwrite: bool = False,
) -> Store:
    """Turn text into a token store and open it; what `milldam tokenize` does, with the same options.

    `inputs`: files, folders, globs, addresses; or a pandas or polars DataFrame, an Arrow table, a HF dataset, a list of
    dicts, an iterator or a generator function of texts or dicts. Strings in a list are paths. Rows that are given are
    written to a file beside `out`, which is removed in the end, and known by their content.

    Resumes unfinished work; a store that is up to date is opened as it is. `memory` limits what the job uses beyond
    what your program already holds. `chat`: records are conversations; a dict has the keys of `chat` in a
    configuration. `decontaminate`: evaluation sets whose items are kept out, as in a configuration.

    >>> milldam.tokenize("corpus.jsonl", "corpus.milldam", tokenizer="tokenizer/", memory="512MB")
    Store('corpus.milldam': 91 documents, 23,862 tokens, uint16)
    """
    options = {name: value for name, value in locals().items() if name not in ("inputs", "out", "tokenizer")}
    from milldam.pipeline.starting import run_checked, tokenize_config

    with _as_paths(inputs, Path(in_home(out))) as paths:
        release()
        check = partial(tokenize_config, paths, out, tokenizer, options)
        run_checked(check, report=False, held_bytes=usage().anonymous)
    return Store(out)


@contextlib.contextmanager
def _as_paths(inputs: Any, out: Path) -> Iterator[Any]:
    """Paths as they are; rows that the program holds or makes as a file, while the block runs."""
    table = sys.modules.get("milldam.stores.table.reader")
    if table is not None and isinstance(inputs, table.Table):
        inputs = inputs.path
    if isinstance(inputs, str | os.PathLike):
        yield inputs
    elif isinstance(inputs, list | tuple) and all(isinstance(one, str | os.PathLike) for one in inputs):
        from milldam.sources.data_sets import refuse_texts

        if "-" not in inputs:  # standard input comes alone, which is checked with the rest
            refuse_texts([str(one) for one in inputs])
        yield inputs
    else:
        from milldam.mapping.spool import as_files

        with as_files(inputs, out) as path:
            yield path


def preprocess(
    config: str | Path | Mapping[str, object],
    *,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    memory: str | int | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    address: str | None = None,
    overwrite: bool | None = None,
) -> Store:
    """Turn raw datasets into a store and open it; what `milldam preprocess` does.

    `config`: a YAML file, or the same as a dict. The other arguments override it; `overrides` sets single keys:
    `["dedup.near.rows=8"]`. Resumes unfinished work; `memory` as in `tokenize`.

    >>> milldam.preprocess({"datasets": "books/", "tokenizer": "tokenizer/", "out": "books.milldam"})
    Store('books.milldam': 16 documents, 3,128 tokens, uint16)
    """
    options = {name: value for name, value in locals().items() if name not in ("config", "overrides")}
    from milldam.config.checking import checked_settings
    from milldam.config.loading import read_config
    from milldam.config.settings import Config
    from milldam.pipeline.starting import run_checked

    release()
    held = usage().anonymous
    chosen = {name: value for name, value in options.items() if value is not None}
    read = read_config(config, overrides, chosen)
    for note in read.notes:
        log.info(note)
    made = run_checked(partial(checked_settings, Config, read), held_bytes=held)
    return Store(made.out)


def contamination(
    store: str | Path,
    against: str | Path | Sequence[str | Path],
    *,
    columns: str | Sequence[str] | None = None,
    ngram: int = 13,
    min_share: float = 0.5,
    findings: str | Path | None = None,
    memory: str | int | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Look for items of evaluation sets in a finished store, by decoding it; what `milldam contamination` does.

    `columns`: fields of the evaluation set; None: every field with text. `findings`: a file for all findings, one JSON
    object per line. `memory`, `workers`: as in `tokenize`. Returns for each set how many items were found, in how many
    documents, and the worst findings.

    >>> found = milldam.contamination("corpus.milldam", "eval.jsonl")
    >>> [(one["set"], one["items_found"] > 0, one["documents"] > 0) for one in found["sets"]]
    [(..., True, True)]
    """
    options = {name: value for name, value in locals().items() if name not in ("store", "against", "findings")}
    from milldam.pipeline.decontaminating import find_contamination

    paths = [against] if isinstance(against, str | Path) else against
    file = None if findings is None else Path(in_home(findings))
    return find_contamination(Store(store), paths, findings=file, held_bytes=usage().anonymous, **options)
