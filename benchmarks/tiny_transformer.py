"""A plain GPT in torch, for `training.py`: token ids and the ids that follow them in, the mean loss out.

As GPT-2 is: learned positions, LayerNorm before attention and MLP, GELU, the output tied to the embedding; no dropout,
no biases in the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

INITIAL_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    width: int
    layers: int
    heads: int
    seq_len: int
    vocab_size: int = 50_304
    """GPT-2's 50,257 rounded up to a multiple of 64, which matrix units like."""


class Block(nn.Module):  # type: ignore[misc, unused-ignore]
    """Attention over what came before, then an MLP; both add to what flows by."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, flow: Tensor) -> Tensor:
        batch, length, width = flow.shape
        # (batch, length, 3 * width) -> three of (batch, heads, length, width of a head)
        parts = self.queries_keys_values(self.before_attention(flow)).view(batch, length, 3, self.heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        flow = flow + self.attended(seen.transpose(1, 2).reshape(batch, length, width))
        rest: Tensor = self.mlp(self.before_mlp(flow))
        return flow + rest


class GPT(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Parameter(torch.empty(shape.seq_len, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.last = nn.LayerNorm(shape.width, bias=False)
        for weights in self.parameters():
            if weights.dim() == 2:
                nn.init.normal_(weights, std=INITIAL_DEVIATION)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of predicting y, the tokens that follow x: both (batch, seq_len)."""
        flow = self.tokens(x) + self.positions
        for block in self.blocks:
            flow = block(flow)
        logits = functional.linear(self.last(flow), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())
