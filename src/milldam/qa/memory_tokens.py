"""Memory tokens, really added: [MEM_READ_i] in front of the texts of a window, [MEM_WRITE_i] behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from milldam.errors import InputError
from milldam.qa.template import Template
from milldam.stores.features.format import MemoryTokens

READ, WRITE = "[MEM_READ_{}]", "[MEM_WRITE_{}]"


def add_memory_tokens(tokenizer: Any, count: int) -> MemoryTokens:
    """Put them into a `tokenizers.Tokenizer`, unless they are there; the model's embeddings must have room for them."""
    from tokenizers import AddedToken

    before = tokenizer.get_vocab(with_added_tokens=True)
    names = [name.format(i) for name in (READ, WRITE) for i in range(count)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    ids = tuple(int(tokenizer.token_to_id(name)) for name in names)
    # Into a vocabulary with gaps, HF tokenizers puts new tokens upon old ones: it counts from the vocabulary's size.
    if len(set(ids)) < len(ids) or set(ids) & {before[name] for name in before.keys() - set(names)}:
        raise InputError(
            "The tokenizer's vocabulary has gaps, and memory tokens would get the ids of other tokens. Number its "
            "tokens without gaps, or fill the gaps with unused ones."
        )
    return MemoryTokens(ids[:count], ids[count:])


def with_memory(template: Template, memory: MemoryTokens) -> Template:
    return replace(template, memory_read=memory.read, memory_write=memory.write)
