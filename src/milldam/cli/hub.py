"""`milldam push` and `milldam pull`: a store to the Hugging Face Hub, and from there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from milldam.cli.commands import json_option, run_and_show
from milldam.errors import EXIT_INTERRUPTED

_quiet = click.option("-q", "--quiet", is_flag=True, help="No progress or summary.")


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("repo", metavar="USER/NAME")
@click.option("--public", is_flag=True, help="Let anyone read it. [default: private]")
@click.option("--revision", metavar="BRANCH", help="Branch to push to; created if it does not exist. [default: main]")
@click.option("--message", help="Commit message.")
@click.option("--dry-run", is_flag=True, help="Show what would be sent and removed; change nothing.")
@json_option
@_quiet
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
    """Push a store to the Hugging Face Hub, with a card.

    STORE: tokens, question-answering features or a table. Private unless --public. Files that are already
    there are not sent again; if it is interrupted or killed, run the same command to resume. The access token comes
    from the variable HF_TOKEN or `hf auth login`. Only the files of the store and its card are sent: no run folder, no
    rejects.

    \b
    milldam push corpus.milldam anna/corpus
    milldam push corpus.milldam anna/corpus --public --dry-run
    """
    from milldam.hub.pushing import PushRequest, push_store

    request = PushRequest(store, repo, public=public, revision=revision, message=message, dry_run=dry_run)
    with _exit_at_once():
        run_and_show(partial(push_store, request), as_json=as_json, quiet=quiet)


@click.command()
@click.argument("repo", metavar="USER/NAME")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for the store. [default: NAME]")
@click.option("--revision", metavar="REVISION", help="Branch, tag or commit. [default: main]")
@click.option("--split", metavar="NAME", help="Fetch only this split of a token store.")
@json_option
@_quiet
def pull(repo: str, out: Path | None, revision: str | None, split: str | None, as_json: bool, quiet: bool) -> None:
    """Fetch a store from the Hugging Face Hub.

    Fetches what `milldam push` sent, and compares every file with the manifest. Files that are here and complete are
    kept; if it is interrupted or killed, run the same command to resume. The store then opens memory-mapped, like any
    local one.

    \b
    milldam pull anna/corpus -o corpus.milldam
    milldam pull anna/corpus -o val.milldam --split val
    """
    from milldam.hub.pulling import PullRequest, pull_store

    request = PullRequest(repo, out, revision, split)
    with _exit_at_once():
        run_and_show(partial(pull_store, request), as_json=as_json, quiet=quiet)


@contextmanager
def _exit_at_once() -> Iterator[None]:
    """Interrupted, do not wait for the threads of huggingface_hub, which wait for the network: a kill does no harm."""
    try:
        yield
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)
        raise
