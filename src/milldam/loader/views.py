"""The methods that turn data into samples, shared by stores, parts of them, files of other tools and feeds."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from numbers import Integral
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import numpy as np

from milldam.choices import Side
from milldam.errors import ConfigError, Setting
from milldam.loader.reading import Way
from milldam.loader.samples import Samples, one_of
from milldam.loader.stream import TokenStream
from milldam.loader.types import Columns, LabelForm, Labelled, PackedBatch, PackedRow, TokenPair
from milldam.loader.windows import Form, Streams, WindowRules, Windows

if TYPE_CHECKING:
    from milldam.loader.conversations import WholeTooLong
    from milldam.loader.packed import Strategy, TooLong

log = logging.getLogger("milldam")


class WindowOptions(TypedDict, total=False):
    """Options of `windows` that are the same for each form."""

    stride: int | None
    split: str | None
    tail: bool
    read: Way


class Cuttable(ABC):
    """Tokens end to end, to be cut into samples of any length."""

    @abstractmethod
    def _cut(self, kind: type[Any], rules: Any, split: str | None, read: Way) -> Any:
        """Samples of a kind. `split`: the one that is asked for here; None: the one that the data was opened for."""

    @abstractmethod
    def _conversations(self, split: str | None) -> tuple[str, bool, bool]:
        """Its name in messages, whether it says which tokens are trained on, and whether it has preference pairs."""

    @overload
    def windows(
        self, seq_len: int, *, form: Literal["xy"] = "xy", **options: Unpack[WindowOptions]
    ) -> Samples[TokenPair, TokenPair]: ...
    @overload
    def windows(
        self, seq_len: int, *, form: Literal["hf"], **options: Unpack[WindowOptions]
    ) -> Samples[Labelled, Labelled]: ...
    def windows(
        self,
        seq_len: int,
        *,
        stride: int | None = None,
        split: str | None = None,
        form: Form = "xy",
        tail: bool = False,
        read: Way = "auto",
    ) -> Samples[Any, Any]:
        """Windows of seq_len tokens, across document boundaries; of a feed, none across the end of a unit.

        stride   tokens from the start of one window to the start of the next; default seq_len
        split    name of a split of the store
        form     xy: (x, y), y shifted by one token; hf: {"input_ids", "labels"}, both the same tokens
        tail     add a window that ends with the last token, if the stride leaves tokens over
        read     map or pread the files; auto: map them if they fit in half of the free memory

        >>> store.windows(4)[0]
        (array([  33, 1655,  547, 1745]), array([1655,  547, 1745,  296]))
        """
        rules = WindowRules(seq_len=seq_len, stride=stride, form=form, tail=tail)
        self._check_masks("windows", split, masks=False)
        samples: Samples[Any, Any] = self._cut(Windows, rules, split, read)
        return samples

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
        side: Side | None = None,
        read: Way = "auto",
    ) -> Samples[PackedRow, PackedBatch]:
        """Packed rows of seq_len tokens, with everything that attention and loss need to keep their documents apart.

        strategy   wrapped (default for text): documents end to end, cut wherever a row is full;
                   best_fit (default for conversations): each document in one row, padded; its index is made once and
                   kept
        form       shifted: labels[t] is the token after input_ids[t]; hf: the same tokens, for models that shift
        pad_last   wrapped: pad the last row instead of leaving its tokens out
        buffer     best_fit: number of documents to choose from
        too_long   best_fit: what to do with documents longer than a row. drop (default for conversations, with a
                   warning): leave them out; cut: keep their first row; split (default for text): pieces in several
                   rows. How many there are: `rows.too_long`
        side       of preference pairs: chosen or rejected, the documents that rows are made of

        Of a feed, a row is made from one unit, and `document_ids` count the documents of a unit.

        >>> batch = store.packed(128).read(np.arange(16))
        >>> batch["position_ids"].shape, batch["cu_seqlens"]
        ((16, 128), array([   0, ..., 2048], dtype=int32))
        """
        # Only those who pack pay for its modules.
        from milldam.loader.packed import PackedRows, RowRules

        # Conversations are neither cut nor split.
        chat = self._check_masks("packed()", split, side)
        strategy = strategy or ("best_fit" if chat and not pad_last else "wrapped")
        rules = RowRules(
            seq_len=seq_len,
            strategy=strategy,
            form=form,
            pad_last=pad_last,
            buffer=buffer,
            too_long=too_long or ("drop" if chat and strategy == "best_fit" else "split"),
            side=side,
        )
        rows: Samples[PackedRow, PackedBatch] = self._cut(PackedRows, rules, split, read)
        return rows

    def conversations(
        self,
        *,
        split: str | None = None,
        max_tokens: int | None = None,
        too_long: WholeTooLong = "drop",
        form: LabelForm = "hf",
        pad_to: int = 1,
        length_groups: int | None = None,
        side: Side | None = None,
        read: Way = "auto",
    ) -> Samples[Columns, Columns]:
        """Documents one by one, batches padded to the longest in them, with an attention mask.

        max_tokens      most tokens of a document
        too_long        what to do with longer ones. drop: with a warning; cut: cut them.
                        How many there are: `conversations.too_long`
        form            hf: labels[t] is input_ids[t] if that is trained on, else -100, for models that shift;
                        shifted: the next token
        pad_to          pad batches to a multiple of this many tokens
        length_groups   put this many samples of similar length together, such as 8 times batch_size * world_size
        side            of preference pairs: chosen or rejected, the documents to give

        >>> chat = milldam.tokenize("chat.jsonl", "chat.milldam", tokenizer="model/", chat=True)
        >>> batch = next(chat.conversations(length_groups=32).batches(4))
        >>> sorted(batch)
        ['attention_mask', 'document_ids', 'input_ids', 'labels']
        """
        from milldam.loader.conversations import ConversationRules, Conversations

        self._check_masks("conversations()", split, side)
        rules = ConversationRules(
            max_tokens=max_tokens, too_long=too_long, form=form, pad_to=pad_to, length_groups=length_groups, side=side
        )
        samples: Samples[Columns, Columns] = self._cut(Conversations, rules, split, read)
        return samples

    def pairs(
        self,
        *,
        split: str | None = None,
        max_tokens: int | None = None,
        too_long: WholeTooLong = "drop",
        pad_to: int = 1,
        length_groups: int | None = None,
        read: Way = "auto",
    ) -> Samples[Columns, Columns]:
        """Preference pairs in the form of TRL's DPOTrainer; options as for `conversations`.

        A pair is {"prompt_ids", "chosen_ids", "rejected_ids"}; a batch of n pairs is what its collator makes of them:
        `input_ids`, `attention_mask` and `completion_mask`, (2n, tokens of the longest), the chosen ones first, and
        `document_ids`.

        >>> pairs = milldam.tokenize("pairs.jsonl", "pairs.milldam", tokenizer="model/", chat=True)
        >>> batch = next(pairs.pairs().batches(8))
        >>> len(batch["input_ids"])                           # the chosen ones first
        16
        """
        from milldam.loader.conversations import ConversationRules, Pairs

        name, _, has_pairs = self._conversations(split)
        if not has_pairs:
            raise ConfigError(
                f"{name}: is not a store of pairs. Records with `chosen` and `rejected` give one: "
                "`milldam tokenize --chat`."
            )
        rules = ConversationRules(max_tokens=max_tokens, too_long=too_long, pad_to=pad_to, length_groups=length_groups)
        samples: Samples[Columns, Columns] = self._cut(Pairs, rules, split, read)
        return samples

    def streams(self, batch_size: int, seq_len: int, *, split: str | None = None, read: Way = "auto") -> Streams:
        """batch_size contiguous streams for models that carry state: row b continues from batch to batch.

        Of a feed, each unit is cut into that many, in the order of the input.

        >>> for x, y in store.streams(4, 32):
        ...     assert x.shape == y.shape == (4, 32)
        """
        self._check_masks("streams", split, masks=False)
        return Streams(self, batch_size, seq_len, split, read)

    def _check_masks(self, verb: str, split: str | None, side: Side | None = None, *, masks: bool = True) -> bool:
        """Refuse to train on both sides of preference pairs alike, and warn of `verb` if it knows no `masks`; whether
        these are conversations."""
        name, chat, pairs = self._conversations(split)
        if pairs and side is None:
            ways = "name one side of them" if masks else "packed() or conversations() of one side of them"
            raise ConfigError(
                f"{name}: is a store of pairs: {verb} would train on the rejected answers, too. Use pairs(), or "
                f"{ways}: ",
                Setting("side", "chosen"),
                ".",
            )
        if side is not None:
            one_of("side", side, Side)
            if not pairs:
                raise ConfigError(f"side: {name} is not a store of pairs. Leave it out.")
        if chat and not masks:
            log.warning(
                f"{name}: {verb} train on every token of its conversations. packed() and conversations() mask what is "
                "not to be trained on."
            )
        return chat


class Trainable(Cuttable):
    """Tokens that are there, in files."""

    @abstractmethod
    def stream(self) -> TokenStream:
        """The tokens that are meant; an error when that is not clear."""

    def named_part(self, name: str) -> Trainable:
        """A part that was given a name when the data was made."""
        raise ConfigError(f'{self.stream().name}: has no splits, and "{name}" is asked for.')

    def _chosen(self, split: str | None) -> Trainable:
        return self if split is None else self.named_part(split)

    def _cut(self, kind: type[Any], rules: Any, split: str | None, read: Way) -> Any:
        samples = kind(self._chosen(split), rules, read)
        if getattr(rules, "too_long", None) in ("drop", "cut") and samples.too_long.documents:
            log.warning(f"{samples._stream.name}: {samples._too_long_message()}")
        return samples

    def _conversations(self, split: str | None) -> tuple[str, bool, bool]:
        stream = self._chosen(split).stream()
        return stream.name, stream.has_spans, stream.pairs

    def split(self, **parts: float | int | EllipsisType) -> dict[str, Part]:
        """Disjoint parts by exact tokens, in the order given: a share (0.9), a number of tokens, or ... for the rest.

        Of conversations each is in one part as a whole, and so are both of a pair: borders are moved back to where a
        conversation begins.
        """
        stream = self.stream()
        sizes = _sizes(parts, stream.tokens, stream.name)
        borders = [0, *accumulate(sizes.values())]
        if stream.has_spans:
            borders = _between_conversations(stream, borders)
        return {
            name: Part(self, name, first, stop) for name, (first, stop) in zip(sizes, pairwise(borders), strict=True)
        }


class Part(Trainable):
    """The tokens [first, stop) of something that can be trained on.

    >>> parts = store.split(train=0.9, val=...)
    >>> parts["train"].tokens + parts["val"].tokens == store.tokens
    True
    >>> x, y = next(parts["train"].windows(128).batches(16, seed=0))
    """

    def __init__(self, whole: Trainable, name: str, first: int, stop: int) -> None:
        self._made_from = (whole, name, first, stop)

    @property
    def tokens(self) -> int:
        return self._made_from[3] - self._made_from[2]

    def stream(self) -> TokenStream:
        whole, name, first, stop = self._made_from
        part = whole.stream().part(first, stop)
        return replace(part, name=f"{part.name} ({name})")

    def __repr__(self) -> str:
        whole, name, first, stop = self._made_from
        return f"Part({whole.stream().name}, {name}: tokens {first:,} to {stop:,})"


def _between_conversations(stream: TokenStream, borders: list[int]) -> list[int]:
    """Borders moved back to where a conversation begins, or a pair of them."""
    from milldam.loader.documents import Documents

    documents = Documents(stream)
    inner = np.array(borders[1:], np.int64) + stream.first
    numbers = documents.find(np.minimum(inner, stream.stop - 1))
    if stream.pairs:
        numbers -= numbers % 2
    begins = documents.begins(numbers)
    # What ends with the stream stays there.
    moved = np.where(inner == stream.stop, inner, begins) - stream.first
    moved_borders = [0, *moved.tolist()]
    for first, stop in pairwise(moved_borders):
        if stop <= first:
            raise ConfigError(f"{stream.name}: split: a part would get no whole conversation. Give it more.")
    return moved_borders


def _sizes(parts: dict[str, float | int | EllipsisType], total: int, name: str) -> dict[str, int]:
    """Tokens of each part: a share as it is written, not as the float nearest to it, and shares cut at the sum of the
    shares so far, so nothing is lost to rounding."""
    counts: dict[str, Fraction] = {}
    for part, size in parts.items():
        share = not isinstance(size, Integral)
        if size is not ... and (isinstance(size, bool) or not size > 0 or (share and size > 1)):
            raise ConfigError(
                f"split: {part}={size}; use a share between 0 and 1, a number of tokens, or ... for the rest."
            )
        counts[part] = Fraction(0) if size is ... else Fraction(str(size)) * (total if share else 1)
    shares = [size for size in parts.values() if isinstance(size, float)]
    rest = [part for part, size in parts.items() if size is ...]
    if parts and len(shares) == len(parts) and math.isclose(sum(shares), 1):
        # 5/6 + 1/6 as written is a little more than 1, and 2/3 + 1/3 a little less.
        rest = [list(parts)[-1]]
        counts[rest[0]] = Fraction(0)
    left = total - sum(counts.values(), Fraction())
    if left < 0 or len(rest) > 1 or not parts:
        raise ConfigError(
            f"{name}: split: {int(total - left):,} tokens are asked for, and there are {total:,}. Say how much each "
            "part gets, such as split(train=0.9, val=...); one of them can get the rest."
        )
    if rest:
        counts[rest[0]] = left
    borders = [int(border) for border in accumulate(counts.values(), initial=Fraction())]
    sizes = {part: stop - first for part, (first, stop) in zip(parts, pairwise(borders), strict=True)}
    for part, count in sizes.items():
        if count < 1:
            raise ConfigError(f"{name}: split: {part} would get no token of {total:,}.")
    return sizes
