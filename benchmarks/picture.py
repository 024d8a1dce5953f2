"""The README's picture, docs/pictures/measured.svg, from what was measured: results/cores-16.json and docs/log.md.

    python benchmarks/picture.py

Bars of wall time and peak memory. One set of colours that can be read on white and on black, since a page's colours may
be chosen by the reader and not by the system.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import NamedTuple
from xml.sax.saxutils import escape

PROJECT = Path(__file__).parents[1]
PICTURE = PROJECT / "docs/pictures/measured.svg"

INK, OURS, THEIRS = "#7a828c", "#0d9488", "#9aa3ad"
WIDTH, NAME, PLOT, GAP, ROW = 860, 170, 250, 90, 26
FONT = "font-family='system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif'"


class Bar(NamedTuple):
    name: str
    seconds: float
    megabytes: float


def preprocessing() -> list[Bar]:
    """The table of 2026-11-15 in docs/log.md: wall seconds and peak anonymous MB of three tools doing the same job."""
    log = (PROJECT / "docs/log.md").read_text(encoding="utf-8")
    section = log.partition("preprocessing beside HF datasets and datatrove")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (milldam|HF datasets|datatrove)[^|]*\| ([\d.]+) \|[^|]*\| (\d+) \|", section, re.MULTILINE)
    return [Bar(name, float(seconds), float(megabytes)) for name, seconds, megabytes in rows]


def sixteen_cores() -> list[Bar]:
    """Medians on sixteen workers, 1 GB of JSON lines; the same `.bin` by both."""
    measured = json.loads((PROJECT / "benchmarks/results/cores-16.json").read_text(encoding="utf-8"))
    names = {"tokenize": "milldam", "preprocess_data_fast": "Megatron-LM, fast script"}
    contenders = [one for one in measured["runs"][0]["contenders"] if one["workers"] == 16]
    return [
        Bar(
            names[one["contender"]],
            median(run["wall"] for run in one["runs"]),
            median(run["peak"] for run in one["runs"]) / 1e6,
        )
        for one in contenders
        if one["contender"] in names
    ]


def drawn() -> str:
    """The whole picture."""
    first = _panel(0, "Clean, deduplicate, tokenize and pack 200 MB on 2 cores", preprocessing())
    second = _panel(24 + 46 + 3 * ROW, "Tokenize 1 GB on 16 cores", sixteen_cores())
    height = 24 + 2 * 46 + 5 * ROW + 4
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' role='img' {FONT}>"
    title = "<title>Wall time and peak memory of milldam, HF datasets, datatrove and Megatron-LM</title>"
    return "\n".join([head, title, *first, *second, "</svg>"]) + "\n"


def _panel(top: float, title: str, bars: list[Bar]) -> list[str]:
    lines = [_text(0, top + 18, title, weight="600", size=15)]
    times = [(bar.seconds, f"{bar.seconds:.1f} s") for bar in bars]
    peaks = [(bar.megabytes, f"{bar.megabytes:,.0f} MB") for bar in bars]
    for left, head, values in ((NAME, "wall time", times), (NAME + PLOT + GAP, "peak memory", peaks)):
        lines.append(_text(left, top + 38, head, size=12))
        longest = max(value for value, _ in values)
        for row, (value, told) in enumerate(values):
            y, length = top + 46 + row * ROW, PLOT * value / longest
            colour = OURS if bars[row].name == "milldam" else THEIRS
            lines.append(f"<rect x='{left}' y='{y}' width='{length:.1f}' height='{ROW - 8}' rx='2' fill='{colour}'/>")
            lines.append(_text(left + length + 6, y + 14, told, size=13))
    for row, bar in enumerate(bars):
        weight = "600" if bar.name == "milldam" else "400"
        lines.append(_text(0, top + 60 + row * ROW, bar.name, weight=weight, size=13))
    return lines


def _text(x: float, y: float, text: str, *, size: int, weight: str = "400") -> str:
    place = f"x='{x:.1f}' y='{y}'"
    return f"<text {place} font-size='{size}' font-weight='{weight}' fill='{INK}'>{escape(text)}</text>"


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawn(), encoding="utf-8")
    print(PICTURE)
