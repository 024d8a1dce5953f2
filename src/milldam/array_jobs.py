"""A job as arrays of tasks for a scheduler: the script that queues its stages, each behind the one before.

Stage after stage: `prepare` as one task, then each stage that has units as an array of shares, then `finish` as one
task. What each task runs is `milldam run-units`, which any scheduler can start. The order is that of the job's plan.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

PREPARE, FINISH = "prepare", "finish"
_IN_SHARES = frozenset({"arrange", "count", "fingerprint", "group", "join", "near", "tokenize"})
_HEAD = """\
#!/bin/bash
# {title}
# Queues the stages of a job, each behind the one before it. Made by `milldam slurm`; run it with bash, or bit by bit.
# Run it again after a failure: what is done is found and left alone.
set -euo pipefail
{setup}
"""


@dataclass(frozen=True, slots=True)
class ArraySettings:
    """How the arrays are queued."""

    nodes: int
    """Shares of each stage, a machine each."""
    options: tuple[str, ...] = ()
    """More options for sbatch, as they are."""
    setup: str = ""
    """Shell commands that come first on every machine, such as the activation of an environment."""
    name: str = "milldam"
    milldam: str = "milldam"
    """How milldam is started there."""


def stages_in_shares(stages: Sequence[str]) -> list[str]:
    """Those that are cut into shares, in the job's order; the rest is done by `finish`."""
    return [stage for stage in stages if stage in _IN_SHARES]


def slurm_script(config: str, overrides: Sequence[str], stages: Sequence[str], settings: ArraySettings) -> str:
    """The script: a line of sbatch per stage, with the stage before as its dependency."""
    lines = [_HEAD.format(title=f"{config}: {', '.join(stages)}", setup=_setup_line(settings))]
    before: str | None = None
    for stage in (PREPARE, *stages_in_shares(stages), FINISH):
        lines.append(_queued(stage, before, config, overrides, settings))
        before = stage
    lines.append(f'echo "queued: {before} is job ${{{_variable(FINISH)}}}"\n')
    return "\n".join(lines)


def _setup_line(settings: ArraySettings) -> str:
    return f"setup={shlex.quote(settings.setup + '; ' if settings.setup else '')}"


def _queued(stage: str, before: str | None, config: str, overrides: Sequence[str], settings: ArraySettings) -> str:
    shared = stage not in (PREPARE, FINISH)
    command = [settings.milldam, "run-units", config, "--stage", stage]
    for one in overrides:
        command += ["--set", one]
    run = shlex.join(command)
    if shared:
        run += f" --index $SLURM_ARRAY_TASK_ID --of {settings.nodes}"
    options = [
        f"--job-name={settings.name}-{stage}",
        *([f"--array=0-{settings.nodes - 1}"] if shared else []),
        *([f"--dependency=afterok:${{{_variable(before)}}}"] if before else []),
        *map(shlex.quote, settings.options),
    ]
    # In single quotes, so that the number of the task is put in on the machine that runs it.
    return f'{_variable(stage)}=$(sbatch --parsable {" ".join(options)} --wrap="${{setup}}"{shlex.quote(run)})'


def _variable(stage: str) -> str:
    return f"job_{stage}"
