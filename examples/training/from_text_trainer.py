"""HF Trainer straight from text: no preprocessing step, the store makes itself while the Trainer trains.

    pip install "milldam[torch]" transformers accelerate
    python examples/training/from_text_trainer.py "data/*.jsonl" --tokenizer gpt2 --store corpus.milldam --steps 100
    python examples/training/from_text_trainer.py "data/*.jsonl" --tokenizer gpt2 --store corpus.milldam --resume

How many batches there are is not known yet, so the Trainer is told a number of steps. It gets whole batches: its own
sampler would have to know the end. On resume the data goes on from the step, without reading what lies before.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import milldam
from milldam.torch import BatchDataset


class BatchTrainer(Trainer):
    """Takes batches as they are."""

    def get_train_dataloader(self) -> DataLoader:
        # With a generator of its own it leaves alone the one that dropout draws from, which the Trainer restores.
        return DataLoader(self.train_dataset, batch_size=None, generator=torch.Generator())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="files, folders, globs")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--store", required=True, help="where the store is made")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--output", default="hf-run", help="folder for checkpoints")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser.parse_args()


def main() -> None:
    options = parse()
    with milldam.open(options.text, tokenizer=options.tokenizer, store=options.store) as feed:
        dataset = BatchDataset(feed.windows(options.seq_len, form="hf"), options.batch_size, seed=1, epochs=None)
        checkpoint = get_last_checkpoint(options.output) if options.resume else None
        if checkpoint is not None:
            dataset.load_state_dict(dataset.state_after(int(checkpoint.rpartition("-")[2])))
        shape = GPT2Config(
            vocab_size=feed.vocab_size, n_positions=options.seq_len, n_embd=64, n_layer=2, n_head=2,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        settings = TrainingArguments(
            output_dir=options.output,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            ignore_data_skip=True,
            learning_rate=1e-3,
            save_steps=options.save_every,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            seed=1,
        )
        torch.manual_seed(1)
        trainer = BatchTrainer(model=GPT2LMHeadModel(shape), args=settings, train_dataset=dataset)
        trainer.train(resume_from_checkpoint=checkpoint)
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {entry['loss']:.6f}")


if __name__ == "__main__":
    main()
