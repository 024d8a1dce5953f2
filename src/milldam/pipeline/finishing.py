"""The end of a job: what workers left in parts is gathered, the manifest written, then rows, summary and report.

The manifest makes the folder a store. What comes after it (rows for trainers that want them, the report) is made again
when it is missing; what was needed only on the way is removed last.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from milldam.config.settings import TRAIN, VAL, Config, text_columns
from milldam.errors import InputError, StoreError
from milldam.files import file_blocks, read_sealed, write_sealed
from milldam.markup import counted
from milldam.pipeline.documents import Reading
from milldam.pipeline.preparing import Prepared
from milldam.pipeline.rejects import DROPPED, REJECTS, Damage, first_reject, reject_lines
from milldam.pipeline.starting import REPORT
from milldam.run.folder import RunFolder
from milldam.run.pools import WorkPlan
from milldam.run.records import Records, sweep
from milldam.run.session import Session
from milldam.run.summary import SUMMARY, Summary
from milldam.sources.units import Unit
from milldam.stores.generations import live_files
from milldam.stores.kinds import AUDIT_FILES, TOKENS, write_audit
from milldam.stores.place import Folder
from milldam.stores.tokens.format import token_dtype
from milldam.stores.tokens.manifest import (
    READ,
    SHARD_FILES,
    Manifest,
    ManifestText,
    Shard,
    ShardSpool,
    Tally,
    Totals,
    total,
    totals_by_split,
)

if TYPE_CHECKING:
    from milldam.pipeline.deduplicating import Deduplication

PACKED_FOLDER = "packed"
_SWEPT = (*(f"*.{ending}" for ending in SHARD_FILES), "*.facts", *AUDIT_FILES)
_REASONS_SHOWN = 10


class TextFacts(TypedDict, total=False):
    """What only tokenize and preprocess tell; without a run's own part when the store was up to date."""

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
    """What was found of each evaluation set."""
    config: dict[str, Any]
    report: str
    """Where the report is."""


TextSummary = Summary[TextFacts]


@dataclass(frozen=True, slots=True)
class Made:
    """What the stages of a job have made."""

    records: Records
    arranged: Records | None
    """Where splits or limits are in tokens: the shards of the result."""
    dedup: Deduplication | None
    limit_reached: bool
    """The rest of the input was not wanted."""

    @property
    def last(self) -> Records:
        """Of the stage whose units left the shards of the store."""
        return self.arranged or self.records

    def parts(self, prefix: str) -> Iterator[Path]:
        """Files of a kind that parts left, in plan order."""
        for _, record in self.records.in_plan_order():
            yield from (self.records.out / name for name in record.files if Path(name).name.startswith(prefix))


@dataclass(frozen=True, slots=True)
class Finish:
    config: Config
    session: Session
    prepared: Prepared
    plan: WorkPlan
    made: Made
    report: bool
    """Make the report."""

    @property
    def folder(self) -> RunFolder:
        return self.session.folder

    def make_manifest(self) -> Draft:
        """Gather what workers left in parts; raises when something is missing, changed, or nothing is left."""
        folder, prepared, made = self.folder, self.prepared, self.made
        if not made.limit_reached and made.records.complete != self.plan.units:
            raise StoreError(f"{folder.out}: {self.plan.units - made.records.complete} units are not done.")
        damage = Damage()
        rejects = reject_lines(made.parts(REJECTS), lambda: (file["path"] for file in folder.inputs.planned()), damage)
        findings = [] if made.dedup is None or made.dedup.findings is None else [made.dedup.findings]
        audit = (
            write_audit(folder.out, "rejects", rejects)
            | write_audit(folder.out, "dropped", _joined(made.parts(DROPPED)))
            | write_audit(folder.out, "contamination", _joined(findings))
        )
        folder.tidy()
        if prepared.input_changed():
            raise InputError("The input changed while it was read. Run the same command again: it reads what changed.")
        gathered = _gather(folder, made)
        if TRAIN not in gathered.shards.splits:
            other_splits = bool(gathered.shards.splits)
            lost = total(gathered.counts.tallies(self.config)).flow()
            first = first_reject(folder.out, audit["rejects"]["name"]) if "rejects" in audit else ""
            left = _nothing_left(self.config, first, lost, other_splits=other_splits)
            raise InputError(f"{left}\n{damage}" if damage.files else left)
        tokenizer = {"name": prepared.tokenizer_name, "xxh3": prepared.tokenizer_hash}
        facts = Manifest(
            dtype=token_dtype(prepared.vocab_size),
            vocab_size=prepared.vocab_size,
            tokenizer=tokenizer | dataclasses.asdict(prepared.special),
            encoder=_encoder_version(self.plan.encoder),
            settings=prepared.identity.settings,
            input=prepared.identity.input,
            shards=(),
            sources=gathered.counts.tallies(self.config),
            damaged_files=damage.files,
            chat=prepared.chat_facts(gathered.chat),
            units=len(made.last.keys),
            audit=audit or None,
        )
        return Draft(facts, gathered, str(damage) if damage.files else "")

    def wind_up(self, draft: Draft) -> tuple[TextSummary, TextSummary]:
        """Make the folder a store; then rows, summary, report; then remove what is no longer needed.

        The summary, and what there is to tell when the same is asked for again.
        """
        finished = finished_summary(self.folder.out, draft.facts, draft.gathered.shards.splits)
        # Before the manifest: what it tells can't be found out again once the folder is a store.
        summary = self._told(self._summary(finished), {"exact_documents": draft.gathered.exact_documents})
        draft.gathered.shards.write(draft.facts, self.folder.out)
        draft.gathered.shards.remove()
        self._clean_up()
        packing = self._pack()
        summary = self._told(replace(summary, output_bytes=_output_bytes(self.folder)), {"packing": packing})
        if self.report:
            self.session.enter("report")
            make_report(self.folder)
            # Once more: what the report took is part of the figures.
            summary = self._told(summary, {"report": str(self.folder.folder / REPORT)})
        return summary, replace(finished, job=summary.job, output_bytes=summary.output_bytes)

    def _told(self, summary: TextSummary, facts: TextFacts) -> TextSummary:
        """The summary with more facts, and time and memory as they are now, written down."""
        summary = self.session.measured(replace(summary, facts=summary.facts | facts))
        summary.write(self.folder.folder)
        return summary

    def _clean_up(self) -> None:
        """Remove what the store does not name: of an earlier one, of runs that were interrupted, and what was needed
        only on the way."""
        folder = self.folder
        sweep(folder.out, _SWEPT, live_files(folder.out, TOKENS))
        kept = (Path(name).name for _, record in self.made.records.in_plan_order() for name in record.files)
        sweep(folder.folder, (f"{REJECTS}*", f"{DROPPED}*"), kept)
        _remove_drop_files(self.config, folder)

    def _pack(self) -> dict[str, Any]:
        if self.config.packing_rules is None:
            return {}
        self.session.enter("pack")
        return pack_store(self.config, self.folder.out)

    def _summary(self, summary: TextSummary) -> TextSummary:
        records, dedup = self.made.records, self.made.dedup
        near = {} if dedup is None else self._with_examples(dedup.near)
        asked = [*self.config.split_shares, *self.config.split_tokens, *([VAL] if self.config.validation_sets else [])]
        splits = summary.facts["splits"]
        config = dataclasses.asdict(self.config)
        del config["storage_options"]  # may hold secrets
        facts: TextFacts = {
            "splits": splits | {name: {"documents": 0, "tokens": 0} for name in asked if name not in splits},
            "session_text_bytes": records.counts["text_bytes"] - records.before["text_bytes"],
            "dedup": {} if dedup is None else dedup.exact,
            "near": near,
            "config": _plain(config),
        }
        if dedup is not None and dedup.contamination is not None:
            facts["contamination"] = dedup.contamination
        return replace(
            summary,
            job="preprocess" if self.report else "tokenize",
            up_to_date=False,
            warnings=(*summary.warnings, *near.get("warnings", ())),
            facts=summary.facts | facts,
            units=self.plan.units,
            reused=records.reused,
            changed=self.plan.changes,
            workers=self.plan.workers,
        )

    def _with_examples(self, near: dict[str, Any]) -> dict[str, Any]:
        """What near-dedup found, with what it removed, to look at, and what to warn of."""
        dedup, rules = self.made.dedup, self.config.dedup_rules
        if dedup is None or rules is None or rules.near is None or not near:
            return near
        from milldam.pipeline.near_examples import near_examples

        def reading_of(number: int) -> Reading:
            unit = self.folder.units.at(number, Unit.from_json)
            spool = str(self.folder.folder)
            return Reading(unit, self.prepared.sets[unit.dataset], self.config.clean_rules, spool=spool)

        shown = near_examples(near, dedup.folder, reading_of, rules.near.ngram)
        return {name: one for name, one in near.items() if name != "shown"} | shown


def complete(config: Config, folder: RunFolder, *, report: bool) -> TextSummary:
    """A finished store: make what is missing beside it, and say that it is up to date."""
    sweep(folder.out, _SWEPT, live_files(folder.out, TOKENS))
    _remove_drop_files(config, folder)
    manifest = ManifestText.at(Folder(folder.out))
    summary = finished_summary(folder.out, manifest.facts(), totals_by_split(manifest.shards()))
    told = read_sealed(folder.folder / SUMMARY) or {}
    if config.packing_rules is not None:
        summary.facts["packing"] = _packing_told(config, told) or pack_store(config, folder.out)
    if report and (_note_packing(folder, told, summary.facts["packing"]) or not (folder.folder / REPORT).exists()):
        make_report(folder)
    return replace(summary, job="preprocess" if report else "tokenize", output_bytes=_output_bytes(folder))


def _joined(paths: Iterable[Path]) -> Iterator[bytes]:
    return itertools.chain.from_iterable(map(file_blocks, paths))


def _remove_drop_files(config: Config, folder: RunFolder) -> None:
    if config.index_rules is not None:
        from milldam.pipeline.index_lookup import remove_lookups

        remove_lookups(folder)
    if config.dedup_rules is not None:
        from milldam.pipeline.deduplicating import remove_drop_files

        remove_drop_files(folder)


def _output_bytes(folder: RunFolder) -> int:
    """Every file of a result but those that tell how it was made."""
    inside = (path for path in folder.out.iterdir() if path != folder.folder)
    files = (file for path in inside for file in (path.rglob("*") if path.is_dir() else (path,)))
    return sum(file.stat().st_size for file in files if file.is_file())


def _packing_told(config: Config, told: dict[str, Any]) -> dict[str, Any]:
    """The figures of rows that are not written, where the summary has them for these rules."""
    rules, packing = config.packing_rules, told.get("facts", {}).get("packing", {})
    wanted = rules and (rules.strategy, config.seq_len)
    same = all((one["strategy"], one["seq_len"]) == wanted for one in packing.values())
    return packing if rules is not None and not rules.write and same else {}


def _note_packing(folder: RunFolder, told: dict[str, Any], packing: dict[str, Any]) -> bool:
    """Put the figures of rows that were made later into the summary; whether anything changed."""
    if not told or told["facts"].get("packing") == packing:
        return False
    write_sealed(folder.folder / SUMMARY, told | {"facts": told["facts"] | {"packing": packing}})
    return True


def finished_summary(out: Path, manifest: Manifest, splits: dict[str, Totals]) -> TextSummary:
    """What the manifest alone tells: its facts, and the sums over its shards."""
    totals = Totals()
    for split in splits.values():
        totals.add(split)
    tally, chat = manifest.tally, manifest.chat
    warnings = []
    if chat is not None and chat.get("special_tokens_in_content"):
        said = counted(chat["special_tokens_in_content"], "conversation")
        warnings.append(f"The text of a special token in what is said of {said} was taken for that token.")
    facts: TextFacts = {
        "encoder": manifest.encoder,
        "damaged_files": manifest.damaged_files,
        "flow": tally.flow(),
        "sources": manifest.sources,
        "splits": {name: {"documents": one.documents, "tokens": one.tokens} for name, one in splits.items()},
        "text_columns": text_columns(manifest.settings),
        "packing": {},
    }
    if chat is not None:
        facts["chat"] = chat
    return Summary(
        job="",
        out=str(out),
        up_to_date=True,
        counts=dataclasses.asdict(totals) | {READ: tally.read},
        rejected=tally.rejected,
        dropped=tally.reasons,
        warnings=tuple(warnings),
        facts=facts,
        audit={what: str(out / file["name"]) for what, file in (manifest.audit or {}).items()},
    )


def make_report(folder: RunFolder) -> None:
    from milldam.report import write_report

    write_report(folder.out)


def pack_store(config: Config, out: Path) -> dict[str, Any]:
    """Figures of the rows of every split; the rows themselves where they are wanted."""
    from milldam.packing.rows import pack

    rules = config.packing_rules
    assert rules is not None and config.seq_len is not None
    return pack(out, rules, config.seq_len, out / PACKED_FOLDER if rules.write else None)


# ---- what became of the documents ----


class Counts:
    """What was read, kept and lost, by dataset."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._lost: defaultdict[int, Counter[tuple[str, str]]] = defaultdict(Counter)

    def add(self, facts: dict[str, Any]) -> None:
        counts, lost = self._counts[facts["dataset"]], self._lost[facts["dataset"]]
        counts[READ] += facts["read"]
        for shard in facts["shards"]:
            # A record is a document, or a pair of them.
            counts["documents"] += shard["documents"] // facts.get("sides", 1)
            counts["tokens"] += shard["tokens"]
        for stage, reasons in facts["dropped"].items():
            for reason, count in reasons.items():
                lost[stage, reason] += count

    def tallies(self, config: Config) -> tuple[Tally, ...]:
        """Of every dataset, in plan order."""
        return tuple(Tally.of(one.name, self._counts[k], self._lost[k]) for k, one in enumerate(config.sources))


@dataclass(slots=True)
class Gathered:
    """What the records tell."""

    shards: ShardSpool
    counts: Counts
    exact_documents: int = 0
    """Encoded by HF tokenizers since gigatoken differs on a character of theirs."""
    chat: Counter[str] = field(default_factory=Counter)
    """Of conversations."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A manifest that is not written yet."""

    facts: Manifest
    """Without shards."""
    gathered: Gathered
    damage: str
    """What to tell of damaged input; empty: nothing."""


def _gather(folder: RunFolder, made: Made) -> Gathered:
    """Every part as the last stage that touched it left it, in one pass and in plan order; holds none of them."""
    gathered = Gathered(ShardSpool(folder.folder), Counts())

    def shards() -> Iterator[Shard]:
        for unit, record in made.last.in_plan_order():
            gathered.counts.add(record.facts)
            gathered.exact_documents += record.facts.get("exact_documents", 0)
            gathered.chat += Counter(record.facts.get("chat", {}))
            yield from (Shard(**shard | {"unit": unit, "part": record.part}) for shard in record.facts["shards"])

    gathered.shards.fill(shards())
    for _, record in made.records.in_plan_order() if made.arranged else ():
        if not record.facts["shards"]:
            gathered.exact_documents += record.facts.get("exact_documents", 0)
            gathered.counts.add(record.facts)
    return gathered


def _nothing_left(config: Config, first_reject: str, flow: list[dict[str, Any]], *, other_splits: bool) -> str:
    if not flow[0]["documents_in"]:
        sliced = any(one.split is not None or one.max_documents is not None for one in config.sources)
        return "No documents in the input" + (
            ", or in the slice of it that was asked for." if sliced else ": nothing to write."
        )
    if other_splits:
        lost = "\n".join(f"  {line}" for line in _losses(flow))
        return (
            f"No documents left for train: {flow[0]['documents_in']:,} were read; the rest is in other splits.\n{lost}"
        )
    stages = "\n".join(f"  {line}" for line in _losses(flow))
    read = counted(flow[0]["documents_in"], "record")
    return f"No documents left: {read} read, all dropped:\n{stages}{first_reject}"


def _losses(flow: list[dict[str, Any]]) -> Iterator[str]:
    for stage in flow:
        if stage["dropped"]:
            reasons = [f"{reason.splitlines()[0][:60]} {count:,}" for reason, count in stage["dropped"].items()]
            more = f" and {len(reasons) - _REASONS_SHOWN:,} reasons more" if len(reasons) > _REASONS_SHOWN else ""
            yield f"{stage['stage']}: {', '.join(reasons[:_REASONS_SHOWN])}{more}"


def _encoder_version(encoder: str) -> str:
    return f"{encoder} {version({'huggingface': 'tokenizers'}.get(encoder, encoder))}"


def _plain(value: Any) -> Any:
    """As JSON knows it."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    # A path need not be UTF-8.
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
