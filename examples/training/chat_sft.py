"""TRL's SFTTrainer on conversations that milldam has tokenized, masked and packed: it does none of that again.

    pip install milldam transformers trl
    milldam tokenize chat.jsonl --chat -o chat.milldam --tokenizer TOKENIZER
    milldam export chat.milldam --to hf -o packed-2048/ --seq-len 2048       # or without --seq-len: one by one
    python examples/training/chat_sft.py packed-2048/ TOKENIZER

An export has `input_ids` and `labels`, and packed rows `seq_lengths`: what TRL's own preparation would have made. Such
rows need `padding_free=True`, so that no conversation sees another.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_from_disk
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of `milldam export --to hf`")
    parser.add_argument("tokenizer", help="folder of the tokenizer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--output", default="sft-run", help="folder for checkpoints")
    return parser.parse_args()


def main() -> None:
    options = parse()
    data = load_from_disk(options.data)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=max(map(len, data["input_ids"])),
    )  # fmt: skip
    settings = SFTConfig(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        max_length=None,
        padding_free="seq_lengths" in data.column_names,
        dataset_kwargs={"skip_prepare_dataset": True},
        seed=1,
    )
    trainer = SFTTrainer(model=LlamaForCausalLM(shape), args=settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {float(entry['loss']):.6f}")


if __name__ == "__main__":
    main()
