"""Files that are damaged in every way that disks, copies and editors know: what the tests of damage share."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from milldam.files import seal_text
from milldam.stores.kinds import KINDS

DEEP: Any = 0
for _ in range(200):
    DEEP = [DEEP]
OTHER_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 10**30, 1.5, float("nan"), "", "x", "../x", "\ud800", [], [None], {}, {"x": 1}, DEEP,
)  # fmt: skip


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))] if data else data


def flip(data: bytes, rng: random.Random) -> bytes:
    """A bit, or some."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 8)) if data else 0):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def zero(data: bytes, rng: random.Random) -> bytes:
    """What a power failure leaves of a page."""
    begin = rng.randrange(len(data)) if data else 0
    length = min(len(data) - begin, rng.choice((1, 8, 512, len(data))))
    return data[:begin] + bytes(length) + data[begin + length :]


def append(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice((b"\0", b"\n", b"garbage", bytes(64), b'{"x": 1}\n', data[-40:]))


def empty(data: bytes, rng: random.Random) -> bytes:
    return b""


def not_utf8(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + b"\xff\xfe" + data[at:]


def nest(data: bytes, rng: random.Random) -> bytes:
    return b"[" * 100_000 + data


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (cut, flip, zero, append, empty)
TEXT = (*BYTES, not_utf8, nest)


def other_value(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one field of it replaced or gone."""
    copied = json.loads(json.dumps(value))
    places = list(_places(copied))
    holder, key = rng.choice(places)
    if isinstance(holder, dict) and rng.random() < 0.1:
        del holder[key]
    else:
        holder[key] = rng.choice(OTHER_VALUES)
    return copied


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def damaged(path: Path, rng: random.Random) -> bytes:
    """The bytes of a file, damaged; of JSON mostly a field, since whoever damages its bytes mostly gets no JSON."""
    data = path.read_bytes()
    if path.suffix == ".json" and len(data) > 10 and rng.random() < 0.7:
        return json.dumps(other_value(json.loads(data), rng), indent=rng.choice((None, 1))).encode()
    is_text = path.suffix in (".json", ".jsonl", ".csv")
    return rng.choice(TEXT if is_text else BYTES)(data, rng)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a manifest says, and seal it again: as a forger would, or another version of milldam."""
    path = next(path for kind in KINDS if (path := folder / kind.manifest).exists())
    value = json.loads(path.read_bytes())

    change(value)
    write_resealed(path, value)


def write_resealed(path: Path, value: dict[str, Any]) -> None:
    value = {name: one for name, one in value.items() if name != "check"}
    # ASCII: what is put in need not be text.
    path.write_bytes(seal_text(json.dumps(value, indent=1).encode() + b"\n"))
