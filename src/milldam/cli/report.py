"""`milldam report`: the page that tells how a run went."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option("--open-path", is_flag=True, help="Print the page as a file:// address, to be opened in a browser.")
def report(store: Path, open_path: bool) -> None:
    """Rebuild a finished run's report and print its path.

    The report is run/report.html in the store.

    \b
    milldam report corpus.milldam
    """
    from milldam.cli.naming import visible
    from milldam.report import write_report

    path = write_report(store)
    click.echo(path.resolve().as_uri() if open_path else visible(str(path)))
