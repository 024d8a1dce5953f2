"""Everything that can be said to `milldam qa`: the keys of its configuration file and the options of `prepare`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal

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
    """Tokens of the context that a window shares with the one before. [default: 128]"""
    hop: AtLeastOne | None = None
    """Instead of overlap: tokens of the context from one window's begin to the next one's."""
    first: First = "auto"
    """What comes first in a window. auto: the context where the tokenizer pads on the left, as XLNet; else the
    question."""
    padding_side: PaddingSide = "auto"
    """Where windows are padded. auto: as the tokenizer has it."""
    memory_tokens: Annotated[int, Ge(0)] = 0
    """Put so many [MEM_READ_i] in front of every window's text and as many [MEM_WRITE_i] behind it."""
    max_segments: AtLeastOne | None = None
    """Keep at most so many windows of an example, the first ones. To choose others, select when loading."""

    def __post_init__(self) -> None:
        if self.overlap is not None and self.hop is not None:
            raise ConfigError(Setting("overlap"), " and ", Setting("hop"), " say the same in two ways; give one.")

    def step(self, room: int) -> int:
        """Tokens of the context from one window's begin to the next one's, when a window has room for so many.

        >>> QARules(overlap=128).step(366), QARules(hop=128).step(366)
        (238, 128)
        """
        if self.hop is not None:
            return min(self.hop, room)  # a longer one would leave out tokens between two windows
        return room - (DEFAULT_OVERLAP if self.overlap is None else self.overlap)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class QASettings(QARules):
    """A job of question answering."""

    inputs: Annotated[tuple[str, ...], MinLen(1)]
    """Files, folders, globs, addresses, `save_to_disk` folders, names on the Hub."""
    tokenizer: str
    """Folder, file or Hub name of the tokenizer; it must give offsets, as all of HF tokenizers do."""
    out: str
    """The folder for the store."""
    doc_stride: Annotated[int, Ge(0)] | None = None
    """The same as overlap, under the name that fast tokenizers use. In older code it is the hop."""
    max_examples: AtLeastOne | None = None
    """Stop after so many examples, exactly."""
    split: str = "train"
    """Names the shards, and says which files of a folder, of a saved dataset or of one on the Hub are read."""
    memory: Size | None = None
    """Limit for the whole process tree, such as 600MB. [default: half of what is free]"""
    workers: AtLeastOne | None = None
    """Cores to use. [default: all]"""
    executor: Executor = "local"
    """Where to run: on this machine, or on a Ray cluster whose machines all see `out`."""
    address: str | None = None
    """Of the Ray cluster, such as 10.0.0.1:6379. [default: the one that runs here]"""
    overwrite: bool = False
    """Replace what was made from other settings."""
    strict: bool = False
    """Stop at the first record that can't be used."""

    def __post_init__(self) -> None:
        QARules.__post_init__(self)
        if self.doc_stride is not None and (self.overlap is not None or self.hop is not None):
            said = (": another word for ", Setting("overlap"), "; give one of overlap, hop and doc_stride.")
            raise ConfigError(Setting("doc_stride"), *said)
        if not _SPLIT.fullmatch(self.split):
            raise ConfigError(Setting("split"), f': "{self.split}"; a name is wanted, such as train or validation.')

    @property
    def rules(self) -> QARules:
        """What changes features, with the overlap said one way."""
        overlap = self.overlap if self.doc_stride is None else self.doc_stride
        if overlap is None and self.hop is None:
            overlap = DEFAULT_OVERLAP
        said = {one.name: getattr(self, one.name) for one in fields(QARules)}
        return QARules(**said | {"overlap": overlap})
