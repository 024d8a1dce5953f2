"""A share of a stage: what one of several machines does of it, beside the others."""

from __future__ import annotations

from dataclasses import dataclass

from milldam.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Share:
    """Every `of`-th piece of work of a stage, from the `index`-th on."""

    stage: str
    index: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ConfigError(f"--index {self.index} --of {self.of}: an index is 0 to {max(0, self.of - 1)}.")

    @property
    def label(self) -> str:
        """
        >>> Share("tokenize", 3, 8).label
        'tokenize-3-of-8'
        """
        return f"{self.stage}-{self.index}-of-{self.of}"

    def holds(self, piece: int) -> bool:
        return piece % self.of == self.index
