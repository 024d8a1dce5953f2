"""A small GPT that the examples beside it train: learned positions, attention and MLP with a norm before each.

`attend` is what an example may exchange: from queries, keys and values of shape (batch, heads, length, width) to what
each position sees.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Every position sees itself and what came before."""
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, flow: Tensor, attend: Attend) -> Tensor:
        parts = self.queries_keys_values(self.norms[0](flow)).unflatten(-1, (3, self.heads, -1))
        # (batch, length, 3, heads, width of a head) -> three of (batch, heads, length, width of a head)
        seen = attend(*parts.permute(2, 0, 3, 1, 4))
        flow = flow + self.joined(seen.transpose(1, 2).flatten(2))
        return flow + self.mlp(self.norms[1](flow))


class TinyGPT(nn.Module):
    def __init__(self, vocab_size: int, seq_len: int, *, width: int = 64, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocab_size, bias=False)

    def forward(self, x: Tensor, y: Tensor, *, positions: Tensor | None = None, attend: Attend = causal) -> Tensor:
        """The mean loss of predicting y from x, both (batch, length); a y of -100 counts for nothing."""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        flow = self.tokens(x) + self.positions(positions)
        for block in self.blocks:
            flow = block(flow, attend)
        return functional.cross_entropy(self.logits(self.norm(flow)).flatten(0, 1), y.flatten(), ignore_index=-100)
