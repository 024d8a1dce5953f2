"""The settings of `milldam qa`: the keys of its configuration file and the options of `prepare`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from milldam.choices import Executor
from milldam.errors import ConfigError, Setting
from milldam.rules import AtLeastOne, Settings, Size

First = Literal["auto", "question", "context"]
PaddingSide = Literal["auto", "left", "right"]
DEFAULT_OVERLAP = 128
_SPLIT = re.compile(r"\w+(?:[.+-]\w+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class QARules(Settings):
    """How examples become windows of at most max_seq_length tokens: every setting that changes features."""

    max_seq_length: Annotated[int, Ge(8)] = 384
    """Tokens of a window, with the question, special and memory tokens; shorter ones are padded to it."""
    overlap: Annotated[int, Ge(0)] | None = None
    """Tokens of the context that a window shares with the previous one. [default: 128]"""
    hop: AtLeastOne | None = None
    """Instead of overlap: tokens of the context from the start of one window to the start of the next."""
    first: First = "auto"
    """What comes first in a window. auto: the context if the tokenizer pads on the left, as XLNet does; otherwise the
    question."""
    padding_side: PaddingSide = "auto"
    """Where windows are padded. auto: as the tokenizer does."""
    memory_tokens: Annotated[int, Ge(0)] = 0
    """Put this many [MEM_READ_i] in front of every window's text and as many [MEM_WRITE_i] behind it."""
    max_segments: AtLeastOne | None = None
    """Keep only the first windows of an example, at most this many. To choose others, select when loading."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class QASettings(QARules):
    """A job of question answering."""

    inputs: Annotated[tuple[str, ...], MinLen(1)]
    """Files, folders, globs, addresses, `save_to_disk` folders, names on the Hub."""
    tokenizer: str
    """Folder, file or Hub name of the tokenizer; it must give offsets, as all of HF tokenizers do."""
    out: str
    """The folder for the store."""
    max_examples: AtLeastOne | None = None
    """Stop after exactly this many examples."""
    split: str = "train"
    """The files of a folder, of a saved dataset or of one on the Hub to read."""
    memory: Size | None = None
    """Limit for the whole process tree, such as 600MB. [default: half of what is free]"""
    workers: AtLeastOne | None = None
    """Cores to use. [default: all]"""
    executor: Executor = "local"
    """Where to run: on this machine, or on a Ray cluster whose machines all see `out`."""
    address: str | None = None
    """Address of the Ray cluster, such as 10.0.0.1:6379. [default: the one that runs here]"""
    overwrite: bool = False
    """Replace what was made with other settings."""
    strict: bool = False
    """Stop at the first record that can't be used."""

    def __post_init__(self) -> None:
        QARules.__post_init__(self)
        if not _SPLIT.fullmatch(self.split):
            raise ConfigError(Setting("split"), f': "{self.split}"; a name is wanted, such as train or validation.')

    @property
    def rules(self) -> QARules:
        """The settings that change features."""
        rules = QARules(**{one.name: getattr(self, one.name) for one in fields(QARules)})
        return rules if rules.hop is not None or rules.overlap is not None else replace(rules, overlap=DEFAULT_OVERLAP)
