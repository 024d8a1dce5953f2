"""The parts a page is put together from. What they are given as `body`, `about` or cells is markup already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from milldam.markup import escape


@dataclass(frozen=True, slots=True)
class Section:
    """A title with a few words beside it, and what it is about."""

    id: str
    title: str
    about: str
    body: str


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure, large. All but `more` is plain text."""

    label: str
    number: str
    unit: str = ""
    more: str = ""


def show_section(section: Section) -> str:
    about = f'<div class="about"><h2>{escape(section.title)}</h2>{section.about}</div>'
    return f'<section id="{section.id}">{about}\n<div class="body">{section.body}</div></section>'


def show_tiles(tiles: Iterable[Tile], *, small: bool = False) -> str:
    return f'<div class="tiles{" small" if small else ""}">{"".join(map(_show_tile, tiles))}</div>'


def _show_tile(tile: Tile) -> str:
    unit = f" <span>{escape(tile.unit)}</span>" if tile.unit else ""
    number = f'<div class="number">{escape(tile.number)}{unit}</div>'
    label, more = f'<div class="label">{escape(tile.label)}</div>', f'<div class="more">{tile.more}</div>'
    return f'<div class="tile">{label}{number}{more}</div>'


def gauge(part: float, whole: float) -> str:
    """How much of a limit is used."""
    over = " over" if part > whole else ""
    return f'<div class="gauge{over}"><i style="width:{_percent(part, whole)}"></i></div>'


def bar(parts: Sequence[tuple[float, str]], whole: float) -> str:
    """A bar of parts side by side, each an amount and a class."""
    shown = "".join(f'<i class="{name}" style="width:{_percent(part, whole)}"></i>' for part, name in parts if part > 0)
    return f'<div class="bar">{shown}</div>'


def _percent(part: float, whole: float) -> str:
    return f"{100 * min(1.0, part / whole) if whole > 0 else 0:.2f}%"


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), kind: str = "plain"
) -> str:
    """A table; the columns in `numbers` are set to the right. Heads are plain text, cells are markup.

    `kind`: "bars" where the second column holds them, "figures" for a single row.
    """

    def cell(name: str, column: int, content: str) -> str:
        place = ' class="n"' if column in numbers else ""
        return f"<{name}{place}>{content}</{name}>"

    top = "".join(cell("th", k, escape(head)) for k, head in enumerate(heads))
    body = "".join(f"<tr>{''.join(cell('td', k, content) for k, content in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll {kind}"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def facts_table(facts: Iterable[tuple[str, object]]) -> str:
    """Names and values, escaped here."""
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>'


def chart(svg: str) -> str:
    return f'<div class="chart">{svg}</div>'


def paragraphs(*texts: str) -> str:
    """Plain sentences; empty ones are left out."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts if text)
