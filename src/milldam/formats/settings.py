"""The settings of `milldam export` and `milldam import`: options of the commands, arguments of the functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le, MinLen

from milldam.errors import ConfigError, Setting
from milldam.formats import FormatName, ReadName
from milldam.rules import AtLeastOne, RunSettings, Size, Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings(RunSettings):
    """An export of a store."""

    to: FormatName
    """Format to write."""
    out: str
    """File, file pair or folder to write."""
    split: str | None = None
    """Write only this split. Default: all, if the format can hold them."""
    seq_len: AtLeastOne | None = None
    """Tokens in a row, across documents. Default: one document per row."""
    dtype: str | None = None
    """Type of the tokens, such as uint16 or int32. Default: that of the store, if the format has it."""
    shard_size: Size = "256MB"
    """Approximate size of a file, in formats of several files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSettings(RunSettings):
    """An import of tokens."""

    source: Annotated[Texts, MinLen(1)]
    """Files and folders to import."""
    out: str
    """Folder for the store."""
    format: ReadName | None = None
    """Format of SOURCE. Default: that of the files."""
    tokenizer: str | None = None
    """Folder, file or Hub name of the tokenizer. Default: the store has none."""
    column: str | None = None
    """Column with the token ids. Default: input_ids or tokens."""
    masks: str | None = None
    """Column with the loss mask, or none to ignore it. Default: labels, assistant_masks or completion_mask."""
    eos: Annotated[int, Ge(0)] | None = None
    """Join all rows and cut documents after this id."""
    bos: Annotated[int, Ge(0)] | None = None
    """The same, but cut before this id, as in llm.c's files."""
    dtype: str | None = None
    """Type of the tokens in .bin files without a header. Default: uint16."""
    split: str | None = None
    """Split to read, and its name in the store. Default: all, or train."""
    vocab_size: Annotated[int, Ge(1), Le(2**31)] | None = None
    """Size of the vocabulary. Default: that of the tokenizer, or the largest id and one."""
    shard_size: Size = "256MB"
    """Approximate size of the store's files."""

    def __post_init__(self) -> None:
        if self.eos is not None and self.bos is not None:
            problem = ": documents are cut after one id, or before one. Leave one out."
            raise ConfigError(Setting("eos"), " and ", Setting("bos"), problem)
        if self.split is not None:
            from milldam.files import stays_in_folder

            if not stays_in_folder(self.split, hidden=False):
                raise ConfigError(Setting("split", self.split), ": no name for files. Use letters and digits.")

    @property
    def border(self) -> int | None:
        """The id at which a stream is cut: after it, or before it where it begins documents (`bos`)."""
        return self.bos if self.eos is None else self.eos
