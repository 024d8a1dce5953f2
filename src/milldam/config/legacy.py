"""Configuration files of Krill -> ours, by a table of keys. Keys that are in no table are named as ignored.

Krill has flat keys (`hub_tokenizer_id`) and, in newer files, the same ones in blocks (`tokenizer`, `preprocess`).
Krill's implicit steps become settings: rows are packed and written, short texts are dropped. A file may mix its keys
with ours; ours win.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from typing import Any

from milldam.config.checking import KeyPath, Values
from milldam.config.settings import Config
from milldam.rules import DedupRules

_MOVED = {
    "hub_tokenizer_id": "tokenizer.path",
    "tokenizer.hub_id": "tokenizer.path",
    "vocab_size": "tokenizer.train.vocab_size",
    "tokenizer.vocab_size": "tokenizer.train.vocab_size",
    "dataset_prepared_path": "out",
    "preprocess.prepared_path": "out",
    "dataset_prepared_min_length": "filters.min_tokens",
    "preprocess.min_length": "filters.min_tokens",
    "preprocess_dedup_cache_dir": "dedup.index",
    "preprocess.dedup_cache_dir": "dedup.index",
    "preprocess_save_shard_size": "shard_size",
    "preprocess.save_shard_size": "shard_size",
    "sequence_len": "seq_len",
    "preprocess.sequence_len": "seq_len",
}
_NEEDLESS = {"preprocess_chunk_size", "preprocess.chunk_size", "preprocess_memory_efficient"} | {
    "memory_efficient_preprocess",
    "preprocess.memory_efficient",
}
_IMPLICIT = {"min_characters": 100, "min_tokens": 150}


def is_legacy(data: dict[str, Any]) -> bool:
    """Whether a file has keys that only Krill knows.

    >>> is_legacy({"hub_tokenizer_id": "gpt2"}), is_legacy({"tokenizer": "gpt2", "sequence_len": 2048})
    (True, False)
    """
    tokenizer = data.get("tokenizer")
    known = {"preprocess", *_MOVED, *_NEEDLESS} - {"sequence_len"}
    return bool(known & data.keys()) or (isinstance(tokenizer, dict) and "hub_id" in tokenizer)


def converted(values: Values) -> dict[str, Any]:
    """The values of a Krill file as ours, with notes on the keys that are gone or ignored."""
    notes, ours = values.notes, {one.name for one in fields(Config)}
    config = {key: deepcopy(one) for key, one in values.data.items() if key in ours and one is not None}
    flat: dict[str, tuple[Any, KeyPath]] = {
        key: (one, (key,)) for key, one in values.data.items() if key not in ours | {"preprocess"}
    }
    for block in ("tokenizer", "preprocess"):
        inner = values.data.get(block)
        for key, one in inner.items() if isinstance(inner, dict) else ():
            if block == "preprocess" or f"{block}.{key}" in _MOVED:
                flat[f"{block}.{key}"] = one, (block, key)
                config.get(block, {}).pop(key, None)
    for old, (value, place) in flat.items():
        if old not in _MOVED or value is None:
            continue
        path = tuple(_MOVED[old].split("."))
        here = config
        for part in path[:-1]:
            inside = here.get(part, {})
            if isinstance(inside, str):
                inside = DedupRules.spelled_out(inside) if part == "dedup" else {"path": inside}
            here[part] = here = inside
        if here.setdefault(path[-1], value) != value:
            notes.append(f"{old} is ignored: {_MOVED[old]} is set otherwise.")
        values.lines[path] = values.lines.get(place, 0)
    if isinstance(config.get("tokenizer"), dict) and config["tokenizer"].keys() <= {"train"}:
        del config["tokenizer"]  # without a path it is missing
    if gone := [key for key in flat if key in _NEEDLESS]:
        notes.append(f"No longer needed: {', '.join(gone)}. Every job is bounded in memory.")
    if ignored := [key for key in flat if key not in _MOVED and key not in _NEEDLESS]:
        notes.append(f"Ignored, since preparing data takes no such keys: {', '.join(ignored)}.")
    _imply(config, notes)
    return config


def _imply(config: dict[str, Any], notes: list[str]) -> None:
    """What Krill does without being asked, as settings."""
    for one in config["datasets"] if isinstance(config.get("datasets"), list) else []:
        if isinstance(one, dict):
            one.setdefault("split", "train")
            if "name" in one:
                one.setdefault("subset", one.pop("name"))
    filters = config.setdefault("filters", {})
    for key, default in _IMPLICIT.items():
        if filters.setdefault(key, default) == default:
            notes.append(f"filters.{key}: {default} is set, since Krill drops shorter texts by itself.")
    if "out" not in config:
        config["out"] = "prepared"
        notes.append("dataset_prepared_path is not set: the store goes to prepared/, unless out is set.")
    if "seq_len" in config:
        config.setdefault("packing", {"strategy": "wrapped", "write": True})
    else:
        notes.append("sequence_len is not set: no packed rows are written.")
    if "shard_size" in config:
        notes.append("The save shard size was the size of output files; shard_size is the input that makes one shard.")
