"""Features in, one shard on disk out.

Memory does not grow with the shard: every append goes straight to the files. What is kept is the last context, to store
a run of equal ones once. Nothing appears under its final name before `commit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milldam.files import NewFile, commit_together
from milldam.stores.features.format import (
    CONTEXTS,
    CONTEXTS_INDEX,
    FIRST_WINDOW,
    IDS,
    NUMBERS,
    TEXTS,
    TEXTS_INDEX,
    FeatureForm,
    encode_context,
    encode_example,
    hash_id,
)
from milldam.stores.features.manifest import FeatureShard
from milldam.stores.kinds import shard_name

if TYPE_CHECKING:
    from milldam.qa.sources import Example
    from milldam.qa.spans import Chosen
    from milldam.qa.windows import Features

_MOST_EXAMPLES = 2**31 - 1


class FeatureShardWriter:
    """Writes the files of one shard, `SPLIT-CONTENT.*`, into a folder; use it as a context manager.

    with FeatureShardWriter(folder, "train", form) as writer:
        writer.append(prepared.features, examples, prepared.chosen)
        shard = writer.commit()
    """

    def __init__(self, folder: Path, split: str, form: FeatureForm) -> None:
        self.split, self.form = split, form
        self.windows = self.examples = 0
        self._context: str | None = None
        self._contexts = 0
        self._files: dict[str, NewFile] = {}
        try:
            for file in form.files:
                self._files[file] = NewFile(folder / f"{split}.{file}")
            for file in (FIRST_WINDOW, TEXTS_INDEX, CONTEXTS_INDEX):
                self._write(file, np.zeros(1, "<i8"))
        except BaseException:
            self._discard()
            raise

    def append(self, features: Features, examples: Sequence[Example], chosen: Sequence[Chosen]) -> None:
        """Add all windows of some examples. Examples without windows, which were dropped, are not stored."""
        stored, places, counts = np.unique(features.example, return_inverse=True, return_counts=True)
        self._check(features, examples, chosen, places)
        if not len(stored):
            return
        self._append_windows(features, places)
        self._write(FIRST_WINDOW, (self.windows + counts.cumsum()).astype("<i8"))
        self._append_texts([(examples[k], chosen[k]) for k in stored.tolist()])
        self.windows += len(features)
        self.examples += len(stored)

    def _check(
        self, features: Features, examples: Sequence[Example], chosen: Sequence[Chosen], places: npt.NDArray[np.intp]
    ) -> None:
        """What would make a store that can't be read is a mistake of the caller."""
        if len(examples) != len(chosen):
            raise ValueError(f"{len(examples)} examples with {len(chosen)} answers")
        if features.input_ids.shape[1:] != (self.form.max_seq_length,):
            raise ValueError(f"windows of {features.input_ids.shape[1:]} tokens; the form says {self.form}")
        if (places[1:] < places[:-1]).any():
            raise ValueError("the windows are not in the order of their examples")
        limits = np.iinfo(self.form.token_dtype)
        if len(features) and not limits.min <= features.input_ids.min() <= features.input_ids.max() <= limits.max:
            raise ValueError(f"token ids that {self.form.token_dtype} can't hold")
        if self.examples + len(examples) > _MOST_EXAMPLES:
            raise ValueError("more examples in a shard than an int32 counts")

    def _append_windows(self, features: Features, places: npt.NDArray[np.intp]) -> None:
        """One row a window in each column."""
        numbers = np.empty((len(features), len(NUMBERS)), np.int32)
        for at, name in enumerate(NUMBERS[:-1]):
            numbers[:, at] = getattr(features, name)
        numbers[:, -1] = self.examples + places
        for column in self.form.columns:
            rows = numbers if column.name == "numbers" else getattr(features, column.name)
            self._write(column.file, np.ascontiguousarray(rows, column.stored))

    def _append_texts(self, examples: list[tuple[Example, Chosen]]) -> None:
        texts, contexts = [], []
        for example, answer in examples:
            if example.context != self._context:
                self._context = example.context
                self._contexts += 1
                contexts.append(encode_context(example.context))
            texts.append(encode_example(example, answer, self._contexts - 1))
        self._write_texts(TEXTS, TEXTS_INDEX, texts)
        self._write_texts(CONTEXTS, CONTEXTS_INDEX, contexts)
        hashes = (hash_id(example.id) for example, _ in examples)
        self._write(IDS, np.fromiter(hashes, "<u8", len(examples)))

    def _write_texts(self, file: str, index: str, texts: list[bytes]) -> None:
        """Texts end to end, and where each of them ends."""
        ends = self._files[file].size + np.cumsum([len(text) for text in texts], dtype=np.int64)
        self._files[file].write(b"".join(texts))
        self._write(index, ends.astype("<i8"))

    def _write(self, file: str, array: npt.NDArray[Any]) -> None:
        if array.size:
            self._files[file].write(array.data)

    def commit(self) -> FeatureShard:
        """Make all files durable under their names."""
        name = shard_name(self.split, *(new.record for new in self._files.values()))
        records = commit_together({f"{name}.{file}": new for file, new in self._files.items()})
        return FeatureShard(name, self.windows, self.examples, records)

    def _discard(self) -> None:
        for new in self._files.values():
            new.discard()

    def __enter__(self) -> FeatureShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()
