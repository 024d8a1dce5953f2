"""`milldam pull`: a store from the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from milldam.cli.push import exit_at_interrupt, say
from milldam.cli.terminal import visible
from milldam.markup import counted

if TYPE_CHECKING:
    from milldam.hub.pulling import PullSummary


@click.command()
@click.argument("repo", metavar="USER/NAME")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for the store. [default: NAME]")
@click.option("--revision", metavar="REVISION", help="Branch, tag or commit. [default: main]")
@click.option("--split", metavar="NAME", help="Only this split of a store of tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No progress or summary.")
def pull(repo: str, out: Path | None, revision: str | None, split: str | None, as_json: bool, quiet: bool) -> None:
    """Fetch a store that `milldam push` put on the Hugging Face Hub; every file is checked against the manifest.

    What is there and whole is kept; interrupted or killed, the same command goes on. Afterwards the store opens
    memory-mapped, as if it had been made here.

    \b
    milldam pull anna/corpus -o corpus.milldam
    milldam pull anna/corpus -o val.milldam --split val
    """
    from milldam.hub.pulling import PullRequest, pull_store

    with exit_at_interrupt("What was fetched stays; run the same command again to go on."):
        summary = pull_store(PullRequest(repo, out, revision, split), (lambda _: None) if quiet else say)
    if as_json:
        click.echo(json.dumps(summary.as_json()))
    elif not quiet:
        click.echo(visible("\n".join(summary_lines(summary))))


def summary_lines(summary: PullSummary) -> list[str]:
    from milldam.memory import format_size

    whole = f"{counted(summary.files, 'file')}, {format_size(summary.bytes)}"
    if summary.up_to_date:
        return [f"{summary.out} is up to date: {whole}, as in {summary.repo} at {summary.commit[:8]}."]
    return [
        f"{summary.out}: {whole}, from {summary.repo} at {summary.commit[:8]}",
        f"Fetched {counted(summary.fetched, 'file')}, {format_size(summary.fetched_bytes)}; {summary.kept} were here"
        + (f"; {summary.removed} of an earlier pull removed" if summary.removed else ""),
    ]
