"""A feed: what a store gives to training, of data that is finished, half made or not begun, in the same order.

`milldam.open("corpus.milldam", units=True)` is the feed of a finished store; `milldam.open("data/*.jsonl",
tokenizer="gpt2", store="corpus.milldam")` that of text, which makes the store while it is read. Both bring the same
batches: their order is defined over the units of the plan (`unit_order`), not over what is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.loader.feed_samples import Cut, FeedSamples
from milldam.loader.parts import Parts
from milldam.loader.reading import Way, require_way
from milldam.loader.samples import at_least
from milldam.loader.stores import require_choice, require_opened_for
from milldam.loader.streams import Steps
from milldam.loader.types import ConversationBatch, PackedBatch, PackedRow, PairBatch, State, TokenizedPair, TokenPair
from milldam.loader.views import warn_unmasked
from milldam.loader.windows import Form, WindowRules, Windows
from milldam.stores.tokens.reader import require_split

if TYPE_CHECKING:
    from milldam.loader.batches import Batches
    from milldam.loader.conversations import ConversationRules, WholeTooLong
    from milldam.loader.packed import LabelForm, Strategy
    from milldam.loader.row_index import TooLong
    from milldam.loader.types import Conversation


class Feed:
    """Data to train on while it is still being tokenized; a context manager, which stops tokenizing at its end.

    feed.windows(1024), .packed(1024), .streams(16, 128), .conversations(), .pairs()

    >>> with milldam.open("corpus.jsonl", tokenizer="tokenizer/", store="fed.milldam") as feed:
    ...     x, y = next(feed.windows(128).batches(16, seed=0))
    >>> x.shape
    (16, 128)
    """

    def __init__(self, parts: Parts, *, split: str | None = None) -> None:
        self._parts = parts
        self.split_name = None if split is None else self._known(split)

    @property
    def name(self) -> str:
        """The path of the store."""
        return self._parts.facts.name

    @property
    def splits(self) -> tuple[str, ...]:
        return self._parts.facts.splits

    @property
    def vocab_size(self) -> int:
        return self._parts.facts.vocab_size

    @property
    def finished(self) -> bool:
        """Whether all units are tokenized: then it is a store like any other."""
        return self._parts.finished() is not None

    def stats(self) -> dict[str, float]:
        """What tokenizing took and how far ahead it is; empty for a finished store."""
        return self._parts.stats()

    def close(self) -> None:
        """Stop tokenizing; finished units stay, and are used when the same feed is opened again."""
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- verbs ----

    def windows(
        self,
        seq_len: int,
        *,
        stride: int | None = None,
        split: str | None = None,
        form: Form = "xy",
        tail: bool = False,
        read: Way = "auto",
    ) -> FeedSamples[Any, Any]:
        """Windows of seq_len tokens, none across the end of a unit; options as for `Store.windows`."""
        rules = WindowRules(seq_len=seq_len, stride=stride, form=form, tail=tail)
        facts: State = {"kind": "windows", "seq_len": rules.seq_len, "stride": rules.hop, "form": form, "tail": tail}
        self._warn_unmasked("windows")
        return self._samples(Cut(Windows, (rules, read), facts, rules.seq_len), split)

    def packed(
        self,
        seq_len: int,
        *,
        strategy: Strategy | None = None,
        split: str | None = None,
        form: LabelForm = "shifted",
        pad_last: bool = False,
        buffer: int = 10_000,
        too_long: TooLong | None = None,
        read: Way = "auto",
    ) -> FeedSamples[PackedRow, PackedBatch]:
        """Packed rows with document boundaries, each from one unit; options as for `Store.packed`.

        `document_ids` count the documents of a unit.
        """
        from milldam.loader.packed import PackedRows, RowRules
        from milldam.loader.row_index import ALGORITHM

        rules = RowRules.chosen(
            chat=self._parts.facts.chat,
            seq_len=seq_len,
            strategy=strategy,
            form=form,
            pad_last=pad_last,
            buffer=buffer,
            too_long=too_long,
        )
        wrapped = rules.strategy == "wrapped"
        facts: State = {"kind": "packed", "strategy": rules.strategy, "seq_len": rules.seq_len}
        facts |= {"too_long": rules.too_long}
        facts |= {"pad_last": pad_last} if wrapped else {"buffer": rules.buffer, "algorithm": ALGORITHM}
        return self._samples(Cut(PackedRows, (rules, read), facts, rules.seq_len), split)

    def conversations(
        self,
        *,
        split: str | None = None,
        max_tokens: int | None = None,
        too_long: WholeTooLong = "drop",
        form: LabelForm = "hf",
        pad_to: int = 1,
        length_groups: int | None = None,
        read: Way = "auto",
    ) -> FeedSamples[Conversation, ConversationBatch]:
        """Documents one by one; options as for `Store.conversations`. `document_ids` count the documents of a group."""
        from milldam.loader.conversations import ConversationRules, Conversations

        rules = ConversationRules(
            max_tokens=max_tokens, too_long=too_long, form=form, pad_to=pad_to, length_groups=length_groups
        )
        return self._samples(_whole_documents("conversations", Conversations, rules, read), split)

    def pairs(
        self,
        *,
        split: str | None = None,
        max_tokens: int | None = None,
        too_long: WholeTooLong = "drop",
        pad_to: int = 1,
        length_groups: int | None = None,
        read: Way = "auto",
    ) -> FeedSamples[TokenizedPair, PairBatch]:
        """Preference pairs; options as for `Store.pairs`."""
        from milldam.loader.conversations import ConversationRules, Pairs

        if not self._parts.facts.pairs:
            raise ConfigError(f"{self.name}: has no pairs. Records with `chosen` and `rejected` give some.")
        rules = ConversationRules(max_tokens=max_tokens, too_long=too_long, pad_to=pad_to, length_groups=length_groups)
        return self._samples(_whole_documents("pairs", Pairs, rules, read), split)

    def streams(self, batch_size: int, seq_len: int, *, split: str | None = None, read: Way = "auto") -> FeedStreams:
        """batch_size contiguous streams, in the order of the input: each unit is cut into that many.

        Row b of a batch continues where row b of the previous batch ended, up to the end of the unit.
        """
        self._warn_unmasked("streams")
        return FeedStreams(self, batch_size, seq_len, self._chosen(split), read)

    # ---- what they have in common ----

    def _samples(self, cut: Cut, split: str | None) -> FeedSamples[Any, Any]:
        require_way(cut.way)
        return FeedSamples(self._parts, self._chosen(split), cut)

    def _chosen(self, split: str | None) -> str:
        """The split that is meant."""
        if split is not None:
            require_opened_for(self.name, self.split_name, split)
        chosen = split or self.split_name
        require_choice(self.name, chosen, self.splits)
        return self.splits[0] if chosen is None else self._known(chosen)

    def _known(self, split: str) -> str:
        require_split(self.name, split, self.splits)
        return split

    def _warn_unmasked(self, verb: str) -> None:
        if self._parts.facts.chat:
            warn_unmasked(self.name, verb)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (self._parts, self.split_name)

    def __repr__(self) -> str:
        state = "finished" if self.finished else "in the making"
        return f"Feed({self.name!r}: {self._parts.facts.units:,} units, {state})"


def _opened_again(parts: Parts, split: str | None) -> Feed:
    return Feed(parts, split=split)


def _whole_documents(verb: str, kind: type[Any], rules: ConversationRules, read: Way) -> Cut:
    return Cut(kind, (rules, read), {"kind": verb} | rules.facts, rules.max_tokens or 1024)


class FeedStreams:
    """`for x, y in feed.streams(batch_size, seq_len)`: (x, y) of shape (batch_size, seq_len)."""

    def __init__(self, feed: Feed, batch_size: int, seq_len: int, split: str, way: Way) -> None:
        self._made_from = (feed, at_least("batch_size", batch_size), at_least("seq_len", seq_len), split, way)

    def __iter__(self) -> Iterator[TokenPair]:
        return iter(self.batches())

    def batches(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = 1,
        prefetch: int = 0,
        copy: bool = True,
        dtype: npt.DTypeLike = np.int64,
    ) -> Batches[TokenPair]:
        """The batches in order, with a state that can be saved; options as for `Samples.batches`."""
        from milldam.loader.batches import Batches, Delivery

        feed, batch_size, seq_len, split, way = self._made_from
        delivery = Delivery(batch_size, rank, world_size, epochs)
        facts: State = {"kind": "streams", "streams": delivery.step, "seq_len": seq_len}
        cut = Cut(Steps, (delivery.step, seq_len, way), facts, seq_len)
        samples: FeedSamples[TokenPair, TokenPair] = FeedSamples(feed._parts, split, cut)
        return Batches(samples, delivery, seed=0, shuffle=False, prefetch=prefetch, copy=copy, dtype=dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return FeedStreams, self._made_from

    def __repr__(self) -> str:
        feed, batch_size, seq_len, _, _ = self._made_from
        return f"FeedStreams({feed.name}: {batch_size:,} x {seq_len:,} tokens)"
