"""A loop as nanoGPT has it, fed by milldam: `get_batch` is gone, and a checkpoint says where the data stands.

    milldam tokenize corpus.jsonl -o corpus.milldam --tokenizer gpt2
    python examples/training/nanogpt_loop.py corpus.milldam --steps 100 --checkpoint run.pt
    python examples/training/nanogpt_loop.py corpus.milldam --steps 100 --checkpoint run.pt --resume

Every window comes once an epoch, in an order that follows from the seed. A run that was killed and resumed has the
losses of one that never stopped.
"""

from __future__ import annotations

import argparse

import torch
from checkpoint import load, save
from tiny_gpt import TinyGPT

import milldam
from milldam.torch import TensorBatches, tensors


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, help="of a .bin file, which does not say")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


@torch.no_grad()
def mean_loss(model: TinyGPT, batches: TensorBatches) -> float:
    losses = [model(x, y) for x, y in batches]
    return float(torch.stack(losses).mean())


def main() -> None:
    options = parse()
    torch.manual_seed(1)
    store = milldam.open(options.store)
    parts = store.split(train=0.9, val=...)
    windows = parts["train"].windows(options.seq_len)
    batches = tensors(windows.batches(options.batch_size, seed=1, epochs=None), device=options.device)

    vocab_size = options.vocab_size or store.vocab_size
    if vocab_size is None:
        raise SystemExit(f"{store} does not say how large its vocabulary is: give --vocab-size.")
    model = TinyGPT(vocab_size, options.seq_len).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = load(options.checkpoint, model, optimizer, batches) if options.resume else 0

    while step < options.steps:
        x, y = next(batches)
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        print(f"step {step}: loss {loss.item():.6f}, epoch {batches.epoch}", flush=True)
        if step % options.checkpoint_every == 0:
            save(options.checkpoint, model, optimizer, batches, step)

    held_back = parts["val"].windows(options.seq_len).batches(options.batch_size, shuffle=False)
    print(f"loss on what was held back: {mean_loss(model, tensors(held_back, device=options.device)):.6f}")


if __name__ == "__main__":
    main()
