"""Training straight from text: the first batch comes at once, and the store makes itself while the model trains.

    python examples/training/from_text.py "data/*.jsonl" --tokenizer gpt2 --store corpus.milldam --steps 100
    python examples/training/from_text.py "data/*.jsonl" --tokenizer gpt2 --store corpus.milldam --steps 200 --resume

Which batch comes when does not depend on how much is made: a run that is killed and resumed, on other ranks too, or
begun again once the store is finished, has the losses of one that never stopped.
"""

from __future__ import annotations

import argparse

import torch
from checkpoint import load, save
from tiny_gpt import TinyGPT

import milldam
from milldam.torch import tensors


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="files, folders, globs")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--store", required=True, help="where the store is made")
    parser.add_argument("--memory", default="2GB", help="for making it, beside the training")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.manual_seed(1)
    with milldam.open(options.text, tokenizer=options.tokenizer, store=options.store, memory=options.memory) as feed:
        made = feed.windows(options.seq_len).batches(options.batch_size, seed=1, epochs=None)
        batches = tensors(made, device=options.device)
        model = TinyGPT(feed.vocab_size, options.seq_len).to(options.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = load(options.checkpoint, model, optimizer, batches) if options.resume else 0
        while step < options.steps:
            x, y = next(batches)
            loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
            if step % options.checkpoint_every == 0:
                save(options.checkpoint, model, optimizer, batches, step)
        told = made.stats()
        print(f"{told['tokens']:,} tokens used; waited {told.get('waited_seconds', 0):.1f} s for the text; {feed!r}")


if __name__ == "__main__":
    main()
