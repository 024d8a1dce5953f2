"""What is shown of a job: while it runs, two live lines on a terminal, a plain line every 30 seconds elsewhere; then
the closing lines, what every job tells and what only its kind has to say.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.contamination import contamination_lines
from milldam.cli.naming import columns, visible
from milldam.markup import counted, preferred_line, shorten, turns_by_role
from milldam.memory import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from milldam.pipeline.finishing import TextSummary
    from milldam.run.budget import WorkPlan
    from milldam.run.summary import Observer, Snapshot, Summary
    from milldam.stores.tokens.manifest import Tally

_MOMENTS = ("start", "peak", "final")
_AUDIT = {
    "rejects": "Rejected records",
    "dropped": "Dropped documents",
    "contamination": "Findings of evaluation sets",
    "answers": "Answers to look at",
}
_SOURCE_HEADS = ("source", "read", "rejected", "dropped", "kept", "tokens")


def show_summary(summary: Summary[Any], *, as_json: bool, quiet: bool = False) -> None:
    if as_json:
        click.echo(json.dumps(summary.as_json()))
    elif not quiet:
        click.echo(visible("\n".join(summary_lines(summary))))


def summary_lines(summary: Summary[Any]) -> list[str]:
    """What was made, at what rate, in how much memory, and what was left out."""
    of_text = "flow" in summary.facts
    if summary.up_to_date:
        again = _text_again(summary) if of_text else []
        return [f"{summary.out} is up to date: {summary.made}.", *again]
    size = f", {format_size(summary.output_bytes)} on disk" if summary.output_bytes else ""
    lines = [f"{summary.out}: {summary.made}{size}", *(_text_lines(summary) if of_text else _plain_lines(summary))]
    if summary.reused:
        new = f"; {', '.join(summary.changed)}" if summary.changed else ""
        lines.append(f"{summary.reused} of {counted(summary.units, 'unit')} reused{new}")
    if summary.work:
        total = sum(summary.work.values()) or 1.0
        lines.append("Time: " + ", ".join(f"{name} {value / total:.0%}" for name, value in summary.work.items()))
    if summary.memory is not None:
        lines += memory_lines(summary.memory)
    if of_text:
        lines += _document_lines(summary)
    elif summary.dropped:
        lines.append(f"Dropped: {sum(summary.dropped.values()):,} ({reason_list(summary.dropped)})")
    audit = dict(summary.audit)
    for what in ("rejects", "answers"):  # of map and qa
        if summary.job in ("map", "qa") and (path := Path(summary.out) / f"{what}.jsonl").exists():
            audit[what] = str(path)
    lines += [f"{_AUDIT[what]} are in {path}" for what, path in audit.items()]
    warnings = [*summary.warnings, *filter(None, [summary.over_budget])]
    return lines + [f"Warning: {warning}" for warning in warnings]


def _plain_lines(summary: Summary[Any]) -> list[str]:
    """Of a job of any other kind than text: its counts by their names, and what of its facts people look for.

    >>> from milldam.run.summary import Summary
    >>> _plain_lines(Summary("export", "out", {"to": "hf"}, counts={"files": 2, "tokens_left_out": 9}, seconds=1.2))
    ['2 files, 9 tokens left out', '1.2 s']
    """
    facts, made = summary.facts, summary.made.split(", ")
    told = []
    for name, count in summary.counts.items():
        what = name.replace("_", " ")
        if what.endswith(" bytes"):
            told.append(f"{format_size(count)} {what.removesuffix(' bytes')}")
        elif (
            text := counted(count, what.removesuffix("s")) if what.endswith("s") else f"{count:,} {what}"
        ) not in made:
            told.append(text)
    lines = [("Would be: " if facts.get("dry_run") else "") + ", ".join(told)] if told else []
    if "columns" in facts:
        lines.append(f"Columns: {', '.join(f'{name} ({kind})' for name, kind in facts['columns'].items())}")
    if "vocab_size" in facts:
        lines.append(f"{facts['dtype']}, vocabulary {facts['vocab_size']:,}")
    lines += _split_lines(facts.get("splits", {}))
    if summary.seconds:
        workers = f", {counted(summary.workers, 'worker')}" if summary.workers else ""
        lines.append(f"{summary.seconds:.1f} s{workers}")
    if summary.job == "push" and not facts["dry_run"]:
        revision = "" if facts["revision"] == "main" else f" --revision {facts['revision']}"
        lines.append(f"To fetch it: milldam pull {facts['repo']}{revision}")
    return lines


def memory_lines(memory: Mapping[str, Any]) -> list[str]:
    """The peak of the whole run against its budget; start, peak and final of each stage."""
    peak, budget = memory["peak"], memory["budget"]
    machines = (f"; {name} {format_size(peak)}" for name, peak in memory.get("machines", {}).items())
    share = f"{format_size(peak)} of {format_size(budget)} ({peak / budget:.0%})"
    beside = f"{''.join(machines)}; file-backed (not counted) {format_size(memory['peak_file_backed'])}"
    rows = [(name, *(format_size(one[at]) for at in _MOMENTS)) for name, one in memory["stages"].items()]
    return [f"Memory (anonymous, whole process tree): peak {share}{beside}", *columns([("", *_MOMENTS), *rows])]


def reason_list(reasons: Mapping[str, int]) -> str:
    """
    >>> reason_list({"too_short": 1200, "empty": 3})
    'too_short 1,200, empty 3'
    """
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())


# ---- tokenize and preprocess ----


def _text_lines(summary: TextSummary) -> list[str]:
    counts, exact = summary.counts, summary.facts.get("exact_documents", 0)
    ratio = counts["characters"] / max(1, counts["tokens"])
    others = f"; {counted(exact, 'document')} with rare characters by HF tokenizers" if exact else ""
    return [
        f"from {format_size(counts['text_bytes'])} of text, {counted(counts['characters'], 'character')}"
        f" ({ratio:.2f} characters per token)",
        *column_lines(summary.facts["text_columns"]),
        *chat_lines(summary.facts.get("chat", {}), counts["tokens"]),
        f"{_speed(summary)}, {counted(summary.workers, 'worker')}, {summary.facts['encoder']}{others}",
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
    if preferred := facts.get("near", {}).get("prefer"):
        lines.append(f"Near-duplicates: {visible(preferred_line(preferred))}")
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


PLAIN_SECONDS = 30.0


@contextmanager
def make_observer(*, quiet: bool) -> Iterator[Observer]:
    """The display that fits where standard error goes."""
    if quiet:
        yield QuietDisplay()
    elif sys.stderr.isatty():
        from rich.console import Console

        display = LiveDisplay(Console(stderr=True))
        with display.live:
            yield display
    else:
        yield PlainDisplay()


class QuietDisplay:
    """Warnings only."""

    command = ("milldam", *sys.argv[1:])

    def planned(self, plan: WorkPlan) -> None:
        pass

    def progress(self, snapshot: Snapshot) -> None:
        pass

    def warn(self, message: str) -> None:
        click.echo(visible(f"Warning: {message}"), err=True)


class PlainDisplay(QuietDisplay):
    """The plan, then a line every 30 seconds."""

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def planned(self, plan: WorkPlan) -> None:
        click.echo("\n".join(plan_lines(plan)), err=True)

    def progress(self, snapshot: Snapshot) -> None:
        if time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            click.echo(progress_line(snapshot), err=True)


class LiveDisplay(QuietDisplay):
    """The plan, then two lines that change in place; their clock goes on also while nobody reports."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        from milldam.run.summary import Snapshot

        self._console = console
        self._snapshot = Snapshot("reading the input")
        self._heard = time.monotonic()
        self.live = Live(get_renderable=self.render, console=console, refresh_per_second=4, transient=True)

    def planned(self, plan: WorkPlan) -> None:
        self.progress(replace(self._snapshot, stage=plan.stages[0], budget_bytes=plan.budget.limit_bytes))
        self.live.refresh()  # first: what is printed goes above the lines as they were last drawn
        self._console.print("\n".join(plan_lines(plan)), highlight=False, markup=False)

    def progress(self, snapshot: Snapshot) -> None:
        self._snapshot, self._heard = snapshot, time.monotonic()

    def warn(self, message: str) -> None:
        self._console.print(visible(f"Warning: {message}"), style="yellow", markup=False)

    def render(self) -> Text:
        from rich.text import Text

        snapshot, heard = self._snapshot, self._heard
        seconds = snapshot.elapsed + time.monotonic() - heard
        lines = live_lines(snapshot, seconds, self._console.width)
        return Text("\n".join(lines), no_wrap=True, overflow="crop")


def plan_lines(plan: WorkPlan) -> list[str]:
    """What will be done and in how much memory."""
    lines = [
        f"Memory: {format_size(plan.budget.limit_bytes)} ({plan.budget.origin})"
        f" = {counted(plan.workers, 'worker')} x {format_size(plan.share_bytes)}"
        + (f"; {plan.note}" if plan.note else ""),
        f"Input:  {format_size(plan.input_bytes)} in {counted(plan.units, 'unit')}"
        f" of about {format_size(plan.shard_size)}" + (f", {plan.done} of them done before" if plan.done else ""),
    ]
    lines += [f"Near-duplicates: {visible(plan.preferred)} stays"] if plan.preferred else []
    lines += [f"Encoder: {plan.encoder} ({plan.encoder_note})"] if plan.encoder else []
    lines[2:2] = column_lines(plan.text_columns)
    lines[2:2] = [f"Conversations: {plan.conversations}"] if plan.conversations else []
    if len(plan.stages) > 2:
        lines.append(f"Stages: {', '.join(plan.stages)}")
    if plan.left_out:
        how = "name it with --input-format txt. In a configuration: input_format: txt for that dataset."
        lines.append(f"Not read: {plan.left_out}. To read text among them, {how}")
    if plan.threads > 1:
        lines[0] += f", {plan.threads} threads each"
    return lines


def progress_line(snapshot: Snapshot) -> str:
    """All in one line."""
    return ", ".join(
        [f"{snapshot.stage} {_share(snapshot):.0%}", *_progress_pace(snapshot, snapshot.elapsed), *_amounts(snapshot)]
    )


def live_lines(snapshot: Snapshot, seconds: float, width: int) -> tuple[str, str]:
    """Two lines that fit into a terminal: what is done of the stage, and what came of it."""
    share = _share(snapshot)
    bar = f" {_bar(share, 20 if width >= 100 else 10)} {share:.0%}" if snapshot.input_total else ""
    return _fit([snapshot.stage + bar, *_progress_pace(snapshot, seconds)], width), _fit(_amounts(snapshot), width)


def _fit(figures: list[str], width: int) -> str:
    """As many figures, the most important first, as a line of so many columns holds."""
    line = figures[0]
    for figure in figures[1:]:
        if len(line) + len(figure) + 2 >= width:
            break
        line += f", {figure}"
    # A full line would wrap on some terminals.
    return line[: width - 1]


def _progress_pace(snapshot: Snapshot, seconds: float) -> list[str]:
    """The time, and how much of the stage is left."""
    share, units = _share(snapshot), f"unit {snapshot.units_done:,}/{snapshot.units:,}"
    left = [f"{_clock(snapshot.elapsed / share - snapshot.elapsed)} left"] if share >= 0.01 else []
    return [_clock(seconds), *left, *([units] if snapshot.units else [])]


def _amounts(snapshot: Snapshot) -> list[str]:
    """What has come of the stage, and the memory."""
    counts, elapsed = snapshot.counts, max(snapshot.elapsed, 1e-9)
    size, documents, tokens = counts["text_bytes"] or counts["input_bytes"], counts["documents"], counts["tokens"]
    memory = f"memory {format_size(snapshot.anonymous_bytes)} of {format_size(snapshot.budget_bytes)}"
    figures = [f"{format_size(size)} at {format_size(size / elapsed)}/s"] if size else []
    figures += [memory] if snapshot.budget_bytes else []
    figures += [f"{_short(documents)} document{'' if documents == 1 else 's'}"] if documents else []
    if tokens:
        figures += [f"{_short(tokens / elapsed)} tokens/s"]
    if tokens and counts["characters"]:
        figures += [f"{counts['characters'] / tokens:.2f} chars/token"]
    return figures or [""]


def _short(count: float) -> str:
    """
    >>> _short(950), _short(1_500), _short(24_100_000)
    ('950', '1.5K', '24.1M')
    """
    return format_size(count).removesuffix("B").replace(" ", "")


def _share(snapshot: Snapshot) -> float:
    if not snapshot.input_total:
        return 0.0
    return min(1.0, snapshot.counts["input_bytes"] / snapshot.input_total)


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def _bar(share: float, width: int) -> str:
    filled = int(share * width)
    return "█" * filled + "░" * (width - filled)
