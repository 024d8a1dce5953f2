"""How examples become windows: every setting that changes features."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from milldam.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class QARules:
    """Windows of at most max_seq_length tokens over a question and its context."""

    max_seq_length: int = 384
    """Tokens of a window, with the question, special and memory tokens; shorter ones are padded to it."""
    overlap: int | None = None
    """Tokens of the context that a window shares with the one before. Default 128. `doc_stride` means this in fast
    tokenizers, and the hop in older ones."""
    hop: int | None = None
    """Instead of overlap: tokens of the context from one window's begin to the next one's."""
    first: Literal["auto", "question", "context"] = "auto"
    """What comes first. auto: the context where the tokenizer pads on the left, as XLNet; else the question."""
    padding_side: Literal["auto", "left", "right"] = "auto"
    memory_tokens: int = 0
    """Put so many [MEM_READ_i] in front of every window's text and as many [MEM_WRITE_i] behind it."""
    max_segments: int | None = None
    """Keep at most so many windows of an example, the first ones. To choose others, select when loading."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "use_attribute_docstrings": True}

    def __post_init__(self) -> None:
        if self.overlap is not None and self.hop is not None:
            raise ConfigError("qa: overlap and hop say the same thing in two ways; give one of them.")
        least = {"max_seq_length": 8, "overlap": 0, "hop": 1, "memory_tokens": 0, "max_segments": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ConfigError(f"qa: {name}: {value}; use {smallest} or more.")

    def step(self, room: int) -> int:
        """Tokens of the context from one window's begin to the next one's, when a window has room for so many.

        >>> QARules(overlap=128).step(366), QARules(hop=128).step(366)
        (238, 128)
        """
        if self.hop is not None:
            return min(self.hop, room)  # a longer one would leave out tokens between two windows
        return room - (128 if self.overlap is None else self.overlap)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
