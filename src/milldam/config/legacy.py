"""Configuration files of Krill -> ours, by a table of keys. Keys that are in no table are named as ignored.

Krill has flat keys (`hub_tokenizer_id`, `preprocess_chunk_size`) and, in newer files, the same ones in blocks
(`tokenizer`, `preprocess`, `train`). Krill's implicit steps become settings: rows are packed and written, short texts
are dropped. A file may mix its keys with ours; ours win.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from typing import Any

from milldam.config.checking import KeyPath, Values, dotted, is_null
from milldam.config.settings import Config, spelled_out

_DEFAULTS = {"min_characters": 100, "min_tokens": 150}
_DEFAULT_OUT = "prepared"
_MOVED: dict[KeyPath, KeyPath] = {
    ("hub_tokenizer_id",): ("tokenizer", "path"),
    ("tokenizer", "hub_id"): ("tokenizer", "path"),
    ("vocab_size",): ("tokenizer", "train", "vocab_size"),
    ("tokenizer", "vocab_size"): ("tokenizer", "train", "vocab_size"),
    ("dataset_prepared_path",): ("out",),
    ("preprocess", "prepared_path"): ("out",),
    ("dataset_prepared_min_length",): ("filters", "min_tokens"),
    ("preprocess", "min_length"): ("filters", "min_tokens"),
    ("preprocess_dedup_cache_dir",): ("dedup", "index"),
    ("preprocess", "dedup_cache_dir"): ("dedup", "index"),
    ("preprocess_save_shard_size",): ("shard_size",),
    ("preprocess", "save_shard_size"): ("shard_size",),
    ("sequence_len",): ("seq_len",),
    ("preprocess", "sequence_len"): ("seq_len",),
}
_GONE: tuple[KeyPath, ...] = (
    ("preprocess_chunk_size",),
    ("preprocess", "chunk_size"),
    ("preprocess_memory_efficient",),
    ("memory_efficient_preprocess",),
    ("preprocess", "memory_efficient"),
)
_LEGACY = (*_MOVED, *_GONE)
_FLAT = {path[0] for path in _LEGACY if len(path) == 1}


def is_legacy(data: dict[str, Any]) -> bool:
    """Whether a file has keys that only Krill knows.

    >>> is_legacy({"hub_tokenizer_id": "gpt2"}), is_legacy({"tokenizer": "gpt2", "sequence_len": 2048})
    (True, False)
    """
    tokenizer = data.get("tokenizer")
    krills = (_FLAT - {"sequence_len"}) | {"preprocess"}
    return bool(krills & data.keys()) or (isinstance(tokenizer, dict) and "hub_id" in tokenizer)


def drop_superseded(data: dict[str, Any], path: KeyPath) -> None:
    """Remove the keys of Krill that mean what `--set` with this path is about to set."""
    ours = _MOVED.get(path, path)
    for old, block in list(_present(data)):
        if old != path and _MOVED.get(old, ())[: len(ours)] == ours:
            del block[str(old[-1])]


def _present(data: dict[str, Any]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Krill's keys that are there, with the block that each is in."""
    for path in _LEGACY:
        block = data if len(path) == 1 else data.get(str(path[0]))
        if isinstance(block, dict) and path[-1] in block:
            yield path, block


def convert(values: Values) -> None:
    """Turns the values of a Krill file into ours, with notes on the keys that are gone or ignored."""
    source, notes = values.data, values.notes
    ours = {one.name for one in fields(Config)}
    config = {key: deepcopy(source[key]) for key in source if key in ours}
    for old, block in _present(source):
        if old[0] == "tokenizer":
            config["tokenizer"].pop(old[1], None)
        value = block[str(old[-1])]
        if old in _MOVED and not is_null(value):
            _move(values, config, old, _MOVED[old], value)
    tokenizer, data_sets = config.get("tokenizer"), config.get("datasets")
    if isinstance(tokenizer, dict) and tokenizer.keys() <= {"train"}:
        del config["tokenizer"]  # without a path it is missing
    elif isinstance(tokenizer, dict) and tokenizer.keys() == {"path"}:
        config["tokenizer"] = tokenizer["path"]
        values.places["tokenizer",] = values.place(("tokenizer", "path"))
    for number, one in enumerate(data_sets if isinstance(data_sets, list) else []):
        if isinstance(one, dict):
            if "name" in one and "subset" not in one:
                one["subset"] = one.pop("name")
                values.places["datasets", number, "subset"] = values.place(("datasets", number, "name"))
            one.setdefault("split", "train")
    filters = config["filters"] = {} if is_null(config.get("filters")) else config["filters"]
    for key, default in _DEFAULTS.items():
        if isinstance(filters, dict) and key not in filters:
            filters[key] = default
            notes.append(f"filters.{key}: {default} is set, since Krill drops shorter texts by itself.")
    if "out" not in config:
        config["out"] = _DEFAULT_OUT
        notes.append(f"dataset_prepared_path is not set: the store goes to {_DEFAULT_OUT}/.")
    if is_null(config.get("seq_len")):
        notes.append("sequence_len is not set: no packed rows are written.")
    else:
        config.setdefault("packing", {"strategy": "wrapped", "write": True})
    if "shard_size" in config:
        notes.append("The save shard size was the size of output files; shard_size is the input that makes one shard.")
    if gone := [dotted(path) for path, _ in _present(source) if path in _GONE]:
        notes.append(f"No longer needed: {', '.join(gone)}. Every job is bounded in memory.")
    inner = source["preprocess"] if isinstance(source.get("preprocess"), dict) else {}
    ignored: list[KeyPath] = [(key,) for key in source if key not in _FLAT | ours | {"preprocess"}]
    ignored += [("preprocess", key) for key in inner if ("preprocess", key) not in _LEGACY]
    if ignored:
        notes.append(f"Ignored, since preparing data takes no such keys: {', '.join(map(dotted, ignored))}.")
    values.data = config


def _move(values: Values, config: dict[str, Any], old: KeyPath, new: KeyPath, value: Any) -> None:
    """Put the value under its new name, unless something is there; messages keep its line."""
    here: Any = config
    for part in new[:-1]:
        # A word such as `dedup: exact` becomes the block it stands for; `filters:` with nothing after it an empty one.
        here[part] = {} if is_null(here.get(part)) else spelled_out(str(part), here[part])
        here = here[part]
        if not isinstance(here, dict):
            values.notes.append(f"{dotted(old)} is ignored: {part} is set otherwise.")
            return
    if here.get(new[-1], value) != value:
        values.notes.append(f"{dotted(old)} is ignored: {dotted(new)} is set otherwise.")
        return
    here[new[-1]] = value
    values.places[new] = values.place(old)
