"""Check a store of any kind against its own manifest: sizes and hashes of all files, then what is special to its kind.

Reads every file in blocks, wherever the store lies: constant memory. Of a store at an address nothing goes into the
cache. Yields a problem at a time, each a sentence that names the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from milldam.files import has_size, hash_bytes
from milldam.stores.kinds import TOKENS, Kind, StoreManifest, store_kind
from milldam.stores.place import Folder, Place

CHANGED = "its bytes have changed since it was written (hash differs)"
_TOKENIZER = "tokenizer.json"


def verify(where: str | Path | Place) -> Iterator[str]:
    """Every problem found; none means that the store is whole."""
    place = Folder(Path(where)) if isinstance(where, str | Path) else where
    kind, manifest = manifest_at(place)
    head = kind.head(place)
    if head.get("totals") != manifest.totals:
        yield f"{place.name}/{kind.manifest}: totals are not the sums over its shards"
    if head.get("fingerprint") != manifest.fingerprint:
        yield f"{place.name}/{kind.manifest}: the fingerprint is not that of its shards"
    yield from _tokenizer_problems(place, getattr(manifest, "tokenizer", {}).get("xxh3"))
    yield from kind.problems(place, manifest)
    for file in kind.audit(place).values():
        # A store is whole without them: they stay where it was made.
        if place.size(file["name"]) is not None and (problem := wrong_bytes(place, file["name"], file)):
            yield problem


def manifest_at(place: Place) -> tuple[Kind, StoreManifest]:
    """What lies at a place. Raises StoreError when it is no store."""
    kind = (None if place.folder is None else store_kind(place.folder)) or TOKENS
    return kind, kind.read_manifest(place)


def has_every_file(folder: Path, kind: Kind) -> bool:
    """Whether every file that the manifest of a folder names is there, of the size that it had; and its tokenizer."""
    place = Folder(folder)
    if any(_tokenizer_problems(place, kind.head(place).get("tokenizer", {}).get("xxh3"))):
        return False
    # By plain strings: there may be millions of files.
    return all(has_size(f"{folder}/{name}", size) for name, size in kind.files_in(folder / kind.manifest))


def _tokenizer_problems(place: Place, made_with: str | None) -> Iterator[str]:
    """`made_with`: its hash; None: made without one, so that nothing can be said of a file of that name."""
    if made_with is None:
        return
    path, data = f"{place.name}/{_TOKENIZER}", place.read(_TOKENIZER)
    if data is None:
        yield f"{path}: missing"
    elif hash_bytes(data) != made_with:
        yield f"{path}: not the tokenizer that made this store (its hash differs)"


def wrong_size(place: Place, name: str, record: dict[str, Any]) -> str | None:
    size = place.size(name)
    if size is None:
        return f"{place.name}/{name}: missing"
    return None if size == record["bytes"] else _sizes(f"{place.name}/{name}", size, record)


def _sizes(path: str, size: int, record: dict[str, Any]) -> str:
    return f"{path}: {size:,} bytes where the manifest says {record['bytes']:,}"


def wrong_bytes(
    place: Place,
    name: str,
    record: dict[str, Any],
    *,
    blocks: Iterable[bytes] | None = None,
    see: Callable[[bytes], object] | None = None,
) -> str | None:
    """What is wrong with size or hash of a file. `blocks`: its bytes, if they are at hand; `see`: gets each block."""
    problem, digest = wrong_size(place, name, record), xxhash.xxh3_128()
    if problem is not None:
        return problem
    for block in place.blocks(name) if blocks is None else blocks:
        digest.update(block)
        if see is not None:
            see(block)
    return None if digest.hexdigest() == record["xxh3"] else f"{place.name}/{name}: {CHANGED}"
