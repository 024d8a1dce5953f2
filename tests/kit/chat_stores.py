"""Stores of given conversations: token ids, and which of them are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tests.kit.token_stores import EOS, write_shards

from milldam.loader.stores import Store
from milldam.stores.tokens.format import Spans
from milldam.stores.tokens.writer import Tokens

PAD = EOS


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: its tokens, and for each whether it is trained on."""

    ids: list[int]
    trained: list[bool]

    @property
    def spans(self) -> list[tuple[int, int]]:
        edges = np.flatnonzero(np.diff([0, *map(int, self.trained), 0]))
        return [(int(first), int(stop)) for first, stop in edges.reshape(-1, 2)]


def random_chat(rng: np.random.Generator, length: int, vocab_size: int = 1000) -> Chat:
    """Turns of random lengths, every second one trained on."""
    borders = np.sort(rng.integers(0, length + 1, rng.integers(0, 6)))
    trained = [bool(np.searchsorted(borders, at, side="right") % 2) for at in range(length)]
    return Chat(rng.integers(1, vocab_size, length).tolist(), trained)


chats = st.builds(
    lambda trained, seed: Chat(np.random.default_rng(seed).integers(1, 1000, len(trained)).tolist(), trained),
    st.lists(st.booleans(), min_size=1, max_size=25),
    st.integers(0, 1000),
)
chat_shards = st.lists(st.lists(chats, max_size=10), min_size=1, max_size=4).filter(any)


def chat_store(
    folder: Path, shards: Sequence[Sequence[Chat]], *, pairs: bool = False, labels: Sequence[int] | None = None
) -> Store:
    """A store with a shard for each list of conversations."""
    made, before = [], 0
    for some in shards:
        spans = [span for chat in some for span in chat.spans]
        own = None if labels is None else np.array(labels[before : before + len(some)], np.uint8)
        before += len(some)
        flat = np.array([token for chat in some for token in chat.ids], np.uint16)
        lengths = np.array([len(chat.ids) for chat in some], np.int64)
        counts = np.array([len(chat.spans) for chat in some], np.int64)
        trained = Spans(np.array(spans, np.int64).reshape(-1, 2), counts, own)
        made.append(("train", Tokens(flat, lengths, spans=trained)))
    every = [chat for some in shards for chat in some]
    facts: dict[str, Any] = {"form": "messages", "pairs": pairs, "conversations": len(every), "turns": len(every)}
    facts |= {"trained_tokens": sum(sum(chat.trained) for chat in every)}
    return write_shards(folder, made, vocab_size=1000, chat=facts)
