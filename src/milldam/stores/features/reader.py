"""A feature store opened for reading: windows, documents and examples by number. Needs numpy alone.

Opening reads the manifest. A column is opened when it is first asked for, the files of all shards at once: mapped side
by side, so that any windows of any shards are one gather, or, when they are larger than memory, read by position
(milldam.loader.reading). Holds no row of its own; a store pickles as its path. Windows and examples are numbered
through the shards in the order of the manifest.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, StoreError, did_you_mean
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Reader, Way, open_reader
from milldam.loader.samples import one_of
from milldam.loader.stream import TokenFile, TokenStream
from milldam.memory import format_size
from milldam.stores.features.format import (
    CONTEXTS,
    CONTEXTS_INDEX,
    FIRST_WINDOW,
    IDS,
    NUMBERS,
    TEXTS,
    TEXTS_INDEX,
    Column,
    MemoryTokens,
    hash_id,
)
from milldam.stores.features.manifest import FeatureShard
from milldam.stores.features.manifest import read as read_manifest
from milldam.stores.place import Folder, same_generation
from milldam.stores.tokens.reader import TOKENIZER, parse_tokenizer

Array = npt.NDArray[Any]

KNOWN_NAMES = {"offset_mapping": "offsets", "segment_index": "segment", "total_segments": "segments"}
"""Names that users know -> columns."""
WINDOW_FIELDS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "start_positions",
    "end_positions",
    "cls_index",
    "offset_mapping",
    "segment_index",
    "total_segments",
    "has_answer",
)
"""What a window has, but for its example's id."""
_WIDE = ("input_ids", "token_type_ids", "start_positions", "end_positions", "cls_index")
"""Given as int64, which models index with."""
_BLOCK_IDS = 1 << 16


class _ShardFiles:
    """The files of all shards, those of one kind end to end; opened when they are first asked for."""

    def __init__(self, folder: Path, shards: Sequence[FeatureShard], way: Way) -> None:
        self._folder, self._shards, self._way = folder, shards, way
        self._readers: dict[str, Reader] = {}
        self._byte_begins: dict[str, Int64s] = {}

    def reader(self, file: str, dtype: np.dtype[Any]) -> Reader:
        """A kind of file of all shards, end to end."""
        reader = self._readers.get(file)
        if reader is None:
            width = dtype.itemsize
            files = tuple(
                TokenFile(self._folder / f"{shard.name}.{file}", shard.size(file) // width) for shard in self._shards
            )
            total = sum(part.tokens for part in files)
            reader = open_reader(TokenStream(str(self._folder), files, dtype, 0, total, ""), self._way)
            self._readers[file] = reader
        return reader

    def begins_of(self, file: str, width: int) -> Int64s:
        """What lies in a kind of file before each shard, in units of `width` bytes."""
        begins = self._byte_begins.get(file)
        if begins is None:
            begins = _begins([shard.size(file) // width for shard in self._shards])
            self._byte_begins[file] = begins
        return begins

    def damaged(self, what: str) -> StoreError:
        return StoreError(
            f"{self._folder}: damaged: {what}. `milldam verify {self._folder}` tells more; make it again."
        )


class _Texts:
    """What examples say, as it is stored: one JSON object an example, each context once a shard."""

    def __init__(self, files: _ShardFiles, example_begins: Int64s) -> None:
        self._files, self._example_begins = files, example_begins

    def example(self, example: int) -> dict[str, Any]:
        """An example as it is stored."""
        shard = int(_shard_of(self._example_begins, np.int64(example)))
        data = self._bytes(TEXTS, TEXTS_INDEX, shard, example + shard)
        value = self._decoded(json.loads, data, f"example {example}")
        if not isinstance(value, dict) or not isinstance(value.get("id"), str):
            raise self._files.damaged(f"example {example} is not an example")
        return value

    def context(self, example: int, number: int) -> str:
        """Context `number` of the shard that an example is in."""
        shard = int(_shard_of(self._example_begins, np.int64(example)))
        entries = self._files.begins_of(CONTEXTS_INDEX, 8)
        if not 0 <= number < entries[shard + 1] - entries[shard] - 1:
            raise self._files.damaged(f"example {example} has context {number}, which is not there")
        data = self._bytes(CONTEXTS, CONTEXTS_INDEX, shard, int(entries[shard]) + number)
        return str(self._decoded(lambda text: text.decode("utf-8", "surrogatepass"), data, f"a context of {example}"))

    def _decoded(self, decode: Callable[[bytes], Any], data: bytes, what: str) -> Any:
        try:
            return decode(data)
        except ValueError as error:
            raise self._files.damaged(f"{what} can't be read ({error})") from None

    def _bytes(self, file: str, index: str, shard: int, entry: int) -> bytes:
        """The text between two entries of an index, which counts bytes in its shard."""
        pair = self._files.reader(index, np.dtype("<i8")).rows(np.array([entry]), 2)[0]
        begin, end = int(pair[0]), int(pair[1])
        begins = self._files.begins_of(file, 1)
        if not 0 <= begin <= end <= begins[shard + 1] - begins[shard]:
            raise self._files.damaged(f"{index} names bytes that are not there")
        if begin == end:
            return b""
        reader = self._files.reader(file, np.dtype(np.uint8))
        return reader.rows(begins[shard : shard + 1] + begin, end - begin).tobytes()


class FeatureStore:
    """Windows by number: `store[i]`, `len(store)`; `store.document(k)`, `store.example(k)` by example.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> len(features), features.examples, features[0]["input_ids"].shape
    (..., 12, (384,))
    """

    def __init__(self, path: str | Path | Folder, *, read: Way = "auto") -> None:
        self.place = path if isinstance(path, Folder) else Folder(Path(path))
        self.path = self.place.folder
        self.manifest = read_manifest(self.place)
        one_of("read", read, Way)
        self._way = read
        self.form = self.manifest.form
        self.fingerprint = self.manifest.fingerprint
        """Names the content: equal fingerprints mean equal windows and texts in equal order."""
        memory = self.manifest.memory
        self.memory_tokens = MemoryTokens(tuple(memory["read"]), tuple(memory["write"]))
        """The ids of the memory tokens, in order; both empty when there are none."""
        self._columns = {column.name: column for column in self.form.columns}
        shards = self.manifest.shards
        self._window_begins = _begins([shard.windows for shard in shards])
        self._example_begins = _begins([shard.examples for shard in shards])
        self._files = _ShardFiles(self.path, shards, read)
        self._texts = _Texts(self._files, self._example_begins)
        self._tokenizer: Any = None

    # ---- facts ----

    def __len__(self) -> int:
        """How many windows there are."""
        return int(self._window_begins[-1])

    @property
    def examples(self) -> int:
        """How many examples there are: those with windows."""
        return int(self._example_begins[-1])

    @property
    def tokenizer(self) -> Any:
        """The store's tokenizer, memory tokens included, as a `tokenizers.Tokenizer`."""
        if self._tokenizer is None:
            path = self.path / TOKENIZER
            data = self.place.read(TOKENIZER)
            if data is None:
                raise StoreError(f"{path}: missing. Make the store again.")
            self._tokenizer = parse_tokenizer(data, str(path))
        return self._tokenizer

    # ---- windows ----

    def rows(self, numbers: npt.ArrayLike, columns: Sequence[str]) -> dict[str, Array]:
        """Columns of some windows, in the order asked for: `columns` of Features, or by the names that users know.

        In the dtypes they are stored in, but `attention_mask` and `example` are int64. Costs one gather a column; all
        that are one number a window take one together.
        """
        wanted = _checked(numbers, len(self), "window")
        gathered: dict[str, Array] = {}
        found: dict[str, Array] = {}
        for name in columns:
            column = KNOWN_NAMES.get(name, name)
            if column in self._columns and column != "numbers":
                found[name] = self._gather(self._columns[column], wanted)
                continue
            if not gathered:
                gathered = self._numbers(wanted)
            found[name] = self._from_numbers(column, gathered)
        return found

    def _from_numbers(self, column: str, numbers: dict[str, Array]) -> Array:
        if column in numbers:
            return numbers[column]
        if column == "attention_mask":
            return self.attention_mask(numbers["length"])
        if column == "has_answer":
            has: Array = numbers["start_positions"] != numbers["cls_index"]
            return has
        known = [*WINDOW_FIELDS, *self._columns, *NUMBERS]
        raise ConfigError(f'{self.path}: no column "{column}".{did_you_mean(column, known)}')

    def _numbers(self, wanted: Int64s) -> dict[str, Array]:
        """What is one number a window."""
        rows = self._gather(self._columns["numbers"], wanted)
        found: dict[str, Array] = {name: rows[:, at].copy() for at, name in enumerate(NUMBERS)}
        shard = _shard_of(self._window_begins, wanted)
        counts = self._example_begins[shard + 1] - self._example_begins[shard]
        wrong = (found["example"] < 0) | (found["example"] >= counts)
        if wrong.any():
            raise self._files.damaged(f"numbers.bin: window {int(wanted[wrong.argmax()]):,}: its example is not there")
        found["example"] = found["example"] + self._example_begins[shard]
        return found

    def _gather(self, column: Column, wanted: Int64s) -> Array:
        if not len(wanted):
            return np.empty((0, *column.shape), column.stored)
        rows = self._files.reader(column.file, column.stored).rows(wanted * column.elements, column.elements)
        # What is read by position lies in a buffer that the next read uses again.
        return (rows if rows.flags.owndata else rows.copy()).reshape(len(wanted), *column.shape)

    def attention_mask(self, length: npt.ArrayLike) -> Int64s:
        """(windows, L): 1 on the tokens of windows that have so many, 0 on padding."""
        return self.form.attention_mask(np.asarray(length), np.int64)

    def memory_positions(self, numbers: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """Where in windows the memory tokens to read and to write are: (windows, M) each, padding counted."""
        count = len(self.memory_tokens.read)
        length = self.rows(numbers, ("length",))["length"].astype(np.int64)[:, None]
        if not count:
            return np.empty((len(length), 0), np.int64), np.empty((len(length), 0), np.int64)
        template = self.manifest.template
        before, after = (len(template[part]["ids"]) for part in ("before", "after"))
        begin = self.form.max_seq_length - length if self.form.pad_left else np.zeros_like(length)
        return begin + before + np.arange(count), begin + length - after - count + np.arange(count)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """One window with all its fields: arrays of L, and numbers."""
        wanted = _one(number, len(self), "window")
        rows = self.rows(np.array([wanted]), (*WINDOW_FIELDS, "example"))
        example = int(rows.pop("example")[0])
        fields = {name: _known(name, array)[0] for name, array in rows.items()}
        window = {name: field if field.ndim else field.item() for name, field in fields.items()}
        return window | {"example_id": self._texts.example(example)["id"]}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(len(self)))

    # ---- examples ----

    def windows_of(self, examples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """The first window of each of some examples, and how many it has."""
        wanted = _checked(examples, self.examples, "example")
        if not len(wanted):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        shard = _shard_of(self._example_begins, wanted)
        # Every shard has one entry more than examples.
        pairs = self._files.reader(FIRST_WINDOW, np.dtype("<i8")).rows(wanted + shard, 2)
        begins = self._window_begins[shard]
        first, counts = pairs[:, 0] + begins, pairs[:, 1] - pairs[:, 0]
        if (first < begins).any() or (counts < 1).any() or (first + counts > self._window_begins[shard + 1]).any():
            raise self._files.damaged(f"{FIRST_WINDOW} names windows that are not there")
        return first, counts

    def document(self, number: int) -> dict[str, Any]:
        """All windows of example `number`, in order: as `store[i]`, with a row a window; `example_id` is one string."""
        wanted = _one(number, self.examples, "example")
        first, count = (int(found[0]) for found in self.windows_of(np.array([wanted])))
        rows = self.rows(np.arange(first, first + count), WINDOW_FIELDS)
        return {name: _known(name, array) for name, array in rows.items()} | {
            "example_id": self._texts.example(wanted)["id"]
        }

    def example(self, number: int) -> dict[str, Any]:
        """The texts of one example: id, title, question, context, answers as HF has them, and the answer trained on.

        `chosen_answer_text` is empty and `chosen_answer_char_span` None when there is none, and `status` says why.
        """
        wanted = _one(number, self.examples, "example")
        value = self._texts.example(wanted)
        try:
            chosen, answers = value["chosen"], value["answers"]
            return {
                "id": value["id"],
                "title": value["title"],
                "question": value["question"],
                "context": self._texts.context(wanted, value["context"]),
                "answers": {
                    "text": [answer["text"] for answer in answers],
                    "answer_start": [answer["start"] for answer in answers],
                },
                "chosen_answer_text": chosen["text"] if chosen else "",
                "chosen_answer_char_span": (chosen["start"], chosen["stop"]) if chosen else None,
                "status": value["status"],
            }
        except (KeyError, TypeError) as error:
            raise self._files.damaged(f"example {wanted} lacks {error}") from None

    def find(self, example_id: str) -> int:
        """The number of the example with this id, the first one; KeyError without one.

        Looks through 8 bytes an example, in blocks: constant memory, about a millisecond for 100,000 examples.
        """
        wanted = np.uint64(hash_id(example_id))
        for begin in range(0, self.examples, _BLOCK_IDS):
            count = min(_BLOCK_IDS, self.examples - begin)
            hashes = self._files.reader(IDS, np.dtype("<u8")).rows(np.array([begin]), count)[0]
            for place in np.flatnonzero(hashes == wanted).tolist():
                # Two ids may share a hash.
                if self._texts.example(begin + place)["id"] == example_id:
                    return begin + int(place)
        raise KeyError(f'{self.path}: no example "{example_id}"')

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_same, (type(self), self.place, self._way, self.fingerprint)

    def __repr__(self) -> str:
        size = sum(record["bytes"] for shard in self.manifest.shards for record in shard.files.values())
        facts = f"{len(self):,} windows of {self.form.max_seq_length}, {self.examples:,} examples"
        return f"FeatureStore({str(self.path)!r}: {facts}, {format_size(size)})"


def _reopen_same(kind: type[FeatureStore], place: Folder, way: Way, fingerprint: str) -> FeatureStore:
    """In another process: the store may have been replaced meanwhile."""
    return kind(same_generation(place, fingerprint, lambda one: read_manifest(one).fingerprint), read=way)


def _begins(counts: list[int]) -> Int64s:
    """(shards + 1,): what lies before each shard, and in all."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def _shard_of(begins: Int64s, numbers: Int64s | np.int64) -> Int64s:
    found: Int64s = np.searchsorted(begins[1:], numbers, side="right")
    return found


def _checked(numbers: npt.ArrayLike, count: int, what: str) -> Int64s:
    """Numbers as int64, none of them outside."""
    wanted = np.asarray(numbers)
    if not len(wanted):
        return np.empty(0, np.int64)
    if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
        raise TypeError(f"{what} numbers are a one-dimensional array of integers, not {wanted.dtype} {wanted.shape}")
    if int(wanted.min()) < 0 or int(wanted.max()) >= count:
        outside = int(wanted.min()) if int(wanted.min()) < 0 else int(wanted.max())
        raise IndexError(f"{what} {outside} of a store of {count:,} {what}s")
    return wanted.astype(np.int64, copy=False)


def _one(number: int, count: int, what: str) -> int:
    """A number, from the end when it is negative."""
    wanted = operator.index(number)
    if not -count <= wanted < count:
        raise IndexError(f"{what} {number} of a store of {count:,} {what}s")
    return wanted + count if wanted < 0 else wanted


def _known(name: str, array: Array) -> Array:
    """In the dtype that users expect."""
    return array.astype(np.int64) if name in _WIDE else array
