"""Packed rows: several documents in a row, and none sees another.

    python examples/training/packed_attention.py corpus.milldam --steps 100

A batch of `store.packed` says of every token which document it is of, so one rule makes the mask: a token sees what
came before it in its own document. On a GPU flex_attention skips what the rule shuts out; torch has no backward pass
of it for CPUs, so there the same rule is a mask of ones and zeros. At the end both are asked for the loss of a batch.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from tiny_gpt import Attend, TinyGPT
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import milldam
from milldam.torch import tensors


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--strategy", choices=["wrapped", "best_fit"], default="best_fit")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def flexible(document_ids: Tensor, attention: Any = flex_attention) -> Attend:
    """Attention within documents, by blocks: what is shut out as a whole is never computed."""

    def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document_ids[batch, query] == document_ids[batch, key]) & (query >= key)

    rows, length = document_ids.shape
    mask = create_block_mask(same_document, rows, None, length, length, device=document_ids.device)
    return partial(attention, block_mask=mask)


def dense(document_ids: Tensor) -> Attend:
    """The same by a mask for every pair of tokens."""
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return partial(functional.scaled_dot_product_attention, attn_mask=same.tril()[:, None])


def main() -> None:
    options = parse()
    torch.manual_seed(1)
    store = milldam.open(options.store)
    rows = store.packed(options.seq_len, strategy=options.strategy)
    batches = tensors(rows.batches(options.batch_size, seed=1, epochs=None), device=options.device)

    model = TinyGPT(store.vocab_size, options.seq_len).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    on_gpu = options.device.startswith("cuda")
    within_documents = partial(flexible, attention=torch.compile(flex_attention)) if on_gpu else dense

    def loss_of(batch: dict[str, Tensor], attend: Attend) -> Tensor:
        return model(batch["input_ids"], batch["labels"], positions=batch["position_ids"], attend=attend)

    for step in range(1, options.steps + 1):
        batch = next(batches)
        loss = loss_of(batch, within_documents(batch["document_ids"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        documents = len(batch["cu_seqlens"]) - 1
        print(f"step {step}: loss {loss.item():.6f}, {documents} pieces in {options.batch_size} rows", flush=True)

    batch = next(batches)
    with torch.no_grad():
        for name, attend in (("flexible", flexible), ("dense", dense)):
            print(f"{name} attention: loss {loss_of(batch, attend(batch['document_ids'])).item():.4f}")


if __name__ == "__main__":
    main()
