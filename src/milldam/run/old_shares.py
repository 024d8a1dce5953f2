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

    def overlaps(self, label: str) -> bool:
        """Whether a share of that label is of the same stage, cut into another number of shares.

        >>> share = Share("tokenize", 3, 8)
        >>> share.overlaps("tokenize-1-of-2"), share.overlaps("tokenize-1-of-8"), share.overlaps("arrange-1-of-2")
        (True, False, False)
        """
        stage, _, rest = label.partition("-")
        return stage == self.stage and not rest.endswith(f"-of-{self.of}")

    def holds(self, piece: int) -> bool:
        return piece % self.of == self.index
