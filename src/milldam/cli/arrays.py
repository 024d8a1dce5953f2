"""A job as arrays of tasks for a scheduler: `slurm` queues its stages, `run-units` is one task on any scheduler.

`prepare` is one task, then each stage of the job's plan is a job array that waits for the previous stage, then `finish`
is one task.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from milldam.cli.commands import described_job
from milldam.errors import ConfigError, NotReadyError, TaskHeldError
from milldam.run.tasks import FINISH, PREPARE

if TYPE_CHECKING:
    from milldam.run.summary import Observer


@click.command(context_settings={"allow_interspersed_args": False})
@described_job
@click.option("--nodes", type=click.IntRange(min=1), required=True, help="Machines that run at the same time.")
@click.option("--tasks", type=click.IntRange(min=1), help="Most tasks per array. [default: as many as nodes]")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the script here. [default: standard output]")
@click.option("--cpus", "cpus_per_task", type=click.IntRange(min=1), help="Cores per task (sbatch --cpus-per-task).")
@click.option("--mem", metavar="SIZE", help="Memory per task (sbatch --mem), such as 64G.")
@click.option("--time", metavar="TIME", help="Time limit per task (sbatch --time).")
@click.option(
    "--sbatch",
    "more",
    multiple=True,
    metavar="OPTION",
    help="Any other sbatch option, such as --partition=cpu. May be repeated.",
)
@click.option("--setup", default="", metavar="COMMANDS", help="Shell commands to run first: source .venv/bin/activate")
@click.option("--milldam", "program", default="milldam", show_default=True, help="Command that starts milldam there.")
def slurm(
    command: tuple[str, ...], nodes: int, tasks: int | None, out: Path | None, more: tuple[str, ...], **named: Any
) -> None:
    """
    Each stage is a job array that waits for the previous stage.

    COMMAND: any job as you would run it: tokenize, preprocess, qa, map, import or export, with its options. It is
    checked first. The tasks run in the current folder; it, the input and the output folder must be on a file system
    that all machines share. Each task runs `milldam run-units`; a task that is queued again does only the rest.

    \b
    milldam slurm --nodes 16 --cpus 32 --mem 64G --time 8:00:00 -o job.sh preprocess config.yaml
    milldam slurm --nodes 4 -o job.sh qa train-v2.0.json -o squad.milldam --tokenizer bert-base-uncased/
    bash job.sh
    """
    from milldam.cli.commands import array_of_command
    from milldam.files import write_file

    work, _ = array_of_command(command)
    setup, program = named.pop("setup"), named.pop("program")
    given = [f"--{name.replace('_', '-')}={value}" for name, value in named.items() if value is not None]
    stages = work.job.stage_names
    options = [*ALWAYS, *given, *more]
    script = slurm_script(command, stages, nodes, tasks, options=options, setup=setup, program=program)
    if out is None:
        click.echo(script, nl=False)
        return
    write_file(out, script.encode())
    listed = ", ".join((PREPARE, *stages, FINISH))
    click.echo(f"{out}: {listed}; {nodes} machines. Queue it: bash {shlex.quote(str(out))}")


# ---- a task ----

S = TypeVar("S")
_LOOK_AGAIN_SECONDS = 2.0


@click.command("run-units", context_settings={"allow_interspersed_args": False})
@described_job
@click.option("--stage", required=True, help="prepare, a stage of the job (`milldam slurm` names them), or finish.")
@click.option("--index", type=int, metavar="I", help="Number of this array task, from 0.")
@click.option("--of", type=int, metavar="N", help="Number of array tasks of the stage.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=0,
    metavar="SECONDS",
    help="How long to wait for results of earlier stages that a slow file system shows late. [default: 0]",
)
def run_units(command: tuple[str, ...], stage: str, index: int | None, of: int | None, wait: float) -> None:
    """
    COMMAND: the job as you would run it on one machine. Does every N-th unit of the stage, starting with unit I, that
    is not done. If the same task is already running, it waits for it. All tasks of earlier stages must be done;
    `prepare` comes first and `finish` last, each as one task. `milldam slurm` writes a script of them.

    \b
    milldam run-units --stage prepare preprocess config.yaml
    milldam run-units --stage tokenize --index 3 --of 8 preprocess config.yaml
    milldam run-units --stage finish preprocess config.yaml
    """
    from milldam.cli.commands import array_of_command, as_interrupt, end_interrupted
    from milldam.cli.summaries import Display, show_summary
    from milldam.run.array import ArrayTask

    if stage in (PREPARE, FINISH):
        if index or (of or 1) > 1:
            raise ConfigError(f"--stage {stage} is for one task alone: leave out --index and --of.")
        index, of = 0, 1
    if index is None or of is None:
        raise ConfigError(f"--stage {stage} is done by array tasks: say which one, such as --index 0 --of 1.")
    task = ArrayTask(stage, index, of)
    work, showing = array_of_command(command)
    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        # Standard output is for the summary, not for what a user's function prints.
        with Display(quiet=showing["quiet"]) as display, contextlib.redirect_stdout(sys.stderr):
            summary = _patiently(partial(work.run, task), display, wait)
    except KeyboardInterrupt:
        end_interrupted()
    if summary is not None:
        show_summary(summary, **showing)


def _patiently(work: Callable[[Observer], S], observer: Observer, seconds: float) -> S:
    """If the same task is running already, wait for it, then do the rest."""
    begun, warned = time.monotonic(), False
    while True:
        try:
            return work(observer)
        except TaskHeldError as error:
            if not warned:
                observer.warn(f"{error} Waiting for it.")
                warned = True
        except NotReadyError:
            if time.monotonic() - begun >= seconds:
                raise
        time.sleep(_LOOK_AGAIN_SECONDS)


# ---- the script ----

WAIT_SECONDS = 120
"""NFS may hide new files of another machine for a minute."""
ALWAYS = ("--requeue", "--open-mode=append", "--kill-on-invalid-dep=yes")
"""A task may run again and append to its log; a task whose dependency failed leaves the queue."""
_HEAD = """\
#!/bin/bash
# Made by `milldam slurm`: queues a job stage by stage; each stage waits for the previous one. Run it with bash.
# After a failure, run it again when nothing of it is queued any more: only the rest is done.
set -euo pipefail
cd {folder}
setup={setup}
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


def slurm_script(
    command: Sequence[str],
    stages: Sequence[str],
    nodes: int,
    tasks: int | None = None,
    *,
    options: Sequence[str] = ALWAYS,
    setup: str = "",
    program: str = "milldam",
) -> str:
    """An array for each stage, which depends on the previous one. The tasks run in this folder."""
    words = {"folder": str(Path.cwd()), "setup": setup, "run_units": f"{program} run-units --wait {WAIT_SECONDS}"}
    words |= {"job": shlex.join(command)}
    quoted = {name: shlex.quote(text) for name, text in words.items()}
    lines, count, before = [_HEAD.format(**quoted, options=shlex.join(options))], tasks or nodes, ""
    for stage in (PREPARE, *stages, FINISH):
        task, queued = f"$run_units --stage {stage}", [f"--job-name=milldam-{stage}"]
        if stage in stages:
            # expanded on the machine that runs the task
            task += f" --index \\$SLURM_ARRAY_TASK_ID --of {count}"
            queued.append(f"--array=0-{count - 1}" + (f"%{nodes}" if count > nodes else ""))
        queued += [f'--dependency="afterok:$job_{before}"'] if before else []
        lines.append(f'job_{stage}=$(queue "{task} $job" \\\n  {" ".join(queued)})')
        before = stage
    numbers = " ".join(f"$job_{stage}" for stage in (PREPARE, *stages, FINISH))
    return "\n".join([*lines, f'\necho "queued: {numbers}"\n'])
