"""The plan and the progress of a job on standard error, and its summary on standard output.

Progress is two lines that change in place on a terminal, elsewhere a line every 30 seconds. A summary ends with its
headline: what was made, from what, in what time and memory, where.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.contamination import contamination_lines
from milldam.cli.naming import columns, visible
from milldam.markup import counted, preferred_line, shorten, turns_by_role
from milldam.memory import format_size

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

    from milldam.run.budget import WorkPlan
    from milldam.run.summary import Snapshot, Summary
    from milldam.stores.tokens.manifest import Tally

_AUDIT = {
    "rejects": "Rejected records",
    "dropped": "Dropped documents",
    "contamination": "Findings of evaluation sets",
    "answers": "Answers to look at",
}
_SAMPLE_TOKENS = 120
PLAIN_SECONDS = 30.0


# ---- the summary ----


def show_summary(summary: Summary[Any], *, as_json: bool, quiet: bool = False, verbose: bool = False) -> None:
    """Print what a job read, lost and made, in what time and memory: the same lines for every job that has them."""
    if as_json or quiet:
        click.echo(json.dumps(summary.as_json()), nl=as_json) if as_json else None
        return
    facts, counts, is_text = summary.facts, summary.counts, "flow" in summary.facts
    if verbose and is_text and Path(summary.out).is_dir():  # not an .npy file
        from milldam.cli.inspect import show_tokens
        from milldam.stores.tokens.reader import Store

        show_tokens(Store(summary.out), 0, _SAMPLE_TOKENS)
    lines = _text_lines(summary, verbose=verbose) if is_text else _count_lines(summary)
    if summary.up_to_date:
        lines = [*(lines if is_text else []), f"{summary.out} is up to date: {summary.made}."]
        click.echo(visible("\n".join(lines)))
        return
    if summary.reused:
        new = f"; {', '.join(summary.changed)}" if summary.changed else ""
        lines.append(f"{summary.reused} of {counted(summary.units, 'unit')} reused{new}")
    if verbose and summary.work:
        total = sum(summary.work.values()) or 1.0
        lines.append("Time: " + ", ".join(f"{name} {value / total:.0%}" for name, value in summary.work.items()))
    if verbose and summary.memory is not None:
        heads = ("start", "peak", "final")
        stages = summary.memory["stages"].items()
        rows = [(name, *(format_size(one[head]) for head in heads)) for name, one in stages]
        lines += ["Memory by stage:", *columns([("", *heads), *rows])]
    audit = dict(summary.audit)
    for what in ("rejects", "answers"):  # of map and qa
        if summary.job in ("map", "qa") and (path := Path(summary.out) / f"{what}.jsonl").exists():
            audit[what] = str(path)
    lines += [f"{_AUDIT[what]} are in {path}" for what, path in audit.items()]
    lines += [f"Report: {facts['report']}"] if "report" in facts else []
    lines += [f"Warning: {warning}" for warning in (*summary.warnings, *filter(None, [summary.over_budget]))]
    pace = [f"{summary.seconds:.1f} s"] if summary.seconds else []
    if is_text:  # the rate of this session: a run that was resumed did the rest before
        done, exact = facts["session_text_bytes"], facts.get("exact_documents", 0)
        rest = f"; the remaining {format_size(done)}" if done < counts["text_bytes"] else ""
        pace = [f"{format_size(counts['text_bytes'])} of text{rest} in {summary.seconds:.1f} s"]
        pace += [f"{format_size(done / max(summary.seconds, 1e-9))}/s"] if done else []
    pace += [counted(summary.workers, "worker")] if summary.workers and pace else []
    if is_text:
        pace.append(facts["encoder"] + (f" ({counted(exact, 'document')} by HF tokenizers)" if exact else ""))
    if memory := summary.memory:
        peak, budget = memory["peak"], memory["budget"]
        machines = (f"; {name} {format_size(most)}" for name, most in memory.get("machines", {}).items())
        cached = f"; file-backed (not counted) {format_size(memory['peak_file_backed'])}"
        text = f"peak {format_size(peak)} of {format_size(budget)} ({peak / budget:.0%}){''.join(machines)}{cached}"
        lines.append(f"Memory: {text}")
    size = f", {format_size(summary.output_bytes)} on disk" if summary.output_bytes else ""
    lines += [", ".join(pace)] if pace else []
    click.echo(visible("\n".join([*lines, f"{summary.out}: {summary.made}{size}"])))


def _count_lines(summary: Summary[Any]) -> list[str]:
    """The counts of a job of any kind but text, by their names.

    >>> from milldam.run.summary import Summary
    >>> _count_lines(Summary("export", "out", {"to": "hf"}, counts={"files": 2, "tokens_left_out": 9}))
    ['2 files, 9 tokens left out']
    """
    facts, shown = summary.facts, summary.made.split(", ")
    counts = []
    for name, count in summary.counts.items():
        what = name.replace("_", " ")
        text = counted(count, what.removesuffix("s")) if what.endswith("s") else f"{count:,} {what}"
        text = f"{format_size(count)} {what.removesuffix(' bytes')}" if what.endswith(" bytes") else text
        counts += [text] if text not in shown else []
    lines = [("Would be: " if facts.get("dry_run") else "") + ", ".join(counts)] if counts else []
    if "columns" in facts:
        lines.append(f"Columns: {', '.join(f'{name} ({kind})' for name, kind in facts['columns'].items())}")
    if "vocab_size" in facts:
        lines.append(f"{facts['dtype']}, vocabulary {facts['vocab_size']:,}")
    if summary.dropped:
        lines.append(f"Dropped: {sum(summary.dropped.values()):,} ({_reasons(summary.dropped)})")
    return lines + _split_lines(facts.get("splits", {}))


def _text_lines(summary: Summary[Any], *, verbose: bool) -> list[str]:
    """The field of the text, and the records: lost, by stage and reason; kept, by source and split."""
    facts, counts = summary.facts, summary.counts
    chat, tokens = facts.get("chat", {}), max(1, counts["tokens"])
    lines = column_lines(facts["text_columns"])
    if chat:
        conversations = counted(chat["conversations"], "conversation") + (" in pairs" if chat["pairs"] else "")
        roles = f" ({by_role})" if (by_role := turns_by_role(chat)) else ""
        trained = f"{counted(chat['trained_tokens'], 'token')} trained on ({chat['trained_tokens'] / tokens:.1%})"
        cut = f", {chat['truncated']:,} cut" if chat.get("truncated") else ""
        lines.append(f"{conversations}, {counted(chat['turns'], 'turn')}{roles}, {trained}{cut}")
    if not summary.up_to_date:
        if verbose:
            ratio = counts["characters"] / tokens
            lines.append(f"{counted(counts['characters'], 'character')}, {ratio:.2f} characters per token")
        dropped, rejected = sum(summary.dropped.values()), sum(summary.rejected.values())
        kept = counts["documents"] // (2 if chat.get("pairs") else 1)  # a record may be a pair of documents
        records = counted(counts["read"], "record")
        lines.append(f"Read {records}: {kept:,} kept, {dropped:,} dropped, {rejected:,} rejected")
        lines += [f"  {stage['stage']}: {_reasons(stage['dropped'])}" for stage in facts["flow"] if stage["dropped"]]
        if preferred := facts.get("near", {}).get("prefer"):
            lines.append(f"Near-duplicates: {preferred_line(preferred)}")
        if "contamination" in facts:
            lines += ["Evaluation sets:", *(f"  {line}" for line in contamination_lines(facts["contamination"]))]
        lines += [*source_lines(facts["sources"]), *_split_lines(facts["splits"])]
    return lines + [
        f"Rows of {packed['seq_len']}, {packed['strategy']}, {name}: {counted(packed['rows'], 'row')}, "
        f"{packed['efficiency']:.2%} filled, {counted(packed['cut_documents'], 'document')} cut, "
        f"{counted(packed['tail'], 'token')} at the end left out"
        for name, packed in facts["packing"].items()
    ]


def _reasons(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())


def _split_lines(splits: Mapping[str, Mapping[str, int]]) -> list[str]:
    sizes = (f"{name} {one['documents']:,} ({counted(one['tokens'], 'token')})" for name, one in splits.items())
    return [f"Splits: {', '.join(sizes)}"] if len(splits) > 1 else []


def column_lines(fields: Mapping[str, str | None]) -> list[str]:
    """The field that the text comes from, by dataset if there are several; nothing for plain text.

    >>> column_lines({"datasets.0": "text", "datasets.1": "body"})
    ['Text:   field "text" of datasets.0; field "body" of datasets.1']
    """
    data_sets: dict[str, list[str]] = {}
    for data_set, column in fields.items():
        data_sets.setdefault(f'field "{column}"' if column else "plain text", []).append(data_set)
    if set(data_sets) <= {"plain text"}:
        return []
    shown = (name if len(data_sets) == 1 else f"{name} of {', '.join(sets)}" for name, sets in data_sets.items())
    return [visible(f"Text:   {'; '.join(shown)}")]


def source_lines(sources: Sequence[Tally]) -> list[str]:
    """A line for each dataset; nothing for a single one, whose figures are the totals."""
    if len(sources) < 2:
        return []
    rows = [
        [shorten(one.name)]
        + [f"{n:,}" for n in (one.read, one.rejected_count, one.dropped_count, one.documents, one.tokens)]
        for one in sources
    ]
    return ["By source:", *columns([("source", "read", "rejected", "dropped", "kept", "tokens"), *rows])]


# ---- while it runs ----


class Display:
    """The plan, then two live lines on a terminal, whose clock runs between reports too, or a plain line every 30
    seconds elsewhere; `quiet`: warnings only. A context manager."""

    command = ("milldam", *sys.argv[1:])

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._shown, self._reported = quiet, time.monotonic(), time.monotonic()
        self.live: Live | None = None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            from milldam.run.summary import Snapshot

            self._snapshot, self._console = Snapshot("reading the input"), Console(stderr=True)
            self.live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Display:
        if self.live is not None:
            self.live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def planned(self, plan: WorkPlan) -> None:
        if self.live is not None:
            self.progress(replace(self._snapshot, stage=plan.stages[0], budget_bytes=plan.budget.limit_bytes))
            self.live.refresh()  # first: printed lines go above the live ones as they were last drawn
        if not self._quiet:
            self._print("\n".join(plan_lines(plan)))

    def progress(self, snapshot: Snapshot) -> None:
        if self.live is not None:
            self._snapshot, self._reported = snapshot, time.monotonic()
        elif not self._quiet and time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            stage, amounts = progress_lines(snapshot, snapshot.elapsed, 0)
            self._print(f"{stage}, {amounts}".removesuffix(", "))

    def warn(self, message: str) -> None:
        self._print(visible(f"Warning: {message}"), style="yellow")

    def _print(self, text: str, style: str | None = None) -> None:
        if self.live is None:
            click.echo(text, err=True)
        else:
            self._console.print(text, style=style, highlight=False, markup=False)

    def _render(self) -> Text:
        from rich.text import Text

        seconds, width = self._snapshot.elapsed + time.monotonic() - self._reported, self._console.width
        # A full line would wrap on some terminals.
        lines = (line[: width - 1] for line in progress_lines(self._snapshot, seconds, 20 if width >= 100 else 10))
        return Text("\n".join(lines), no_wrap=True, overflow="crop")


def plan_lines(plan: WorkPlan) -> list[str]:
    """What will be done, and in how much memory."""
    lines = [
        f"Memory: {format_size(plan.budget.limit_bytes)} ({plan.budget.origin})"
        f" = {counted(plan.workers, 'worker')} x {format_size(plan.share_bytes)}"
        + (f"; {plan.note}" if plan.note else "")
        + (f", {plan.threads} threads each" if plan.threads > 1 else ""),
        f"Input:  {format_size(plan.input_bytes)} in {counted(plan.units, 'unit')}"
        f" of about {format_size(plan.shard_size)}" + (f", {plan.done} of them done before" if plan.done else ""),
    ]
    lines += [f"Conversations: {plan.conversations}"] if plan.conversations else []
    lines += column_lines(plan.text_columns)
    lines += [visible(f"Near-duplicates: {plan.preferred} stays")] if plan.preferred else []
    lines += [f"Encoder: {plan.encoder} ({plan.encoder_note})"] if plan.encoder else []
    if len(plan.stages) > 2:
        lines.append(f"Stages: {', '.join(plan.stages)}")
    if plan.left_out:
        how = "name it with --input-format txt. In a configuration: input_format: txt for that dataset."
        lines.append(f"Not read: {plan.left_out}. To read text among them, {how}")
    return lines


def progress_lines(snapshot: Snapshot, seconds: float, bar_length: int) -> tuple[str, str]:
    """The stage with its time and what is left; its results so far and the memory, the most important first."""

    def clock(seconds: float) -> str:
        whole = int(seconds)
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"

    counts, elapsed, total = snapshot.counts, max(snapshot.elapsed, 1e-9), snapshot.input_total
    share = min(1.0, counts["input_bytes"] / total) if total else 0.0
    full = int(share * bar_length)
    bar = f" {'█' * full}{'░' * (bar_length - full)}" if bar_length else ""
    pace = [f"{snapshot.stage}{bar} {share:.0%}" if total else snapshot.stage, clock(seconds)]
    pace += [f"{clock(snapshot.elapsed / share - snapshot.elapsed)} left"] if share >= 0.01 else []
    pace += [f"unit {snapshot.units_done:,}/{snapshot.units:,}"] if snapshot.units else []
    size, documents, tokens = counts["text_bytes"] or counts["input_bytes"], counts["documents"], counts["tokens"]
    memory = f"memory {format_size(snapshot.anonymous_bytes)} of {format_size(snapshot.budget_bytes)}"
    amounts = [f"{format_size(size)} at {format_size(size / elapsed)}/s"] if size else []
    amounts += [memory] if snapshot.budget_bytes else []
    amounts += [counted(documents, "document")] if documents else []
    amounts += [f"{tokens / elapsed:,.0f} tokens/s"] if tokens else []
    amounts += [f"{counts['characters'] / tokens:.2f} chars/token"] if tokens and counts["characters"] else []
    return ", ".join(pace), ", ".join(amounts)
