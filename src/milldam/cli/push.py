"""`milldam push`: a store to the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from milldam.cli.terminal import visible
from milldam.markup import counted

if TYPE_CHECKING:
    from milldam.hub.pushing import PushSummary


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("repo", metavar="USER/NAME")
@click.option("--public", is_flag=True, help="Everybody may read it. [default: private]")
@click.option("--revision", metavar="BRANCH", help="Branch to push to; made when it is not there. [default: main]")
@click.option("--message", help="Message of the commits.")
@click.option("--dry-run", is_flag=True, help="Say what would be sent and removed; change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No progress or summary.")
def push(
    store: Path,
    repo: str,
    public: bool,
    revision: str | None,
    message: str | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Push a store of tokens, of question-answering features or a table to the Hugging Face Hub, with a data set card.

    Private unless --public. What is there already is not sent again; interrupted or killed, the same command goes on.
    The token is what huggingface_hub finds: the variable HF_TOKEN, or `hf auth login`. Nothing but the files of the
    store and its card is sent: no run folder, no rejects.

    \b
    milldam push corpus.milldam anna/corpus
    milldam push corpus.milldam anna/corpus --public --dry-run
    """
    from milldam.hub.pushing import PushRequest, push_store

    request = PushRequest(store, repo, public=public, revision=revision, message=message, dry_run=dry_run)
    with exit_at_interrupt("What was committed stays; run the same command again to go on."):
        summary = push_store(request, (lambda _: None) if quiet else say)
    for note in summary.notes:
        click.echo(visible(f"Note: {note}"), err=True)
    if as_json:
        click.echo(json.dumps(summary.as_json()))
    elif not quiet:
        click.echo(visible("\n".join(summary_lines(summary))))


def summary_lines(summary: PushSummary) -> list[str]:
    from milldam.memory import format_size

    who = "private" if summary.private else "public"
    if summary.up_to_date:
        return [f"{summary.url} is up to date: {counted(summary.present, 'file')}, {who}."]
    sent, gone = ("Would send", "remove") if summary.dry_run else ("Sent", "removed")
    lines = [
        f"{summary.url} ({who}, {summary.revision})",
        f"{sent} {counted(summary.uploaded, 'file')}, {format_size(summary.uploaded_bytes)};"
        f" {summary.present} were there"
        + (f"; {gone} {len(summary.deleted)}, which the store no longer has" if summary.deleted else ""),
    ]
    if not summary.dry_run:
        lines.append(f"To fetch it: milldam pull {summary.repo}" + _revision(summary.revision))
    return lines


def _revision(name: str) -> str:
    return "" if name == "main" else f" --revision {name}"


def say(sentence: str) -> None:
    """Progress, on standard error."""
    click.echo(visible(sentence), err=True)


@contextmanager
def exit_at_interrupt(told: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the process at once: the network would hold it up, and a kill does no harm."""
    from milldam.cli.interrupting import EXIT_INTERRUPTED

    def leave(number: int, frame: FrameType | None) -> None:
        # Not click.echo: the signal may have come in the middle of one.
        os.write(2, f"\nInterrupted. {told}\n".encode())
        os._exit(EXIT_INTERRUPTED)

    earlier = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
