"""The end of a job: what workers left in parts is gathered, the manifest written, then rows, summary and report.

The manifest makes the folder a store. What comes after it (rows for trainers that want them, the report) is made again
when it is missing; what was needed only on the way is removed last.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from milldam.config.settings import TRAIN, VAL, Config, text_columns
from milldam.errors import InputError, StoreError
from milldam.files import file_blocks, read_sealed, remove_matching, write_sealed
from milldam.markup import counted
from milldam.pipeline.preparing import Prepared
from milldam.pipeline.rejects import DROPPED, REJECTS, Damage, first_reject, reject_lines
from milldam.run.budget import WorkPlan
from milldam.run.engine import Session
from milldam.run.folder import RunFolder
from milldam.run.records import Records, sweep
from milldam.run.summary import SUMMARY, Summary
from milldam.stores.kinds import AUDIT_FILES, TOKENS, live_files, write_audit
from milldam.stores.tokens.format import token_dtype
from milldam.stores.tokens.manifest import READ, SHARD_FILES, STAGES, Manifest, Shard, Tally

if TYPE_CHECKING:
    from milldam.pipeline.deduplicating import Deduplication

PACKED_FOLDER, REPORT = "packed", "report.html"
_SWEPT = (*(f"*.{ending}" for ending in SHARD_FILES), "*.facts", *AUDIT_FILES)
_REASONS_SHOWN = 10
_COUNTED_BESIDES = ("exact_documents", "not_judged")
"""Documents encoded by HF tokenizers since gigatoken differs on a character of theirs; documents in pieces, which are
neither filtered nor compared with others."""


class TextFacts(TypedDict, total=False):
    """Facts of tokenize and preprocess alone; without a run's own part when the store was up to date."""

    encoder: str
    exact_documents: int
    """Encoded by HF tokenizers since the encoder differs from it on a character in them."""
    damaged_files: int
    flow: list[dict[str, Any]]
    """Records into and out of each stage, with the reasons of what was lost there."""
    sources: tuple[Tally, ...]
    """The same figures by dataset."""
    splits: dict[str, dict[str, int]]
    """Documents and tokens of each."""
    text_columns: dict[str, str | None]
    """The field that was read, by dataset; None: plain text."""
    chat: dict[str, Any]
    """Of conversations: pairs or not, turns, tokens that are trained on."""
    packing: dict[str, Any]
    """Figures of the rows, by split."""
    session_text_bytes: int
    """Text that was tokenized in `seconds`: what a run that was resumed had done before is not in it."""
    dedup: dict[str, Any]
    near: dict[str, Any]
    contamination: dict[str, Any]
    """Figures of each evaluation set."""
    config: dict[str, Any]
    report: str
    """The path of the report."""


TextSummary = Summary[TextFacts]


@dataclass(slots=True)
class Made:
    """The records that the stages of a job have made."""

    records: Records
    arranged: Records | None = None
    """Where splits or limits are in tokens: the shards of the result."""
    dedup: Deduplication | None = None

    def parts(self, prefix: str) -> Iterator[Path]:
        """Files of a kind that parts left, in plan order."""
        for _, record in self.records.in_plan_order():
            yield from (self.records.out / name for name in record.files if Path(name).name.startswith(prefix))


def finish(
    config: Config, run: Session, prepared: Prepared, plan: WorkPlan, made: Made, *, whole: bool, report: bool
) -> TextSummary:
    """Make the folder a store; then rows, summary, report; then remove what is no longer needed.

    `whole`: though units are left: the rest of the input is not wanted. `report`: make the page about it. Raises when
    something is missing, changed, or nothing is left.
    """
    folder, records, dedup = run.folder, made.records, made.dedup
    if not whole and records.complete != plan.units:
        raise StoreError(f"{folder.out}: {plan.units - records.complete} units are not done.")
    manifest, counts = _gather(config, run, prepared, plan, made)
    # Between what can still be refused and what makes it a store: the index knows finished runs only.
    if dedup is not None:
        dedup.enter_index()
        run.enter("finish")
    # Before the manifest: what it tells can't be found out again once the folder is a store.
    summary = _summary(folder.out, manifest)
    facts, warnings = _facts_of_run(config, made, counts, summary)

    def write(summary: TextSummary, facts: TextFacts) -> TextSummary:
        """The summary with more facts, and time and memory as they are now, written down."""
        summary = run.measured(replace(summary, facts=summary.facts | facts))
        summary.write(folder.folder)
        return summary

    summary = replace(summary, job="preprocess" if report else "tokenize", up_to_date=False, changed=plan.changes)
    summary = replace(summary, units=plan.units, reused=records.reused, workers=plan.workers)
    summary = write(replace(summary, warnings=(*summary.warnings, *warnings)), facts)
    manifest.write(folder.out)
    _clean_up(config, folder)
    kept = (Path(name).name for _, record in records.in_plan_order() for name in record.files)
    sweep(folder.folder, (f"{REJECTS}*", f"{DROPPED}*"), kept)
    packing = {}
    if config.packing_rules is not None:
        run.enter("pack")
        packing = _pack(config, folder.out)
    summary = write(replace(summary, output_bytes=_output_bytes(folder)), {"packing": packing})
    if report:
        from milldam.report import write_report

        run.enter("report")
        write_report(folder.out)
        # Once more: what the report took is part of the figures.
        summary = write(summary, {"report": str(folder.folder / REPORT)})
    return summary


def _gather(
    config: Config, run: Session, prepared: Prepared, plan: WorkPlan, made: Made
) -> tuple[Manifest, Counter[str]]:
    """Gather what workers left in parts: the manifest, and what is counted besides. Raises when the input changed, or
    nothing is left."""
    folder, damage = run.folder, Damage()
    rejects = reject_lines(made.parts(REJECTS), lambda: (file["path"] for file in folder.inputs.planned()), damage)
    findings = [] if made.dedup is None or made.dedup.findings is None else [made.dedup.findings]
    audit = write_audit(folder.out, "rejects", rejects)
    for name, paths in (("dropped", made.parts(DROPPED)), ("contamination", findings)):
        audit |= write_audit(folder.out, name, itertools.chain.from_iterable(map(file_blocks, paths)))
    folder.tidy()
    if prepared.input.look() != prepared.identity.input:
        raise InputError("The input changed while it was read. Run the same command again: it reads what changed.")
    shards, tallies, counts = _count(made, config)
    chat = Counter({name: count for name, count in counts.items() if name not in _COUNTED_BESIDES})
    tokenizer = {"name": prepared.known.name, "xxh3": prepared.identity.settings["tokenizer"]}
    manifest = Manifest(
        dtype=token_dtype(prepared.known.vocab_size),
        vocab_size=prepared.known.vocab_size,
        tokenizer=tokenizer | asdict(prepared.known.special),
        encoder=f"{plan.encoder} {version({'huggingface': 'tokenizers'}.get(plan.encoder, plan.encoder))}",
        settings=prepared.identity.settings,
        input=prepared.identity.input,
        shards=shards,
        sources=tallies,
        damaged_files=damage.files,
        chat=prepared.chat_facts(chat),
        units=len((made.arranged or made.records).keys),
        audit=audit or None,
    )
    if TRAIN not in manifest.splits:
        first = first_reject(folder.out, audit["rejects"]["name"]) if "rejects" in audit else ""
        left = _nothing_left(config, first, manifest.tally.flow(), other_splits=bool(shards))
        raise InputError(f"{left}\n{damage}" if damage.files else left)
    if damage.files:
        run.observer.warn(str(damage))
    return manifest, counts


def _facts_of_run(
    config: Config, made: Made, counts: Counter[str], summary: TextSummary
) -> tuple[TextFacts, list[str]]:
    """Facts that only the run knows, and warnings."""
    records, dedup, warnings = made.records, made.dedup, list[str]()
    near = {} if dedup is None else dedup.near
    if dedup is not None and "shown" in near:
        from milldam.pipeline.near_examples import near_examples

        examples = near_examples(near, dedup.folder)
        near = {name: one for name, one in near.items() if name != "shown"} | examples
        warnings += near.get("warnings", ())
    if counts["not_judged"] and (config.filters.on_text or config.dedup_rules or config.index_rules):
        many = counted(counts["not_judged"], "text file")
        warnings.append(f"{many} larger than max_document_bytes: neither filtered nor compared with other documents.")
    empty = [*config.split_shares, *config.split_tokens, *([VAL] if config.validation else [])]
    splits = {name: {"documents": 0, "tokens": 0} for name in empty} | summary.facts["splits"]
    facts: TextFacts = {
        "splits": {name: splits[name] for name in dict.fromkeys([*summary.facts["splits"], *empty])},
        "session_text_bytes": records.counts["text_bytes"] - records.before["text_bytes"],
        "dedup": {} if dedup is None else dedup.exact,
        "near": near,
        # Storage options may hold secrets.
        "config": _plain({name: value for name, value in asdict(config).items() if name != "storage_options"}),
        "exact_documents": counts["exact_documents"],
    }
    if dedup is not None and dedup.contamination is not None:
        facts["contamination"] = dedup.contamination
    return facts, warnings


def complete(config: Config, folder: RunFolder, *, report: bool) -> TextSummary:
    """A finished store: make what is missing beside it, and say that it is up to date."""
    _clean_up(config, folder)
    summary = _summary(folder.out, Manifest.read(folder.out))
    recorded, anew = read_sealed(folder.folder / SUMMARY), False
    if config.packing_rules is not None:
        summary.facts["packing"] = packing = _pack(config, folder.out)
        anew = recorded is not None and recorded["facts"].get("packing") != packing
        if recorded is not None and anew:
            write_sealed(folder.folder / SUMMARY, recorded | {"facts": recorded["facts"] | {"packing": packing}})
    if report and (anew or not (folder.folder / REPORT).exists()):
        from milldam.report import write_report

        write_report(folder.out)
    return replace(summary, job="preprocess" if report else "tokenize", output_bytes=_output_bytes(folder))


def _clean_up(config: Config, folder: RunFolder) -> None:
    """Remove what the store does not name: of an earlier one, of runs that were interrupted, and what was needed only
    on the way."""
    sweep(folder.out, _SWEPT, live_files(folder.out, TOKENS))
    if config.index_rules is not None:
        remove_matching(folder.folder / "index", "*.hashes")  # what it was compared with stays told
    if config.dedup_rules is not None:
        from milldam.pipeline.deduplicating import remove_drop_files

        remove_drop_files(folder)


def _output_bytes(folder: RunFolder) -> int:
    """Every file of a result but those that tell how it was made."""
    inside = (path for path in folder.out.iterdir() if path != folder.folder)
    files = (file for path in inside for file in (path.rglob("*") if path.is_dir() else (path,)))
    return sum(file.stat().st_size for file in files if file.is_file())


def _pack(config: Config, out: Path) -> dict[str, Any]:
    """Figures of the rows of every split; the rows themselves where they are wanted."""
    from milldam.packing.rows import pack

    rules = config.packing_rules
    assert rules is not None and config.seq_len is not None
    return pack(out, rules, config.seq_len, out / PACKED_FOLDER if rules.write else None)


def _summary(out: Path, manifest: Manifest) -> TextSummary:
    """A summary from the manifest alone: its facts, and the sums over its shards."""
    tally, chat = manifest.tally, manifest.chat
    warnings = []
    if chat is not None and chat.get("special_tokens_in_content"):
        conversations = counted(chat["special_tokens_in_content"], "conversation")
        warnings.append(f"The text of a special token in what is said of {conversations} was taken for that token.")
    facts: TextFacts = {
        "encoder": manifest.encoder,
        "damaged_files": manifest.damaged_files,
        "flow": tally.flow(),
        "sources": manifest.sources,
        "splits": manifest.counts_by_split,
        "text_columns": text_columns(manifest.settings),
        "packing": {},
    }
    if chat is not None:
        facts["chat"] = chat
    return Summary(
        job="",
        out=str(out),
        up_to_date=True,
        counts=manifest.totals | {READ: tally.read},
        rejected=tally.rejected,
        dropped=tally.reasons,
        warnings=tuple(warnings),
        facts=facts,
        audit={what: str(out / file["name"]) for what, file in (manifest.audit or {}).items()},
    )


# ---- what became of the documents ----


def _count(made: Made, config: Config) -> tuple[tuple[Shard, ...], tuple[Tally, ...], Counter[str]]:
    """Every part as the last stage that touched it left it, in plan order.

    Returns the shards, those of training first; what was read, kept and lost of each dataset; and what is counted of
    conversations, `exact_documents` and `not_judged` among it.
    """
    shards, counts = list[Shard](), Counter[str]()
    kept = [Counter[str]() for _ in config.sources]
    lost = [{stage: Counter[str]() for stage in STAGES} for _ in config.sources]
    final = (made.arranged or made.records).in_plan_order()
    staged = made.records.in_plan_order() if made.arranged is not None else ()
    # Of those that were arranged, the arranged ones count.
    unarranged = ((unit, record) for unit, record in staged if not record.facts["shards"])
    for unit, record in itertools.chain(final, unarranged):
        facts = record.facts
        number, sides = facts["dataset"], facts.get("sides", 1)
        kept[number].update(read=facts["read"])
        for shard in facts["shards"]:
            # A record is a document, or a pair of them.
            kept[number].update(documents=shard["documents"] // sides, tokens=shard["tokens"])
            shards.append(Shard(**shard | {"unit": unit, "part": record.part}))
        for stage, reasons in facts["dropped"].items():
            lost[number][stage].update(reasons)
        counts.update(facts.get("chat", {}))
        counts.update({name: facts.get(name, 0) for name in _COUNTED_BESIDES})
    tallies = []
    for source, kept_of, lost_of in zip(config.sources, kept, lost, strict=True):
        rejected, *dropped = (dict(sorted(lost_of[stage].items())) for stage in STAGES)
        by_stage = {stage: reasons for stage, reasons in zip(STAGES[1:], dropped, strict=True) if reasons}
        read = kept_of["read"] + sum(rejected.values())
        tallies.append(Tally(source.name, read, rejected, by_stage, kept_of["documents"], kept_of["tokens"]))
    shards.sort(key=lambda shard: (shard.split != TRAIN, shard.split))
    return tuple(shards), tuple(tallies), +counts


def _nothing_left(config: Config, first_reject: str, flow: list[dict[str, Any]], *, other_splits: bool) -> str:
    read = flow[0]["documents_in"]
    if not read:
        sliced = any(one.split is not None or one.max_documents is not None for one in config.sources)
        return "No documents in the input" + (
            ", or in the slice of it that was asked for." if sliced else ": nothing to write."
        )
    lines = []
    for stage in flow:
        if stage["dropped"]:
            reasons = [f"{reason.splitlines()[0][:60]} {count:,}" for reason, count in stage["dropped"].items()]
            more = f" and {len(reasons) - _REASONS_SHOWN:,} reasons more" if len(reasons) > _REASONS_SHOWN else ""
            lines.append(f"  {stage['stage']}: {', '.join(reasons[:_REASONS_SHOWN])}{more}")
    lost = "\n".join(lines)
    if other_splits:
        return f"No documents left for train: {read:,} were read; the rest is in other splits.\n{lost}"
    return f"No documents left: {counted(read, 'record')} read, all dropped:\n{lost}{first_reject}"


def _plain(value: Any) -> Any:
    """As JSON knows it."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    # A path need not be UTF-8.
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
