"""The closing lines of a command that ran a job: what every job tells, and what only its kind has to say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from milldam.cli.contamination import contamination_lines
from milldam.cli.naming import columns, visible
from milldam.markup import counted, shorten, turns_by_role
from milldam.memory import format_size

if TYPE_CHECKING:
    from milldam.pipeline.finishing import TextSummary
    from milldam.run.summary import Summary
    from milldam.stores.tokens.manifest import Tally

_MOMENTS = ("start", "peak", "final")
_SOURCE_HEADS = ("source", "read", "rejected", "dropped", "kept", "tokens")


def show_summary(summary: Summary[Any], *, as_json: bool, quiet: bool = False) -> None:
    if as_json:
        click.echo(json.dumps(summary.as_json()))
    elif not quiet:
        click.echo(visible("\n".join(summary_lines(summary))))


def summary_lines(summary: Summary[Any]) -> list[str]:
    """What was made, at what rate, in how much memory, and what was left out."""
    telling = _JOBS[summary.job]
    if summary.up_to_date:
        return [f"{summary.out} is up to date: {summary.made}.", *telling.again(summary)]
    size = f", {format_size(summary.output_bytes)} on disk" if summary.output_bytes else ""
    lines = [f"{summary.out}: {summary.made}{size}", *telling.made(summary)]
    if summary.reused:
        new = f"; {', '.join(summary.changed)}" if summary.changed else ""
        lines.append(f"{summary.reused} of {counted(summary.units, 'unit')} reused{new}")
    if summary.work:
        total = sum(summary.work.values()) or 1.0
        lines.append("Time: " + ", ".join(f"{name} {value / total:.0%}" for name, value in summary.work.items()))
    lines += memory_lines(summary.memory) if summary.memory is not None else []
    lines += telling.last(summary)
    rejects = _rejects_of(Path(summary.out))
    if summary.rejected and rejects.exists():
        lines.append(f"Rejected records are in {rejects}")
    warnings = [*summary.warnings, *filter(None, [summary.over_budget])]
    return lines + [f"Warning: {warning}" for warning in warnings]


def _rejects_of(out: Path) -> Path:
    return out / "rejects.jsonl" if out.is_dir() else out.with_name(f"{out.name}.rejects.jsonl")


def _nothing(summary: Summary[Any]) -> list[str]:
    return []


def memory_lines(memory: Mapping[str, Any]) -> list[str]:
    """Start, peak and final of each stage and of the whole run."""
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


def reason_list(reasons: Mapping[str, int]) -> str:
    """
    >>> reason_list({"too_short": 1200, "empty": 3})
    'too_short 1,200, empty 3'
    """
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())


# ---- tokenize and preprocess ----


def _text_lines(summary: TextSummary) -> list[str]:
    counts = summary.counts
    ratio = counts["characters"] / max(1, counts["tokens"])
    return [
        f"from {format_size(counts['text_bytes'])} of text, {counted(counts['characters'], 'character')}"
        f" ({ratio:.2f} characters per token)",
        *column_lines(summary.facts["text_columns"]),
        *chat_lines(summary.facts.get("chat", {}), counts["tokens"]),
        f"{_speed(summary)}, {counted(summary.workers, 'worker')}, {summary.facts['encoder']}",
    ]


def chat_lines(chat: Mapping[str, Any], tokens: int) -> list[str]:
    """What is known of conversations; none where there are none."""
    if not chat:
        return []
    share = f"{chat['trained_tokens'] / max(1, tokens):.1%}"
    what = counted(chat["conversations"], "conversation") + (" in pairs" if chat["pairs"] else "")
    cut = f", {chat['truncated']:,} cut" if chat.get("truncated") else ""
    roles = turns_by_role(chat)
    turns = counted(chat["turns"], "turn") + (f" ({roles})" if roles else "")
    return [f"{what}, {turns}, {counted(chat['trained_tokens'], 'token')} trained on ({share}){cut}"]


def _speed(summary: TextSummary) -> str:
    """The time of this session, and the rate at what it did: a run that was resumed had done the rest before."""
    seconds, done = summary.seconds, summary.facts["session_text_bytes"]
    if not done:
        return f"{seconds:.1f} s"
    left = f" for the remaining {format_size(done)}" if done < summary.counts["text_bytes"] else ""
    return f"{seconds:.1f} s{left}, {format_size(done / max(seconds, 1e-9))}/s"


def _document_lines(summary: TextSummary) -> list[str]:
    """What became of the records: lost, by stage and reason; kept, by source and split; packed."""
    facts, counts = summary.facts, summary.counts
    dropped, rejected = sum(summary.dropped.values()), sum(summary.rejected.values())
    # A record may be a pair of documents.
    there = counts["documents"] // (2 if facts.get("chat", {}).get("pairs") else 1)
    kept = f"{there:,} kept, {dropped:,} dropped, {rejected:,} rejected"
    lines = [f"Read {counted(counts['read'], 'record')}: {kept}"]
    lines += [f"  {stage['stage']}: {reason_list(stage['dropped'])}" for stage in facts["flow"] if stage["dropped"]]
    if "contamination" in facts:
        lines += ["Evaluation sets:", *(f"  {line}" for line in contamination_lines(facts["contamination"]))]
    lines += source_lines(facts["sources"])
    lines += [*_split_lines(facts["splits"]), *_packing_lines(summary)]
    return lines + ([f"Report: {facts['report']}"] if "report" in facts else [])


def _split_lines(splits: Mapping[str, Mapping[str, int]]) -> list[str]:
    if len(splits) < 2:
        return []
    told = (f"{name} {one['documents']:,} ({counted(one['tokens'], 'token')})" for name, one in splits.items())
    return [f"Splits: {', '.join(told)}"]


def _packing_lines(summary: TextSummary) -> list[str]:
    return [
        f"Rows of {packed['seq_len']}, {packed['strategy']}, {name}: {counted(packed['rows'], 'row')}, "
        f"{packed['efficiency']:.2%} filled, {counted(packed['cut_documents'], 'document')} cut, "
        f"{counted(packed['tail'], 'token')} at the end left out"
        for name, packed in summary.facts["packing"].items()
    ]


def column_lines(columns: Mapping[str, str | None]) -> list[str]:
    """The field that the text comes from, and where there are several the datasets of each; none for plain text.

    >>> column_lines({"datasets.0": "text", "datasets.1": "body"})
    ['Text:   field "text" of datasets.0; field "body" of datasets.1']
    """
    fields: dict[str | None, list[str]] = {}
    for data_set, column in columns.items():
        fields.setdefault(column, []).append(data_set)
    if set(fields) <= {None}:
        return []
    told = {f'field "{visible(column)}"' if column else "plain text": sets for column, sets in fields.items()}
    which = (field if len(told) == 1 else f"{field} of {', '.join(sets)}" for field, sets in told.items())
    return [f"Text:   {'; '.join(which)}"]


def source_lines(sources: Sequence[Tally]) -> list[str]:
    """What each dataset brought, a line for each; nothing where there is but one, of which the totals tell all."""
    if len(sources) < 2:
        return []
    rows = [
        (
            shorten(one.name),
            *map("{:,}".format, (one.read, one.rejected_count, one.dropped_count, one.documents, one.tokens)),
        )
        for one in sources
    ]
    return ["By source:", *columns([_SOURCE_HEADS, *rows])]


def _text_again(summary: TextSummary) -> list[str]:
    facts = summary.facts
    told = [*column_lines(facts["text_columns"]), *chat_lines(facts.get("chat", {}), summary.counts["tokens"])]
    return [*told, *_packing_lines(summary)]


# ---- map, qa ----


def _map_lines(summary: Summary[Any]) -> list[str]:
    read, rows = summary.counts["read"], summary.counts["rows"]
    columns = ", ".join(f"{name} ({kind})" for name, kind in summary.facts["columns"].items())
    lines = [f"{counted(read, 'row')} in, {rows:,} out"] if read != rows else []
    return [*lines, f"Columns: {columns}", _pace(summary)]


def _qa_lines(summary: Summary[Any]) -> list[str]:
    counts, seconds = summary.counts, max(summary.seconds, 1e-9)
    return [
        f"{counts['windows_with_answers']:,} windows with the answer",
        f"{_pace(summary)}, {counts['examples'] / seconds:,.0f} examples/s, {_millions(counts['tokens'] / seconds)}",
        f"Answers: {counts['answered']:,} found, {counts['repaired']:,} of them repaired; "
        f"{counts['unrepairable']:,} unrepairable; {counted(counts['unanswerable'], 'question')} without one",
    ]


def _qa_last(summary: Summary[Any]) -> list[str]:
    lines = [f"Dropped: {sum(summary.dropped.values()):,} ({reason_list(summary.dropped)})"] if summary.dropped else []
    answers = Path(summary.out) / "answers.jsonl"
    return lines + ([f"Answers to look at are in {answers}"] if answers.exists() else [])


def _pace(summary: Summary[Any]) -> str:
    return f"{summary.seconds:.1f} s, {counted(summary.workers, 'worker')}"


def _millions(tokens_a_second: float) -> str:
    return f"{tokens_a_second / 1e6:.2f}M tokens/s"


# ---- import, export, push, pull ----


def _import_lines(summary: Summary[Any]) -> list[str]:
    facts, counts = summary.facts, summary.counts
    lines = [
        f"{facts['dtype']}, vocabulary {facts['vocab_size']:,}",
        f"from {counted(counts['files'], 'file')} ({', '.join(facts['formats'])}) in {summary.seconds:.1f} s, "
        f"{_millions(counts['tokens'] / max(summary.seconds, 1e-9))}",
    ]
    return lines + _split_lines(facts["splits"])


def _export_lines(summary: Summary[Any]) -> list[str]:
    counts, size = summary.counts, summary.output_bytes
    # What an earlier call wrote is in the size, its time is not in the seconds.
    rate = "" if summary.reused else f", {size / max(summary.seconds, 1e-9) / 1e6:,.0f} MB/s"
    lines = [f"{summary.facts['to']}: {counted(counts['files'], 'file')}, {summary.seconds:.1f} s{rate}"]
    lines += [counted(counts["rows"], "row")] if "rows" in counts else []
    left = counts.get("tokens_left_out")
    return lines + ([f"{left:,} tokens at the end fill no row and are left out"] if left else [])


def _push_lines(summary: Summary[Any]) -> list[str]:
    facts, counts = summary.facts, summary.counts
    sent, gone = ("Would send", "remove") if facts["dry_run"] else ("Sent", "removed")
    lines = [
        f"{sent} {counted(counts['sent'], 'file')}, {format_size(counts['sent_bytes'])}; "
        f"{counts['present']} already there"
        + (f"; {gone} {counts['removed']} that the store no longer has" if counts["removed"] else "")
    ]
    revision = "" if facts["revision"] == "main" else f" --revision {facts['revision']}"
    return lines if facts["dry_run"] else [*lines, f"To fetch it: milldam pull {facts['repo']}{revision}"]


def _pull_lines(summary: Summary[Any]) -> list[str]:
    facts, counts = summary.facts, summary.counts
    return [
        f"from {facts['repo']} at {facts['commit'][:8]}",
        f"Fetched {counted(counts['fetched'], 'file')}, {format_size(counts['fetched_bytes'])}; "
        f"{counts['kept']} already here"
        + (f"; {counts['removed']} of an earlier pull removed" if counts["removed"] else ""),
    ]


class _Telling(NamedTuple):
    """What a kind of job adds to what all tell."""

    made: Callable[[Summary[Any]], list[str]]
    """After the first line."""
    last: Callable[[Summary[Any]], list[str]] = _nothing
    """At the end."""
    again: Callable[[Summary[Any]], list[str]] = _nothing
    """When there was nothing to do."""


_TEXT = _Telling(_text_lines, _document_lines, _text_again)
_JOBS = {
    "tokenize": _TEXT,
    "preprocess": _TEXT,
    "map": _Telling(_map_lines),
    "qa": _Telling(_qa_lines, _qa_last),
    "import": _Telling(_import_lines),
    "export": _Telling(_export_lines),
    "push": _Telling(_push_lines),
    "pull": _Telling(_pull_lines),
}
