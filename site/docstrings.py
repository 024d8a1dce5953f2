"""Docstrings as Markdown: examples and columns, which read well in a terminal, become code. An extension of griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe

COLUMNS = re.compile(r"\S {2,}\S")
SKIP = re.compile(r" *# doctest: \+\w+")


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    return "\n\n".join(_paragraph(part) for part in text.split("\n\n"))


def _paragraph(part: str) -> str:
    if part.lstrip().startswith(">>>"):
        return f"```pycon\n{SKIP.sub('', part)}\n```"
    first, _, rest = part.partition("\n")
    if COLUMNS.search(first) and not first.startswith("#"):
        return f"```text\n{part}\n```"
    # A sentence, and columns right behind it.
    return f"{first}\n\n{_paragraph(rest)}" if rest and COLUMNS.search(rest.partition("\n")[0]) else part
