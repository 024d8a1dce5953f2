"""What a run took of its memory budget, for the closing lines of a command."""

from __future__ import annotations

from typing import Any

from milldam.cli.terminal import columns

_MOMENTS = ("start", "peak", "final")


def memory_lines(memory: dict[str, Any]) -> list[str]:
    """Start, peak and final of each stage and of the whole run."""
    from milldam.memory import format_size

    stages = {**memory["stages"], "whole run": memory}
    rows = [("", *_MOMENTS), *((name, *(format_size(one[at]) for at in _MOMENTS)) for name, one in stages.items())]
    peak, budget = memory["peak"], memory["budget"]
    share = f"{format_size(peak)} of {format_size(budget)} ({peak / budget:.0%})"
    machines = (f"{name} {format_size(peak)}" for name, peak in memory.get("machines", {}).items())
    return [
        f"Memory (anonymous, whole process tree): peak {share}",
        *columns(rows),
        *([f"  peak by machine: {', '.join(machines)}"] if memory.get("machines") else []),
        f"  file-backed (not counted): {format_size(memory['peak_file_backed'])}",
    ]
