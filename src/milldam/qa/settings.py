"""Everything that can be said to `milldam qa`: the keys of its configuration file and the options of `prepare`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from milldam.errors import ConfigError, did_you_mean
from milldam.qa.rules import QARules

_SPLIT = re.compile(r"\w+(?:[.+-]\w+)*")
_LENGTHS = ("max_seq_length", "overlap", "hop", "doc_stride", "memory_tokens")
_COUNTS = ("max_segments", "max_examples", "workers")
_CHOICES = {
    "first": ("auto", "question", "context"),
    "padding_side": ("auto", "left", "right"),
    "engine": ("local", "ray"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QASettings:
    """A job of question answering."""

    inputs: str | tuple[str, ...]
    """Files, folders, globs, addresses, `save_to_disk` folders, names on the Hub."""
    tokenizer: str
    """Folder, file or Hub name of the tokenizer; it must give offsets, as all of HF tokenizers do."""
    out: str
    """The folder for the store."""
    max_seq_length: int = 384
    """Tokens of a window, with the question, special and memory tokens."""
    overlap: int | None = None
    """Tokens of the context that a window shares with the one before. [default: 128]"""
    hop: int | None = None
    """Instead of overlap: tokens of the context from one window's begin to the next one's."""
    doc_stride: int | None = None
    """Another word for overlap, which is what fast tokenizers mean by it. In older code it is the hop."""
    memory_tokens: int = 0
    """So many [MEM_READ_i] and [MEM_WRITE_i] in every window."""
    first: Literal["auto", "question", "context"] = "auto"
    """What comes first in a window. auto: the context where the tokenizer pads on the left."""
    padding_side: Literal["auto", "left", "right"] = "auto"
    """Where windows are padded. auto: as the tokenizer has it."""
    max_segments: int | None = None
    """Keep at most so many windows of an example, the first ones."""
    max_examples: int | None = None
    """Stop after so many examples, exactly."""
    split: str = "train"
    """Names the shards, and says which files of a folder, of a saved data set or of one on the Hub are read."""
    memory: str | int | None = None
    """Limit for the whole process tree, such as 600MB. [default: half of what is free]"""
    workers: int | None = None
    """Cores to use. [default: all]"""
    engine: Literal["local", "ray"] = "local"
    """Where it is worked: on this machine, or on a Ray cluster whose machines all see `out`."""
    address: str | None = None
    """Of the Ray cluster, such as 10.0.0.1:6379. [default: the one that runs here]"""
    overwrite: bool = False
    """Replace what was made from other settings or input."""
    strict: bool = False
    """Stop at the first record that can't be used."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}

    def __post_init__(self) -> None:
        for name in (*_LENGTHS, *_COUNTS):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ConfigError(f"qa: {name}: {value!r}; a whole number is wanted.")
        for name in ("max_examples", "workers"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"qa: {name}: {getattr(self, name)}; use 1 or more.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f'qa: {name}: "{getattr(self, name)}"; must be one of {", ".join(choices)}.')
        if self.doc_stride is not None and (self.overlap is not None or self.hop is not None):
            raise ConfigError("qa: doc_stride is another word for overlap; give one of overlap, hop and doc_stride.")
        if not _SPLIT.fullmatch(self.split):
            raise ConfigError(f'qa: split: "{self.split}"; a name is wanted, such as train or validation.')
        if not self.paths:
            raise ConfigError("qa: inputs: nothing is named. Name a file, such as train-v2.0.json.")
        _ = self.rules

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.inputs,) if isinstance(self.inputs, str) else tuple(self.inputs)

    @property
    def rules(self) -> QARules:
        """What changes features, with the overlap said one way."""
        overlap = self.overlap if self.doc_stride is None else self.doc_stride
        return QARules(
            max_seq_length=self.max_seq_length,
            overlap=128 if overlap is None and self.hop is None else overlap,
            hop=self.hop,
            first=self.first,
            padding_side=self.padding_side,
            memory_tokens=self.memory_tokens,
            max_segments=self.max_segments,
        )


KEYS = tuple(field.name for field in fields(QASettings))


def settings_of(given: Mapping[str, Any]) -> QASettings:
    """Settings from plain values, as a configuration file or a caller has them; what is None is left at its default."""
    for name in given:
        if name not in KEYS:
            raise ConfigError(f'qa: no setting "{name}".{did_you_mean(str(name), KEYS)}')
    values = {name: value for name, value in given.items() if value is not None}
    missing = [name for name in ("inputs", "tokenizer", "out") if name not in values]
    if missing:
        raise ConfigError(f"qa: {', '.join(missing)}: missing. At least inputs, tokenizer and out are needed.")
    values |= {name: str(values[name]) for name in ("tokenizer", "out")}
    return QASettings(**values | {"inputs": _texts(values["inputs"])})


def _texts(inputs: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    return (str(inputs),) if isinstance(inputs, str | Path) else tuple(str(one) for one in inputs)
