"""The contenders of `loading.py`, milldam among them: each prepared and measured in a process of its own.

    loading_peers.py prepare NAME DATA ...   the store's tokens in the form that this one reads, once
    loading_peers.py measure NAME DATA ...   one line of JSON after its imports, one with its figures at the end
    loading_peers.py flat milldam DATA ...   anonymous memory of a torch DataLoader and its workers, epoch by epoch

All deliver (x, y) as int64, y one token on, from all over the data, in this process (no workers). How each is used is
what its own documentation or training script shows, with these choices in its favour:

- nanogpt: as its train.py does it: the file mapped anew for every batch, a random place for every sample.
- megatron: no attention mask; its index was built before, in `prepare`; DataLoader, random order is its own.
- litdata: TokensLoader, its own loader and shuffle (of chunks, and inside them), widened once a batch.
- mds: a row a sample, its own shuffle, widened once a batch.
- hf-numpy: rows of fixed length in Arrow, a batch read by a list of numbers, without a DataLoader.
- hf-torch: the same through a DataLoader, which asks for whole batches.
- c: gather.c in a loop of its own, in milldam's order, which was computed before.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

VOCABULARY = 50_257
END = 50_256
SEED = 17
LITDATA_CHUNK_TOKENS = 16_000_000
"""About what its documentation shows for token data (2049 * 8012)."""
PIECE_TOKENS = 1_000_000
HF_BATCH_ROWS = 1000
"""Rows of a record batch: what datasets itself writes."""
C_BATCHES = 256
"""Batches of one call into C, so that Python does not count."""

# milldam loads its modules when they are first used: all that it will need counts as imports, as with the others.
MILLDAM = ("milldam", "milldam.api", "milldam.loader.batches")
TORCH = ("torch", "torch.utils.data")
MEGATRON = ("megatron.core.datasets.blended_megatron_dataset_builder", "megatron.core.datasets.gpt_dataset")

Batches = Iterator[tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Task:
    """What to read, and how it is wanted."""

    data: Path
    """Folder of one number of tokens, with the store and what the peers made of it."""
    seq_len: int
    batch_size: int

    @property
    def store(self) -> Path:
        return self.data / "store"

    @property
    def joined(self) -> Path:
        """All shards as one, without the suffix: what Megatron, nanoGPT and C read, and what the others are made of."""
        return self.data / "joined" / "tokens"

    @property
    def tokens_file(self) -> Path:
        return self.joined.with_suffix(".bin")

    def own(self, name: str) -> Path:
        """A folder or file for this length of samples alone."""
        return self.data / f"{name}-{self.seq_len}"


@dataclass(frozen=True, slots=True)
class Contender:
    open: Callable[[Task], Batches]
    imports: tuple[str, ...]
    """Loaded before the clock starts and before memory is counted."""
    reads: Callable[[Task], Path]
    """File or folder that must be in the page cache."""
    prepare: Callable[[Task], None] | None = None
    package: str = "milldam"
    batches_at_once: int = 1
    """Batches of one step of the iterator."""
    is_peer: bool = False


# ---- milldam ----


def milldam_batches(task: Task, *, read: Literal["auto", "map", "pread"] = "auto", **options: Any) -> Any:
    import milldam

    windows = milldam.open(task.store).windows(task.seq_len, read=read)
    return windows.batches(task.batch_size, seed=SEED, epochs=None, **options)


def milldam_with(**options: Any) -> Contender:
    def batches(task: Task) -> Batches:
        return iter(milldam_batches(task, **options))

    return Contender(batches, MILLDAM, reads=lambda task: task.store)


def milldam_tensors(task: Task) -> Batches:
    from milldam.torch import tensors

    return iter(tensors(milldam_batches(task)))


def milldam_loader(task: Task) -> Batches:
    from torch.utils.data import DataLoader

    return iter(DataLoader(milldam_data(task, epochs=None), batch_size=None))


def milldam_data(task: Task, epochs: int | None) -> Any:
    """Whole batches, as a dataset of torch's."""
    import milldam
    from milldam.torch import BatchDataset

    windows = milldam.open(task.store).windows(task.seq_len)
    return BatchDataset(windows, task.batch_size, seed=SEED, epochs=epochs)


# ---- bare C ----


def compiled_gather(folder: Path) -> Any:
    source = Path(__file__).with_name("gather.c")
    library = folder / "gather.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source], check=True)
    gather = ctypes.CDLL(str(library)).gather
    gather.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_void_p]
    gather.restype = None
    return gather


def c_batches(task: Task) -> Batches:
    gather = compiled_gather(task.data)
    tokens = np.asarray(np.memmap(task.tokens_file, np.uint16, mode="r"))
    starts = np.load(c_order(task), mmap_mode="r")
    x, y = (np.empty((task.batch_size, task.seq_len), np.int64) for _ in range(2))
    for first in itertools.cycle(range(0, len(starts), C_BATCHES * task.batch_size)):
        part = np.ascontiguousarray(starts[first : first + C_BATCHES * task.batch_size])
        gather(
            tokens.ctypes.data, part.ctypes.data, C_BATCHES, task.batch_size, task.seq_len, x.ctypes.data, y.ctypes.data
        )
        yield x, y


def c_order(task: Task) -> Path:
    return task.own("order").with_suffix(f".{task.batch_size}.npy")


def prepare_c(task: Task) -> None:
    """The begins of the samples of an epoch as milldam takes them, in whole calls."""
    from milldam.loader.order import Shuffled

    compiled_gather(task.data)
    samples = (task.tokens_file.stat().st_size // 2 - 1) // task.seq_len
    count = samples - samples % (C_BATCHES * task.batch_size)
    starts = Shuffled(samples, SEED).numbers(np.arange(count)) * task.seq_len
    np.save(c_order(task), starts)


# ---- nanoGPT and Megatron-Core ----


def nanogpt(task: Task) -> Batches:
    import torch

    length = task.seq_len
    while True:
        # Mapped anew each time, as its script does, so that resident memory does not grow.
        data = np.memmap(task.tokens_file, np.uint16, mode="r")
        places = torch.randint(len(data) - length, (task.batch_size,))
        x = torch.stack([torch.from_numpy(data[i : i + length].astype(np.int64)) for i in places])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in places])
        yield x, y


class MegatronTokenizer:
    """All that its dataset asks of a tokenizer."""

    vocab_size = VOCABULARY
    eod = END
    pad = -1
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "random"}


def megatron_data(task: Task) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=task.seq_len,
        blend=([str(task.joined)], None),
        split="1,0,0",
        path_to_cache=str(task.data / "megatron-cache"),
        tokenizer=MegatronTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()[0]


def prepare_megatron(task: Task) -> None:
    """Builds its index of samples and their order, which it keeps."""
    megatron_data(task)


def megatron(task: Task) -> Batches:
    from torch.utils.data import DataLoader

    # Its samples lie in random order already: Megatron's own sampler goes through them in sequence.
    loader = DataLoader(megatron_data(task), batch_size=task.batch_size, drop_last=True)
    while True:
        for batch in loader:
            yield batch["tokens"], batch["labels"]


# ---- litdata ----


def token_pieces(path: str) -> Iterator[Any]:
    import torch

    tokens = np.memmap(path, np.uint16, mode="r")
    for first in range(0, len(tokens), PIECE_TOKENS):
        yield torch.from_numpy(np.array(tokens[first : first + PIECE_TOKENS]))


def prepare_litdata(task: Task) -> None:
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    if (task.data / "litdata" / "index.json").exists():
        return
    litdata.optimize(
        fn=token_pieces,
        inputs=[str(path) for path in sorted(task.store.glob("*.bin"))],
        output_dir=str(task.data / "litdata"),
        chunk_size=LITDATA_CHUNK_TOKENS,
        item_loader=TokensLoader(),
        num_workers=1,
    )


def litdata_batches(task: Task) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.item_loader import TokensLoader

    data = StreamingDataset(
        str(task.data / "litdata"), item_loader=TokensLoader(block_size=task.seq_len + 1), shuffle=True, seed=SEED
    )
    loader = StreamingDataLoader(data, batch_size=task.batch_size, num_workers=0, drop_last=True)
    while True:
        for rows in loader:
            yield shifted(rows.long())


def shifted(rows: Any) -> tuple[Any, Any]:
    """(x, y) of rows one token longer."""
    return rows[:, :-1], rows[:, 1:]


# ---- MosaicML streaming ----


def rows_of(task: Task) -> Iterator[Any]:
    """Rows of seq_len + 1 tokens, hop seq_len, in pieces of some thousands: (rows, seq_len + 1) uint16."""
    tokens = np.memmap(task.tokens_file, np.uint16, mode="r")
    count = (len(tokens) - 1) // task.seq_len
    windows = np.lib.stride_tricks.sliding_window_view(tokens, task.seq_len + 1)[:: task.seq_len]
    for first in range(0, count, HF_BATCH_ROWS):
        yield np.ascontiguousarray(windows[first : first + HF_BATCH_ROWS])


def prepare_mds(task: Task) -> None:
    from streaming import MDSWriter

    folder = task.own("mds")
    if (folder / "index.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{task.seq_len + 1}"}) as writer:
        for rows in rows_of(task):
            for row in rows:
                writer.write({"tokens": row})


def mds(task: Task) -> Batches:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()
    data = StreamingDataset(local=str(task.own("mds")), shuffle=True, shuffle_seed=SEED, batch_size=task.batch_size)
    loader = DataLoader(data, batch_size=task.batch_size, num_workers=0, drop_last=True)
    while True:
        for batch in loader:
            yield shifted(batch["tokens"].long())


# ---- HF datasets ----


def prepare_hf(task: Task) -> None:
    import pyarrow as pa

    path = task.own("hf").with_suffix(".arrow")
    if path.exists():
        return
    field_type = pa.list_(pa.uint16(), task.seq_len + 1)
    schema = pa.schema([("tokens", field_type)])
    unfinished = path.with_suffix(".unfinished")
    with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for rows in rows_of(task):
            column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), type=field_type)
            writer.write_batch(pa.record_batch([column], schema=schema))
    unfinished.rename(path)


def hf_data(task: Task, form: str) -> Any:
    from datasets import Dataset

    return Dataset.from_file(str(task.own("hf").with_suffix(".arrow"))).with_format(form)


def hf_numpy(task: Task) -> Batches:
    data = hf_data(task, "numpy")
    rng = np.random.default_rng(SEED)
    size = task.batch_size
    while True:
        order = rng.permutation(len(data))
        for first in range(0, len(order) - size + 1, size):
            rows = data[order[first : first + size]]["tokens"]
            yield shifted(rows.astype(np.int64))


def hf_torch(task: Task) -> Batches:
    from torch.utils.data import DataLoader

    loader = DataLoader(hf_data(task, "torch"), batch_size=task.batch_size, shuffle=True, drop_last=True)
    while True:
        for batch in loader:
            yield shifted(batch["tokens"].long())


def arrow_file(task: Task) -> Path:
    return task.own("hf").with_suffix(".arrow")


# ---- all of them ----

CONTENDERS = {
    "milldam": milldam_with(),
    "milldam-prefetch": milldam_with(prefetch=4),
    "milldam-map": milldam_with(read="map"),
    "milldam-pread": milldam_with(read="pread"),
    "milldam-block": milldam_with(shuffle="block"),
    "milldam-tensors": Contender(milldam_tensors, (*MILLDAM, *TORCH, "milldam.torch"), reads=lambda task: task.store),
    "milldam-loader": Contender(milldam_loader, (*MILLDAM, *TORCH, "milldam.torch"), reads=lambda task: task.store),
    "c": Contender(
        c_batches,
        (),
        reads=lambda task: task.tokens_file,
        prepare=prepare_c,
        package="",
        batches_at_once=C_BATCHES,
    ),
    "nanogpt": Contender(nanogpt, TORCH, reads=lambda task: task.tokens_file, package="torch", is_peer=True),
    "megatron": Contender(
        megatron,
        (*TORCH, *MEGATRON),
        reads=lambda task: task.joined.parent,
        prepare=prepare_megatron,
        package="megatron-core",
        is_peer=True,
    ),
    "litdata": Contender(
        litdata_batches,
        (*TORCH, "litdata"),
        reads=lambda task: task.data / "litdata",
        prepare=prepare_litdata,
        package="litdata",
        is_peer=True,
    ),
    "mds": Contender(
        mds,
        (*TORCH, "streaming"),
        reads=lambda task: task.own("mds"),
        prepare=prepare_mds,
        package="mosaicml-streaming",
        is_peer=True,
    ),
    "hf-numpy": Contender(
        hf_numpy, ("datasets",), reads=arrow_file, prepare=prepare_hf, package="datasets", is_peer=True
    ),
    "hf-torch": Contender(
        hf_torch, (*TORCH, "datasets"), reads=arrow_file, prepare=prepare_hf, package="datasets", is_peer=True
    ),
}


# ---- measuring one ----


def anonymous_bytes(process: int | str = "self") -> int:
    """RssAnon: memory of its own, without the pages of mapped files."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def say(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def measure(name: str, task: Task, warm_up: float, seconds: float) -> None:
    contender = CONTENDERS[name]
    begin = time.perf_counter()
    for module in contender.imports:
        importlib.import_module(module)
    imported = anonymous_bytes()
    # numpy was there before: this script needs it.
    say(imported_bytes=imported, import_seconds=time.perf_counter() - begin)
    begin = time.perf_counter()
    batches = contender.open(task)
    first = next(batches)
    first_seconds = time.perf_counter() - begin
    first_bytes = anonymous_bytes()
    check(first, task)
    run_for(batches, warm_up)
    cpu = time.process_time()
    steps, wall = run_for(batches, seconds)
    samples = steps * contender.batches_at_once * task.batch_size
    say(
        first_seconds=first_seconds,
        first_batch_bytes=first_bytes - imported,
        samples=samples,
        seconds=wall,
        cpu_seconds=time.process_time() - cpu,
        versions=versions_of(contender),
    )
    # Some of them hold threads or shared memory whose end can hang; all that was to be said is said.
    sys.stdout.flush()
    os._exit(0)


def run_for(batches: Batches, seconds: float) -> tuple[int, float]:
    """Takes batches until the time is over; each is dropped when the next one comes, as a training loop does."""
    begin = now = time.perf_counter()
    steps = 0
    while now - begin < seconds:
        _batch = next(batches)
        steps += 1
        now = time.perf_counter()
    return steps, now - begin


def check(batch: tuple[Any, Any], task: Task) -> None:
    """A contender that does less than it must is no contender."""
    x, y = (np.asarray(part) for part in batch)
    shape = (task.batch_size, task.seq_len)
    if x.shape != shape or y.shape != shape or x.dtype != np.int64 or y.dtype != np.int64:
        raise SystemExit(f"x is {x.dtype} {x.shape}, y is {y.dtype} {y.shape}; both must be int64 {shape}")
    if not np.array_equal(x[:, 1:], y[:, :-1]):
        raise SystemExit("y is not x one token on")


def versions_of(contender: Contender) -> dict[str, str]:
    names = ["numpy", *[name for name in (contender.package,) if name]]
    if "torch" in contender.imports:
        names.append("torch")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in dict.fromkeys(names)}


def flat(task: Task, epochs: int, workers: int) -> None:
    """Anonymous memory of this process and of its workers after each epoch."""
    from torch.utils.data import DataLoader

    data = milldam_data(task, epochs=1)
    loader = DataLoader(data, batch_size=None, num_workers=workers, persistent_workers=True)
    for epoch in range(epochs):
        data.set_epoch(epoch)
        batches = sum(1 for _ in loader)
        processes = ["self", *children()]
        say(epoch=epoch + 1, batches=batches, anonymous_bytes=[anonymous_bytes(one) for one in processes])


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("prepare", "measure", "flat"))
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("data", type=Path, help="a folder with a store in it")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before the clock starts (1)")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds on the clock (5)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    task = Task(given.data, given.seq_len, given.batch_size)
    if given.action == "measure":
        measure(given.name, task, given.warm_up, given.seconds)
    elif given.action == "flat":
        flat(task, given.epochs, given.workers)
    elif (prepare := CONTENDERS[given.name].prepare) is not None:
        prepare(task)


if __name__ == "__main__":
    main()
