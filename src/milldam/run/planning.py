"""From the budget to a number of workers: what each takes, how many fit, and the smallest budget that works."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from milldam.errors import ResourceError, Setting
from milldam.memory import Budget, format_size, stays_shared
from milldam.run.tasks import cores as cores

# Measured (docs/log.md): a worker's imports, what batches on their way may take, a loaded tokenizer by its file's size.
WORKER_BYTES = 42 * 10**6
WORK_BYTES = 60 * 10**6
BATCHES_BYTES = 16 * 10**6
TABLE_BYTES = 34 * 10**6
"""gigatoken's cache of the words of half a gigabyte of text, without which it is still fast."""
TOKENIZER_FACTOR = 16
FILTER_BYTES, LANGUAGE_BYTES, FUNCTION_BYTES = 40 * 10**6, 85 * 10**6, 64 * 10**6
"""What text rules, the language model, and a function that gets documents whole take beside the rest."""
GROUPING_WORKER_BYTES, LEAST_GROUPING_BYTES = 60 * 10**6, 101 * 10**6
"""The process that groups hashes, and the least that grouping works with."""
SMALL_INPUT = 16 * 10**6
"""Bytes of input for which starting worker processes takes longer than the work."""


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """What follows from the budget and the input."""

    budget: Budget
    units: int
    input_bytes: int
    shard_size: int
    workers: int
    threads: int
    share_bytes: int
    encoder: str
    encoder_note: str
    note: str = ""
    stages: tuple[str, ...] = ("tokenize",)
    left_out: str = ""
    """Files of the input's folders that are not read, and why."""
    done: int = 0
    """Units that were done before, where that is known."""
    pieces: dict[str, int] = field(default_factory=dict)
    """Of the stages that several machines can share, in order: into how many pieces each can be cut at most."""
    conversations: str = ""
    """The form of the records, and how they become texts; empty: they are none."""
    text_columns: dict[str, str | None] = field(default_factory=dict)
    """The field that is read, by dataset; None: plain text."""
    changes: tuple[str, ...] = ()
    """Input files that are new, changed or gone since an earlier run."""


P = TypeVar("P", bound=WorkPlan)


def make_plan(
    budget: Budget, *, kind: type[P], workers: int, useful: int, cores: int, held_bytes: int, **facts: Any
) -> P:
    """A plan in which `workers`, of as many as would be useful, share the cores and what the budget leaves them."""
    return kind(
        budget=budget,
        workers=workers,
        threads=max(1, cores // workers),
        share_bytes=(budget.limit_bytes - held_bytes) // workers,
        note=f"the budget holds {workers} of {useful} workers" if workers < useful else "",
        **facts,
    )


def fit_workers(
    budget: Budget, parent_bytes: int, loaded_bytes: int, wanted: int, *, own_bytes: int = 0, forked: bool = False
) -> int:
    """How many workers the budget holds, at most `wanted`; one works in this process.

    A worker loads `loaded_bytes`, which forked workers share but for what each writes to, and holds `own_bytes` beside
    what every worker holds. Raises ResourceError with the smallest budget that would do when it holds none.
    """
    alone = least_bytes(parent_bytes, loaded_bytes + own_bytes)
    if budget.limit_bytes < alone:
        raise ResourceError(
            f"A budget of {format_size(budget.limit_bytes)} is too small for this tokenizer and these rules: "
            "it takes at least ",
            enough_memory(alone),
            ".",
        )
    loaded, own = WORKER_BYTES + loaded_bytes, own_bytes + WORK_BYTES
    left = budget.limit_bytes - parent_bytes
    several = (left - loaded) // (own + loaded - stays_shared(loaded)) if forked else left // (own + loaded)
    return max(1, min(wanted, several))


def least_bytes(parent_bytes: int, loaded_bytes: int) -> int:
    """What a run takes in which this process does the work itself."""
    return max(parent_bytes, WORKER_BYTES) + loaded_bytes + WORK_BYTES


def enough_memory(least: int) -> Setting:
    """A budget that does; a process does not weigh the same twice, so it is a little more."""
    return Setting("memory", f"{least * 103 // 100 // 10**6 + 1}MB")


def require_room_for_grouping(budget: Budget, parent_bytes: int) -> None:
    """Raise ResourceError with the smallest budget that would do when dedup could not group in a process of its own."""
    require_room(budget, parent_bytes + GROUPING_WORKER_BYTES + LEAST_GROUPING_BYTES, "dedup")


def require_room(budget: Budget, needed: int, what: str) -> None:
    """Raise ResourceError when a budget does not hold so much."""
    if budget.limit_bytes < needed:
        raise ResourceError(
            f"A budget of {format_size(budget.limit_bytes)} is too small for {what}: it takes at least ",
            enough_memory(needed),
            ".",
        )
