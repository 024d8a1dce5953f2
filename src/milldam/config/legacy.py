"""Configuration files of Krill -> ours, by a table of keys. Keys that are in no table are named as ignored.

Krill has flat keys (`hub_tokenizer_id`) and, in newer files, the same ones in blocks (`tokenizer`, `preprocess`).
Krill's implicit steps become settings: rows are packed and written, short texts are dropped. A file may mix its keys
with ours; ours win.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from milldam.config.checking import KeyPath, Values, dotted
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


def is_legacy(data: dict[str, Any]) -> bool:
    """Whether a file has keys that only Krill knows.

    >>> is_legacy({"hub_tokenizer_id": "gpt2"}), is_legacy({"tokenizer": "gpt2", "sequence_len": 2048})
    (True, False)
    """
    tokenizer = data.get("tokenizer")
    known = _MOVED.keys() - {"sequence_len"}
    return any(key in known or key.startswith("preprocess") for key in map(str, data)) or (
        isinstance(tokenizer, dict) and "hub_id" in tokenizer
    )


def converted(values: Values) -> dict[str, Any]:
    """The values of a Krill file as ours, with notes on keys that are ignored."""
    ours, notes = {one.name for one in fields(Config)}, values.notes
    flat: dict[KeyPath, Any] = {}
    for key, one in values.data.items():
        is_block = isinstance(one, dict) and key in ("tokenizer", "preprocess")
        flat |= {(key, inner): value for inner, value in one.items()} if is_block else {(key,): one}
    config: dict[str, Any] = {}
    ignored = []
    for place, value in sorted(flat.items(), key=lambda item: dotted(item[0]) in _MOVED):  # ours first: they win
        old = dotted(place)
        path = tuple((_MOVED.get(old) or old).split("."))
        if path[0] not in ours:
            ignored.append(old)
        if path[0] not in ours or value is None:
            continue
        here = config
        for part in path[:-1]:
            if isinstance(here.get(part), str):
                here[part] = DedupRules.spelled_out(here[part]) if part == "dedup" else {"path": here[part]}
            here = here.setdefault(part, {})
        if here.setdefault(path[-1], value) != value:
            notes.append(f"{old} is ignored: {_MOVED[old]} is set otherwise.")
        values.lines[path] = values.lines.get(place, 0)
    if isinstance(config.get("tokenizer"), dict) and config["tokenizer"].keys() <= {"train"}:
        del config["tokenizer"]  # without a path it is missing
    if ignored:
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
    for key, default in (("min_characters", 100), ("min_tokens", 150)):
        if filters.setdefault(key, default) == default:
            notes.append(f"filters.{key}: {default} is set, since Krill drops shorter texts by itself.")
    if "out" not in config:
        config["out"] = "prepared"
        notes.append("dataset_prepared_path is not set: the store goes to prepared/, unless out is set.")
    if "seq_len" in config:
        config.setdefault("packing", {"strategy": "wrapped", "write": True})
    if "shard_size" in config:
        notes.append("The save shard size was the size of output files; shard_size is the input that makes one shard.")
