"""HF Trainer on conversations: packed rows, or one by one and padded.

    pip install "milldam[torch]" transformers accelerate
    milldam tokenize chat.jsonl --chat -o chat.milldam --tokenizer TOKENIZER
    python examples/training/chat_trainer.py chat.milldam --steps 100 --output run/
    python examples/training/chat_trainer.py chat.milldam --steps 200 --output run/ --resume
    python examples/training/chat_trainer.py chat.milldam --padded

Packed: HF's models see from `position_ids`, which begin anew in each conversation, that none may see another (eager,
sdpa and flex attention; without a cache, as the Trainer has it). Padded: a batch is as long as its longest.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import milldam


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--padded", action="store_true", help="conversations one by one")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--output", default="chat-run", help="folder for checkpoints")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser.parse_args()


def main() -> None:
    options = parse()
    store = milldam.open(options.store)
    padded, packed = store.conversations, store.packed
    samples = padded(max_tokens=options.seq_len) if options.padded else packed(options.seq_len, form="hf")
    shape = LlamaConfig(
        vocab_size=store.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=options.seq_len, bos_token_id=None, eos_token_id=None,
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
    trainer = Trainer(model=LlamaForCausalLM(shape), args=settings, train_dataset=samples)
    trainer.train(resume_from_checkpoint=options.resume)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {float(entry['loss']):.6f}")


if __name__ == "__main__":
    main()
