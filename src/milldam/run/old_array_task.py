"""A share of one stage, for array schedulers such as Slurm: every n-th unit, on this machine, beside other shares.

The job goes its usual way through the stages: those before are done, and have no units left; at the wanted stage the
share's units are worked on; then the way ends with `ShareDone`. So the order of stages is written nowhere but in the
job, and a share that is queued again finds what it has done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, NotReadyError
from milldam.run.pools import Pool as Crew
from milldam.run.pools import Workers as Staff
from milldam.run.tasks import Event, Executor, Task


class ShareDone(Exception):  # noqa: N818 - no error: the share's way ends here
    """The share is done; the other shares and stages are for others."""


class _Beside:
    """Another crew, for all but its executors."""

    def __init__(self, inner: Crew) -> None:
        self._inner = inner

    @property
    def cores(self) -> int:
        return self._inner.cores

    @property
    def overhead_bytes(self) -> int:
        return self._inner.overhead_bytes

    @property
    def machine(self) -> str:
        return self._inner.machine

    def require_shared(self, folder: Path) -> None:
        self._inner.require_shared(folder)

    def close(self) -> None:
        self._inner.close()

    def leave(self) -> None:
        self._inner.leave()


class ShareCrew(_Beside):
    """A share of a stage on top of another crew. `stages`: all of the job's that are done in shares, in order."""

    def __init__(self, inner: Crew, wanted: str, holds: Callable[[int], bool], stages: Sequence[str]) -> None:
        super().__init__(inner)
        self._wanted, self._holds, self._stages = wanted, holds, stages
        if wanted not in stages:
            listed = ", ".join(stages)
            raise ConfigError(
                f"--stage {wanted}: this job has the stages {listed}; prepare before and finish after them."
            )

    def executor(self, stage: str, staff: Staff) -> Executor:
        if stage == self._wanted:
            return _ShareExecutor(self._inner.executor(stage, staff), self._holds)
        if stage in self._stages and self._stages.index(stage) < self._stages.index(self._wanted):
            return _NothingLeft(stage, self._wanted)
        raise ShareDone


class FinishCrew(_Beside):
    """For who comes after all shares, and does what is not done in shares."""

    def __init__(self, inner: Crew, stages: Sequence[str]) -> None:
        super().__init__(inner)
        self._stages = stages

    def executor(self, stage: str, staff: Staff) -> Executor:
        return _NothingLeft(stage, "finish") if stage in self._stages else self._inner.executor(stage, staff)


class _ShareExecutor:
    """Works on the units of a share, then ends its way."""

    def __init__(self, inner: Executor, holds: Callable[[int], bool]) -> None:
        self._inner, self._holds = inner, holds

    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        self._inner.run(task, filter(self._holds, units), assign, on_event)
        raise ShareDone


class _NothingLeft:
    """A stage before the wanted one: its shares must be done."""

    def __init__(self, stage: str, wanted: str) -> None:
        self._stage, self._wanted = stage, wanted

    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        if next(iter(units), None) is not None:
            raise NotReadyError(
                f"--stage {self._wanted}: the stage {self._stage} before it is not done. Run its shares first; "
                "`milldam preprocess` does all that is left on one machine."
            )
