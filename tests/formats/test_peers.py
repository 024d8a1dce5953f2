"""What milldam writes, read by the packages it is written for. Needs them installed: `make test-all` does that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.kit.token_stores import shard_file

import milldam

DEMO = Path(milldam.__file__).parent / "demo_data"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def store(tmp_path: Path) -> milldam.Store:
    return milldam.tokenize(DEMO / "corpus.jsonl", tmp_path / "store", tokenizer=DEMO, memory="256MB")


def test_megatron_reads_a_shard_as_it_lies(store: milldam.Store) -> None:
    """Megatron-LM's own IndexedDataset gives the same documents."""
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    theirs = megatron.IndexedDataset(str(store.path / store.shards[0].name))
    assert len(theirs) == len(store)
    assert all(np.array_equal(theirs[k], store[k]) for k in range(len(store)))
    assert theirs.document_indices.tolist() == list(range(len(store) + 1))


def test_a_nanogpt_style_memmap_reads_the_tokens(store: milldam.Store) -> None:
    """np.memmap over the .bin file, as nanoGPT opens it, is the store's stream of tokens."""
    torch = pytest.importorskip("torch")
    data = np.memmap(shard_file(store.path, 0, "bin"), dtype=np.uint16, mode="r")
    batch = torch.from_numpy(data[:64].astype(np.int64))
    assert batch.tolist() == np.concatenate(list(store))[:64].tolist()
