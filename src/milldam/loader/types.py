"""The types of samples and batches.

Arrays of a batch have one row a sample, those of a sample have no rows. Tokens are int64, the default of every loader;
with another `dtype` arrays of that one have these names.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from milldam.loader.permutation import Int64s

Array = npt.NDArray[Any]
Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

TokenPair = tuple[Int64s, Int64s]
"""(x, y): y is x one token on."""

State = dict[str, object]
"""The position of a loader, as small JSON."""

LabelForm = Literal["shifted", "hf"]
"""Labels: the next token, or the same one for models that shift by themselves."""

Columns = dict[str, Array]
"""A sample or a batch of whole documents or of pairs, by the names that `conversations` lists."""

SampleT = TypeVar("SampleT", covariant=True)
BatchT = TypeVar("BatchT")


class Labelled(TypedDict):
    """A sample in the form of HF transformers.

    >>> sorted(store.windows(128, form="hf")[0])
    ['input_ids', 'labels']
    """

    input_ids: Int64s
    labels: Int64s


class PackedRow(Labelled):
    """A row of documents or pieces of documents, which attention and loss keep apart.

    >>> sorted(store.packed(128)[0])
    ['document_ids', 'input_ids', 'labels', 'loss_mask', 'position_ids']
    """

    position_ids: Int64s
    document_ids: Int64s
    loss_mask: Bools


class PackedBatch(PackedRow):
    """Packed rows, and where their pieces begin when all rows are put end to end.

    >>> batch = next(iter(store.packed(128).batches(8, seed=0)))
    >>> batch["input_ids"].shape, int(batch["cu_seqlens"][-1])
    ((8, 128), 1024)
    """

    cu_seqlens: Int32s
    max_seqlen: int
