"""A job as arrays of tasks for a scheduler: the script that queues its stages, each behind the one before.

Stage after stage: `prepare` as one task, then each stage that can be cut into pieces as a job array, then
`finish` as one task. What each task runs is `milldam run-units`, which any scheduler can start. The stages, their order
and their pieces are those of the job's plan.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from milldam.run.tasks import FINISH, PREPARE

WAIT_SECONDS = 120
"""NFS may hide from a machine for a minute what another has written."""
ALWAYS = ("--requeue", "--open-mode=append", "--kill-on-invalid-dep=yes")
"""A task may run again, its messages follow those of the first time, and what can't begin any more leaves the queue."""
_HEAD = """\
#!/bin/bash
# Made by `milldam slurm`: queues a job stage by stage, each behind the one before. Run it with bash.
# Run it again after a failure, when nothing of it is queued any more: what is done is found and left alone.
set -euo pipefail
cd {folder}

# What every task does first.
setup={setup}
# What it does: $run_units, its options, then the command that describes the job.
run_units={run_units}
job={job}
options=({options})

# queue COMMAND OPTION...: hands a task, or an array of them, to Slurm; prints the number of the job.
queue() {{
  local id command=$1
  shift
  id=$(printf '#!/bin/bash\\n%s\\n%s\\n' "$setup" "$command" | sbatch --parsable "${{options[@]}}" "$@") || return
  # The name of a cluster may follow.
  printf '%s\\n' "${{id%%;*}}"
}}
"""


@dataclass(frozen=True, slots=True)
class ArraySettings:
    """How the arrays are queued."""

    nodes: int
    """Tasks of an array that work at the same time, a machine each."""
    tasks: int | None = None
    """Tasks of an array; None: as many as nodes."""
    options: tuple[str, ...] = ()
    """More options for sbatch, as they are."""
    setup: str = ""
    """Shell commands that come first on every machine, such as the activation of an environment."""
    name: str = "milldam"
    milldam: str = "milldam"
    """How milldam is started there: shell words."""


def slurm_script(
    command: Sequence[str], folder: Path, pieces: Mapping[str, int | None], settings: ArraySettings
) -> str:
    """The script: an array for each stage, with the one before as its dependency.

    `command`: the words that describe the job, as after `milldam`. `folder`: where the tasks run, from which its paths
    are seen. `pieces`: the stages that are shared, and into how many pieces each can be cut, where that is known.
    """
    head = _HEAD.format(
        folder=shlex.quote(str(folder)),
        setup=shlex.quote(settings.setup),
        run_units=shlex.quote(f"{settings.milldam} run-units --wait {WAIT_SECONDS}"),
        job=shlex.quote(shlex.join(command)),
        options=shlex.join([*ALWAYS, *settings.options]),
    )
    most = settings.tasks or settings.nodes
    tasks = {stage: max(1, most if count is None else min(count, most)) for stage, count in pieces.items()}
    stages: dict[str, int | None] = {PREPARE: None, **tasks, FINISH: None}
    lines = [head]
    before = None
    for stage, count in stages.items():
        lines.append(_queued(stage, count, before, settings))
        before = stage
    numbers = " ".join(f"${_variable(stage)}" for stage in stages)
    return "\n".join([*lines, f'\necho "queued: {numbers}"\n'])


def _queued(stage: str, tasks: int | None, before: str | None, settings: ArraySettings) -> str:
    command = f"$run_units --stage {stage}"
    options = [f"--job-name={shlex.quote(f'{settings.name}-{stage}')}"]
    if tasks is not None:
        # Put in on the machine that runs the task.
        command += f" --index \\$SLURM_ARRAY_TASK_ID --of {tasks}"
        at_once = f"%{settings.nodes}" if tasks > settings.nodes else ""
        options.append(f"--array=0-{tasks - 1}{at_once}")
    if before is not None:
        options.append(f'--dependency="afterok:${_variable(before)}"')
    return f'{_variable(stage)}=$(queue "{command} $job" \\\n  {" ".join(options)})'


def _variable(stage: str) -> str:
    return f"job_{stage}"
