"""A feed: what a store gives to training, of data that is finished, half made or not begun, in the same order.

`milldam.open("corpus.milldam", units=True)` is the feed of a finished store; `milldam.open("data/*.jsonl",
tokenizer="gpt2", store="corpus.milldam")` that of text, which makes the store while it is read. Both bring the same
batches: their order is defined over the units of the plan (`unit_order`), not over what is there.

A sample never goes over the end of a part of a unit. The samples of a group of parts are read in one gather, as those
of a mixture are. A number says the group and the sample in it, and means something only to the object that gave it:
states hold places. Holds what the last groups need: their mappings, and what packing looks up.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.loader.conversations import WholeDocuments
from milldam.loader.mixing import Sources, groups, read_by_source
from milldam.loader.order import Shuffle
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Way
from milldam.loader.samples import NoSamplesError, ReadPart, Samples, StreamSamples, one_of
from milldam.loader.stores import require_choice, require_opened_for
from milldam.loader.stream import TokenFile, TokenStream
from milldam.loader.types import BatchT, SampleT, State
from milldam.loader.unit_order import Key, Parts, UnitOrder
from milldam.loader.views import Cuttable
from milldam.stores.tokens.reader import require_split

log = logging.getLogger("milldam")
_USUAL_TOKENS = 1024
"""Of a document, before the first was seen."""
_INDEX_BITS, _OPEN_GROUPS = 36, 8


class Feed(Cuttable):
    """Data to train on while it is still being tokenized; a context manager, which stops tokenizing at its end.

    feed.windows(1024), .packed(1024), .streams(16, 128), .conversations(), .pairs()

    >>> with milldam.open("corpus.jsonl", tokenizer="tokenizer/", store="fed.milldam") as feed:
    ...     x, y = next(feed.windows(128).batches(16, seed=0))
    >>> x.shape
    (16, 128)
    """

    def __init__(self, parts: Parts, split: str | None = None) -> None:
        self._parts = parts
        if split is not None:
            require_split(self.name, split, self.splits)
        self.split_name = split

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
        """Time and memory of tokenizing, and how far ahead it is; empty for a finished store."""
        return self._parts.stats()

    def close(self) -> None:
        """Stop tokenizing; finished units stay, and are used when the same feed is opened again."""
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _cut(self, kind: type[Any], rules: Any, split: str | None, read: Way) -> FeedSamples[Any, Any]:
        one_of("read", read, Way)
        if split is not None:
            require_opened_for(self.name, self.split_name, split)
            require_split(self.name, split, self.splits)
        chosen = split or self.split_name
        require_choice(self.name, chosen, self.splits)
        return FeedSamples(self._parts, chosen or self.splits[0], kind, rules, read)

    def _conversations(self, split: str | None) -> tuple[str, bool, bool]:
        return self.name, self._parts.facts.chat, self._parts.facts.pairs

    def __repr__(self) -> str:
        state = "finished" if self.finished else "in the making"
        return f"Feed({self.name!r}: {self._parts.facts.units:,} units, {state})"


class FeedSamples(Samples[SampleT, BatchT]):
    """Samples of a feed: `samples.batches(16)`. Their number is known once all units are tokenized.

    Groups of parts are opened when they are needed; threads may share them.

    >>> samples = milldam.open("corpus.milldam", units=True).windows(128)
    >>> next(samples.batches(16, seed=0))[0].shape
    (16, 128)
    """

    _length_known = False
    _no_sampler = "A sampler of torch can't draw from a feed, whose end is not known."

    def __init__(self, parts: Parts, split: str, kind: type[Any], rules: Any, way: Way) -> None:
        self.parts, self.split, self._made_from = parts, split, (parts, split, kind, rules, way)
        self.name, self.units = parts.facts.name, parts.facts.units
        self._kind, self._rules, self._way = kind, rules, way
        self._whole_documents = issubclass(kind, WholeDocuments)
        self._signed, self._reusable, self._rows_each = kind._signed, kind._reusable, kind._rows_each
        self._padding, self._label_form = kind.padding_with(parts.facts.pad_id), getattr(rules, "form", None)
        self._counted: int | None = None
        self._lock = threading.RLock()
        self._serials: dict[Key, int] = {}
        self._keys: list[Key] = []
        self._opened: OrderedDict[Key, Sources] = OrderedDict()
        self._warned = False

    @property
    def identity(self) -> State:
        own: State = {"kind": self._kind._kind, **self._rules.facts}
        return own | {"order": "units", "data": self.parts.facts.identity, "split": self.split}

    @property
    def sample_tokens(self) -> int:
        """If samples differ in length, the mean of the group that was opened last."""
        if not self._whole_documents:
            return int(self._rules.seq_len)
        group = next(reversed(self._opened.values()), None)
        return int(group.sources[0].sample_tokens if group and group.sources else _USUAL_TOKENS)

    @property
    def token_dtype(self) -> np.dtype[Any]:
        return self.parts.facts.dtype

    @property
    def tokenizer(self) -> str | None:
        return self.parts.facts.tokenizer

    @property
    def epoch_samples(self) -> int:
        """Samples per epoch; TypeError while the number is unknown."""
        if self._counted is None:
            if self.parts.finished() is None:
                raise TypeError(
                    f"{self.name}: how many samples an epoch has is known once all of it is made. Train for a number "
                    "of steps, or until the loop ends."
                )
            count = 0
            for unit in range(self.units):
                number, last = 0, False
                while not last:
                    part = self.parts.part(unit, number)
                    if self.split in part.files:
                        count += sum(map(len, self._samples_of([part.files[self.split]])))
                    number, last = number + 1, part.last
            self._counted = count
        return self._counted

    def __len__(self) -> int:
        return self.epoch_samples

    def __reduce__(self) -> tuple[Any, ...]:
        return FeedSamples, self._made_from

    # ---- for code that makes batches ----

    def _order(self, shuffle: Shuffle, seed: int) -> UnitOrder:
        if not isinstance(shuffle, bool):
            raise ConfigError(
                f"shuffle: {shuffle!r}; a feed has True (over units and groups of parts) or False. For other orders, "
                "open the finished store without units."
            )
        return UnitOrder(self, seed, shuffled=shuffle)

    def _stats(self) -> dict[str, float]:
        return self.parts.stats()

    @property
    def _numbered(self) -> int:
        return 1 << 56

    def _look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[BatchT]:
        serials, inside = numbers >> _INDEX_BITS, numbers & ((1 << _INDEX_BITS) - 1)
        there, which = np.unique(serials, return_inverse=True)
        opened = [self.open_group(self._keys[serial]) for serial in there.tolist()]
        if len(opened) == 1:
            return opened[0]._look_up(inside, dtype)
        parts = [(where, opened[one]._look_up(inside[where], dtype)) for one, where in groups(which, len(opened))]
        return lambda part, out: read_by_source(parts, part, out, self._padding, self._rows_each)

    # ---- groups of parts, for `unit_order` ----

    def group_base(self, key: Key) -> int:
        """The number of the first sample of a group."""
        with self._lock:
            if key not in self._serials:
                self._serials[key] = len(self._keys)
                self._keys.append(key)
            return self._serials[key] << _INDEX_BITS

    def open_group(self, key: Key) -> Sources:
        """The samples of a group of parts."""
        with self._lock:
            group = self._opened.get(key)
            if group is None:
                files = [self.parts.part(unit, number).files[self.split] for unit, number in key]
                samples = self._samples_of(files)
                group = self._opened[key] = Sources(samples)
                for one in samples if getattr(self._rules, "too_long", None) in ("drop", "cut") else ():
                    # Once: how many there are in all is not known.
                    if one.too_long.documents and not self._warned:
                        log.warning(f"{one._stream.name}: {one._too_long_message()} So it is in all other parts.")
                        self._warned = True
                if len(self._opened) > _OPEN_GROUPS:
                    self._opened.popitem(last=False)
            self._opened.move_to_end(key)
            return group

    def _samples_of(self, files: Sequence[TokenFile]) -> list[Any]:
        """Samples of each file that has any; of whole documents, which never go over the end of a file, of all."""
        facts, place = self.parts.facts, self.parts.finished()
        samples: list[StreamSamples[Any, Any]] = []
        for some in [tuple(files)] if self._whole_documents else [(file,) for file in files]:
            # The name of a shard says its content.
            names = "+".join(file.path.stem for file in some)
            stream = TokenStream(
                name=f"{facts.name}/{names}",
                files=some,
                dtype=facts.dtype,
                first=0,
                stop=sum(file.tokens for file in some),
                fingerprint=names,
                cache=facts.rows,
                pad_id=facts.pad_id,
                tokenizer=facts.tokenizer,
                pairs=facts.pairs,
                origin=None if place is None else place.origin,
            )
            try:
                samples.append(self._kind(stream, self._rules, self._way))
            except NoSamplesError:
                continue
        return samples
