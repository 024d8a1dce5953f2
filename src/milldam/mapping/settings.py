"""Everything that can be said to `milldam.map`, and what HF `datasets.map` calls the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from milldam.choices import Documents, Executor, InputFormat, InvalidUtf8
from milldam.config.checking import checked_settings
from milldam.errors import ConfigError, Setting
from milldam.memory import parse_size
from milldam.rules import AtLeastOne, Settings, Size, SizeRange
from milldam.run.pools import SMALL_INPUT

Format = Literal["python", "numpy", "arrow"]
OnError = Literal["raise", "reject"]

_PARAMETERS = (
    "batched",
    "batch_size",
    "columns",
    "remove_columns",
    "input_columns",
    "format",
    "with_indices",
    "on_error",
    "documents",
    "separator",
    "invalid_utf8",
    "max_document_bytes",
    "input_format",
    "split",
    "subset",
    "strict",
)
"""Settings that change rows, besides the function, its arguments, `batch_bytes` and the schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSettings(Settings):
    """A job of `milldam.map`."""

    source: Any
    """Files, folders, globs, addresses, Hub names; a `datasets.Dataset` or `IterableDataset`; a generator function."""
    function: Callable[..., Any]
    function_spec: str | None = None
    """`script.py:function`, where the function was named so: workers load it by that."""
    out: str | None = None
    """The folder for the table. [default: one in the user's cache, found again by the function, settings and input]"""
    batched: bool = True
    """The function takes and returns a dict of columns; False: one row as a dict."""
    batch_size: AtLeastOne = 1000
    """At most so many rows a call."""
    batch_bytes: Annotated[str | int, SizeRange(most=1 << 30)] = "8MB"
    """At most so many bytes a call; a larger row comes alone. An Arrow array holds no more than 1 GiB for sure."""
    columns: tuple[str, ...] | None = None
    """Read only these columns of the input."""
    remove_columns: Literal["all"] | tuple[str, ...] = ()
    """Input columns that the table leaves out; "all": all of them."""
    input_columns: tuple[str, ...] | None = None
    """Give these to the function as positional arguments, in place of a dict."""
    format: Format = "python"
    """What the function gets: "python" lists, "numpy" arrays, or "arrow" tables."""
    with_indices: bool = False
    """Give the rows' numbers as a second argument."""
    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the function."""
    schema: Any = None
    """The columns of the table: a `pyarrow.Schema` or `datasets.Features`. [default: inferred from the first rows]"""
    workers: AtLeastOne | None = None
    """Cores to use. [default: all]"""
    memory: Size | None = None
    """Limit for the whole process tree, such as 512MB. [default: half of what is free]"""
    executor: Executor = "local"
    """Where to run: "local", or "ray", a cluster whose machines all see `out`."""
    address: str | None = None
    """Of the Ray cluster. [default: the one that runs here]"""
    shard_size: Size = "64MB"
    """Input of a unit, about: what is reused, or done again, as a whole."""
    shards: AtLeastOne | None = None
    """Exactly so many units of even size instead."""
    on_error: OnError = "raise"
    """When the function raises: "raise", or "reject": set the rows aside on which it does."""
    key: str | None = None
    """Names the function where what it depends on can't be hashed."""
    source_key: str | None = None
    """Names the source where it can't be identified."""
    documents: Documents = "file"
    separator: str | None = None
    invalid_utf8: InvalidUtf8 = "reject"
    max_document_bytes: Size = "32MiB"
    input_format: InputFormat | None = None
    split: str | None = None
    subset: str | None = None
    strict: bool = False
    """Stop at the first record that can't be read."""
    overwrite: bool = False
    """Do everything again, also what is up to date."""

    def __post_init__(self) -> None:
        if isinstance(self.function, type):
            name = self.function.__name__
            raise ConfigError(Setting("function"), f": {name} is a class. Give one that is made of it: {name}(...).")
        if self.format == "arrow" and self.input_columns is not None:
            takes = ' go with format "python" or "numpy"; an Arrow table comes whole.'
            raise ConfigError(Setting("input_columns"), takes)

    @property
    def most_batch_bytes(self) -> int:
        return parse_size(self.batch_bytes)

    @property
    def parameters(self) -> dict[str, Any]:
        """Every setting that changes rows, but for the function and the schema; plain JSON."""
        found = {name: getattr(self, name) for name in _PARAMETERS} | {"batch_bytes": self.most_batch_bytes}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def wants_processes(self, input_bytes: int) -> bool:
        """Unless there is little to do, or one worker on this machine is asked for, the function runs in others."""
        if self.executor != "local":
            return True
        return input_bytes > SMALL_INPUT if self.workers is None else self.workers > 1

    @property
    def unit_bytes(self) -> int:
        return parse_size(self.shard_size)

    @property
    def cuts(self) -> dict[str, Any]:
        """What changes how the input is cut into units."""
        return {"shard_size": self.unit_bytes, "shards": self.shards}


# ---- names of HF `datasets.map` ----


class HuggingFaceNames(TypedDict, total=False):
    """What `datasets.map` calls workers, schema, key and the opposite of overwrite."""

    num_proc: int | None
    features: Any
    new_fingerprint: str | None
    load_from_cache_file: bool | None


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
    if isinstance(values.get("function"), str):
        from milldam.text.user_functions import load_function

        values |= {"function": load_function(values["function"]), "function_spec": values["function"]}
    return checked_settings(MapSettings, values, if_missing="A source and a function are needed.")


def _translated(given: dict[str, Any]) -> dict[str, Any]:
    found = dict(given)
    for theirs, ours in _SAME.items():
        if theirs in found:
            if found.get(ours) is not None:
                raise ConfigError(Setting(theirs), " is another word for ", Setting(ours), "; give one of them.")
            found[ours] = found.pop(theirs)
    if "load_from_cache_file" in found:
        found["overwrite"] = found.get("overwrite", False) or not found.pop("load_from_cache_file")
    for name, advice in _OTHER.items():
        if found.pop(name, False):
            raise ConfigError(Setting(name), f": not here: {advice}")
    return found
