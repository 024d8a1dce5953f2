"""Input at addresses whose file system keeps listings, as object stores do: what is there now is what counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from tests.kit.jobs import TOKENIZER, documents, expected_ids, write_lines

import milldam


class KeptListings(LocalFileSystem):  # type: ignore[misc] # fsspec has no types
    """Local files behind a cache of listings and no invalidation but by who asks for it."""

    protocol = "kept"

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


def _tokenize(folder: Path, out: Path) -> milldam.Store:
    return milldam.tokenize(f"kept://{folder}", out, tokenizer=TOKENIZER, workers=1)


def test_objects_that_are_new_are_seen_in_a_process_that_lives_on(tmp_path: Path) -> None:
    """A second run in the same process reads what was added since the first."""
    fsspec.register_implementation("kept", KeptListings, clobber=True)
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in/a.jsonl", ["one"])
    assert documents(_tokenize(tmp_path / "in", tmp_path / "out")) == expected_ids(["one"])
    write_lines(tmp_path / "in/b.jsonl", ["two"])
    assert documents(_tokenize(tmp_path / "in", tmp_path / "out")) == expected_ids(["one", "two"])
