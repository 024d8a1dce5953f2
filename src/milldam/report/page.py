"""The facts of a run -> the page: frame, headline, sections. Its policy forbids scripts and addresses elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from milldam.markup import counted, duration, escape, escape_plain, moment, share, short_count, shorten
from milldam.memory import format_size
from milldam.report.contents import contamination, conversations, duplicates, lengths, packing, samples, splits
from milldam.report.drawing import Section, Tile, gauge, page_style, show_section, show_tiles
from milldam.report.facts import Facts
from milldam.report.work import configuration, flow, memory, sources, throughput, versions
from milldam.stores.tokens.manifest import Tally

# Whatever slipped through the escaping could still neither run nor load anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SECTIONS = (
    *(memory, throughput, flow, sources, conversations, lengths, packing, duplicates, contamination, splits, samples),
    *(configuration, versions),
)
_MARK = (
    '<svg width="26" height="18" viewBox="0 0 26 18" aria-hidden="true">'
    '<path d="M1 6c3 0 3-3 6-3s3 3 6 3M1 12c3 0 3-3 6-3s3 3 6 3" class="wave"/>'
    '<path d="M16 1v16h7z" class="dam"/></svg>'
)


def render(facts: Facts) -> str:
    """The whole page, fit to be encoded."""
    sections = [section for make in _SECTIONS if (section := make(facts)) is not None]
    name = facts.path.resolve().name
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape_plain(name)}: milldam run report</title>",
        f"<style>\n{page_style()}</style>",
    ]
    body = [
        f'<header><div class="mark">{_MARK}milldam run report</div><h1>{escape(name)}</h1>{_byline(facts)}</header>',
        f"<main>\n{show_tiles(_headline(facts))}\n{_contents(sections)}",
        *map(show_section, sections),
        f"</main>\n<footer>{escape(facts.path.resolve())}</footer>",
    ]
    top = '<!doctype html>\n<html lang="en">\n<head>'
    return "\n".join([top, *head, '</head>\n<body>\n<div class="page">', *body, "</div>\n</body>\n</html>\n"])


def _byline(facts: Facts) -> str:
    manifest = facts.manifest
    said = [
        f"Tokenizer <b>{escape(shorten(manifest.tokenizer.get('name', '')))}</b>",
        f"encoder <b>{escape(shorten(manifest.encoder))}</b>",
    ]
    if facts.summary.get("finished"):
        said.append(f"finished <b>{moment(facts.summary['finished'])}</b>")
    return f"<p>{', '.join(said)}.</p>"


def _contents(sections: Sequence[Section]) -> str:
    links = "".join(f'<a href="#{one.id}">{escape(one.title)}</a>' for one in sections)
    return f"<nav>{links}</nav>"


def _headline(facts: Facts) -> Iterator[Tile]:
    """The six figures that matter."""
    manifest = facts.manifest
    documents, tokens, text = manifest.documents, manifest.tokens, manifest.text_bytes
    tally = manifest.tally
    read = f"of {short_count(tally.read)} read<br>{_lost(tally)}"
    yield Tile("Documents", *_figure(short_count(documents)), _exact(documents) + read)
    yield Tile("Tokens", *_figure(short_count(tokens)), _exact(tokens) + _per_document(facts))
    ratio = f"{text / tokens:.2f} bytes a token" if tokens else ""
    yield Tile("Text", *_figure(format_size(text)), f"{manifest.characters:,} characters<br>{ratio}")
    yield _time_tile(facts)
    yield _speed_tile(facts)
    yield _memory_tile(facts)


def _lost(tally: Tally) -> str:
    rejected = f", {short_count(tally.rejected_count)} rejected" if tally.rejected else ""
    return f"{short_count(tally.dropped_count) if tally.dropped else 'none'} dropped{rejected}"


def _exact(count: int) -> str:
    """The whole number, where the large one is rounded."""
    return "" if short_count(count) == f"{count:,}" else f"{count:,}<br>"


def _figure(shown: str) -> tuple[str, str]:
    """Number and unit apart."""
    number, _, unit = shown.partition(" ")
    return number, unit


def _per_document(facts: Facts) -> str:
    documents = facts.manifest.documents
    return f"{facts.manifest.tokens / documents:,.0f} a document" if documents else ""


def _time_tile(facts: Facts) -> Tile:
    if not facts.seconds:
        return Tile("Time", "–", more="not recorded")
    said = [counted(facts.summary["workers"], "worker")] if facts.summary.get("workers") else []
    said += [f"{facts.sessions} sessions"] if facts.sessions > 1 else []
    return Tile("Time", duration(facts.seconds), more="<br>".join(said))


def _speed_tile(facts: Facts) -> Tile:
    if not facts.seconds:
        return Tile("Throughput", "–", more="not recorded")
    number, unit = _figure(format_size(facts.manifest.text_bytes / facts.seconds))
    return Tile("Throughput", number, f"{unit}/s", f"{short_count(facts.manifest.tokens / facts.seconds)} tokens/s")


def _memory_tile(facts: Facts) -> Tile:
    peak, budget = facts.peak_memory, facts.budget
    if not peak:
        return Tile("Peak memory", "–", more="not recorded")
    more = ""
    if budget:
        kind = ' class="alarm"' if peak > budget else ""
        more = f"{gauge(peak, budget)}<span{kind}>{share(peak, budget)} of the {format_size(budget)} budget</span>"
    return Tile("Peak memory", *_figure(format_size(peak)), more)
