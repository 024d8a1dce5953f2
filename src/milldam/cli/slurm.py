"""`milldam slurm`: a job as arrays of tasks, with the barriers between its stages."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from milldam.cli.commands import described_job


@click.command(context_settings={"allow_interspersed_args": False})
@described_job
@click.option("--nodes", type=click.IntRange(min=1), required=True, help="Machines that run at the same time.")
@click.option("--tasks", type=click.IntRange(min=1), help="Most tasks per array. [default: as many as nodes]")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the script here. [default: standard output]")
@click.option("--cpus", type=click.IntRange(min=1), help="Cores per task (sbatch --cpus-per-task).")
@click.option("--mem", metavar="SIZE", help="Memory per task (sbatch --mem), such as 64G.")
@click.option("--time", "time_limit", metavar="TIME", help="Time limit per task (sbatch --time).")
@click.option("--partition", metavar="NAME", help="Partition to queue in (sbatch --partition).")
@click.option("--account", metavar="NAME", help="Account to charge (sbatch --account).")
@click.option(
    "--sbatch",
    "more",
    multiple=True,
    metavar="OPTION",
    help="Any other sbatch option, passed on as is; may be repeated.",
)
@click.option("--setup", default="", metavar="COMMANDS", help="Shell commands to run first: source .venv/bin/activate")
@click.option("--milldam", "program", default="milldam", show_default=True, help="Command that starts milldam there.")
def slurm(
    command: tuple[str, ...],
    nodes: int,
    tasks: int | None,
    out: Path | None,
    cpus: int | None,
    mem: str | None,
    time_limit: str | None,
    partition: str | None,
    account: str | None,
    more: tuple[str, ...],
    setup: str,
    program: str,
) -> None:
    """Write a script that queues a job on Slurm.

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
    from milldam.run.array_jobs import ArraySettings, slurm_script

    work, _ = array_of_command(command)
    pieces = work.job.pieces()
    named = {"cpus-per-task": cpus, "mem": mem, "time": time_limit, "partition": partition, "account": account}
    options = (*(f"--{name}={value}" for name, value in named.items() if value is not None), *more)
    settings = ArraySettings(nodes, tasks, options, setup, milldam=program)
    script = slurm_script(command, Path.cwd(), pieces, settings)
    if out is None:
        click.echo(script, nl=False)
        return
    write_file(out, script.encode())
    stages = ", ".join(("prepare", *pieces, "finish"))
    click.echo(f"{out}: {stages}; {nodes} machines. Queue it: bash {shlex.quote(str(out))}")
