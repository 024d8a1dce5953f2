"""`dedup: {method: index}`: what an index holds is dropped in one pass; documents are not compared with each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import (
    invoke,
    run_milldam,
    set_aside,
    store_bytes,
    write_lines,
)
from tests.kit.preprocess_jobs import (
    assert_holds,
    config_of,
    drops_by_stage,
    fresh_texts,
    preprocess,
    summary_of,
    texts_in,
    write_config,
)
from tests.kit.quick import first_quick

import milldam
from milldam import ConfigError

OLD, NEW = fresh_texts(60), fresh_texts(60, 1)


def assert_flow(out: Path, dropped: dict[str, dict[str, int]]) -> None:
    """The flow names exactly these drops, adds up, and ends with the documents of the store."""
    assert drops_by_stage(out) == dropped
    assert summary_of(out)["flow"][-1]["documents_out"] == len(milldam.open(out))
    tally = milldam.open(out).manifest.tally
    assert {"read": tally.rejected} | tally.dropped == {"read": {}} | dropped
    assert tally.read == tally.documents + tally.dropped_count + tally.rejected_count


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    """An index of two runs."""
    for name, texts in {"first": OLD[:40], "second": OLD[30:]}.items():
        data = write_lines(tmp_path / f"{name}.jsonl", texts)
        preprocess(tmp_path / name, data, dedup={"index": tmp_path / "seen"})
    return tmp_path / "seen"


def compared(out: Path, texts: list[str] | Path, index: Path, **settings: Any) -> milldam.Store:
    data = texts if isinstance(texts, Path) else write_lines(out.with_suffix(".jsonl"), texts)
    dedup = {"method": "index", "index": index, **settings.pop("dedup", {})}
    return preprocess(out, data, dedup=dedup, **settings)


def state(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".hashes")}


def test_only_what_the_index_holds_is_dropped(tmp_path: Path, seen: Path) -> None:
    """Copies within the corpus stay; each drop is counted and names the run that has it; the index is only read."""
    before = state(seen)
    texts = [NEW[0], OLD[3], NEW[1], NEW[0], OLD[55], OLD[3], "", NEW[2]]
    store = compared(tmp_path / "out", texts, seen, write_dropped=True)
    assert_holds(store, [NEW[0], NEW[1], NEW[0], NEW[2]])
    assert_flow(store.path, {"clean": {"empty": 1}, "dedup": {"seen_before": 3}})
    runs = {run["out"]: run["id"] for run in json.loads(invoke("dedup-index", seen, "--json").stdout)}
    named = {one["text"]: one["duplicate_of"]["run"] for one in set_aside(store.path, "dropped") if one["text"]}
    assert named == {OLD[3]: runs[str(tmp_path / "first")], OLD[55]: runs[str(tmp_path / "second")]}
    assert state(seen) == before
    assert not (store.path / "run/prints").exists()


@pytest.mark.parametrize("workers", first_quick([2, 1]))
def test_the_store_is_that_of_the_texts_that_are_left(tmp_path: Path, seen: Path, workers: int) -> None:
    """Its shards have the bytes that the new texts alone give, with splits, for any number of workers."""
    texts = [text for pair in zip(NEW, OLD, strict=True) for text in pair] * 40
    settings = {"splits": {"val": 0.2}, "shard_size": "100KB"}
    store = compared(tmp_path / "out", texts, seen, workers=workers, **settings)
    assert len(store.manifest.shards) > 2
    left = NEW * 40
    assert sorted(texts_in(store, "train") + texts_in(store, "val")) == sorted(left)
    plain = preprocess(tmp_path / "plain", write_lines(tmp_path / "left.jsonl", left), dedup="off", **settings)
    assert texts_in(store, "val") == texts_in(plain, "val")
    assert store_bytes(compared(tmp_path / "again", tmp_path / "out.jsonl", seen, **settings).path) == store_bytes(
        store.path
    )


def test_weights_slices_and_limits_go_with_it(tmp_path: Path, seen: Path) -> None:
    """Repetitions, numbers of documents and standard input need no first pass of dedup."""
    texts = [*OLD[:5], *NEW[:10], *OLD[5:10]]
    data = write_lines(tmp_path / "corpus.jsonl", texts)
    twice = preprocess(tmp_path / "a", {"path": data, "weight": 2}, dedup={"method": "index", "index": seen})
    assert texts_in(twice) == NEW[:10] * 2
    some = preprocess(tmp_path / "b", {"path": data, "max_documents": 8}, dedup={"method": "index", "index": seen})
    assert texts_in(some) == NEW[:3]
    assert texts_in(compared(tmp_path / "c", data, seen, limit=4)) == NEW[:4]
    config = config_of(tmp_path / "d", "-", dedup={"method": "index", "index": seen})
    with data.open("rb") as lines:
        run_milldam("preprocess", write_config(tmp_path / "config.json", config), stdin=lines)
    assert texts_in(tmp_path / "d") == NEW[:10]


# ---- an index that changes ----


def grow(tmp_path: Path, index: Path) -> None:
    preprocess(tmp_path / "late", write_lines(tmp_path / "late.jsonl", NEW[:30]), dedup={"index": index})


def test_changed_input_and_overwrite_take_the_index_as_it_is_now(tmp_path: Path, seen: Path) -> None:
    """All units are then made against it; input that did not change is not."""
    data = tmp_path / "data"
    data.mkdir()
    write_lines(data / "a.jsonl", [*NEW[:20], *OLD[:5]])
    assert texts_in(compared(tmp_path / "out", data, seen)) == NEW[:20]
    grow(tmp_path, seen)
    assert texts_in(compared(tmp_path / "out", data, seen)) == NEW[:20]
    write_lines(data / "b.jsonl", NEW[25:40])
    assert texts_in(compared(tmp_path / "out", data, seen)) == NEW[30:40]
    invoke(
        "dedup-index",
        seen,
        "--remove",
        json.loads((tmp_path / "out/run/index/index-runs.json").read_text())["runs"][0]["id"],
    )
    assert OLD[0] in texts_in(compared(tmp_path / "out", data, seen, overwrite=True))


# ---- what is refused ----


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dedup": {"method": "index"}}, r"dedup\.method: index: name the folder of the index as dedup\.index"),
        ({"dedup": {"method": "index", "index": "nothing"}}, "holds no runs to compare with"),
        ({"dedup": {"method": "index", "index": "seen", "near": {}}}, "needs a pass of its own"),
        ({"decontaminate": "corpus.jsonl"}, "decontaminate: needs a pass of its own"),
    ],
)
def test_what_one_pass_can_not_do_is_refused(
    tmp_path: Path, seen: Path, settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason, and no index is made by asking for one."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "corpus.jsonl", ["one"])
    with pytest.raises(ConfigError, match=said):
        preprocess(tmp_path / "out", "corpus.jsonl", **{"dedup": {"method": "index", "index": "seen"}} | settings)
    assert not (tmp_path / "nothing").exists()
