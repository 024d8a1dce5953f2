"""What a model learns from packed conversations is what it learns from the same ones, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.kit.chat_stores import chat_store, random_chat

from milldam.loader.stores import Store

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from milldam.torch import tensors  # noqa: E402 - after torch is known to be there

SEQ_LEN = 64


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    rng = np.random.default_rng(3)
    every = [random_chat(rng, int(length)) for length in rng.integers(2, SEQ_LEN + 1, 40)]
    return chat_store(tmp_path_factory.mktemp("chat") / "s", [every[:15], every[15:]])


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> Any:
    """A tiny Llama: rotary positions, and attention as HF makes it from position ids."""
    torch.manual_seed(1)
    shape = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=SEQ_LEN, attn_implementation=request.param,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(shape).to(torch.float64).eval()


def mean_and_gradient(model: Any, batches: Any) -> tuple[float, list[Any]]:
    """The mean loss of all targets of some batches, and what it makes of the weights."""
    model.zero_grad()
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch}
        # With a cache, HF does not look for packed sequences in position ids.
        logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        targets += int((labels != -100).sum())
    loss = total / targets
    loss.backward()
    return loss.item(), [weight.grad.clone() for weight in model.parameters()]


def one_by_one(store: Store) -> list[dict[str, Any]]:
    """Each conversation as a batch of its own, from its tokens and stretches alone."""
    batches = []
    for number, document in enumerate(store):
        ids = torch.from_numpy(document.astype(np.int64))
        labels = torch.full_like(ids, -100)
        for first, stop in store.spans(number).tolist():
            labels[first:stop] = ids[first:stop]
        batches.append({"input_ids": ids[None], "labels": labels[None]})
    return batches


def test_packed_rows_give_the_loss_of_the_same_conversations_one_by_one(store: Store, model: Any) -> None:
    """Masked, positions from 0 on, no conversation sees another; gradients, too."""
    expected, gradients = mean_and_gradient(model, one_by_one(store))
    rows = store.packed(SEQ_LEN, form="hf")
    assert len(rows) < len(store)
    found, own = mean_and_gradient(model, tensors(rows.batches(4)))
    assert found == pytest.approx(expected, rel=1e-9)
    for mine, theirs in zip(own, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_padded_conversations_give_the_same_loss(store: Store, model: Any) -> None:
    expected, _ = mean_and_gradient(model, one_by_one(store))
    found, _ = mean_and_gradient(model, tensors(store.conversations(length_groups=8).batches(8)))
    assert found == pytest.approx(expected, rel=1e-9)
