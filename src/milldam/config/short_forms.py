"""Short forms, spelled out: `tokenizer: gpt2/` is `tokenizer: {path: gpt2/}`."""

from __future__ import annotations

from typing import Any

_BLOCKS: dict[str, dict[str, dict[str, Any]]] = {
    "dedup": {"exact": {}, "bloom": {"method": "bloom"}, "near": {"near": {}}},
    "packing": {"wrapped": {"strategy": "wrapped"}, "best_fit": {"strategy": "best_fit"}},
    "clean": {"default": {}},
}
_PATHS = ("tokenizer", "datasets", "validation")


def spelled_out(name: str, value: Any) -> Any:
    """The block that a word stands for, so that more can be said in it; anything else as it is.

    >>> spelled_out("dedup", "near"), spelled_out("tokenizer", "gpt2/"), spelled_out("dedup", "off")
    ({'near': {}}, {'path': 'gpt2/'}, 'off')
    """
    if not isinstance(value, str):
        return value
    if name in _PATHS:
        return {"path": value}
    return dict(_BLOCKS.get(name, {}).get(value, {})) if value in _BLOCKS.get(name, {}) else value
