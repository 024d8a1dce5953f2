"""HF Trainer: a GPT-2 from scratch on windows of a store.

    pip install "milldam[torch]" transformers accelerate
    python examples/training/hf_trainer.py corpus.milldam --steps 100 --output run/
    python examples/training/hf_trainer.py corpus.milldam --steps 200 --output run/ --resume

`form="hf"` gives `input_ids` and `labels` of the same tokens, as HF models want them. The Trainer brings its own
sampler, ranks and state; a resumed run jumps to its place without reading what lies before.
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import milldam


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--output", default="hf-run", help="folder for checkpoints")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser.parse_args()


def main() -> None:
    options = parse()
    store = milldam.open(options.store)
    parts = store.split(train=0.9, val=...)
    train, val = (part.windows(options.seq_len, form="hf") for part in parts.values())
    shape = GPT2Config(
        vocab_size=store.vocab_size, n_positions=options.seq_len, n_embd=64, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    settings = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=1e-3,
        save_steps=options.save_every,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=1,
    )
    torch.manual_seed(1)
    trainer = Trainer(model=GPT2LMHeadModel(shape), args=settings, train_dataset=train, eval_dataset=val)
    trainer.train(resume_from_checkpoint=options.resume)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {entry['loss']:.6f}")
    print(f"loss on what was held back: {trainer.evaluate()['eval_loss']:.6f}")


if __name__ == "__main__":
    main()
