"""`milldam migrate`: a configuration of Krill in milldam's form."""

from __future__ import annotations

from pathlib import Path

import click

from milldam.cli.commands import config_file
from milldam.cli.naming import visible
from milldam.errors import ConfigError


@click.command()
@config_file
@click.option("-o", "--out", type=click.Path(path_type=Path), help="File to write. [default: standard output]")
@click.option("--overwrite", is_flag=True, help="Replace the file.")
def migrate(config: Path, out: Path | None, overrides: tuple[str, ...], overwrite: bool) -> None:
    """Convert a Krill configuration to milldam's form.

    A comment beside each key says what it was.

    \b
    milldam migrate krill.yaml -o preprocess.yaml
    """
    from milldam.config.loading import as_yaml, load_config

    if out is not None and out.exists() and not overwrite:
        raise ConfigError(f"{out} exists. Choose another name, or add --overwrite.")
    loaded = load_config(config, overrides)
    if not loaded.comments:
        raise ConfigError(f"{config}: has no keys of Krill; it is in today's form already.")
    header = [f"Made by milldam migrate from {config.name}.", *loaded.notes]
    written = as_yaml(loaded.source, loaded.comments, header)
    if out is None:
        click.echo(written, nl=False)
    else:
        from milldam.files import explain_os_errors, write_file

        with explain_os_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, written.encode())
    for note in loaded.notes:
        click.echo(visible(note), err=True)
