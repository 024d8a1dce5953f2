"""The end of a job: what workers left in parts is gathered, the manifest written, then rows, summary and report.

The manifest makes the folder a store. What comes after it (rows for trainers that want them, the report) is made again
when it is missing; what was needed only on the way is removed last.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

from milldam.config.settings import TRAIN, VAL, Config, text_columns
from milldam.errors import InputError
from milldam.files import NewFile, names_matching, remove_matching
from milldam.markup import counted
from milldam.packing.rows import pack
from milldam.pipeline.arranging import RECORDS as ARRANGED
from milldam.pipeline.preparing import Preparation, Prepared
from milldam.pipeline.rejects import first_reject, gather_rejects
from milldam.pipeline.shelf import STAGED
from milldam.run.folder import DEDUP_FOLDER, PACKED_FOLDER, RECORDS, Run, require_complete
from milldam.run.monitor import Monitor
from milldam.run.planning import WorkPlan
from milldam.run.records import PartRecord, in_plan_order
from milldam.run.summary import SUMMARY, Summary, describe_machine, package_versions
from milldam.run.workforce import Workforce
from milldam.sealed import read_sealed, write_sealed
from milldam.stores.tokens.drafting import ShardSpool
from milldam.stores.tokens.format import token_dtype
from milldam.stores.tokens.manifest import Manifest, ManifestText, Shard, Totals, totals_by_split
from milldam.stores.tokens.place import Folder
from milldam.stores.tokens.tally import READ, Tally, total

DROPPED, REPORT = "dropped.jsonl.zst", "report.html"
_DROPPED_PARTS = "dropped-*.jsonl.zst"
_BLOCK = 1 << 20
_REASONS_SHOWN = 10


class TextFacts(TypedDict, total=False):
    """What only tokenize and preprocess tell; without a run's own part when the store was up to date."""

    engine: str
    inexact_cuts: int
    damaged_files: int
    flow: list[dict[str, Any]]
    """Records into and out of each stage, with the reasons of what was lost there."""
    sources: tuple[Tally, ...]
    """The same figures by data set."""
    splits: dict[str, dict[str, int]]
    """Documents and tokens of each."""
    text_columns: dict[str, str | None]
    """The field that was read, by data set; None: plain text."""
    packing: dict[str, Any]
    """Figures of the rows, by split."""
    session_text_bytes: int
    """Text that was tokenized in `seconds`: what a run that was resumed had done before is not in it."""
    dedup: dict[str, Any]
    near: dict[str, Any]
    config: dict[str, Any]
    report: str
    """Where the report is."""


TextSummary = Summary[TextFacts]


@dataclass(frozen=True, slots=True)
class Finish:
    config: Config
    run: Run
    prepared: Prepared
    plan: WorkPlan
    workforce: Workforce
    monitor: Monitor
    report: bool
    """Make the report."""

    def make_manifest(self, preparation: Preparation, *, require_all: bool) -> Draft:
        """Gather what workers left in parts; raises when something is missing, changed, or nothing is left."""
        run, prepared = self.run, self.prepared
        if require_all:
            require_complete(run, self.plan.units)
        damage = gather_rejects(run)
        _gather_dropped(run)
        run.tidy()
        if preparation.list_input() != prepared.identity.input:
            raise InputError("The input changed while it was read. Run the same command again with --overwrite.")
        gathered = _gather(run)
        if TRAIN not in gathered.shards.splits:
            other_splits = bool(gathered.shards.splits)
            lost = total(gathered.counts.tallies(self.config)).flow()
            left = _nothing_left(self.config, run, lost, other_splits=other_splits)
            raise InputError(f"{left}\n{damage}" if damage.files else left)
        tokenizer = {"name": prepared.tokenizer_name, "xxh3": prepared.tokenizer_hash}
        facts = Manifest(
            dtype=token_dtype(prepared.vocab_size),
            vocab_size=prepared.vocab_size,
            tokenizer=tokenizer | dataclasses.asdict(prepared.special),
            engine=_engine_version(self.plan.engine),
            settings=prepared.identity.settings,
            input=prepared.identity.input,
            shards=(),
            sources=gathered.counts.tallies(self.config),
            inexact_cuts=gathered.inexact_cuts,
            damaged_files=damage.files,
        )
        return Draft(facts, gathered, str(damage) if damage.files else "")

    def wind_up(self, draft: Draft) -> TextSummary:
        """Make the folder a store; then rows, summary, report; then remove what is no longer needed."""
        # Before the manifest: what it tells can't be found out again once the folder is a store.
        summary = self._summary(draft)
        summary.write(self.run.folder)
        draft.gathered.shards.write(draft.facts, self.run.out)
        draft.gathered.shards.remove()
        summary = self._measured(summary, {"packing": self._pack()})
        summary.write(self.run.folder)
        remove_intermediate(self.run)
        summary = replace(summary, output_bytes=_output_bytes(self.run))
        summary.write(self.run.folder)
        if self.report:
            self.workforce.enter("report")
            make_report(self.run)
            # Once more: what the report took is part of the figures.
            summary = self._measured(summary, {"report": str(self.run.folder / REPORT)})
            summary.write(self.run.folder)
        self.run.write_status({"stage": "finished", "units": self.plan.units, "units_done": self.plan.units})
        return summary

    def _pack(self) -> dict[str, Any]:
        if self.config.packing_rules is None:
            return {}
        self.workforce.enter("pack")
        return pack_store(self.config, self.run.out)

    def _measured(self, summary: TextSummary, facts: TextFacts) -> TextSummary:
        """With more facts, and time and memory as they are now."""
        return replace(
            summary,
            facts=summary.facts | facts,
            seconds=self.workforce.elapsed,
            stages=self.workforce.wall,
            work=dict(self.workforce.seconds),
            memory=self.monitor.use(self.plan.budget.limit_bytes),
            finished=time.time(),
        )

    def _summary(self, draft: Draft) -> TextSummary:
        summary = finished_summary(self.run.out, draft.facts, draft.gathered.shards.splits)
        asked = [*self.config.split_shares, *self.config.split_tokens, *([VAL] if self.config.validation_sets else [])]
        splits = summary.facts["splits"]
        facts: TextFacts = {
            "splits": splits | {name: {"documents": 0, "tokens": 0} for name in asked if name not in splits},
            "session_text_bytes": self.run.progress.text_bytes - self.plan.done_text_bytes,
            "dedup": self.workforce.dedup,
            "near": self.workforce.near,
            "config": _plain(dataclasses.asdict(self.config)),
        }
        summary = replace(
            summary,
            job="preprocess" if self.report else "tokenize",
            up_to_date=False,
            units=self.plan.units,
            reused=self.plan.done,
            workers=self.plan.workers,
            machine=describe_machine(),
            versions=package_versions(),
            started=self.run.plan()["started"],
        )
        return self._measured(summary, facts)


def complete(config: Config, run: Run, *, report: bool) -> TextSummary:
    """A finished store: make what is missing beside it, and say that it is up to date."""
    # A run that was killed while it wrote the report left a part of it.
    run.tidy()
    manifest = ManifestText.at(Folder(run.out))
    summary = finished_summary(run.out, manifest.facts(), totals_by_split(manifest.shards()))
    told = read_sealed(run.folder / SUMMARY) or {}
    if config.packing_rules is not None:
        summary.facts["packing"] = _packing_told(config, told) or pack_store(config, run.out)
    if report and (_note_packing(run, told, summary.facts["packing"]) or not (run.folder / REPORT).exists()):
        make_report(run)
    remove_intermediate(run)
    return replace(summary, job="preprocess" if report else "tokenize", output_bytes=_output_bytes(run))


def _output_bytes(run: Run) -> int:
    """Every file of a result but those that tell how it was made."""
    inside = (path for path in run.out.iterdir() if path != run.folder)
    files = (file for path in inside for file in (path.rglob("*") if path.is_dir() else (path,)))
    return sum(file.stat().st_size for file in files if file.is_file())


def _packing_told(config: Config, told: dict[str, Any]) -> dict[str, Any]:
    """The figures of rows that are not written, where the summary has them for these rules."""
    rules, packing = config.packing_rules, told.get("facts", {}).get("packing", {})
    wanted = rules and (rules.strategy, config.sequence_len)
    same = all((one["strategy"], one["sequence_len"]) == wanted for one in packing.values())
    return packing if rules is not None and not rules.write and same else {}


def _note_packing(run: Run, told: dict[str, Any], packing: dict[str, Any]) -> bool:
    """Put the figures of rows that were made later into the summary; whether anything changed."""
    if not told or told["facts"].get("packing") == packing:
        return False
    write_sealed(run.folder / SUMMARY, told | {"facts": told["facts"] | {"packing": packing}})
    return True


def finished_summary(out: Path, manifest: Manifest, splits: dict[str, Totals]) -> TextSummary:
    """What the manifest alone tells: its facts, and the sums over its shards."""
    totals = Totals()
    for split in splits.values():
        totals.add(split)
    tally, cuts = manifest.tally, manifest.inexact_cuts
    return Summary(
        job="",
        out=str(out),
        up_to_date=True,
        counts=dataclasses.asdict(totals) | {READ: tally.read},
        rejected=tally.rejected,
        dropped=tally.reasons,
        warnings=(f"{counted(cuts, 'cut')} in giant documents could not be proved exact.",) if cuts else (),
        facts={
            "engine": manifest.engine,
            "inexact_cuts": cuts,
            "damaged_files": manifest.damaged_files,
            "flow": tally.flow(),
            "sources": manifest.sources,
            "splits": {name: {"documents": one.documents, "tokens": one.tokens} for name, one in splits.items()},
            "text_columns": text_columns(manifest.settings),
            "packing": {},
        },
    )


def make_report(run: Run) -> None:
    from milldam.report import write_report

    write_report(run.out)


def pack_store(config: Config, out: Path) -> dict[str, Any]:
    """Figures of the rows of every split; the rows themselves where they are wanted."""
    rules = config.packing_rules
    assert rules is not None and config.sequence_len is not None
    return pack(out, rules, config.sequence_len, out / PACKED_FOLDER if rules.write else None)


def remove_intermediate(run: Run) -> None:
    """What a finished store no longer needs."""
    shutil.rmtree(run.folder / DEDUP_FOLDER, ignore_errors=True)
    remove_matching(run.out, f"{STAGED}-[0-9]*")
    remove_matching(run.folder, _DROPPED_PARTS)


def _gather_dropped(run: Run) -> None:
    """Put the dropped documents of all parts end to end, in plan order."""
    parts = sorted(names_matching(run.folder, _DROPPED_PARTS))
    if not parts:
        return
    with NewFile(run.out / DROPPED) as new:
        for part in parts:
            with (run.folder / part).open("rb") as file:
                while block := file.read(_BLOCK):
                    new.write(block)
        new.commit()


# ---- what became of the documents ----


class Counts:
    """What was read, kept and lost, by data set."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._lost: defaultdict[int, Counter[tuple[str, str]]] = defaultdict(Counter)

    def add(self, record: PartRecord) -> None:
        counts, lost = self._counts[record.dataset], self._lost[record.dataset]
        counts[READ] += record.read
        for shard in record.shards:
            counts["documents"] += shard["documents"]
            counts["tokens"] += shard["tokens"]
        for stage, reasons in record.dropped.items():
            for reason, count in reasons.items():
                lost[stage, reason] += count

    def tallies(self, config: Config) -> tuple[Tally, ...]:
        """Of every data set, in plan order."""
        return tuple(Tally.of(one.name, self._counts[k], self._lost[k]) for k, one in enumerate(config.sources))


@dataclass(slots=True)
class Gathered:
    """What the records tell."""

    shards: ShardSpool
    counts: Counts
    inexact_cuts: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """A manifest that is not written yet."""

    facts: Manifest
    """Without shards."""
    gathered: Gathered
    damage: str
    """What to tell of damaged input; empty: nothing."""


def _gather(run: Run) -> Gathered:
    """Every part as the last stage that touched it left it, in one pass and in plan order; holds none of them."""
    arranged = run.appended_files(ARRANGED)
    gathered = Gathered(ShardSpool(run.folder), Counts())

    def shards() -> Iterator[Shard]:
        for record in in_plan_order(arranged or run.appended_files(RECORDS)):
            gathered.counts.add(record)
            gathered.inexact_cuts += 0 if arranged else record.inexact_cuts
            yield from (Shard(**shard) for shard in record.shards)

    gathered.shards.fill(shards())
    for record in run.records() if arranged else ():
        gathered.inexact_cuts += record.inexact_cuts
        if not record.shards:
            gathered.counts.add(record)
    return gathered


def _nothing_left(config: Config, run: Run, flow: list[dict[str, Any]], *, other_splits: bool) -> str:
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
    first = first_reject(run.out)
    read = counted(flow[0]["documents_in"], "record")
    return f"No documents left: {read} read, all dropped:\n{stages}{first}"


def _losses(flow: list[dict[str, Any]]) -> Iterator[str]:
    for stage in flow:
        if stage["dropped"]:
            reasons = [f"{reason.splitlines()[0][:60]} {count:,}" for reason, count in stage["dropped"].items()]
            more = f" and {len(reasons) - _REASONS_SHOWN:,} reasons more" if len(reasons) > _REASONS_SHOWN else ""
            yield f"{stage['stage']}: {', '.join(reasons[:_REASONS_SHOWN])}{more}"


def _engine_version(engine: str) -> str:
    return f"{engine} {version({'huggingface': 'tokenizers'}.get(engine, engine))}"


def _plain(value: Any) -> Any:
    """As JSON knows it."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    # A path need not be UTF-8.
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
