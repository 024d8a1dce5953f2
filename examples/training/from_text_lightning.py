"""Lightning straight from text: its checkpoints hold where the data stands, though nothing was prepared.

    pip install "milldam[torch]" lightning
    python examples/training/from_text_lightning.py "data/*.jsonl" --tokenizer gpt2 --store corpus.milldam --steps 100
    python examples/training/from_text_lightning.py "data/*.jsonl" --tokenizer gpt2 --store corpus.milldam --resume

The end of the data is not known, so the trainer is told a number of steps, and `Endless` says that there is no end:
without a length Lightning asks for a batch ahead, and its checkpoints would be one batch too far.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import lightning
from lightning_module import Model
from torch import Tensor

import milldam
from milldam.torch import TensorBatches, tensors


class Endless:
    """Batches, more than will ever be taken."""

    def __init__(self, batches: TensorBatches) -> None:
        self._batches = batches
        self.state_dict, self.load_state_dict = batches.state_dict, batches.load_state_dict

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return 1 << 40


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+", help="files, folders, globs")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--store", required=True, help="where the store is made")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--checkpoint", default="checkpoint.ckpt")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    lightning.seed_everything(1, verbose=False)
    trainer = lightning.Trainer(
        max_steps=options.steps,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with milldam.open(options.text, tokenizer=options.tokenizer, store=options.store) as feed:
        ranks = {"rank": trainer.global_rank, "world_size": trainer.world_size}
        batches = feed.windows(options.seq_len).batches(options.batch_size, seed=1, epochs=None, **ranks)
        model = Model(feed.vocab_size, options.seq_len)
        trainer.fit(model, Endless(tensors(batches)), ckpt_path=options.checkpoint if options.resume else None)
        trainer.save_checkpoint(options.checkpoint)


if __name__ == "__main__":
    main()
