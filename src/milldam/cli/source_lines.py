"""What each data set brought, for the summary of a run and for `milldam stats`."""

from __future__ import annotations

from typing import Any

from milldam.cli.terminal import columns

_HEADS = ("source", "read", "rejected", "dropped", "kept", "tokens")


def source_lines(sources: list[dict[str, Any]]) -> list[str]:
    """A table with a line for each; nothing where there is but one, of which the totals tell all."""
    from milldam.markup import shorten
    from milldam.store.tally import Tally

    if len(sources) < 2:
        return []
    rows = [
        (
            shorten(one.name),
            *map("{:,}".format, (one.read, one.rejected_count, one.dropped_count, one.documents, one.tokens)),
        )
        for one in (Tally(**source) for source in sources)
    ]
    return ["By source:", *columns([_HEADS, *rows])]
