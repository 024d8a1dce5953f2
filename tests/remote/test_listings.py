"""Input at addresses whose file system keeps listings, as object stores do: what is there now is what counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from tests.kit.jobs import TOKENIZER, documents, expected_ids, write_lines

import milldam
from milldam import InputError


class KeptListings(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """Local files behind a cache of listings and no invalidation but by who asks for it."""

    protocol = "kept"
    changes: Path | None = None
    """Is written once, as soon as any file is opened."""

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True, **options)
        return self.dircache[path] if detail else [one["name"] for one in self.dircache[path]]

    def info(self, path: str, **options: Any) -> Any:
        path = self._strip_protocol(path)
        for listing in self.dircache.values():
            for entry in listing:
                if entry["name"] == path:
                    return entry
        return super().info(path, **options)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def open(self, path: str, *arguments: Any, **options: Any) -> Any:
        if KeptListings.changes is not None and KeptListings.changes.exists():
            write_lines(KeptListings.changes, ["another text of another size"])
        return super().open(path, *arguments, **options)


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptListings, "changes", None)
    fsspec.register_implementation("kept", KeptListings, clobber=True)


def _tokenize(folder: Path, out: Path) -> milldam.Store:
    return milldam.tokenize(f"kept://{folder}", out, tokenizer=TOKENIZER, workers=1)


def test_objects_that_are_new_are_seen_in_a_process_that_lives_on(tmp_path: Path) -> None:
    """A second run in the same process reads what was added since the first."""
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in/a.jsonl", ["one"])
    assert documents(_tokenize(tmp_path / "in", tmp_path / "out")) == expected_ids(["one"])
    write_lines(tmp_path / "in/b.jsonl", ["two"])
    assert documents(_tokenize(tmp_path / "in", tmp_path / "out")) == expected_ids(["one", "two"])


def test_an_object_that_changes_while_it_is_read_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is made of half of each."""
    (tmp_path / "in").mkdir()
    monkeypatch.setattr(KeptListings, "changes", write_lines(tmp_path / "in/a.jsonl", ["one"]))
    with pytest.raises(InputError, match="changed while it was read"):
        _tokenize(tmp_path / "in", tmp_path / "out")
