"""Configuration files of Krill -> ours, by a table of keys. What is in no table is named as ignored.

Krill knows flat keys (`hub_tokenizer_id`, `preprocess_chunk_size`) and, in newer files, the same ones in blocks
(`tokenizer`, `preprocess`, `train`). What Krill did without being asked is set as well: rows are packed and written,
short texts are dropped. A file may mix its keys with ours; ours stay where both are given.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

from milldam.config.checking import KeyPath, dotted
from milldam.config.settings import Config
from milldam.config.yaml_values import spelled_out

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
_OURS = {one.name for one in fields(Config)}


@dataclass(slots=True)
class Conversion:
    """A file of Krill in our form, and what became of its keys."""

    config: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """Sentences for the user."""
    origins: dict[KeyPath, KeyPath] = field(default_factory=dict)
    """Where the keys that moved stood."""


def is_legacy(source: dict[str, Any]) -> bool:
    """Whether a file has keys that only Krill knows.

    >>> is_legacy({"hub_tokenizer_id": "gpt2"}), is_legacy({"tokenizer": "gpt2", "sequence_len": 2048})
    (True, False)
    """
    tokenizer = source.get("tokenizer")
    only_krills = (_FLAT - {"sequence_len"}) | {"preprocess"}
    return bool(only_krills & source.keys()) or (isinstance(tokenizer, dict) and "hub_id" in tokenizer)


def drop_superseded(source: dict[str, Any], path: KeyPath) -> None:
    """Remove the keys of Krill that mean what `--set` with this path is about to say."""
    ours = _MOVED.get(path, path)
    for old, _ in list(_present(source)):
        if old != path and _MOVED.get(old, ())[: len(ours)] == ours:
            block = source if len(old) == 1 else source[str(old[0])]
            del block[str(old[-1])]


def convert(source: dict[str, Any]) -> Conversion:
    """Our form of a file of Krill; the source is left as it is."""
    made = Conversion({key: deepcopy(source[key]) for key in source if key in _OURS})
    config = made.config
    for old, value in _present(source):
        if old[0] == "tokenizer":
            config["tokenizer"].pop(old[1], None)
        if old in _MOVED and value is not None:
            _move(made, old, _MOVED[old], value)
    _tidy(made)
    _add_defaults(made)
    gone = [dotted(path) for path, _ in _present(source) if path in _GONE]
    if gone:
        told = "There is one way of working, within memory, whatever the size."
        made.notes.append(f"No longer needed: {', '.join(gone)}. {told}")
    block = source["preprocess"] if isinstance(source.get("preprocess"), dict) else {}
    ignored: list[KeyPath] = [(key,) for key in source if key not in _FLAT | _OURS | {"preprocess"}]
    ignored += [("preprocess", key) for key in block if ("preprocess", key) not in _LEGACY]
    if ignored:
        made.notes.append(f"Ignored, since preparing data takes no such keys: {', '.join(map(dotted, ignored))}.")
    return made


def _present(source: dict[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    for path in _LEGACY:
        block = source if len(path) == 1 else source.get(str(path[0]))
        if isinstance(block, dict) and path[-1] in block:
            yield path, block[str(path[-1])]


def _move(made: Conversion, old: KeyPath, new: KeyPath, value: Any) -> None:
    """Put the value under its new name, unless something is there."""
    here: Any = made.config
    for part in new[:-1]:
        # A word such as `dedup: exact` becomes the block it stands for; `filters:` with nothing after it an empty one.
        here[part] = {} if here.get(part) is None else spelled_out(str(part), here[part])
        here = here[part]
        if not isinstance(here, dict):
            made.notes.append(f"{dotted(old)} is ignored: {part} says otherwise.")
            return
    if here.get(new[-1], value) != value:
        made.notes.append(f"{dotted(old)} is ignored: {dotted(made.origins.get(new, new))} says otherwise.")
        return
    here[new[-1]] = value
    made.origins.setdefault(new, old)


def _tidy(made: Conversion) -> None:
    """Short forms of a tokenizer, and datasets as Krill understands them."""
    config = made.config
    tokenizer = config.get("tokenizer")
    if isinstance(tokenizer, dict) and "path" not in tokenizer and tokenizer.keys() <= {"train"}:
        del config["tokenizer"]  # a block without a path is no tokenizer, and is missed as such
    elif isinstance(tokenizer, dict) and tokenizer.keys() == {"path"}:
        config["tokenizer"] = tokenizer["path"]
        made.origins["tokenizer",] = made.origins.pop(("tokenizer", "path"), ("tokenizer",))
    data_sets = config.get("datasets")
    for number, one in enumerate(data_sets if isinstance(data_sets, list) else []):
        if isinstance(one, dict):
            if "name" in one and "subset" not in one:
                one["subset"] = one.pop("name")
                made.origins["datasets", number, "subset"] = ("datasets", number, "name")
            one.setdefault("split", "train")


def _add_defaults(made: Conversion) -> None:
    """What Krill did without being asked, unless the file says otherwise in our words."""
    config = made.config
    filters = config["filters"] = config.get("filters") or {}
    for key, default in _DEFAULTS.items():
        if isinstance(filters, dict) and key not in filters:
            filters[key] = default
            made.notes.append(f"filters.{key}: {default} is set, since Krill drops shorter texts by itself.")
    if "out" not in config:
        config["out"] = _DEFAULT_OUT
        made.notes.append(f"dataset_prepared_path is not given: the store goes to {_DEFAULT_OUT}/.")
    if config.get("seq_len") is None:
        made.notes.append("sequence_len is not given: no packed rows are written.")
    else:
        config.setdefault("packing", {"strategy": "wrapped", "write": True})
    if "shard_size" in config:
        told = "shard_size is the input that makes one shard."
        made.notes.append(f"The save shard size was the size of output files; {told}")
