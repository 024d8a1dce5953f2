"""Everything that can be said to `milldam.map`, checked; and what HF `datasets.map` calls the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, did_you_mean
from milldam.memory import parse_size

FORMATS = ("python", "numpy", "arrow")
ON_ERROR = ("raise", "reject")
LARGEST_BATCH = 1 << 30
_CHOICES = {
    "engine": ("local", "ray"),
    "format": FORMATS,
    "on_error": ON_ERROR,
    "documents": ("file", "line", "paragraph"),
    "invalid_utf8": ("reject", "drop", "replace", "strict"),
}
_SIZES = ("batch_bytes", "shard_size")
_COUNTS = ("batch_size", "workers", "shards")
_NAMES = ("columns", "input_columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSettings:
    """A job of `milldam.map`."""

    source: Any
    """Files, folders, globs, addresses, Hub names; a `datasets.Dataset` or `IterableDataset`; a generator function."""
    function: Callable[..., Any]
    out: str | None = None
    """The folder for the table. [default: one in the user's cache, found again by the function, settings and input]"""
    function_spec: str | None = None
    """`script.py:function`, where the function was named so: workers load it by that."""
    batched: bool = True
    """The function takes and returns a dict of columns; False: one row as a dict."""
    batch_size: int = 1000
    """At most so many rows a call."""
    batch_bytes: int | str = "8MB"
    """At most so many bytes a call; a larger row comes alone."""
    columns: tuple[str, ...] | None = None
    """Read only these columns of the input."""
    remove_columns: tuple[str, ...] | str = ()
    """Input columns that the table leaves out; "all": all of them."""
    input_columns: tuple[str, ...] | None = None
    """Give these to the function as positional arguments, in place of a dict."""
    format: str = "python"
    """What the function gets: "python" lists, "numpy" arrays, or "arrow" tables."""
    with_indices: bool = False
    """Give the rows' numbers as a second argument."""
    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the function."""
    schema: Any = None
    """The columns of the table: a `pyarrow.Schema` or `datasets.Features`. [default: inferred from the first rows]"""
    workers: int | None = None
    """Cores to use. [default: all]"""
    memory: str | int | None = None
    """Limit for the whole process tree, such as 512MB. [default: half of what is free]"""
    engine: str = "local"
    """Where it is worked: "local", or "ray": on a cluster whose machines all see `out`."""
    address: str | None = None
    """Of the Ray cluster. [default: the one that runs here]"""
    shard_size: int | str = "64MB"
    """Input of a unit, about: what is reused, or done again, as a whole."""
    shards: int | None = None
    """Exactly so many units of even size instead."""
    on_error: str = "raise"
    """When the function raises: "raise", or "reject": set the rows aside on which it does."""
    key: str | None = None
    """Names the function where what it depends on can't be hashed."""
    source_key: str | None = None
    """Names the source where it can't be identified."""
    documents: str = "file"
    separator: str | None = None
    invalid_utf8: str = "reject"
    input_format: str | None = None
    split: str | None = None
    subset: str | None = None
    strict: bool = False
    """Stop at the first record that can't be read."""
    overwrite: bool = False
    """Do everything again, also what is up to date."""

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                hint = did_you_mean(str(value), choices)
                raise ConfigError(f'map: {name}: "{value}"; must be one of {", ".join(choices)}.{hint}')
        if not callable(self.function):
            raise ConfigError(f"map: function: of type {type(self.function).__name__}, which can't be called.")
        if isinstance(self.function, type):
            name = self.function.__name__
            raise ConfigError(f"map: function: {name} is a class. Give one that is made of it: {name}(...).")
        if isinstance(self.remove_columns, str) and self.remove_columns != "all":
            raise ConfigError(f'map: remove_columns: "{self.remove_columns}"; a list of names, or "all".')
        if self.format == "arrow" and self.input_columns is not None:
            raise ConfigError('map: input_columns go with format="python" or "numpy"; an Arrow table comes whole.')
        if not isinstance(self.fn_kwargs, Mapping):
            raise ConfigError(
                f"map: fn_kwargs: of type {type(self.fn_kwargs).__name__}; a dict of names and values is wanted."
            )

    def _check_numbers(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is None and name != "batch_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                whole = " A batch is never the whole input: memory is bounded." if name == "batch_size" else ""
                raise ConfigError(f"map: {name}: {value!r}; a whole number of 1 or more is wanted.{whole}")
        for name in _SIZES:
            if parse_size(getattr(self, name)) < 1:
                raise ConfigError(f"map: {name}: {getattr(self, name)}; use 1 byte or more.")
        if parse_size(self.batch_bytes) > LARGEST_BATCH:
            raise ConfigError(f"map: batch_bytes: {self.batch_bytes}; at most 1GiB, which one Arrow array can hold.")

    @property
    def most_batch_bytes(self) -> int:
        return parse_size(self.batch_bytes)

    @property
    def parameters(self) -> dict[str, Any]:
        """Every setting that changes rows, but for the function and the schema; plain JSON."""
        removed = self.remove_columns
        return {
            "batched": self.batched,
            "batch_size": self.batch_size,
            "batch_bytes": self.most_batch_bytes,
            "columns": _listed(self.columns),
            "remove_columns": removed if isinstance(removed, str) else list(removed),
            "input_columns": _listed(self.input_columns),
            "format": self.format,
            "with_indices": self.with_indices,
            "on_error": self.on_error,
            "documents": self.documents,
            "separator": self.separator,
            "invalid_utf8": self.invalid_utf8,
            "input_format": self.input_format,
            "split": self.split,
            "subset": self.subset,
            "strict": self.strict,
        }

    @property
    def cuts(self) -> dict[str, Any]:
        """What changes how the input is cut into units."""
        return {"shard_size": parse_size(self.shard_size), "shards": self.shards}


def _listed(names: tuple[str, ...] | None) -> list[str] | None:
    return None if names is None else list(names)


KEYS = tuple(one.name for one in fields(MapSettings) if one.name != "function_spec")

# ---- names of HF `datasets.map` ----

_SAME = {"num_proc": "workers", "features": "schema", "new_fingerprint": "key"}
_OTHER = {
    "with_rank": "rows must not depend on which worker makes them; leave it out.",
    "keep_in_memory": "a table is always mapped from disk; leave it out.",
    "writer_batch_size": "record batches of a table have about 4 MB, whatever the function returns; leave it out.",
    "cache_file_name": "out= names the folder of the table.",
    "cache_file_names": "out= names the folder of the table.",
    "drop_last_batch": "no rows are dropped in silence; return empty columns for what you do not want.",
    "desc": "the folder and the function name a run; leave it out.",
    "disable_nullable": "say which columns are never null with schema=.",
    "suffix_template": "shards are named by their content; leave it out.",
    "try_original_type": "columns that are passed through keep their type; leave it out.",
    "load_from_cache_files": "overwrite=True does everything again.",
}


def settings_of(given: Mapping[str, Any]) -> MapSettings:
    """Settings from what a caller says; what is None is left at its default. HF's names mean what they do there."""
    values = _translated({name: value for name, value in given.items() if value is not None})
    for name in values:
        if name not in (*KEYS, "function_spec"):
            raise ConfigError(f'map: no setting "{name}".{did_you_mean(name, KEYS)}')
    missing = [name for name in ("source", "function") if name not in values]
    if missing:
        raise ConfigError(f"map: {', '.join(missing)}: missing. A source and a function are needed.")
    if isinstance(values["function"], str):
        values |= _loaded(values["function"])
    for name in _NAMES:
        if name in values:
            values[name] = _names(name, values[name])
    if isinstance(values.get("remove_columns"), Sequence) and values["remove_columns"] != "all":
        values["remove_columns"] = _names("remove_columns", values["remove_columns"])
    return MapSettings(**values | ({"out": str(values["out"])} if "out" in values else {}))


def _loaded(spec: str) -> dict[str, Any]:
    from milldam.text.user_functions import load_function

    return {"function": load_function(spec), "function_spec": spec}


def _translated(given: dict[str, Any]) -> dict[str, Any]:
    found = dict(given)
    for theirs, ours in _SAME.items():
        if theirs in found:
            if ours in found:
                raise ConfigError(f"map: {theirs} is another word for {ours}; give one of them.")
            found[ours] = found.pop(theirs)
    if "load_from_cache_file" in found:
        found["overwrite"] = found.get("overwrite", False) or not found.pop("load_from_cache_file")
    for name, advice in _OTHER.items():
        if found.pop(name, False):
            raise ConfigError(f"map: {name}: not here: {advice}")
    return found


def _names(setting: str, value: str | Sequence[str]) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str | Path) else tuple(value)
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"map: {setting}: {name!r}; names of columns are wanted.")
    return names
