"""A feed: what a store gives to training, of data that is finished, half made or not begun, in the same order.

`milldam.open("corpus.milldam", units=True)` is the feed of a finished store; `milldam.open("data/*.jsonl",
tokenizer="gpt2", store="corpus.milldam")` that of text, which makes the store while it is read. Both bring the same
batches: their order is defined over the units of the plan (`unit_order`), not over what is there.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from milldam.errors import ConfigError
from milldam.loader.feed_samples import Cut, FeedSamples
from milldam.loader.reading import Way
from milldam.loader.samples import one_of
from milldam.loader.stores import require_choice, require_opened_for
from milldam.loader.types import ConversationBatch, PackedBatch, PackedRow, PairBatch, TokenizedPair, TokenPair
from milldam.loader.unit_order import Parts
from milldam.loader.views import ConversationForms, PairForms, RowForms, require_side, warn_unmasked
from milldam.loader.windows import Form, StepRules, Steps, StreamBatches, WindowRules, Windows
from milldam.stores.tokens.reader import require_split

if TYPE_CHECKING:
    from milldam.loader.types import Conversation

_USUAL_TOKENS = 1024
"""Of a sample, before the first was seen."""


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
        self._warn_unmasked("windows")
        rules = WindowRules(seq_len=seq_len, stride=stride, form=form, tail=tail)
        return self._samples(Windows, rules, seq_len, split, read)

    def packed(
        self, seq_len: int, *, split: str | None = None, read: Way = "auto", **options: Unpack[RowForms]
    ) -> FeedSamples[PackedRow, PackedBatch]:
        """Packed rows with document boundaries, each from one unit; options as for `Store.packed`.

        `document_ids` count the documents of a unit.
        """
        from milldam.loader.packed import PackedRows, RowRules

        require_side(self.name, options.get("side"), pairs=self._parts.facts.pairs, verb="packed")
        rules = RowRules.chosen(chat=self._parts.facts.chat, seq_len=seq_len, **options)
        return self._samples(PackedRows, rules, seq_len, split, read)

    def conversations(
        self, *, split: str | None = None, read: Way = "auto", **options: Unpack[ConversationForms]
    ) -> FeedSamples[Conversation, ConversationBatch]:
        """Documents one by one; options as for `Store.conversations`. `document_ids` count the documents of a group."""
        from milldam.loader.conversations import ConversationRules, Conversations

        require_side(self.name, options.get("side"), pairs=self._parts.facts.pairs, verb="conversations")
        rules = ConversationRules(**options)
        return self._samples(Conversations, rules, rules.max_tokens or _USUAL_TOKENS, split, read)

    def pairs(
        self, *, split: str | None = None, read: Way = "auto", **options: Unpack[PairForms]
    ) -> FeedSamples[TokenizedPair, PairBatch]:
        """Preference pairs; options as for `Store.pairs`."""
        from milldam.loader.conversations import ConversationRules, Pairs

        if not self._parts.facts.pairs:
            raise ConfigError(f"{self.name}: has no pairs. Records with `chosen` and `rejected` give some.")
        rules = ConversationRules(**options)
        return self._samples(Pairs, rules, rules.max_tokens or _USUAL_TOKENS, split, read)

    def streams(self, batch_size: int, seq_len: int, *, split: str | None = None, read: Way = "auto") -> FeedStreams:
        """batch_size contiguous streams, in the order of the input: each unit is cut into that many.

        Row b of a batch continues where row b of the previous batch ended, up to the end of the unit.
        """
        self._warn_unmasked("streams")
        return FeedStreams(self, batch_size, seq_len, self._chosen(split), read)

    # ---- what they have in common ----

    def _samples(
        self, kind: type[Any], rules: Any, sample_tokens: int, split: str | None, read: Way
    ) -> FeedSamples[Any, Any]:
        one_of("read", read, Way)
        cut = Cut(kind, rules, read, sample_tokens)
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
            warn_unmasked(self.name, verb, pairs=self._parts.facts.pairs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (self._parts, self.split_name)

    def __repr__(self) -> str:
        state = "finished" if self.finished else "in the making"
        return f"Feed({self.name!r}: {self._parts.facts.units:,} units, {state})"


def _opened_again(parts: Parts, split: str | None) -> Feed:
    return Feed(parts, split=split)


class FeedStreams(StreamBatches):
    """`for x, y in feed.streams(batch_size, seq_len)`: (x, y) of shape (batch_size, seq_len)."""

    def __init__(self, feed: Feed, batch_size: int, seq_len: int, split: str, way: Way) -> None:
        super().__init__(batch_size, seq_len)
        self._feed, self._split, self._way = feed, split, way

    def _steps_of(self, lanes: int) -> FeedSamples[TokenPair, TokenPair]:
        cut = Cut(Steps, StepRules(lanes, self.seq_len), self._way, self.seq_len)
        return FeedSamples(self._feed._parts, self._split, cut)

    def __reduce__(self) -> tuple[Any, ...]:
        return FeedStreams, (self._feed, self.batch_size, self.seq_len, self._split, self._way)

    def __repr__(self) -> str:
        return f"FeedStreams({self._feed.name}: {self.batch_size:,} x {self.seq_len:,} tokens)"
