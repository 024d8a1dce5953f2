"""How the run went: memory, time, what became of the documents; what it was told to do, with what, and where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from milldam.markup import counted, duration, escape, share, short_count, shorten
from milldam.memory import format_size
from milldam.report.drawing import Section, Tile, bar, chart, facts_table, memory_chart, paragraphs, show_tiles, table
from milldam.report.facts import Facts
from milldam.stores.kinds import TOKENS
from milldam.stores.tokens.manifest import READ

_REASONS_SHOWN = 40
_SHOWN_CHARACTERS = 20_000
_NOTHING = '<span class="gone">none dropped</span>'


def memory(facts: Facts) -> Section:
    body = ""
    if facts.timeline is not None:
        body += chart(memory_chart(facts.timeline, facts.budget))
    if facts.memory:
        body += f"<h3>Anonymous memory by stage</h3>{_stage_table(facts)}"
    if not body:
        body = '<p class="none">The run left no record of its memory.</p>'
    key = '<p><span class="key"></span>Anonymous: what the kernel can&#39;t take back, held to the budget.</p>'
    key += '<p><span class="key file"></span>File-backed: mapped files, dropped by the kernel at will.</p>'
    return Section("memory", "Memory", key + paragraphs("Sum over all processes.", _unseen_peak(facts)), body)


def _unseen_peak(facts: Facts) -> str:
    """The peak is taken from every sample, the curve from those that were written."""
    if facts.timeline is None or facts.peak_memory <= facts.timeline.peak.anonymous:
        return ""
    return f"Between the samples drawn it reached {format_size(facts.peak_memory)}."


def _stage_table(facts: Facts) -> str:
    limit = facts.memory["budget"]
    rows = (
        (
            escape(shorten(stage)),
            bar([(one["peak"], "over" if one["peak"] > limit else "")], limit),
            *(format_size(one[at]) for at in ("start", "peak", "final")),
        )
        for stage, one in facts.memory["stages"].items()
    )
    heads = ["Stage", "Peak against the budget", "Start", "Peak", "Final"]
    return table(heads, rows, numbers=(2, 3, 4), kind="bars")


def throughput(facts: Facts) -> Section:
    """Rates over the whole time, then where the time went."""
    seconds, text = facts.seconds, facts.manifest.text_bytes
    body = show_tiles(_rates(facts, seconds), small=True) if seconds else ""
    for name, title in (("stages", "Time per stage"), ("work", "Work per step, summed over workers")):
        if facts.summary.get(name):
            body += f"<h3>{title}</h3>{_time_table(facts.summary[name], text)}"
    if not body:
        body = '<p class="none">The run left no record of its time.</p>'
    again = f"The run was resumed; the time is that of its {facts.sessions} sessions." if facts.sessions > 1 else ""
    about = paragraphs("Text that came out, in the time of the whole run.", again)
    return Section("throughput", "Throughput", about, body)


def _rates(facts: Facts, seconds: float) -> Iterator[Tile]:
    manifest = facts.manifest
    yield Tile("Text", *_rate(format_size(manifest.text_bytes / seconds)))
    yield Tile("Tokens", short_count(manifest.tokens / seconds), "/s")
    yield Tile("Records", short_count(manifest.tally.read / seconds), "/s", "read")
    workers = facts.summary.get("workers")
    if workers:
        yield Tile("Workers", f"{workers}", "", f"{format_size(manifest.text_bytes / seconds / workers)}/s each")


def _rate(size: str) -> tuple[str, str]:
    number, unit = size.split()
    return number, f"{unit}/s"


def _time_table(seconds: dict[str, float], text_bytes: int) -> str:
    total = sum(seconds.values())
    rows = (
        (
            escape(shorten(name)),
            bar([(one, "")], max(seconds.values())),
            duration(one),
            share(one, total),
            f"{format_size(text_bytes / one)}/s" if one >= 0.01 else "",
        )
        for name, one in seconds.items()
        if duration(one) != "0 s"
    )
    return table(["Stage", "", "Time", "Share", "Text"], rows, numbers=(2, 3, 4), kind="bars")


def flow(facts: Facts) -> Section:
    """Documents in and out, as a funnel: the bars are parts of what was read."""
    tally = facts.manifest.tally
    did_something = (one for one in tally.flow() if one["stage"] == READ or one["dropped"])
    rows = "".join(_passage(one, tally.read) for one in did_something)
    about = '<p><span class="key"></span>Went on to the next stage.</p><p><span class="key lost"></span>Dropped.</p>'
    kept = f"{tally.documents:,} of {counted(tally.read, 'record')} are in the store"
    lost = f"{tally.dropped_count:,} were dropped, {tally.rejected_count:,} rejected as unreadable"
    body = f'<ol class="flow">{rows}</ol>'
    return Section("flow", "Documents in and out", about + paragraphs(f"{kept}; {lost}."), body)


def sources(facts: Facts) -> Section | None:
    """What each dataset brought; None where there is but one."""
    found = facts.manifest.sources
    if len(found) < 2:
        return None
    heads = ["Source", "Read", "Rejected", "Dropped", "Kept", "Tokens", "Share of tokens"]
    rows = (
        (
            f"<b>{escape(shorten(one.name))}</b>",
            *(f"{n:,}" for n in (one.read, one.rejected_count, one.dropped_count, one.documents, one.tokens)),
            share(one.tokens, facts.manifest.tokens),
        )
        for one in found
    )
    about = paragraphs("What became of the records of each dataset.", "Rejected: not readable.")
    return Section("sources", "By source", about, table(heads, rows, numbers=range(1, 7)))


def _passage(one: dict[str, Any], read: int) -> str:
    came, went = one["documents_in"], one["documents_out"]
    lost = max(0, came - went)
    gone = f'<span class="gone some">−{lost:,} ({share(lost, came)})</span>' if lost else _NOTHING
    shown = bar([(went, ""), (lost, "lost")], read)
    numbers = f'<span class="n">{went:,}</span>{gone}'
    return f"<li><b>{escape(shorten(one['stage'], 40))}</b>{shown}{numbers}{_reasons(one['dropped'])}</li>"


def _reasons(dropped: dict[str, int]) -> str:
    if not dropped:
        return ""
    ranked = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    chips = [f'<span class="reason">{escape(shorten(name))} <b>{n:,}</b></span>' for name, n in ranked[:_REASONS_SHOWN]]
    if len(ranked) > _REASONS_SHOWN:
        rest = sum(n for _, n in ranked[_REASONS_SHOWN:])
        chips.append(f'<span class="reason">{len(ranked) - _REASONS_SHOWN} other reasons <b>{rest:,}</b></span>')
    return f'<div class="reasons">{"".join(chips)}</div>'


def configuration(facts: Facts) -> Section:
    """The configuration as given, and the settings that decide the result."""
    dedup = facts.manifest.settings.get("dedup")
    method = {"dedup": dedup | {"method": "near, after exact"}} if dedup and dedup.get("near") else {}
    settings = f"<pre>{_yaml(facts.manifest.settings | method)}</pre>"
    config = facts.told.get("config")
    body = settings
    if config:
        body = (
            f"<pre>{_yaml(config)}</pre><details><summary>Settings that decide the result</summary>{settings}</details>"
        )
    about = paragraphs("Equal settings and equal input give the same store, byte for byte.")
    return Section("configuration", "Configuration", about, body)


def _yaml(value: dict[str, Any]) -> str:
    if not value:
        return "(none)"
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=False, width=100)
    return escape(text[:_SHOWN_CHARACTERS].rstrip()) + ("\n…" if len(text) > _SHOWN_CHARACTERS else "")


def versions(facts: Facts) -> Section:
    manifest, given = facts.manifest, facts.manifest.input
    told = facts.summary.get("versions", {})
    body = f"<div><h3>Versions</h3>{facts_table([*told.items(), ('encoder', manifest.encoder)])}</div>"
    if facts.summary.get("machine"):
        body += f"<div><h3>Machine</h3>{facts_table(facts.summary['machine'].items())}</div>"
    store = [
        ("tokenizer", manifest.tokenizer.get("name", "")),
        ("vocabulary", f"{manifest.vocab_size:,}"),
        ("token type", manifest.dtype),
        ("input", f"{counted(given['files'], 'file')}, {format_size(given['bytes'])}"),
        ("fingerprint of the input", given["fingerprint"]),
        ("store format", TOKENS.version),
        ("fingerprint", manifest.fingerprint),
    ]
    if manifest.inexact_cuts:
        store.append(("inexact cuts", f"{manifest.inexact_cuts:,}"))
    if manifest.damaged_files:
        store.append(("damaged input files", f"{manifest.damaged_files:,}"))
    body = f'<div class="pair">{body}</div><h3>Store</h3>{facts_table(store)}'
    about = paragraphs("The fingerprint names the content: equal ones mean equal tokens in equal order.")
    return Section("versions", "Versions and machine", about, body)
