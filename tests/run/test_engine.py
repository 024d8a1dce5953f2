"""The engine with its hardest case: a compressed stream of conversations with two sides and columns beside them, killed
in the middle of a unit, resumed to the same bytes.

A unit that can't be cut comes in parts: each is durable before its record is, and says how far the unit was read. A
part ends with the batch that fills it, by bytes of text alone. A row has two sides: judged once, encoded twice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.kit.jobs import zstd

from milldam.files import FileSink, NewFile, write_sealed
from milldam.memory import usage
from milldam.run import engine
from milldam.run.engine import Assigned, Make, Options, Session, Stage
from milldam.run.records import RECORDS, Record, Records
from milldam.run.units import Identity
from milldam.stores.kinds import Kind

PAIRS = Kind("pairs", "pairs.json", "pairs", "a store of pairs", "")
BATCH_BYTES, PART_BYTES = 4_000, 20_000
KEPT = ("url", "score")


@dataclass(frozen=True)
class Batch:
    """Rows of a unit, with all that is known of them: two texts each, and what is kept beside them."""

    rows: np.ndarray[Any, np.dtype[np.int64]]  # (n,) numbers in the unit, which never change
    texts: list[str]  # 2 a row
    columns: dict[str, list[Any]]
    counts: Counter[str]
    ids: bytes = b""
    lengths: tuple[int, ...] = ()  # 2 a row

    def narrow(self, mask: list[bool], reason: str) -> Batch:
        """Only the rows of the mask, in every field; the others are counted."""
        self.counts[reason] += mask.count(False)
        texts = [text for k, text in enumerate(self.texts) if mask[k // 2]]
        columns = {name: list(compress(values, mask)) for name, values in self.columns.items()}
        return replace(self, rows=self.rows[np.array(mask, bool)], texts=texts, columns=columns)


def read(path: Path, after: int) -> Iterator[Batch]:
    """The rows behind the first `after`. What comes before is unpacked again: a stream has no other way in."""
    counts: Counter[str] = Counter()
    rows: list[int] = []
    texts: list[str] = []
    columns: dict[str, list[Any]] = {name: [] for name in KEPT}
    size = 0
    with zstd.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number < after:
                continue
            record = json.loads(line)
            sides = [f"{record['prompt']}\n{record[side]}" for side in ("chosen", "rejected")]
            rows, texts, size = [*rows, number], [*texts, *sides], size + sum(map(len, sides))
            for name in KEPT:
                columns[name].append(record[name])
            if size >= BATCH_BYTES:
                yield Batch(np.array(rows), texts, columns, counts)
                rows, texts, columns, size = [], [], {name: [] for name in KEPT}, 0
    yield Batch(np.array(rows, np.int64), texts, columns, counts)


def judge(batch: Batch) -> Batch:
    return batch.narrow([score >= 0 for score in batch.columns["score"]], "low_score")


def encode(batch: Batch) -> Batch:
    encoded = [text.encode() for text in batch.texts]
    return replace(batch, ids=b"".join(encoded), lengths=tuple(map(len, encoded)))


class Sink:
    """Tokens, lengths and columns of a part."""

    def __init__(self, out: Path, name: str) -> None:
        self._tokens, self._lengths = NewFile(out / f"{name}.bin"), NewFile(out / f"{name}.idx")
        self._beside, self._writer = NewFile(out / f"{name}.parquet"), None
        self.size = self.documents = 0

    def add(self, batch: Batch) -> None:
        self._tokens.write(batch.ids)
        self._lengths.write(np.array(batch.lengths, "<u4").data)
        table = pa.table({"row": batch.rows, **batch.columns}, schema=SCHEMA)
        self._writer = self._writer or pq.ParquetWriter(FileSink(self._beside), SCHEMA)
        self._writer.write_table(table)
        self.size, self.documents = self.size + len(batch.ids), self.documents + len(batch.lengths)

    def close(self) -> dict[str, dict[str, Any]]:
        if self._writer is not None:
            self._writer.close()
        return {new.path.name: new.commit() for new in (self._tokens, self._lengths, self._beside)}


SCHEMA = pa.schema([("row", pa.int64()), ("url", pa.string()), ("score", pa.float64())])


@dataclass(frozen=True)
class Loads:
    """`dies_at`: the part before whose record the process is killed; None: it lives."""

    out: Path
    dies_at: int | None

    def load(self) -> Make:
        def make(assigned: Assigned, progress: Any) -> Iterator[Record]:
            part, after = assigned.next_part, 0 if assigned.begun is None else assigned.begun.facts["after"]
            sink, counts = Sink(self.out, f"{assigned.key}-{part}"), Counter[str]()
            for batch in read(Path(assigned.unit["path"]), after):
                after = int(batch.rows[-1]) + 1 if len(batch.rows) else after
                for step in (judge, encode):
                    batch = step(batch)
                sink.add(batch)
                counts.update(batch.counts)
                batch.counts.clear()
                if sink.size >= PART_BYTES:
                    files = sink.close()
                    if part == self.dies_at and not (self.out / "died").exists():
                        (self.out / "died").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    counts["documents"] = sink.documents
                    yield Record(assigned.key, part, False, files, counts=dict(counts), facts={"after": after})
                    part, counts = part + 1, Counter()
                    sink = Sink(self.out, f"{assigned.key}-{part}")
            counts["documents"] = sink.documents
            yield Record(assigned.key, part, True, sink.close(), counts=dict(counts))

        return make


@dataclass(frozen=True)
class PlannedFile:
    path: str
    size: int

    @property
    def key(self) -> str:
        return f"{Path(self.path).stat().st_size:016x}"

    def as_json(self) -> dict[str, Any]:
        return {"path": self.path}


class PairJob(engine.Job[dict[str, Any]]):
    kind, stage_names, outputs = PAIRS, ("encode",), ("*.bin", "*.idx", "*.parquet")

    def __init__(self, path: Path, out: Path, workers: int, dies_at: int | None) -> None:
        self.path, self.out, self.workers, self.dies_at = path, out, workers, dies_at

    def prepare(self, run: Session) -> Identity:
        run.folder.inputs.write(())
        return Identity({"pairs": 1}, {"files": 1, "bytes": self.path.stat().st_size, "fingerprint": "0"})

    def units(self, run: Session) -> Iterable[PlannedFile]:
        return [PlannedFile(str(self.path), self.path.stat().st_size)]

    def stages(self, run: Session) -> Iterator[Stage]:
        folder = run.folder
        self.records = Records(folder.journal, RECORDS, folder.out, folder.units.keys())
        yield Stage("encode", Loads(self.out, self.dies_at), self.records, dict)

    def finish(self, run: Session, plan: Any) -> dict[str, Any]:
        totals: Counter[str] = Counter()
        parts = [record for _, record in self.records.in_plan_order()]
        for record in parts:
            totals.update(record.counts)
        files = {name: file for record in parts for name, file in record.outputs.items()}
        made = {"totals": dict(totals), "parts": len(parts), "files": files}
        write_sealed(run.folder.out / PAIRS.manifest, made)
        return made

    def up_to_date(self, run: Session) -> None:
        return None


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    path = tmp_path / "pairs.jsonl.zst"
    with zstd.open(path, "wt", encoding="utf-8") as file:
        for number in range(900):
            words = [" ".join("wörd" * int(n) for n in rng.integers(1, 6, size=6)) for _ in range(3)]
            record = dict(zip(("prompt", "chosen", "rejected"), words, strict=True))
            record |= {"url": f"https://example.org/{number}", "score": float(rng.normal())}
            file.write(json.dumps(record) + "\n")
    return path


def run(path: Path, out: Path, workers: int = 1, dies_at: int | None = None) -> dict[str, Any]:
    options = Options(out, memory="1GB", held_bytes=usage().anonymous)
    return engine.run(PairJob(path, out, workers, dies_at), options)


def test_a_unit_killed_in_its_middle_is_resumed_to_the_same_bytes(pairs: Path, tmp_path: Path) -> None:
    """What was durable stays, the part that was open is made again, and nothing is there twice or missing."""
    whole = run(pairs, tmp_path / "whole")
    assert whole["parts"] > 4 and whole["totals"]["low_score"] > 300
    assert whole["totals"]["documents"] == 2 * (900 - whole["totals"]["low_score"])
    program = "import sys, pathlib, tests.run.test_engine as t; t.run(*map(pathlib.Path, sys.argv[1:]), dies_at=2)"
    killed = subprocess.run([sys.executable, "-c", program, str(pairs), str(tmp_path / "out")])
    assert killed.returncode == -signal.SIGKILL
    recorded = (tmp_path / "out/run/records.jsonl").read_bytes()
    assert len(recorded.splitlines()) == 2
    assert run(pairs, tmp_path / "out") == whole
    assert (tmp_path / "out/run/records.jsonl").read_bytes().startswith(recorded)
    for name in whole["files"]:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_rows_keep_their_columns_and_both_sides(pairs: Path, tmp_path: Path) -> None:
    """The columns of a part stand in the order of its rows; each row has two documents."""
    whole = run(pairs, tmp_path / "whole")
    tables = [pq.read_table(tmp_path / "whole" / name) for name in whole["files"] if name.endswith(".parquet")]
    rows = pa.concat_tables(tables).to_pylist()
    assert [one["url"] for one in rows] == [f"https://example.org/{one['row']}" for one in rows]
    assert all(one["score"] >= 0 for one in rows) and 2 * len(rows) == whole["totals"]["documents"]
