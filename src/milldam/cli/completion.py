"""`milldam completion`: the script that teaches a shell our commands."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    \b
    milldam completion bash >> ~/.bashrc
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None and ctx.parent is not None
    click.echo(kind(ctx.parent.command, {}, "milldam", "_MILLDAM_COMPLETE").source())
