"""A finished store -> `run/report.html`, a page that tells how the run went and what came out of it.

    facts           what the page tells, gathered from the store and its run folder
    timeline        run/memory.csv -> a curve of bounded size
    page.html.jinja, page.css    the page: open them to change what it says and how it looks

The page stands alone: one file, no script, no font, image or address from elsewhere; it opens from the disk. Text
from the data is escaped and its invisible characters are shown. Making it takes memory that does not grow with the
store: lengths and the memory timeline are streamed, and a handful of documents are decoded. The decoding loads the
store's tokenizer, which is the largest part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from milldam import markup
from milldam.files import explain_os_errors, write_file
from milldam.memory import format_size
from milldam.report.facts import gather

NAME = "report.html"

__all__ = ["NAME", "write_report"]


def write_report(out: Path) -> Path:
    """Make the page of a finished store anew; its path. Equal files give equal bytes."""
    page, path = _render(gather(out)), out / "run" / NAME
    with explain_os_errors(path):
        path.parent.mkdir(exist_ok=True)
    write_file(path, page.encode())
    return path


def _render(facts: dict[str, Any]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        return value if isinstance(value, Markup) else Markup(markup.escape(value))

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {
        "counted": markup.counted,
        "exact": lambda count: "" if markup.short_count(count) == f"{count:,}" else Markup(f"{count:,}<br>"),
        "figure": lambda text: text.split(" ", 1),
        "moment": markup.moment,
        "n": lambda number: f"{number:,}",
        "place": lambda side: f"{markup.shorten(side['file'].rpartition('/')[2], 40)}, {markup.place_words(side)}",
        "plain": lambda text: Markup(markup.escape_plain(text)),
        "rate": lambda size: f"{format_size(size)}/s",
        "short": markup.short_count,
        "shorten": markup.shorten,
        "size": format_size,
        "sum_bytes": lambda files: sum(file["bytes"] for file in files.values()),
        "strong": lambda text: Markup(f"<b>{markup.escape(text)}</b>"),
        "yaml": _yaml,
    }
    environment.globals |= {
        "duration": markup.duration,
        "percent": lambda part, whole: f"{100 * min(1.0, part / whole) if whole > 0 else 0:.2f}%",
        "place_words": markup.place_words,
        "preferred_line": markup.preferred_line,
        "share": markup.share,
        "turns_by_role": markup.turns_by_role,
    }
    return environment.get_template("page.html.jinja").render(facts)


def _yaml(value: dict[str, Any]) -> str:
    import yaml

    if not value:
        return "(none)"
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=False, width=100).rstrip()
