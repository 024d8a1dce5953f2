"""The kinds of stores: what tells a folder that milldam made, and its kind, and the head that their manifests share.

A manifest is one JSON object, written last. Its `format` and `format_version` come first; it may come from anywhere, so
the rest is checked field by field when it is read (`milldam.checked`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from milldam.checked import parse_json, read_json
from milldam.errors import StoreError
from milldam.files import hash_bytes

_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    manifest: str
    """The name of its manifest."""
    format: str
    phrase: str
    opened: str
    """What opens it; {0} is its folder."""
    version: int = 1

    def parse(self, data: bytes, path: str | Path) -> dict[str, Any]:
        """The object in a manifest of this kind."""
        return self.require(parse_json(data, path), path)

    def read(self, folder: Path, name: str | None = None) -> dict[str, Any]:
        """The object in the manifest of a folder. `name`: another name that the file has."""
        path = folder / (name or self.manifest)
        try:
            return self.require(read_json(path), path)
        except FileNotFoundError:
            raise StoreError(self.missing_in(folder)) from None

    def require(self, value: Any, path: str | Path) -> dict[str, Any]:
        if not isinstance(value, dict) or value.get("format") != self.format:
            raise StoreError(f"{path}: not the manifest of {self.phrase}.")
        if value.get("format_version") != self.version:
            raise StoreError(
                f"{path}: its format_version is {str(value.get('format_version'))[:40]}; this milldam reads "
                f"{self.version}. Upgrade milldam, or make it again."
            )
        return value

    def missing_in(self, folder: Path) -> str:
        """Why a folder without the manifest is none of this kind."""
        if folder.is_file():
            return f"{folder}: a file, not {self.phrase}, which is a folder. `milldam.open` says what it is."
        if not folder.is_dir():
            return f"{folder}: no such folder."
        other = store_kind(folder)
        if other is not None:
            return f"{folder}: {other.phrase}, not {self.phrase}. {other.opened.format(folder)}"
        if (folder / "run").exists():
            how = f"`milldam status {folder}` says how to go on."
            return f"{folder}: unfinished: a run was interrupted here. {how}"
        splits = sorted(path.parent.name for path in folder.glob(f"*/{self.manifest}"))
        if splits:
            named = f"Name {folder / splits[0]}, say."
            return f"{folder}: not {self.phrase} itself, but there is one of each split: {', '.join(splits)}. {named}"
        return f"{folder}: not {self.phrase} (no {self.manifest} in it)."


TOKENS = Kind("tokens", "milldam.json", "milldam store", "a store of tokens", "`milldam.open` opens it.")
TABLE = Kind(
    "table",
    "milldam-table.json",
    "milldam table",
    "a table that milldam.map made",
    '`milldam.Table("{0}")` opens it; its `.to_hf()` gives a datasets.Dataset.',
)
FEATURES = Kind(
    "features",
    "milldam-qa.json",
    "milldam features",
    "a store of question-answering features",
    '`milldam.qa.FeatureStore("{0}")` opens it.',
)
KINDS = (TOKENS, FEATURES, TABLE)


def store_kind(folder: str | Path) -> Kind | None:
    """The kind of store that a folder is; None: none, or not finished."""
    return next((kind for kind in KINDS if (Path(folder) / kind.manifest).is_file()), None)


# ---- names of shards ----


def shard_name(split: str, *files: dict[str, Any]) -> str:
    """The name of a shard: its split, then a hash of its content (the records of its files).

    So two shards share a name only when they share their bytes: a store can be updated while it is read
    (docs/decisions/0023).

    >>> shard_name("train", {"bytes": 2, "xxh3": "d0"}, {"bytes": 58, "xxh3": "9a"})
    'train-bc274ec07b8e'
    """
    return f"{split}-{hash_bytes(''.join(file['xxh3'] for file in files).encode())[:_DIGITS]}"


# ---- what several manifests have ----


class _FileRecord(TypedDict):
    """A file as it was written."""

    bytes: int
    xxh3: str


class _InputFacts(TypedDict, total=False):
    """What was read: all of it, or nothing where nobody knows."""

    files: int
    bytes: int
    fingerprint: str


class _TokenizerFacts(TypedDict, total=False):
    name: str | None
    xxh3: str | None
    """Of `tokenizer.json`; None: there is none."""
    vocab_size: int
    bos: int | None
    eos: int | None
    bos_token: str | None
    eos_token: str | None
    cls_id: int | None


FileRecord = Annotated[dict[str, Any], _FileRecord]
InputFacts = Annotated[dict[str, Any], _InputFacts]
TokenizerFacts = Annotated[dict[str, Any], _TokenizerFacts]
TokenDtype = Annotated[str, Literal["uint16", "int32"]]
