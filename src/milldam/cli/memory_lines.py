"""What a run took of its memory budget, for the closing lines of a command."""

from __future__ import annotations

from typing import Any


def memory_lines(memory: dict[str, Any]) -> list[str]:
    from milldam.memory import format_size

    lines = ["Memory (anonymous, whole process tree):"]
    lines += [f"  {name + ':':<8}{format_size(memory[name])}" for name in ("start", "peak", "final")]
    share = memory["peak"] / memory["budget"]
    lines[2] += f" of {format_size(memory['budget'])} ({share:.0%})"
    stages = (f"{name} {format_size(one['peak'])}" for name, one in memory["stages"].items())
    machines = (f"{name} {format_size(peak)}" for name, peak in memory.get("machines", {}).items())
    return [
        *lines,
        f"  peak by stage: {', '.join(stages)}",
        *([f"  peak by machine: {', '.join(machines)}"] if memory.get("machines") else []),
        f"  file-backed, apart: {format_size(memory['peak_file_backed'])}",
    ]
