"""Which tokens begin and end a document: found in the files beside the tokenizer, or by their usual names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, Setting, did_you_mean

_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<eod>", "<end_of_text>")
_USUAL_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "<|startoftext|>", "[BOS]")


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """The names that the files beside a tokenizer give to its special tokens."""

    bos: str | None = None
    eos: str | None = None
    bos_id: int | None = None
    eos_id: int | None = None


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What is put around each document; None: nothing."""

    bos: int | None
    eos: int | None
    bos_token: str | None = None
    eos_token: str | None = None


def read_named_tokens(folder: Path) -> NamedTokens:
    """Names from tokenizer_config.json and special_tokens_map.json, ids from config.json."""
    named: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        content = _read_object(folder / file)
        for role in ("bos", "eos"):
            token = content.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                named[role] = token
    config = _read_object(folder / "config.json")
    ids = {role: config.get(f"{role}_token_id") for role in ("bos", "eos")}
    number = {role: value if _is_id(value) else None for role, value in ids.items()}
    return NamedTokens(named.get("bos"), named.get("eos"), number["bos"], number["eos"])


def _is_id(value: Any) -> bool:
    """Some configs say -1, or a list of several."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def choose_special_tokens(tokenizer: Any, named: NamedTokens, *, bos: str, eos: str) -> SpecialTokens:
    """Apply the policy: "auto" (what the tokenizer has; BOS only on request), "none", or a token by name."""
    bos_token = None if bos == "none" else _find(tokenizer, bos, named.bos, named.bos_id, _USUAL_BOS, "tokenizer.bos")
    eos_token = None if eos == "none" else _find(tokenizer, eos, named.eos, named.eos_id, _USUAL_EOS, "tokenizer.eos")
    ids = {token: tokenizer.token_to_id(token) if token else None for token in (bos_token, eos_token)}
    return SpecialTokens(ids[bos_token], ids[eos_token], bos_token, eos_token)


def _find(
    tokenizer: Any, wanted: str, named: str | None, named_id: int | None, usual: tuple[str, ...], setting: str
) -> str | None:
    if wanted != "auto":
        return _require(tokenizer, wanted, setting)
    from_id = tokenizer.id_to_token(named_id) if named_id is not None else None
    for token in (named, from_id, *usual):
        if token is not None and tokenizer.token_to_id(token) is not None:
            return str(token)
    return None


def _require(tokenizer: Any, token: str, setting: str) -> str:
    if tokenizer.token_to_id(token) is None:
        added = [added.content for added in tokenizer.get_added_tokens_decoder().values()]
        hint = did_you_mean(token, added)
        raise ConfigError(
            Setting(setting), f' "{token}": the tokenizer has no such token.{hint} Use "auto", "none" or one it has.'
        )
    return token
