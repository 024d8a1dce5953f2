"""The training examples run as they are, on a tiny store; stopped and resumed, their losses are the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.kit.jobs import DEMO, TOKENIZER

import milldam

EXAMPLES = Path(__file__).parents[2] / "examples" / "training"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus that comes with milldam: 23,862 tokens."""
    folder = tmp_path_factory.mktemp("examples") / "corpus.milldam"
    milldam.tokenize(DEMO / "corpus.jsonl", folder, tokenizer=TOKENIZER, workers=1)
    return folder


def run(folder: Path, name: str, *arguments: object, launcher: tuple[str, ...] | list[str] = ()) -> str:
    """What an example prints."""
    command = [sys.executable, *launcher, str(EXAMPLES / name), *(str(one) for one in arguments)]
    # One thread is enough for a tiny model, and gives the same sums everywhere.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> dict[int, float]:
    """The loss of every step that was printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)", output, re.MULTILINE)}


FROM_TEXT = [DEMO / "corpus.jsonl", "--tokenizer", TOKENIZER, "--store", "fed.milldam"]
HF = ("torch", "transformers", "accelerate")


@pytest.mark.slow
def test_a_nanogpt_loop_goes_on_with_the_same_losses(store: Path, tmp_path: Path) -> None:
    """Killed after its checkpoint and resumed, the loop is the one that never stopped."""
    pytest.importorskip("torch")
    options = [store, "--steps", 8, "--checkpoint-every", 5]
    whole = losses(run(tmp_path, "nanogpt_loop.py", *options))
    assert list(whole) == list(range(1, 9))
    assert losses(run(tmp_path, "nanogpt_loop.py", *options, "--resume")) == {step: whole[step] for step in (6, 7, 8)}


@pytest.mark.slow
def test_ranks_share_the_data_and_their_number_may_change(store: Path, tmp_path: Path) -> None:
    """Two ranks train on what one does, so one goes on where two stopped."""
    pytest.importorskip("torch")
    options = [store, "--steps", 4, "--checkpoint-every", 3]
    two = run(tmp_path, "distributed.py", *options, launcher=TORCHRUN)
    one = run(tmp_path, "distributed.py", *options, "--resume")
    assert list(losses(two)) == [1, 2, 3, 4]
    assert losses(one) == pytest.approx({4: losses(two)[4]}, abs=1e-4)
    assert "32 samples seen by 2 ranks" in two and "32 samples seen by 1 ranks" in one


@pytest.mark.slow
def test_packed_rows_keep_documents_apart_in_both_ways(store: Path, tmp_path: Path) -> None:
    """flex_attention by the document ids gives the loss of a mask for every pair of tokens."""
    pytest.importorskip("torch")
    output = run(tmp_path, "packed_attention.py", store, "--steps", 2)
    assert list(losses(output)) == [1, 2]
    flexible, dense = re.findall(r"attention: loss ([\d.]+)", output)
    assert float(flexible) == pytest.approx(float(dense), abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["hf_trainer.py", "from_text_trainer.py"])
def test_hf_trainer_goes_on_with_the_same_losses(store: Path, tmp_path: Path, example: str) -> None:
    """HF's own checkpoints, over windows of a store with its sampler, and over whole batches of a feed."""
    for needed in HF:
        pytest.importorskip(needed)
    data = [store] if example == "hf_trainer.py" else FROM_TEXT
    options = [*data, "--steps", 6, "--save-every", 4, "--output", "run"]
    whole = losses(run(tmp_path, example, *options))
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    assert losses(run(tmp_path, example, *options, "--resume")) == whole
    assert list(whole) == list(range(1, 7))


@pytest.mark.slow
@pytest.mark.parametrize("example", ["lightning_module.py", "from_text_lightning.py"])
def test_lightning_goes_on_in_the_middle_of_an_epoch(store: Path, tmp_path: Path, example: str) -> None:
    """Lightning keeps the position of the batches in its checkpoint, over epochs of five batches."""
    pytest.importorskip("lightning")
    options = [store, "--batch-size", 64] if example == "lightning_module.py" else FROM_TEXT
    whole = losses(run(tmp_path, example, *options, "--steps", 7))
    run(tmp_path, example, *options, "--steps", 4, "--checkpoint", "four.ckpt")
    resumed = run(tmp_path, example, *options, "--steps", 7, "--checkpoint", "four.ckpt", "--resume")
    assert losses(resumed) == {step: whole[step] for step in range(5, 8)}


@pytest.mark.slow
def test_jax_takes_numpy_batches_and_goes_on_from_a_json_file(store: Path, tmp_path: Path) -> None:
    """Without torch, int32 arrays are enough."""
    pytest.importorskip("jax")
    options = [store, "--steps", 4, "--state", "state.json"]
    assert list(losses(run(tmp_path, "jax_numpy.py", *options))) == [1, 2, 3, 4]
    assert "goes on after 32 samples" in run(tmp_path, "jax_numpy.py", *options)


@pytest.mark.slow
def test_a_loop_trains_straight_from_text(tmp_path: Path) -> None:
    """Resumed when the store is finished, or begun anew when it is gone, the losses are the same."""
    pytest.importorskip("torch")
    options = [*FROM_TEXT, "--steps", 4, "--checkpoint-every", 3]
    whole = losses(run(tmp_path, "from_text.py", *options))
    assert list(whole) == [1, 2, 3, 4]
    shutil.rmtree(tmp_path / "fed.milldam")
    assert losses(run(tmp_path, "from_text.py", *options, "--resume")) == {4: whole[4]}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 conversations of up to 120 tokens, 40 pairs of answers, and both as HF datasets; the same answers,
    each with a label; a tokenizer of their ids."""
    from tests.kit.chat_stores import Chat, chat_store, random_chat

    folder = tmp_path_factory.mktemp("chats")
    rng = np.random.default_rng(1)
    every = [random_chat(rng, int(length), 500) for length in rng.integers(20, 120, 80)]
    chat_store(folder / "chat", [every[:40], every[40:]])
    answers = [(chat, rng.integers(1, 500, 10).tolist()) for chat in every[:40] for _ in range(2)]
    pairs = [Chat(chat.ids + ids, [False] * len(chat.ids) + [True] * 10) for chat, ids in answers]
    chat_store(folder / "pairs", [pairs], pairs=True)
    milldam.export(folder / "chat", "hf", folder / "packed", seq_len=128, workers=1)
    milldam.export(folder / "chat", "hf", folder / "single", workers=1)
    milldam.export(folder / "pairs", "hf", folder / "preferences", workers=1)
    chat_store(folder / "kto", [pairs], labels=[number % 2 for number in range(80)])
    milldam.export(folder / "kto", "hf", folder / "judged", workers=1)
    (folder / "tokenizer").mkdir()
    words = {f"w{number}": number for number in range(1000)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    whole = {"version": "1.0", "added_tokens": [], "model": model}
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(whole))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.slow
def test_a_plain_loop_trains_on_conversations(chats: Path, tmp_path: Path) -> None:
    """Stopped at a checkpoint and resumed, the losses are the same; attention by cu_seqlens sees what a mask shows."""
    pytest.importorskip("torch")
    options = [chats / "chat", "--seq-len", 128, "--steps", 4, "--checkpoint-every", 3]
    output = run(tmp_path, "chat_torch.py", *options)
    whole = losses(output)
    assert list(whole) == [1, 2, 3, 4]
    told = dict(line.split(": loss ") for line in output.splitlines() if line.startswith("attention by "))
    assert float(told["attention by lengths"]) == pytest.approx(float(told["attention by a mask"]), abs=2e-4)
    assert losses(run(tmp_path, "chat_torch.py", *options, "--resume")) == {4: whole[4]}


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--padded",)])
def test_the_trainer_trains_on_conversations(chats: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("accelerate")
    output = run(tmp_path, "chat_trainer.py", chats / "chat", "--seq-len", 128, "--steps", 2, *options)
    assert list(losses(output)) == [1, 2]


@pytest.mark.parametrize(
    ("example", "data"), [("sft", "packed"), ("sft", "single"), ("dpo", "preferences"), ("kto", "judged")]
)
def test_trl_takes_exports_as_they_are(chats: Path, tmp_path: Path, example: str, data: str) -> None:
    pytest.importorskip("trl")
    output = run(tmp_path, f"chat_{example}.py", chats / data, chats / "tokenizer", "--steps", 2)
    assert list(losses(output)) == [1, 2]
