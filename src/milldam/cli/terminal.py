"""Text made fit to be printed: harmless whatever its origin, and in columns."""

from __future__ import annotations

from collections.abc import Sequence

_PICTURES = {code: 0x2400 + code for code in range(0x20) if code != 0x0A} | {0x7F: 0x2421}
_VISIBLE = _PICTURES | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """Control characters as pictures, line ends apart: what we print must not steer the terminal."""
    return text.translate(_VISIBLE)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Indented lines of a table: names to the left, figures to the right.

    >>> columns([("", "start", "peak"), ("tokenize", "71 MB", "296 MB")])
    ['            start    peak', '  tokenize  71 MB  296 MB']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(["", *(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(cells))])
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]
