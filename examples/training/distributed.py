"""Several ranks, each with its share of every batch; a run can go on with another number of them.

    torchrun --nproc-per-node 2 examples/training/distributed.py corpus.milldam --steps 100 --checkpoint run.pt
    python examples/training/distributed.py corpus.milldam --steps 100 --checkpoint run.pt --resume

All ranks together take `--batch-size` samples a step. Which ones follows from the step alone, so two ranks with four
each train on what one rank with eight does, and a checkpoint says where the data stands in one number.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from checkpoint import load, save
from tiny_gpt import TinyGPT
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import milldam
from milldam.torch import tensors


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="samples a step, of all ranks together")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def join_the_others() -> tuple[int, int, str]:
    """(rank, how many there are, this rank's device); alone when torchrun did not start this."""
    if "LOCAL_RANK" not in os.environ:
        return 0, 1, "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    return dist.get_rank(), dist.get_world_size(), device


def mean_of_ranks(loss: torch.Tensor, ranks: int) -> float:
    total = loss.detach().clone()
    if ranks > 1:
        dist.all_reduce(total)
    return total.item() / ranks


def main() -> None:
    options = parse()
    rank, ranks, device = join_the_others()
    if options.batch_size % ranks:
        raise SystemExit(f"--batch-size {options.batch_size} can't be shared by {ranks} ranks evenly")
    torch.manual_seed(1)
    store = milldam.open(options.store)
    windows = store.windows(options.seq_len)
    share = windows.batches(options.batch_size // ranks, seed=1, epochs=None, rank=rank, world_size=ranks)
    batches = tensors(share, device=device)

    model = TinyGPT(store.vocab_size, options.seq_len).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = load(options.checkpoint, model, optimizer, batches) if options.resume else 0
    trained: nn.Module = DistributedDataParallel(model) if ranks > 1 else model

    while step < options.steps:
        x, y = next(batches)
        loss = trained(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        mean = mean_of_ranks(loss, ranks)
        if rank == 0:
            print(f"step {step}: loss {mean:.6f}, {batches.samples_seen} samples seen by {ranks} ranks", flush=True)
        if rank == 0 and step % options.checkpoint_every == 0:
            save(options.checkpoint, model, optimizer, batches, step)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
