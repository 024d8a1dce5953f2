"""A table of question answering opened for reading: windows, documents and examples by number.

A row of the table is an example with its texts and, as lists, its windows (docs/format.md). Opening reads only the
manifest; the files are opened at the first read. The columns of windows lie in them as plain arrays, so that any
windows of any shards are one gather, from mapped files or, if they are larger than memory, by position
(milldam.loader.reading). Holds some numbers per record batch, and no row; a store pickles as its path. Windows and
examples are numbered through the shards in the order of the manifest.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milldam.checked import checked
from milldam.errors import ConfigError, StoreError, did_you_mean
from milldam.files import in_home
from milldam.loader.permutation import Int64s
from milldam.loader.reading import Reader, Way, open_reader
from milldam.loader.samples import counted_number, one_of
from milldam.loader.stream import TokenFile, TokenStream
from milldam.memory import format_size
from milldam.stores.kinds import TABLE, TokenDtype
from milldam.stores.place import Folder, same_generation
from milldam.stores.tokens.reader import TOKENIZER, parse_tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

    from milldam.stores.table.manifest import TableManifest, TableShard

Array = npt.NDArray[Any]

TEXTS = ["id", "title", "question", "context", "answers", "chosen", "status"]
NUMBERS = (
    *("length", "start_positions", "end_positions", "cls_index", "context_begin", "context_tokens"),
    *("segment_index", "total_segments", "example"),
)
"""The int32 of a window in the column `numbers`, in order. `example` counts in the shard."""
_GATHERED = ("input_ids", "token_type_ids", "offsets")
_WIDE = ("input_ids", "token_type_ids", "start_positions", "end_positions", "cls_index")
"""Returned as int64, which models index with."""
WINDOW_FIELDS = (*_WIDE, "attention_mask", "offset_mapping", "segment_index", "total_segments", "has_answer")
"""The fields of a window besides texts and the id of its example."""
_WINDOW_TEXTS = ("question", "context", "chosen_answer_text", "chosen_answer_char_span")


@dataclass(frozen=True, slots=True)
class MemoryTokens:
    """The ids of memory tokens, in order."""

    read: tuple[int, ...] = ()
    write: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.read)


@dataclass(frozen=True, slots=True)
class Form:
    """What all windows of a table have in common."""

    max_seq_length: int
    token_dtype: TokenDtype
    pad_id: int
    pad_type: int
    pad_left: bool
    before: int
    """Special tokens in front of a window's memory tokens."""
    after: int
    """Special tokens behind them at its end."""
    memory: MemoryTokens = field(default_factory=MemoryTokens)

    @property
    def columns(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """The columns of windows: type, and shape of a row."""
        length, number = self.max_seq_length, np.dtype("<i4")
        return {
            "input_ids": (np.dtype(self.token_dtype).newbyteorder("<"), (length,)),
            "token_type_ids": (np.dtype(np.uint8), (length,)),
            "offsets": (number, (length, 2)),
            "numbers": (number, (len(NUMBERS),)),
        }

    @classmethod
    def of(cls, manifest: TableManifest, path: str) -> Form:
        """Raises StoreError when a table has other rows, or can't be."""
        if manifest.qa is None:
            raise StoreError(f"{path}: a table without windows of question answering. `milldam.open` opens it.")
        form = checked(cls, manifest.qa, f"{path}/{TABLE.manifest}")
        windows = manifest.counts.get("windows")
        sizes = form.max_seq_length - 1, form.before, form.after, windows if isinstance(windows, int) else -1
        if min(sizes) < 0 or len(form.memory.read) != len(form.memory.write):
            raise StoreError(f"{path}/{TABLE.manifest}: damaged: qa or counts have numbers that can't be.")
        return form

    def attention_mask(
        self, lengths: npt.ArrayLike, dtype: npt.DTypeLike = np.int64, out: Array | None = None
    ) -> Array:
        """(windows, L): 1 on the tokens of windows that have so many, 0 on padding."""
        length, lengths = self.max_seq_length, np.asarray(lengths)
        mask = np.empty((len(lengths), length), dtype) if out is None else out[: len(lengths)]
        # (L,): how far each token is from the side that has no padding
        places = np.arange(length)[::-1] if self.pad_left else np.arange(length)
        np.less(places, lengths[:, None], out=mask)
        return mask


class _Layout:
    """Where the windows of all record batches lie in the files, which are read as if they lay end to end."""

    def __init__(self, folder: Path, manifest: TableManifest, form: Form, way: Way) -> None:
        import pyarrow as pa

        self.batches: list[pa.RecordBatch] = []
        starts: dict[str, list[int]] = {name: [] for name in (*form.columns, "lists")}
        shard_begins, counts, before, at = [], [], 0, 0
        for shard in manifest.shards:
            path = folder / shard.name
            try:
                address, batches = _mapped(path, shard)
                for batch in batches:
                    for name, (dtype, shape) in form.columns.items():
                        starts[name].append((_place(batch, name, dtype, shape) - address + at) // dtype.itemsize)
                    lists = batch.column("numbers")
                    starts["lists"].append((lists.buffers()[1].address + 4 * lists.offset - address + at) // 4)
                    counts.append((len(lists.values), batch.num_rows))
                    shard_begins.append(before)
            except FileNotFoundError:
                raise StoreError(
                    f"{path}: missing. Make the table again: the same call makes what is missing."
                ) from None
            except (pa.ArrowException, OSError, KeyError, ValueError) as error:
                raise damaged(path, str(error)) from None
            self.batches += batches
            before, at = before + shard.rows, at + shard.bytes
        sums = np.concatenate((np.zeros((1, 2), np.int64), np.cumsum(counts, axis=0, dtype=np.int64).reshape(-1, 2)))
        self.windows, self.examples = np.ascontiguousarray(sums.T)
        """(batches + 1,): windows and examples before each batch, and in all."""
        self.shard_begins = np.array(shard_begins, np.int64)
        """(batches,): examples before the shard of each batch."""
        if self.windows[-1] != manifest.counts["windows"]:
            listed = manifest.counts["windows"]
            raise damaged(folder, f"{self.windows[-1]:,} windows where the manifest says {listed:,}")
        self.lists = np.array(starts["lists"], np.int64)
        """(batches,): where the list offsets of each batch begin, counted in int32."""
        self._columns: dict[str, tuple[Reader, Int64s, tuple[int, ...]]] = {}
        """Of each column: its reader, what to add to `window * values` by batch, and the shape of a row."""
        for name, (dtype, shape) in form.columns.items():
            files = tuple(TokenFile(folder / one.name, one.bytes // dtype.itemsize) for one in manifest.shards)
            stream = TokenStream(str(folder), files, dtype, 0, sum(file.tokens for file in files), "")
            shifts = np.array(starts[name], np.int64) - self.windows[:-1] * math.prod(shape)
            self._columns[name] = open_reader(stream, way), shifts, shape
        self.reader = self._columns["numbers"][0]
        """Reads int32."""

    def gather(self, name: str, windows: Int64s, batch: Int64s) -> Array:
        """A column of windows, which lie in these batches."""
        reader, shifts, shape = self._columns[name]
        if not len(windows):
            return np.empty((0, *shape), reader.dtype)
        values = math.prod(shape)
        rows = reader.rows(shifts[batch] + windows * values, values)
        # A positioned reader uses its buffer again for the next read.
        return (rows if rows.flags.owndata else rows.copy()).reshape(len(windows), *shape)


def _mapped(path: Path, shard: TableShard) -> tuple[int, list[pa.RecordBatch]]:
    """The address of a mapped file, and the record batches in it."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        data = file.read_buffer()
    if data.size != shard.bytes:
        raise ValueError(f"{data.size:,} bytes where {shard.bytes:,} are expected")
    batches = list(pa.ipc.open_stream(data))
    for batch in batches:
        batch.validate()
    rows = sum(batch.num_rows for batch in batches)
    if rows != shard.rows:
        raise ValueError(f"{rows:,} rows where the manifest says {shard.rows:,}")
    return data.address, batches


def _place(batch: pa.RecordBatch, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """The address of the values of a column of windows. Raises ValueError if the column is another one."""
    import pyarrow as pa

    lists = batch.column(name)
    if lists.type != pa.list_(pa.list_(pa.from_numpy_dtype(dtype), math.prod(shape))):
        raise ValueError(f"{name} is {lists.type}, not as the manifest says")
    flat = lists.values.values
    whole = lists.offsets[0].as_py() == 0 and lists.offsets[-1].as_py() == len(lists.values)
    if not whole or lists.null_count or lists.values.null_count or flat.null_count:
        raise ValueError(f"{name} has nulls or gaps")
    return int(flat.buffers()[1].address + flat.offset * dtype.itemsize)


def damaged(path: Path, what: str) -> StoreError:
    folder = path.parent if path.suffix else path
    return StoreError(f"{path}: damaged: {what}. `milldam verify {folder}` tells more; make it again.")


class FeatureStore:
    """Windows by number: `store[i]`, `len(store)`; texts by example: `store.example(k)`.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> len(features), features.examples, features[0]["input_ids"].shape
    (..., 12, (384,))
    """

    def __init__(self, path: str | Path | Folder, *, read: Way = "auto") -> None:
        self.place = path if isinstance(path, Folder) else Folder(Path(in_home(path)))
        self.path = self.place.folder
        self.manifest: TableManifest = TABLE.read(self.place)
        self.form = Form.of(self.manifest, self.place.name)
        self.fingerprint = self.manifest.fingerprint
        """Names the content: equal fingerprints mean equal windows and texts in equal order."""
        self.memory_tokens = self.form.memory
        """The ids of the memory tokens, in order; both empty when there are none."""
        self.examples: int = self.manifest.rows
        """How many examples there are: those with windows."""
        self._windows = int(self.manifest.counts["windows"])
        one_of("read", read, Way)
        self._way = read
        self._checked = set[int]()
        """Record batches whose texts were looked through."""

    # ---- facts ----

    def __len__(self) -> int:
        """How many windows there are."""
        return self._windows

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The store's tokenizer, memory tokens included, as a `tokenizers.Tokenizer`."""
        path, data = self.path / TOKENIZER, self.place.read(TOKENIZER)
        if data is None:
            raise StoreError(f"{path}: missing. Make the store again.")
        return parse_tokenizer(data, str(path))

    @functools.cached_property
    def _layout(self) -> _Layout:
        return _Layout(self.path, self.manifest, self.form, self._way)

    # ---- windows ----

    def rows(self, numbers: npt.ArrayLike, columns: Sequence[str]) -> dict[str, Array]:
        """Columns of some windows, in the order asked for, by the names that users know.

        In the dtypes they are stored in, except that `attention_mask` and `example` are int64. Costs one gather per
        array column; all columns with one number per window share one.
        """
        wanted, layout = _checked(numbers, len(self), "window"), self._layout
        batch = layout.windows[1:].searchsorted(wanted, side="right")
        table: Array | None = None
        found: dict[str, Array] = {}
        for name in columns:
            column = "offsets" if name == "offset_mapping" else name
            if column in _GATHERED:
                found[name] = layout.gather(column, wanted, batch)
                continue
            if table is None:
                table = layout.gather("numbers", wanted, batch)
            if column == "attention_mask":
                found[name] = self.form.attention_mask(table[:, 0])
            elif column == "has_answer":
                found[name] = table[:, 1] != table[:, 3]
            elif column == "example":
                found[name] = example = table[:, -1] + layout.shard_begins[batch]
                if len(example) and not 0 <= int(example.min()) <= int(example.max()) < self.examples:
                    raise damaged(self.path, "the example of a window is not there")
            elif column in NUMBERS:
                found[name] = table[:, NUMBERS.index(column)].copy()
            else:
                known = [*WINDOW_FIELDS, *_GATHERED, *NUMBERS]
                raise ConfigError(f'{self.path}: no column "{column}".{did_you_mean(column, known)}')
        return found

    def memory_positions(self, numbers: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """Where in windows the memory tokens to read and to write are: (windows, M) each, padding counted."""
        form, places = self.form, np.arange(len(self.memory_tokens))
        length = self.rows(numbers, ("length",))["length"].astype(np.int64)[:, None]
        begin = form.max_seq_length - length if form.pad_left else np.zeros_like(length)
        return begin + form.before + places, begin + length - form.after - len(places) + places

    def __getitem__(self, number: int) -> dict[str, Any]:
        """One window with all its fields: arrays of L, numbers, and texts of its example."""
        rows = self.rows([counted_number(operator.index(number), len(self), "window")], (*WINDOW_FIELDS, "example"))
        example = int(rows.pop("example")[0])
        window = {name: column[0].astype(np.int64) if name in _WIDE else column[0] for name, column in rows.items()}
        window = {name: value if value.ndim else value.item() for name, value in window.items()}
        texts = self.example(example)
        return window | {"example_id": texts["id"]} | {name: texts[name] for name in _WINDOW_TEXTS}

    # ---- examples ----

    def windows_of(self, examples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """The first window of each of some examples, and how many it has."""
        wanted, layout = _checked(examples, self.examples, "example"), self._layout
        if not len(wanted):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        batch = layout.examples[1:].searchsorted(wanted, side="right")
        pairs = layout.reader.rows(layout.lists[batch] + wanted - layout.examples[batch], 2)
        begins = layout.windows[batch]
        first, counts = pairs[:, 0] + begins, (pairs[:, 1] - pairs[:, 0]).astype(np.int64)
        if (first < begins).any() or (counts < 1).any() or (first + counts > layout.windows[batch + 1]).any():
            raise damaged(self.path, "an example has windows that are not there")
        return first, counts

    def example(self, number: int) -> dict[str, Any]:
        """The texts of one example: id, title, question, context, answers as HF has them, and the answer trained on.

        `chosen_answer_text` is empty and `chosen_answer_char_span` None if there is none; `status` says why.
        """
        wanted, layout = counted_number(operator.index(number), self.examples, "example"), self._layout
        place = int(layout.examples[1:].searchsorted(wanted, side="right"))
        try:
            batch = layout.batches[place].select(TEXTS)
            # Arrow trusts the offsets in a file, and would read elsewhere if one is wrong.
            if place not in self._checked:
                batch.validate(full=True)
                self._checked.add(place)
        except (ValueError, KeyError) as error:  # Arrow's own are ValueErrors
            raise damaged(self.path, f"texts that can't be read ({error})") from None
        texts = batch.slice(wanted - int(layout.examples[place]), 1).to_pylist()[0]
        chosen, answers, status = texts.pop("chosen"), texts["answers"], texts.pop("status")
        texts["answers"] = {"text": [one["text"] for one in answers], "answer_start": [one["start"] for one in answers]}
        texts["chosen_answer_text"] = chosen["text"] if chosen else ""
        texts["chosen_answer_char_span"] = (chosen["start"], chosen["stop"]) if chosen else None
        return {**texts, "status": status}

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_same, (type(self), self.place, self._way, self.fingerprint)

    def __repr__(self) -> str:
        facts = f"{len(self):,} windows of {self.form.max_seq_length}, {self.examples:,} examples"
        return f"FeatureStore({str(self.path)!r}: {facts}, {format_size(self.manifest.bytes)})"


def _reopen_same(kind: type[FeatureStore], place: Folder, way: Way, fingerprint: str) -> FeatureStore:
    """In another process, where the store may have been replaced meanwhile."""
    return kind(same_generation(place, TABLE, fingerprint), read=way)


def _checked(numbers: npt.ArrayLike, count: int, what: str) -> Int64s:
    """Numbers as int64, none of them out of range."""
    wanted = np.asarray(numbers, None if len(np.atleast_1d(numbers)) else np.int64)
    if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
        raise TypeError(f"{what} numbers are a one-dimensional array of integers, not {wanted.dtype} {wanted.shape}")
    outside = wanted[(wanted < 0) | (wanted >= count)]
    if len(outside):
        raise IndexError(f"{what} {outside[0]} of a store of {count:,} {what}s")
    return wanted.astype(np.int64, copy=False)
