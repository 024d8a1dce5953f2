"""What a run sets aside: files that the manifest lists, under names with the hash of their content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xxhash
from tests.kit.damage import edit_manifest
from tests.kit.jobs import TOKENIZER, run_here, write_lines
from tests.kit.preprocess_jobs import fresh_texts, preprocess

import milldam

KINDS = ("rejects", "dropped", "contamination")


def _store(folder: Path, seed: int = 0) -> milldam.Store:
    """A store with a file of each kind; another seed changes its input."""
    item = fresh_texts(1, 7, words=(30, 31))[0]
    texts = fresh_texts(10, seed)
    corpus = write_lines(folder / "a.jsonl", [*texts, texts[0], f"{texts[1]} {item}"])
    with corpus.open("a") as last:
        last.write(f'{{"title": "no text here, {seed}"}}\n')
    items = write_lines(folder / "items.jsonl", [item])
    return preprocess(folder / "out", corpus, dedup="exact", write_dropped=True, decontaminate=items)


@pytest.fixture
def store(tmp_path: Path) -> milldam.Store:
    return _store(tmp_path)


def test_each_is_named_by_its_content_and_listed_in_the_manifest(store: milldam.Store) -> None:
    """With its size and hash; the store gives their paths."""
    listed = json.loads((store.path / "milldam.json").read_bytes())["audit"]
    assert tuple(listed) == tuple(store.audit) == KINDS
    for kind, path in store.audit.items():
        data = path.read_bytes()
        digest = xxhash.xxh3_128_hexdigest(data)
        assert listed[kind] == {"name": path.name, "bytes": len(data), "xxh3": digest}
        assert path.name.startswith(f"{kind}-{digest}.jsonl")


def test_one_listed_outside_of_the_store_is_refused(store: milldam.Store) -> None:
    """A manifest may come from anywhere."""
    edit_manifest(store.path, lambda manifest: manifest["audit"]["rejects"].update(name="../a.jsonl"))
    assert '"../a.jsonl" leaves the folder; refused' in run_here("verify", store.path, code=3).output
    with pytest.raises(milldam.errors.StoreError, match="leaves the folder"):
        assert "rejects" in milldam.open(store.path).audit


def test_summary_inspect_stats_and_report_name_them(tmp_path: Path) -> None:
    """So that nobody has to know the hash."""
    store = _store(tmp_path)
    paths = [str(path) for path in store.audit.values()]
    for command in ("inspect", "stats"):
        shown = run_here(command, store.path).output
        assert all(path in shown for path in paths)
    page = (store.path / "run/report.html").read_text("utf-8")
    assert all(path.name in page for path in store.audit.values())
    assert list(json.loads((store.path / "run/summary.json").read_bytes())["audit"].values()) == paths


def test_rejects_of_an_npy_file_lie_in_its_work_folder(tmp_path: Path) -> None:
    """The summary names them; they are replaced with the file, and removed when there are none any more."""
    corpus, npy = tmp_path / "a.jsonl", tmp_path / "a.npy"
    words = ("tokenize", corpus, "-o", npy, "--format", "npy", "--tokenizer", TOKENIZER)
    corpus.write_text('{"text": "good"}\nbroken\n')
    assert f"Rejected records are in {tmp_path}/.a.npy.milldam-npy/rejects-" in run_here(*words).output
    (rejects,) = json.loads(run_here(*words, "--json").stdout)["audit"].values()
    assert json.loads(Path(rejects).read_text())["line"] == 2
    corpus.write_text('{"text": "good"}\n')
    run_here(*words)
    assert not Path(rejects).exists()
