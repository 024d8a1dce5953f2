"""Fine-tuning on packed conversations in a plain loop: loss on what is trained on alone, no conversation sees another.

    milldam tokenize chat.jsonl --chat -o chat.milldam --tokenizer TOKENIZER
    python examples/training/chat_torch.py chat.milldam --steps 100
    python examples/training/chat_torch.py chat.milldam --steps 200 --resume

A row of `store.packed` has whole conversations, as many as fit; `labels` are -100 outside of what is trained on,
positions begin anew in each. Attention: on a GPU by `cu_seqlens`, all rows end to end (torch's flash attention for
sequences of varying length; `flash_attn_varlen_func` takes the same numbers); elsewhere by a mask of equal ids.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from packed_attention import dense
from tiny_gpt import Attend, TinyGPT
from torch import Tensor

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
    from torch.nn.attention.varlen import varlen_attn

    borders, longest = batch["cu_seqlens"], batch["max_seqlen"]

    def attend(*parts: Tensor) -> Tensor:
        # (rows, heads, length, width) -> (tokens, heads, width)
        queries, keys, values = (part.transpose(1, 2).flatten(0, 1).to(torch.bfloat16) for part in parts)
        seen = varlen_attn(queries, keys, values, borders, borders, longest, longest, window_size=(-1, 0))
        rows, length = batch["input_ids"].shape
        return seen.to(parts[0].dtype).unflatten(0, (rows, length)).transpose(1, 2)

    return attend


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

    on_gpu = options.device.startswith("cuda")
    within = by_lengths if on_gpu else (lambda batch: dense(batch["document_ids"]))
    loss_of = partial(train_step, model, optimizer)
    for step in range(done + 1, options.steps + 1):
        batch = next(batches)
        loss = loss_of(batch, within(batch))
        share = batch["loss_mask"].float().mean().item()
        print(f"step {step}: loss {loss:.6f}, {100 * share:.0f} % of tokens trained on", flush=True)
        if step % options.checkpoint_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"data": batches.state_dict(), "step": step}, options.checkpoint)


def train_step(model: TinyGPT, optimizer: torch.optim.Optimizer, batch: dict[str, Any], attend: Attend) -> float:
    loss = model(batch["input_ids"], batch["labels"], positions=batch["position_ids"], attend=attend)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


if __name__ == "__main__":
    main()
