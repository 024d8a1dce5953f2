"""A task of a job array: what one of several machines does of a stage, beside the others."""

from __future__ import annotations

from dataclasses import dataclass

from milldam.errors import ConfigError, Setting

PREPARE, FINISH = "prepare", "finish"
"""Before the first stage and behind the last: each for one task alone."""


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """Every `of`-th unit of a stage, from the `index`-th on."""

    stage: str
    index: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            said = f": {self.index} of {self.of} array tasks: the index is 0 to {max(0, self.of - 1)}."
            raise ConfigError(Setting("index"), said)

    @property
    def label(self) -> str:
        """
        >>> ArrayTask("tokenize", 3, 8).label
        'tokenize-3-of-8'
        """
        return f"{self.stage}-{self.index}-of-{self.of}"

    def overlaps(self, label: str) -> bool:
        """Whether a task of that label is of the same stage, cut into another number of tasks.

        >>> task = ArrayTask("tokenize", 3, 8)
        >>> task.overlaps("tokenize-1-of-2"), task.overlaps("tokenize-1-of-8"), task.overlaps("arrange-1-of-2")
        (True, False, False)
        """
        stage, _, rest = label.partition("-")
        return stage == self.stage and not rest.endswith(f"-of-{self.of}")

    def holds(self, unit: int) -> bool:
        return unit % self.of == self.index
