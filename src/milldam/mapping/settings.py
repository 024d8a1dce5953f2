"""The settings of `milldam.map`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from milldam.choices import Documents, InputFormat, InvalidUtf8
from milldam.config.checking import checked_settings
from milldam.memory import parse_size
from milldam.rules import AtLeastOne, RunSettings, Size, SizeRange, Texts

Format = Literal["python", "numpy", "arrow"]
OnError = Literal["raise", "reject"]

_WITHOUT_EFFECT = (
    *("source", "function", "function_spec", "out", "fn_kwargs", "schema", "workers", "memory", "executor", "address"),
    *("shard_size", "key", "overwrite"),
)
"""Settings that don't change rows, and those that count in another way: the function and its arguments, the schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSettings(RunSettings):
    """A job of `milldam.map`."""

    source: Any
    """Files, folders, globs, addresses, Hub names; a `datasets.Dataset` or `IterableDataset`; rows of any kind."""
    function: Callable[..., Any]
    function_spec: str | None = None
    """`script.py:function`, where the function was named so: workers load it by that."""
    out: str | None = None
    """Folder for the table. Default: one in the cache, found again by the function, settings and input."""
    batched: bool = True
    """The function takes and returns a dict of columns; False: one row as a dict."""
    batch_size: AtLeastOne = 1000
    """Rows per call."""
    batch_bytes: Annotated[str | int, SizeRange(most=1 << 30)] = "8MB"
    """Most bytes per call; a larger row comes alone."""
    columns: Texts | None = None
    """Read only these columns: a,b,c. Default: all."""
    remove_columns: Literal["all"] | Texts = ()
    """Input columns to leave out of the table: a,b,c or "all"."""
    format: Format = "python"
    """Type of the columns that the function gets: lists of Python, numpy arrays, or an Arrow table."""
    with_indices: bool = False
    """Pass the row numbers as a second argument."""
    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the function; on the command line JSON or text."""
    schema: Any = None
    """The columns of the table: a `pyarrow.Schema` or `datasets.Features`. Default: inferred from the first rows."""
    shard_size: Size = "64MB"
    """Approximate input per unit, which is reused or redone as a whole."""
    on_error: OnError = "raise"
    """If the function fails: stop, or set the row aside."""
    key: str | None = None
    """Name that identifies the function, if what it depends on can't be hashed."""
    documents: Documents = "file"
    separator: str | None = None
    invalid_utf8: InvalidUtf8 = "reject"
    max_document_bytes: Size = "32MiB"
    input_format: InputFormat | None = None
    split: str | None = None
    """Read only this split of a dataset."""
    subset: str | None = None
    strict: bool = False
    """Stop at the first record that can't be read."""

    @property
    def most_batch_bytes(self) -> int:
        return parse_size(self.batch_bytes)

    @property
    def parameters(self) -> dict[str, Any]:
        """Every setting that changes rows, except the function and the schema; plain JSON."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _WITHOUT_EFFECT}
        values["batch_bytes"] = self.most_batch_bytes
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def unit_bytes(self) -> int:
        return parse_size(self.shard_size)


def settings_of(options: Mapping[str, Any]) -> MapSettings:
    """Settings from a caller's options; those that are None are left at their defaults."""
    values = {name: value for name, value in options.items() if value is not None}
    if isinstance(values.get("function"), str):
        from milldam.text.user_functions import load_function

        values |= {"function": load_function(values["function"]), "function_spec": values["function"]}
    settings = checked_settings(MapSettings, values)
    # Checking copies dicts; a DatasetDict or Features must stay what it is.
    return replace(settings, source=values["source"], schema=values.get("schema"))
