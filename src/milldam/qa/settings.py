"""The settings of `milldam qa`: the keys of its configuration file and the options of `prepare`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen

from milldam.errors import ConfigError, Setting
from milldam.rules import AtLeastOne, RunSettings, Settings, Texts

First = Literal["auto", "question", "context"]
PaddingSide = Literal["auto", "left", "right"]
DEFAULT_OVERLAP = 128


@dataclass(frozen=True, kw_only=True)
class QARules(Settings):
    """How examples become windows of at most max_seq_length tokens: every setting that changes features."""

    max_seq_length: Annotated[int, Ge(8)] = 384
    """Tokens per window, with the question, special and memory tokens; shorter ones are padded."""
    overlap: Annotated[int, Ge(0)] | None = None
    """Tokens of the context that two windows share. Default: 128."""
    hop: AtLeastOne | None = None
    """Instead of overlap: tokens of the context from the start of one window to the start of the next."""
    first: First = "auto"
    """What comes first in a window. auto: the context if the tokenizer pads on the left, as XLNet does; otherwise the
    question."""
    padding_side: PaddingSide = "auto"
    """Where windows are padded. auto: as the tokenizer does."""
    memory_tokens: Annotated[int, Ge(0)] = 0
    """Memory tokens at each end: so many [MEM_READ_i] before every window's text, as many [MEM_WRITE_i] after it."""
    max_segments: AtLeastOne | None = None
    """Keep only the first windows of an example, at most this many."""

    def __post_init__(self) -> None:
        if self.overlap is not None and self.hop is not None:
            raise ConfigError(Setting("overlap"), " and ", Setting("hop"), " say the same in two ways; give one.")

    def step(self, room: int) -> int:
        """Tokens of the context from the start of one window to the next, if a window has room for `room` of them.

        >>> QARules(overlap=128).step(366), QARules(hop=128).step(366)
        (238, 128)
        """
        if self.hop is not None:
            return min(self.hop, room)  # a longer one would leave out tokens between two windows
        return room - (DEFAULT_OVERLAP if self.overlap is None else self.overlap)

    @property
    def facts(self) -> dict[str, Any]:
        """Every setting that changes features."""
        facts = {one.name: getattr(self, one.name) for one in fields(QARules)}
        return facts | ({"overlap": DEFAULT_OVERLAP} if self.overlap is self.hop is None else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class QASettings(QARules, RunSettings):
    """A job of question answering."""

    inputs: Annotated[Texts, MinLen(1)]
    """Files, folders, globs, addresses, `save_to_disk` folders, names on the Hub."""
    tokenizer: str
    """Folder, file or Hub name of the tokenizer."""
    out: str
    """Folder for the store."""
    max_examples: AtLeastOne | None = None
    """Stop after exactly this many examples."""
    split: str = "train"
    """Split to read, and its name in the store."""
    strict: bool = False
    """Stop at the first record that can't be used."""
