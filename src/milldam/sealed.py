"""JSON that says itself whether it is whole: what milldam writes down for itself, and believes when it goes on.

An object with one more field at its end, `check`: the hash of the text before it. So a line that was torn, a page that
was zeroed, a digit that was flipped are noticed, and what is not noticed is what was written: no field needs a look.
Files and lines stay JSON that other tools read. About a microsecond an object.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xxhash import xxh3_64, xxh3_64_hexdigest

from milldam.errors import StoreError
from milldam.files import hash_file, json_bytes, write_file

_encode, _decode = json.JSONEncoder().encode, json.JSONDecoder().decode
_BEFORE, _BEHIND = b', "check": "', b'"}\n'
_TAIL = len(_BEFORE) + 16 + len(_BEHIND)
_FILE_BEFORE, _FILE_BEHIND, _CLOSED = b',\n "check": "', b'"\n}\n', b"\n}\n"
_FILE_TAIL = len(_FILE_BEFORE) + 16 + len(_FILE_BEHIND)


def seal_line(value: dict[str, Any]) -> bytes:
    """
    >>> seal_line({"unit": 3})
    b'{"unit": 3, "check": "846547cfc5d7423c"}\\n'
    """
    body = _encode(value).encode()[:-1]
    return body + _BEFORE + xxh3_64_hexdigest(body).encode() + _BEHIND


def is_sealed(line: bytes) -> bool:
    """Whether a line is as it was written; its line end alone may be missing."""
    line = ended(line)
    body, end = line[:-_TAIL], line[-_TAIL:]
    if not end.startswith(_BEFORE) or not end.endswith(_BEHIND):
        return False
    return end[len(_BEFORE) : -len(_BEHIND)] == xxh3_64_hexdigest(body).encode()


def ended(line: bytes) -> bytes:
    """A line with its end, which a crash may have cost it."""
    return line if line.endswith(b"\n") else line + b"\n"


def unseal_line(line: bytes) -> dict[str, Any] | None:
    """What was sealed; None when the line is not as it was written."""
    value: dict[str, Any] | None = _decode(ended(line)[:-_TAIL].decode() + "}") if is_sealed(line) else None
    return value


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """A file of one object, laid out for people."""
    write_file(path, seal_file(value))


def replace_unsynced(path: Path, data: bytes) -> None:
    """Write a file of which a power failure may leave a torn one: what is not as it was written is not believed."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


def seal_file(value: dict[str, Any]) -> bytes:
    return b"".join(sealed_blocks([json_bytes(value)[: -len(_CLOSED)]]))


def sealed_blocks(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The text of an object laid out for people, up to its last value, and the rest with the hash."""
    digest = xxh3_64()
    for block in blocks:
        digest.update(block)
        yield block
    yield _FILE_BEFORE + digest.hexdigest().encode() + _FILE_BEHIND


def is_whole_text(data: bytes | mmap.mmap) -> bool:
    """Whether the text of a file is as `sealed_blocks` gave it. A gigabyte takes a tenth of a second."""
    end = max(0, len(data) - _FILE_TAIL)
    check = xxh3_64_hexdigest(memoryview(data)[:end]).encode()
    return data[end:] == _FILE_BEFORE + check + _FILE_BEHIND


def read_sealed(path: Path) -> dict[str, Any] | None:
    """What a file holds; None when there is none, or it is not as it was written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: can't be read ({error.strerror}).") from None
    if not is_whole_text(data):
        return None
    value: dict[str, Any] = json.loads(data)
    del value["check"]
    return value


def record_of(path: Path) -> dict[str, Any]:
    """What `is_whole` compares a file with later."""
    return {"bytes": path.stat().st_size, "xxh3": hash_file(path)}


def has_size(path: str | Path, size: int) -> bool:
    """Whether a file is there, and of this size."""
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False


def is_whole(path: str | Path, record: dict[str, Any]) -> bool:
    """Whether a file is as it was written: its size first, then its hash."""
    try:
        return has_size(path, record["bytes"]) and hash_file(Path(path)) == record["xxh3"]
    except OSError:
        return False
