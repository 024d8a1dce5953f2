"""What each data set brought, for the summary of a run and for `milldam stats`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from milldam.cli.terminal import columns

if TYPE_CHECKING:
    from milldam.stores.tokens.tally import Tally

_HEADS = ("source", "read", "rejected", "dropped", "kept", "tokens")


def source_lines(sources: Sequence[Tally]) -> list[str]:
    """A table with a line for each; nothing where there is but one, of which the totals tell all."""
    from milldam.markup import shorten

    if len(sources) < 2:
        return []
    rows = [
        (
            shorten(one.name),
            *map("{:,}".format, (one.read, one.rejected_count, one.dropped_count, one.documents, one.tokens)),
        )
        for one in sources
    ]
    return ["By source:", *columns([_HEADS, *rows])]
