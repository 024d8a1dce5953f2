"""Conversations one by one, or in pairs: a sample is a document as a whole, a batch is padded to its longest.

Labels are as HF has them: `labels[t]` is `input_ids[t]` where that token is trained on, else -100, and models shift by
themselves; form="shifted": the token behind, for loops that do not shift. Of data that does not say what is trained on
(text) all is. A batch is some three dozen numpy calls. Holds the batch, and 8 bytes for each document that is left out.

A batch of conversations is a dict: `input_ids`, `attention_mask` and `labels`, (rows, tokens of the longest), padded by
the data's pad id, 0 and -100; `document_ids`, and `label`, where documents have one (KTO). Of pairs: see `store.pairs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

from milldam.choices import Side
from milldam.errors import ConfigError, StoreError
from milldam.loader.documents import (
    NO_LOSS,
    Documents,
    Losses,
    TrainedTokens,
    mark,
    mask_labels,
    require_documents,
)
from milldam.loader.order import LengthGrouped, Order, Shuffle
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Way, ranges
from milldam.loader.samples import NoSamplesError, StreamSamples, TooLongDocuments, at_least, counted_number, one_of
from milldam.loader.stream import TokenStream
from milldam.loader.types import Array, Bools, Columns, LabelForm, State

if TYPE_CHECKING:
    from milldam.loader.views import Trainable

WholeTooLong = Literal["drop", "cut"]
_DOCUMENTS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRules:
    max_tokens: int | None = None
    """The longest document there may be; None: as long as it is."""
    too_long: WholeTooLong = "drop"
    """How to treat longer ones; both of a pair share it."""
    form: LabelForm = "hf"
    pad_to: int = 1
    """Batches are padded to a multiple of so many tokens."""
    length_groups: int | None = None
    """Put so many samples of like length together; None: do not."""
    side: Side | None = None
    """The documents of pairs that samples are made of."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "pad_to", "length_groups"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, at_least(name, getattr(self, name)))
        one_of("too_long", self.too_long, WholeTooLong)
        one_of("form", self.form, LabelForm)

    @property
    def facts(self) -> State:
        """All that decides which document has which number, and where it comes."""
        own: State = {} if self.side is None else {"side": self.side}
        return own | {"max_tokens": self.max_tokens, "too_long": self.too_long, "length_groups": self.length_groups}


class WholeDocuments(StreamSamples[Columns, Columns]):
    """Samples of one or two whole documents each: all that a stream has as a whole, but for those left out."""

    _signed = True
    # Every batch has its own width.
    _reusable = False

    def __init__(self, data: Trainable | TokenStream, rules: ConversationRules, way: Way = "auto") -> None:
        super().__init__(data, rules, way)
        self.rules, stream = rules, self._stream
        require_documents(stream)
        self._documents = Documents(stream)
        first, stop = self._in_stream()
        side, each = rules.side, self._rows_each
        if (each > 1 or side is not None) and (first % 2 or stop % 2):
            raise ConfigError(
                f"{stream.name}: a pair is cut. Split it by `milldam.open(...).split(train=0.9, val=...)`."
            )
        self._wanted = range(first, stop) if side is None else range(first + get_args(Side).index(side), stop, 2)
        self._left_out = np.empty(0, np.int64)
        if (most := rules.max_tokens) is not None and self.too_long.documents and rules.too_long == "drop":
            long = [
                np.flatnonzero(lengths > most) + block * _DOCUMENTS_AT_ONCE
                for block, lengths in enumerate(self._length_blocks())
            ]
            self._left_out = np.unique(np.concatenate(long) // each)
        if not len(self):
            raise NoSamplesError(
                f"{stream.name}: has no documents to make samples of. {self._too_long_message()}".rstrip()
            )

    def _in_stream(self) -> tuple[int, int]:
        """[first, stop): the documents that lie in the stream as a whole."""
        stream, documents = self._stream, self._documents
        if not stream.tokens:
            return 0, 0
        first, last = documents.find(np.array([stream.first, stream.stop - 1])).tolist()
        begins, lengths = documents.extents(np.array([first, last]))
        first += int(begins[0]) < stream.first
        last -= int(begins[1] + lengths[1]) > stream.stop
        return first, last + 1

    def _length_blocks(self) -> Iterator[Int64s]:
        for begin in range(0, len(self._wanted), _DOCUMENTS_AT_ONCE):
            yield self._documents.extents(np.array(self._wanted[begin : begin + _DOCUMENTS_AT_ONCE]))[1]

    @cached_property
    def too_long(self) -> TooLongDocuments:
        """The documents that are longer than `max_tokens`."""
        if self.rules.max_tokens is None:
            return TooLongDocuments(of_documents=len(self._wanted))
        return TooLongDocuments.count(self._length_blocks(), self.rules.max_tokens)

    def _too_long_message(self) -> str:
        """How many documents are too long, and what becomes of them; empty when there are none."""
        most = self.rules.max_tokens
        return "" if most is None else self.too_long.message("max_tokens", most, self.rules.too_long)

    @property
    def sample_tokens(self) -> int:
        """On average: samples differ."""
        sides = 1 if self.rules.side is None else 2
        return max(1, self._stream.tokens // (sides * len(self)))

    def __len__(self) -> int:
        return len(self._wanted) // self._rows_each - len(self._left_out)

    def _documents_of(self, numbers: Int64s) -> Int64s:
        """(len(numbers) * documents of each,): the documents of each sample, side by side."""
        each = self._rows_each
        if len(self._left_out):
            # Before the k-th that is left out, there are so many that are not.
            numbers = numbers + (self._left_out - np.arange(len(self._left_out))).searchsorted(numbers, side="right")
        places: Int64s = (numbers[:, None] * each + np.arange(each)).reshape(-1)
        return places * self._wanted.step + self._wanted.start

    def _extents(self, documents: Int64s) -> tuple[Int64s, Int64s]:
        begins, lengths = self._documents.extents(documents)
        return begins, lengths if self.rules.max_tokens is None else np.minimum(lengths, self.rules.max_tokens)

    def _stretches(self, numbers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        return *self._extents(self._documents_of(numbers)), np.full_like(numbers, self._rows_each)

    @cached_property
    def _trained(self) -> TrainedTokens | None:
        return TrainedTokens(self._stream, self._documents) if self._stream.has_spans else None

    def _losses(self, documents: Int64s, lengths: Int64s) -> Losses:
        shifted = self.rules.form == "shifted"
        # Models that shift never look at the label of a row's first token; HF has one there all the same.
        reach, first = lengths - shifted, int(shifted)
        if self._trained is None:
            return Losses.everywhere(reach, shifted=shifted, first=first)
        return self._trained.losses(documents, np.zeros_like(documents), reach, shifted=shifted, first=first)

    def _order(self, shuffle: Shuffle, seed: int) -> Order:
        order = super()._order(shuffle, seed)
        group = self.rules.length_groups
        return order if group is None else LengthGrouped(order, len(self), seed, group, self.longest)

    def lengths(self, numbers: Int64s) -> Int64s:
        """(samples, documents of each): their tokens."""
        return self._stretches(numbers)[1].reshape(-1, self._rows_each)

    def longest(self, numbers: Int64s) -> Int64s:
        """The tokens of each sample, of its longer document."""
        longest: Int64s = self.lengths(numbers).max(axis=1)
        return longest

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._stream.name}: {len(self):,})"


class _Padded:
    """Documents of samples as rows of one width."""

    def __init__(self, samples: WholeDocuments, documents: Int64s, dtype: npt.DTypeLike) -> None:
        begins, self.lengths = samples._extents(documents)
        multiple = samples.rules.pad_to
        self.width = max(1, -(-int(self.lengths.max(initial=0)) // multiple)) * multiple
        self._rows_at = np.arange(len(documents)) * self.width
        # Where tokens lie when rows lie end to end.
        where = ranges(self._rows_at, self.lengths)
        self.ids = np.full((len(documents), self.width), samples._stream.pad_id, dtype)
        self.ids.reshape(-1)[where] = samples._reader.runs(begins, self.lengths)
        self.attention_mask = np.zeros(self.ids.shape, np.int64)
        self.attention_mask.reshape(-1)[where] = 1
        self.losses = samples._losses(documents, self.lengths)

    def loss_mask(self) -> Bools:
        mask = np.empty(self.ids.shape, np.bool_)
        mark(*self.losses.at(self._rows_at), mask.reshape(-1))
        return mask


class Conversations(WholeDocuments):
    """Documents one by one: `conversations[k]`, `len(conversations)`, `conversations.batches(16)`."""

    _kind = "conversations"

    @cached_property
    def _labels(self) -> Bools | None:
        """The label of each document of all files: a byte each."""
        if not self._stream.has_labels:
            return None
        held = self._stream.hold_indexes()
        labels = [np.fromfile(file.labels, np.uint8) for file in self._stream.files if file.labels is not None]
        if [len(some) for some in labels] != np.diff(self._documents.firsts).tolist():
            raise StoreError(f"{self._stream.name}: damaged: not every document has a label (.labels).")
        del held
        return np.concatenate(labels).astype(np.bool_)

    @classmethod
    def padding_with(cls, pad_id: int) -> Mapping[str, int]:
        return {"input_ids": pad_id, "attention_mask": 0, "labels": NO_LOSS}

    def labels_of(self, numbers: Int64s) -> Bools:
        """The label of each document, of data that has some."""
        assert self._labels is not None
        return self._labels[self._documents_of(numbers)]

    def flat(self, numbers: Int64s) -> tuple[Array, Bools, Int64s]:
        """Documents end to end without padding: tokens, which of them are trained on, and how many each has."""
        documents = self._documents_of(numbers)
        begins, lengths = self._extents(documents)
        tokens = self._reader.runs(begins, lengths)
        trained = np.empty(len(tokens), np.bool_)
        mark(*self._losses(documents, lengths).at(lengths.cumsum() - lengths), trained)
        return tokens, trained, lengths

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: Columns | None = None) -> Columns:
        documents = self._documents_of(numbers)
        padded = _Padded(self, documents, dtype)
        labels = padded.ids.copy()
        if self.rules.form == "shifted":
            labels.reshape(-1)[:-1] = padded.ids.reshape(-1)[1:]
        mask_labels(labels, padded.loss_mask())
        batch = {
            "input_ids": padded.ids,
            "attention_mask": padded.attention_mask,
            "labels": labels,
            "document_ids": documents,
        }
        if self._labels is not None:
            batch["label"] = self._labels[documents]
        return batch


class Pairs(WholeDocuments):
    """Preference pairs: `pairs[k]`, `len(pairs)`, `pairs.batches(16)`; see `store.pairs`.

    The prompt ends where the first trained stretch begins that is not the same in both: earlier turns of the assistant,
    which both share, belong to it. `completion_mask` is 1 where tokens behind it are trained on.
    """

    _kind = "pairs"
    _rows_each = 2

    @classmethod
    def padding_with(cls, pad_id: int) -> Mapping[str, int]:
        return {"input_ids": pad_id, "attention_mask": 0, "completion_mask": 0}

    def _rows(self, numbers: Int64s, dtype: npt.DTypeLike) -> tuple[Int64s, _Padded, Int64s]:
        """(2n,) documents, all chosen ones first; these as rows; and the tokens of the prompt of each, the same for
        both of a pair."""
        documents = self._documents_of(numbers).reshape(-1, 2).T.reshape(-1)
        padded = _Padded(self, documents, dtype)
        losses = padded.losses
        # How many tokens both of each pair begin with.
        chosen, rejected = padded.ids.reshape(2, -1, padded.width)
        unlike = np.concatenate((chosen != rejected, np.ones((len(chosen), 1), np.bool_)), axis=1)
        shared = np.minimum(unlike.argmax(axis=1), padded.lengths.reshape(2, -1).min(axis=0))
        both = np.concatenate((shared, shared))
        owners = np.arange(len(both)).repeat(losses.counts)
        # Begins of stretches that go beyond what is shared; where there is none, all of the row is prompt.
        begins = np.where(losses.ends > both[owners], losses.begins, padded.width)
        first = padded.lengths.copy()
        np.minimum.at(first, owners, begins)
        prompts = np.minimum(first.reshape(2, -1).min(axis=0), shared)
        return documents, padded, np.concatenate((prompts, prompts))

    def read(self, numbers: Int64s, dtype: npt.DTypeLike = np.int64, out: Columns | None = None) -> Columns:
        documents, padded, prompts = self._rows(numbers, dtype)
        mask = padded.loss_mask() & (np.arange(padded.width) >= prompts[:, None])
        return {
            "input_ids": padded.ids,
            "attention_mask": padded.attention_mask,
            "completion_mask": mask.astype(np.int64),
            "document_ids": documents,
        }

    def __getitems__(self, numbers: Sequence[int]) -> list[Columns]:
        wanted = np.array([counted_number(number, len(self)) for number in numbers], np.int64)
        _, padded, prompts = self._rows(wanted, np.int64)
        rows, half = [row[:length] for row, length in zip(padded.ids, padded.lengths, strict=True)], len(numbers)
        return [
            {"prompt_ids": chosen[:prompt], "chosen_ids": chosen[prompt:], "rejected_ids": rejected[prompt:]}
            for chosen, rejected, prompt in zip(rows[:half], rows[half:], prompts[:half].tolist(), strict=True)
        ]
