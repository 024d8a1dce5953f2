"""Configuration files of Krill -> ours, by a table of keys. What is in no table is named as ignored.

Krill knows flat keys (`hub_tokenizer_id`, `preprocess_chunk_size`) and, in newer files, the same ones in blocks
(`tokenizer`, `preprocess`, `train`). What Krill did without being asked is set as well: rows are packed and written,
short texts are dropped. A file may mix its keys with ours as long as they do not contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

from milldam.config.checking import KeyPath, dotted
from milldam.config.settings import Config
from milldam.config.yaml_values import spelled_out
from milldam.errors import did_you_mean

MIN_CHARACTERS = 100
MIN_TOKENS = 150
DEFAULT_OUT = "prepared"

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
_FLAT = {str(path[0]) for path in _LEGACY if len(path) == 1}
_COMMON = {"sequence_len"}
"""Keys of other tools too, which do not make a file one of Krill's."""
_IN_PREPROCESS = {str(path[1]) for path in _LEGACY if path[0] == "preprocess"}
_OURS = {one.name for one in fields(Config)}


@dataclass(slots=True)
class Conversion:
    """A file of Krill in our form, and what became of its keys."""

    config: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """Sentences for the user."""
    origins: dict[KeyPath, KeyPath] = field(default_factory=dict)
    """Where the keys that moved stood."""
    problems: list[tuple[KeyPath, str]] = field(default_factory=list)
    """What is wrong, by the place in the old file."""


def is_legacy(source: dict[str, Any]) -> bool:
    """Whether a file has keys that only Krill knows.

    >>> is_legacy({"hub_tokenizer_id": "gpt2"}), is_legacy({"tokenizer": "gpt2", "sequence_len": 2048})
    (True, False)
    """
    tokenizer = source.get("tokenizer")
    return (
        bool((_FLAT - _COMMON) & source.keys())
        or "preprocess" in source
        or (isinstance(tokenizer, dict) and "hub_id" in tokenizer)
    )


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
    _add_defaults(made)
    _name_the_rest(made, source)
    return made


def _present(source: dict[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    for path in _LEGACY:
        block = source if len(path) == 1 else source.get(str(path[0]))
        if isinstance(block, dict) and path[-1] in block:
            yield path, block[str(path[-1])]


def _move(made: Conversion, old: KeyPath, new: KeyPath, value: Any) -> None:
    """Put the value under its new name, unless another value is there."""
    here: Any = made.config
    for part in new[:-1]:
        # A word such as `dedup: exact` becomes the block it stands for; `filters:` with nothing after it an empty one.
        here[part] = {} if here.get(part) is None else spelled_out(str(part), here[part])
        here = here[part]
        if not isinstance(here, dict):
            made.problems.append((old, f"contradicts {part}, which is not a block of keys here."))
            return
    if here.get(new[-1], value) != value:
        other = made.origins.get(new, new)
        made.problems.append((old, f"contradicts {dotted(other)}. Remove one of the two."))
        return
    here[new[-1]] = value
    made.origins.setdefault(new, old)


def _add_defaults(made: Conversion) -> None:
    """What Krill did without being asked, unless the file says otherwise in our words."""
    config = made.config
    filters = config["filters"] = config.get("filters") or {}
    if isinstance(filters, dict):
        for key, default in (("min_characters", MIN_CHARACTERS), ("min_tokens", MIN_TOKENS)):
            if key not in filters:
                filters[key] = default
                made.notes.append(f"filters.{key}: {default} is set, since Krill drops shorter texts by itself.")
    if "out" not in config:
        config["out"] = DEFAULT_OUT
        made.notes.append(f"dataset_prepared_path is not given: the store goes to {DEFAULT_OUT}/.")
    if config.get("seq_len") is None:
        made.notes.append("sequence_len is not given: no packed rows are written.")
    else:
        config.setdefault("packing", {"strategy": "wrapped", "write": True})
    if "shard_size" in config:
        made.notes.append(
            "The save shard size was the size of output files; shard_size is the input that makes one shard."
        )


def _name_the_rest(made: Conversion, source: dict[str, Any]) -> None:
    """Keys that have no place in our form: no longer needed, none of data's, or misspelt."""
    gone = [dotted(path) for path, _ in _present(source) if path in _GONE]
    if gone:
        made.notes.append(
            f"No longer needed: {', '.join(gone)}. There is one way of working, within memory, whatever the size."
        )
    ignored: list[KeyPath] = [(key,) for key in source if key not in _FLAT | _OURS | {"preprocess"}]
    block = source.get("preprocess")
    if isinstance(block, dict):
        ignored += [("preprocess", key) for key in block if key not in _IN_PREPROCESS]
    elif block is not None:
        made.problems.append((("preprocess",), "must be a block of keys."))
    for path in tuple(ignored):
        hint = did_you_mean(str(path[-1]), _FLAT | _IN_PREPROCESS if len(path) == 1 else _IN_PREPROCESS)
        if path[-1] in _IN_PREPROCESS:
            hint = " It belongs under preprocess."
        if hint:
            made.problems.append((path, f"no such key.{hint}"))
            ignored.remove(path)
    if ignored:
        made.notes.append(f"Ignored, since preparing data takes no such keys: {', '.join(map(dotted, ignored))}.")
