"""What became of the records: read = kept + dropped + rejected, the same figures wherever they are shown, by source."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import invoke, set_aside, write_lines
from tests.kit.preprocess_jobs import config_of, fresh_texts, giant_text, write_config
from tests.kit.source_reading import write_texts

import milldam
from milldam.stores.tokens.manifest import Manifest, Tally


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Datasets that share documents, with blank, short and unreadable records among them."""
    folder = tmp_path_factory.mktemp("counts")
    texts = fresh_texts(900, seed=1)
    first = write_lines(folder / "first.jsonl", [*texts[:500], "", "tiny", *texts[:60]])
    with first.open("a") as file:
        file.write('{"text": broken\n' * 3 + '{"title": "no text"}\n')
    second = write_texts(folder / "second.jsonl.gz", [*texts[400:700], "tiny", giant_text(2_000_000)])
    (folder / "third").mkdir()
    write_lines(folder / "third" / "a.jsonl", texts[650:900])
    write_lines(folder / "third" / "b.jsonl", ["  ", *fresh_texts(200, seed=2)])
    validation = write_lines(folder / "validation.jsonl", [*texts[100:140], "val only", ""])
    return {"first": first, "second": second, "third": folder / "third", "validation": validation}


def jobs(sets: dict[str, Path]) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Datasets and settings, by name."""
    first, second, third = sets["first"], sets["second"], sets["third"]
    weighted = [{"path": first, "weight": 2.5}, {"path": second, "weight": 0.5}, third]
    limited = [{"path": first, "max_documents": 300}, {"path": second, "max_tokens": 5000}, third]
    return {
        "plain": ([first], {"dedup": "off", "clean": "off"}),
        "dedup": ([first, second, third], {"filters": {"min_characters": 10, "max_tokens": 60_000}}),
        "weights": (weighted, {"splits": {"val": 0.1}, "filters": {"min_tokens": 5}}),
        "limits": (limited, {"splits": {"val_tokens": 900}, "dedup": "near", "write_dropped": True}),
        "validation": ([second, first], {"validation": sets["validation"], "packing": "wrapped", "seq_len": 64}),
        "limit": ([first, second], {"limit": 420, "filters": {"min_characters": 10}}),
    }


NAMES = ("plain", "dedup", "weights", "limits", "validation", "limit")


def write_job(sets: dict[str, Path], name: str, folder: Path, **more: Any) -> Path:
    datasets, settings = jobs(sets)[name]
    config = config_of(folder / "out", datasets, shard_size="100KB", **settings, **more)
    return write_config(folder / "config.yaml", config)


Figures = tuple[int, int, int, int]
"""Read, kept, dropped, rejected."""


def figures_shown(out: Path, summary: dict[str, Any], printed: str) -> dict[str, Figures]:
    """The four figures, by the place that shows them."""
    tally = Manifest.read(out).tally
    stats = json.loads(invoke("stats", out, "--json").stdout)
    page = re.sub(r"<[^>]+>", " ", html.unescape((out / "run" / "report.html").read_text(encoding="utf-8")))
    text = re.search(r"([\d,]+) of ([\d,]+) records are in the store; ([\d,]+) were dropped, ([\d,]+) rejected", page)
    tile = re.search(r"Documents\s+([\d,]+)\s+of ([\d,]+) read\s+([\d,]+|none) dropped(?:, ([\d,]+) rejected)?", page)
    line = re.search(r"^Read ([\d,]+) records: ([\d,]+) kept, ([\d,]+) dropped, ([\d,]+) rejected$", printed, re.M)
    assert text is not None and tile is not None and line is not None
    kept, read, dropped, rejected = map(_number, text.groups())
    tile_kept, tile_read, tile_dropped, tile_rejected = map(_number, tile.groups())
    told = json.loads((out / "run" / "summary.json").read_bytes())
    flow = told["facts"]["flow"]
    return {
        "manifest": (tally.read, tally.documents, tally.dropped_count, tally.rejected_count),
        "stats": _of(stats),
        "summary": _of(summary),
        "summary.json": _of(told),
        "flow": (flow[0]["documents_in"], flow[-1]["documents_out"], *_lost(flow)),
        "report, text": (read, kept, dropped, rejected),
        "report, tile": (tile_read, tile_kept, tile_dropped, tile_rejected),
        "terminal": tuple(map(_number, line.groups())),  # type: ignore[dict-item]
    }


def _number(shown: str | None) -> int:
    return 0 if shown in (None, "none") else int(str(shown).replace(",", ""))


def _of(told: dict[str, Any]) -> Figures:
    counts = told.get("counts", told)
    return counts["read"], counts["documents"], sum(told["dropped"].values()), sum(told["rejected"].values())


def _lost(flow: list[dict[str, Any]]) -> tuple[int, int]:
    lost = [sum(stage["dropped"].values()) for stage in flow]
    return sum(lost[1:]), lost[0]


def assert_adds_up(out: Path, summary: dict[str, Any], printed: str) -> None:
    shown = figures_shown(out, summary, printed)
    assert len(set(shown.values())) == 1, shown
    read, kept, dropped, rejected = shown["manifest"]
    assert read == kept + dropped + rejected and kept == len(milldam.open(out))
    for one in (Tally(**one) for one in summary["facts"]["sources"]):
        assert one.read == one.documents + one.dropped_count + one.rejected_count, one
    assert sum(one["tokens"] for one in summary["facts"]["sources"]) == milldam.open(out).tokens
    assert rejected == len(set_aside(out))


@pytest.mark.parametrize("name", NAMES)
def test_every_place_shows_the_same_figures(sets: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Terminal, JSON, stats, report and manifest; by source they add up, too."""
    config = write_job(sets, name, tmp_path)
    done = invoke("preprocess", config)
    assert done.exit_code == 0, done.output
    again = json.loads(invoke("preprocess", config, "--json").stdout)
    assert_adds_up(tmp_path / "out", again, done.stdout)
