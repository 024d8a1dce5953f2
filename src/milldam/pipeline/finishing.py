"""The end of a job: what workers left in parts is gathered, the manifest written, then rows, summary and report.

The manifest makes the folder a store. What comes after it (rows for trainers that want them, the report) is made again
when it is missing; what was needed only on the way is removed last.
"""

from __future__ import annotations

import dataclasses
import platform
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from milldam.config.settings import TRAIN, VAL, Config, text_columns
from milldam.errors import InputError
from milldam.files import NewFile, names_matching, remove_matching
from milldam.markup import counted
from milldam.memory import Monitor, format_size
from milldam.packing.rows import pack
from milldam.pipeline.arranging import RECORDS as ARRANGED
from milldam.pipeline.preparing import Preparation, Prepared
from milldam.pipeline.rejects import first_reject, gather_rejects
from milldam.pipeline.shelf import STAGED
from milldam.run.folder import DEDUP_FOLDER, PACKED_FOLDER, RECORDS, Run, require_complete
from milldam.run.planning import WorkPlan, cores
from milldam.run.progress import Summary
from milldam.run.records import PartRecord, in_plan_order
from milldam.run.workforce import Workforce
from milldam.sealed import read_sealed, write_sealed
from milldam.stores.tokens.drafting import ShardSpool
from milldam.stores.tokens.format import token_dtype
from milldam.stores.tokens.manifest import Manifest, ManifestText, Shard, Totals, totals_by_split
from milldam.stores.tokens.place import Folder
from milldam.stores.tokens.tally import READ, Tally, total

DROPPED, REPORT, SUMMARY = "dropped.jsonl.zst", "report.html", "summary.json"
_DROPPED_PARTS = "dropped-*.jsonl.zst"
_BLOCK = 1 << 20
_REASONS_SHOWN = 10
_PACKAGES = ("milldam", "gigatoken", "tokenizers", "pyarrow", "numpy", "duckdb")


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

    def wind_up(self, draft: Draft) -> Summary:
        """Make the folder a store; then rows, summary, report; then remove what is no longer needed."""
        # Before the manifest: what it tells can't be found out again once the folder is a store.
        summary = self._summary(draft)
        self._write(summary)
        draft.gathered.shards.write(draft.facts, self.run.out)
        draft.gathered.shards.remove()
        summary = dataclasses.replace(summary, packing=self._pack(), **self._measured())
        self._write(summary)
        remove_intermediate(self.run)
        summary = dataclasses.replace(summary, output_bytes=_output_bytes(self.run))
        self._write(summary)
        if self.report:
            self.workforce.enter("report")
            make_report(self.run)
            # Once more: what the report took is part of the figures.
            summary = dataclasses.replace(summary, **self._measured(), report=str(self.run.folder / REPORT))
            self._write(summary)
        self.run.write_status({"stage": "finished", "units": self.plan.units, "units_done": self.plan.units})
        return summary

    def _pack(self) -> dict[str, Any]:
        if self.config.packing_rules is None:
            return {}
        self.workforce.enter("pack")
        return pack_store(self.config, self.run.out)

    def _write(self, summary: Summary) -> None:
        write_sealed(self.run.folder / SUMMARY, dataclasses.asdict(summary) | {"out": str(summary.out)})

    def _measured(self) -> dict[str, Any]:
        return {
            "seconds": self.workforce.elapsed,
            "stages": dict(self.workforce.seconds),
            "wall": self.workforce.wall,
            "memory": self.monitor.summary() | {"budget": self.plan.budget.limit_bytes},
            "finished": time.time(),
        }

    def _summary(self, draft: Draft) -> Summary:
        summary = finished_summary(self.run.out, draft.facts, draft.gathered.shards.splits)
        asked = [*self.config.split_shares, *self.config.split_tokens, *([VAL] if self.config.validation_sets else [])]
        none = {"documents": 0, "tokens": 0}
        return dataclasses.replace(
            summary,
            up_to_date=False,
            splits=summary.splits | {name: dict(none) for name in asked if name not in summary.splits},
            workers=self.plan.workers,
            dedup=self.workforce.dedup,
            near=self.workforce.near,
            config=_plain(dataclasses.asdict(self.config)),
            machine=_machine(),
            versions=_versions(),
            started=self.run.plan()["started"],
            session_text_bytes=self.run.progress.text_bytes - self.plan.done_text_bytes,
            **self._measured(),
        )


def complete(config: Config, run: Run, *, report: bool) -> Summary:
    """A finished store: make what is missing beside it, and say that it is up to date."""
    # A run that was killed while it wrote the report left a part of it.
    run.tidy()
    manifest = ManifestText.at(Folder(run.out))
    summary = finished_summary(run.out, manifest.facts(), totals_by_split(manifest.shards()))
    if config.packing_rules is not None:
        summary = dataclasses.replace(summary, packing=_packing_told(config, run) or pack_store(config, run.out))
    if report and (_note_packing(run, summary.packing) or not (run.folder / REPORT).exists()):
        make_report(run)
    remove_intermediate(run)
    return dataclasses.replace(summary, output_bytes=_output_bytes(run))


def _output_bytes(run: Run) -> int:
    """Every file of a result but those that tell how it was made."""
    inside = (path for path in run.out.iterdir() if path != run.folder)
    files = (file for path in inside for file in (path.rglob("*") if path.is_dir() else (path,)))
    return sum(file.stat().st_size for file in files if file.is_file())


def _packing_told(config: Config, run: Run) -> dict[str, Any]:
    """The figures of rows that are not written, where the summary has them for these rules."""
    path, rules = run.folder / SUMMARY, config.packing_rules
    told: dict[str, Any] = (read_sealed(path) or {}).get("packing", {})
    wanted = rules and (rules.strategy, config.sequence_len)
    same = all((one["strategy"], one["sequence_len"]) == wanted for one in told.values())
    return told if rules is not None and not rules.write and same else {}


def _note_packing(run: Run, packing: dict[str, Any]) -> bool:
    """Put the figures of rows that were made later into the summary; whether anything changed."""
    path = run.folder / SUMMARY
    told = read_sealed(path) or {}
    if not told or told.get("packing") == packing:
        return False
    write_sealed(path, told | {"packing": packing})
    return True


def finished_summary(out: Path, manifest: Manifest, splits: dict[str, Totals]) -> Summary:
    """What the manifest alone tells: its facts, and the sums over its shards."""
    totals = Totals()
    for split in splits.values():
        totals.add(split)
    tally = manifest.tally
    return Summary(
        out=out,
        up_to_date=True,
        documents=totals.documents,
        tokens=totals.tokens,
        text_bytes=totals.text_bytes,
        characters=totals.characters,
        read=tally.read,
        rejected=tally.rejected,
        dropped=tally.reasons,
        flow=tally.flow(),
        sources=manifest.sources,
        engine=manifest.engine,
        inexact_cuts=manifest.inexact_cuts,
        damaged_files=manifest.damaged_files,
        text_columns=text_columns(manifest.settings),
        splits={name: {"documents": one.documents, "tokens": one.tokens} for name, one in splits.items()},
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


# ---- where and with what ----


def _machine() -> dict[str, str]:
    return {"system": platform.platform(), "processor": _processor(), "cores": str(cores()), "memory": _memory()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory() -> str:
    import psutil

    return format_size(psutil.virtual_memory().total)


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


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
