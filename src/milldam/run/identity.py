"""What a result depends on, and how two of them differ."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milldam.stores.kinds import Kind, result_id
from milldam.stores.place import Folder


@dataclass(frozen=True, slots=True)
class Identity:
    """What a result depends on: two runs with equal identities give equal bytes."""

    settings: dict[str, Any]
    input: dict[str, Any]
    """Number of files, bytes, and a fingerprint of names, sizes and versions."""
    tokenizer_name: str | None = field(default=None, compare=False)
    """What people call the tokenizer, which the settings hold as a hash: the same one may have another name."""

    @classmethod
    def of_store(cls, out: Path, kind: Kind) -> Identity:
        """Of a finished store. Raises StoreError when that can't be told."""
        head = kind.head(Folder(out))
        return cls(head["settings"], head["input"], head.get("tokenizer", {}).get("name"))

    @property
    def run_id(self) -> str:
        """Names the result."""
        return result_id(self.settings, self.input)

    def differences(self, other: Identity) -> list[str]:
        """What differs, a line each; empty when nothing does."""
        before, now = _flat(self.settings), _flat(other.settings)
        found = [
            f"{name}: {other._shown(name, now)} (made with {self._shown(name, before)})"
            for name in dict.fromkeys([*before, *now])
            if before.get(name) != now.get(name)
        ]
        if self.input != other.input:
            found.append(
                f"input: {other.input['files']:,} files, {other.input['bytes']:,} bytes"
                f" (made from {self.input['files']:,} files, {self.input['bytes']:,} bytes)"
            )
        return found

    def _shown(self, name: str, flat: dict[str, Any]) -> str:
        shown = _short(flat.get(name))
        is_tokenizer = name.rpartition(".")[2] == "tokenizer" and self.tokenizer_name is not None
        return f'"{self.tokenizer_name}", hash {shown}' if is_tokenizer else shown


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested settings by dotted names.

    >>> _flat({"a": 1, "b": {"c": [2, {"d": 3}]}})
    {'a': 1, 'b.c.0': 2, 'b.c.1.d': 3}
    """
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in items:
        found |= _flat(inner, f"{name}.{key}" if name else str(key))
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
