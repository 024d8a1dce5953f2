"""A user's word for a tokenizer -> what windows are made with: tokenizer.json with memory tokens, and the template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.files import hash_bytes
from milldam.qa.settings import QARules
from milldam.qa.template import Template, add_memory_tokens, template_of, with_memory
from milldam.qa.windows import Windower
from milldam.stores.features.format import FeatureForm
from milldam.tokenizers.loading import load_tokenizer

_FACTS = ("cls_token", "pad_token", "padding_side")


@dataclass(frozen=True, slots=True)
class QATokenizer:
    name: str
    json: str
    """With memory tokens."""
    plain_hash: str
    """Of the tokenizer as it was given."""
    vocab_size: int
    template: Template

    def form(self, rules: QARules) -> FeatureForm:
        dtype = "uint16" if self.vocab_size <= 1 << 16 else "int32"
        own = self.template
        return FeatureForm(rules.max_seq_length, dtype, own.pad_id, own.pad_type, own.pad_left)


def load_qa_tokenizer(spec: str, rules: QARules) -> QATokenizer:
    """Load it, add the memory tokens, and try the rules on it. Raises ConfigError and InputError."""
    loaded = load_tokenizer(spec)
    tokenizer, plain = loaded.huggingface, loaded.json
    template = template_of(tokenizer, rules, facts_beside(spec))
    if rules.memory_tokens:
        template = with_memory(template, add_memory_tokens(tokenizer, rules.memory_tokens))
    text = tokenizer.to_str() if rules.memory_tokens else plain
    Windower(tokenizer, rules, template)
    return QATokenizer(loaded.name, text, hash_bytes(plain.encode()), loaded.vocab_size, template)


def load_windower(path: Path, rules: QARules, template: Template) -> Windower:
    """The windower of a worker, from the tokenizer.json in the store."""
    from tokenizers import Tokenizer

    return Windower(Tokenizer.from_str(path.read_text(encoding="utf-8")), rules, template)


def facts_beside(spec: str) -> dict[str, Any]:
    """What the files beside a tokenizer say of its special tokens and padding."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = _beside(spec, name)
        try:
            content = json.loads(path.read_bytes()) if path is not None else {}
        except (OSError, ValueError):
            continue
        for key in _FACTS if isinstance(content, dict) else ():
            value = content.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[key] = value
    return found


def _beside(spec: str, name: str) -> Path | None:
    path = Path(spec).expanduser()
    if path.exists():
        return (path if path.is_dir() else path.parent) / name
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(spec, name)
    return Path(cached) if isinstance(cached, str) else None
