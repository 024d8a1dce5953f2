"""JAX, without torch: batches are numpy arrays, and numpy arrays are all that JAX needs.

    pip install milldam jax
    python examples/training/jax_numpy.py corpus.milldam --steps 100 --state run.json

The model predicts the next token from the mean of the last few. `--state` keeps where the data stands, as JSON; the
next run goes on from there.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import milldam

WIDTH = 64
LOOK_BACK = 4
Weights = dict[str, jax.Array]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--state", type=Path, help="a file that keeps where the data stands")
    return parser.parse_args()


def new_weights(vocab_size: int) -> Weights:
    first, last = jax.random.split(jax.random.key(1))
    return {
        "embedding": jax.random.normal(first, (vocab_size, WIDTH)) * 0.1,
        "logits": jax.random.normal(last, (WIDTH, vocab_size)) * 0.1,
    }


def loss_of(weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean loss of predicting y from x, both (batch, length)."""
    tokens = weights["embedding"][x]
    before = jnp.pad(tokens, ((0, 0), (LOOK_BACK - 1, 0), (0, 0)))
    seen = sum(before[:, back : back + x.shape[1]] for back in range(LOOK_BACK)) / LOOK_BACK
    chances = jax.nn.log_softmax(jnp.tanh(seen) @ weights["logits"])
    return -jnp.take_along_axis(chances, y[..., None], axis=-1).mean()


@partial(jax.jit, donate_argnums=0)
def learn(weights: Weights, x: jax.Array, y: jax.Array) -> tuple[Weights, jax.Array]:
    loss, slopes = jax.value_and_grad(loss_of)(weights, x, y)
    return jax.tree.map(lambda weight, slope: weight - slope, weights, slopes), loss


def main() -> None:
    options = parse()
    store = milldam.open(options.store)
    windows = store.windows(options.seq_len)
    # JAX computes with int32 unless told otherwise.
    batches = windows.batches(options.batch_size, seed=1, epochs=None, dtype=np.int32)
    if options.state is not None and options.state.exists():
        batches.load_state_dict(json.loads(options.state.read_text()))
        print(f"goes on after {batches.samples_seen} samples")

    weights = new_weights(store.vocab_size)
    for step in range(1, options.steps + 1):
        x, y = next(batches)
        weights, loss = learn(weights, x, y)
        print(f"step {step}: loss {loss:.6f}", flush=True)
    if options.state is not None:
        options.state.write_text(json.dumps(batches.state_dict()))


if __name__ == "__main__":
    main()
