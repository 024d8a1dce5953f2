"""Fine-tuning on packed conversations in a plain loop: loss on what is trained on alone, no conversation sees another.

    milldam tokenize chat.jsonl --chat -o chat.milldam --tokenizer TOKENIZER
    python examples/training/chat_torch.py chat.milldam --steps 100
    python examples/training/chat_torch.py chat.milldam --steps 200 --resume

A row of `store.packed` has whole conversations, as many as fit; `labels` are -100 outside of what is trained on,
positions begin anew in each. Attention goes by `cu_seqlens`, all rows end to end: on a GPU as nested tensors, for which
torch has flash attention (`flash_attn_varlen_func` takes the same numbers); elsewhere piece after piece. At the end a
mask of equal ids is asked for the loss of the same batch.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from packed_attention import dense
from tiny_gpt import Attend, TinyGPT, causal
from torch import Tensor
from torch.nn import functional

import milldam
from milldam.torch import tensors


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4, help="rows")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--checkpoint", default="chat.pt")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def by_lengths(batch: dict[str, Any]) -> Attend:
    """Attention within conversations, all rows end to end, as flash attention has it."""
    borders, longest, shape = batch["cu_seqlens"].long(), batch["max_seqlen"], batch["input_ids"].shape

    def attend(*parts: Tensor) -> Tensor:
        # (rows, heads, length, width) -> (tokens, heads, width)
        flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        seen = nested(flat, borders, longest) if flat[0].is_cuda else one_by_one(flat, borders)
        return seen.to(parts[0].dtype).unflatten(0, shape).transpose(1, 2)

    return attend


def nested(parts: list[Tensor], borders: Tensor, longest: int) -> Tensor:
    """By torch's kernels for sequences of varying length, which take half precision."""
    jagged = (
        torch.nested.nested_tensor_from_jagged(part.bfloat16(), borders, min_seqlen=1, max_seqlen=longest)
        for part in parts
    )
    queries, keys, values = (part.transpose(1, 2) for part in jagged)
    seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return seen.transpose(1, 2).values()


def one_by_one(parts: list[Tensor], borders: Tensor) -> Tensor:
    """CPUs have no such kernel."""
    pieces = zip(*(part.transpose(0, 1).split(borders.diff().tolist(), dim=1) for part in parts), strict=True)
    return torch.cat([causal(*piece) for piece in pieces], dim=1).transpose(0, 1)


def main() -> None:
    options = parse()
    torch.manual_seed(1)
    store = milldam.open(options.store)
    rows = store.packed(options.seq_len)
    batches = tensors(rows.batches(options.batch_size, seed=1, epochs=None), device=options.device)
    model = TinyGPT(store.vocab_size, options.seq_len).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = 0
    if options.resume:
        saved = torch.load(options.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        batches.load_state_dict(saved["data"])
        done = saved["step"]

    loss_of = partial(train_step, model, optimizer)
    for step in range(done + 1, options.steps + 1):
        batch = next(batches)
        loss = loss_of(batch, by_lengths(batch))
        share = batch["loss_mask"].float().mean().item()
        print(f"step {step}: loss {loss:.6f}, {100 * share:.0f} % of tokens trained on", flush=True)
        if step % options.checkpoint_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"data": batches.state_dict(), "step": step}, options.checkpoint)

    batch = next(batches)
    with torch.no_grad():
        for name, attend in (("lengths", by_lengths(batch)), ("a mask", dense(batch["document_ids"]))):
            loss = model(batch["input_ids"], batch["labels"], positions=batch["position_ids"], attend=attend)
            print(f"attention by {name}: loss {loss.item():.4f}")


def train_step(model: TinyGPT, optimizer: torch.optim.Optimizer, batch: dict[str, Any], attend: Attend) -> float:
    loss = model(batch["input_ids"], batch["labels"], positions=batch["position_ids"], attend=attend)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


if __name__ == "__main__":
    main()
