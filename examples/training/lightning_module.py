"""Lightning: a module, and a data module that gives it batches of a store.

    pip install "milldam[torch]" lightning
    python examples/training/lightning_module.py corpus.milldam --steps 100 --checkpoint run.ckpt
    python examples/training/lightning_module.py corpus.milldam --steps 200 --checkpoint run.ckpt --resume

Lightning takes anything that can be iterated for a loader. What has a `state_dict`, as batches of milldam have, it puts
into its checkpoints, so a run goes on in the middle of an epoch with the batch that comes next.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from tiny_gpt import TinyGPT
from torch import Tensor

import milldam
from milldam.torch import TensorBatches, tensors


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--checkpoint", default="checkpoint.ckpt")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


class StoreData(lightning.LightningDataModule):
    """Windows of a store: nine tenths to train on, one to validate."""

    def __init__(self, path: str, *, batch_size: int, seq_len: int) -> None:
        super().__init__()
        self.store = milldam.open(path)
        self._batch_size = batch_size
        parts = self.store.split(train=0.9, val=...)
        self._train, self._val = (part.windows(seq_len) for part in parts.values())

    def train_dataloader(self) -> TensorBatches:
        return tensors(self._train.batches(self._batch_size, seed=1, drop_last=True, **self._ranks()))

    def val_dataloader(self) -> TensorBatches:
        return tensors(self._val.batches(self._batch_size, shuffle=False, **self._ranks()))

    def _ranks(self) -> dict[str, int]:
        return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}


class Model(lightning.LightningModule):
    def __init__(self, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        self.gpt = TinyGPT(vocab_size, seq_len)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        loss = self.gpt(*batch)
        self.print(f"step {self.global_step + 1}: loss {loss.item():.6f}")
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.log("held_back", self.gpt(*batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    options = parse()
    lightning.seed_everything(1, verbose=False)
    data = StoreData(options.store, batch_size=options.batch_size, seq_len=options.seq_len)
    trainer = lightning.Trainer(
        max_steps=options.steps,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model = Model(data.store.vocab_size, options.seq_len)
    trainer.fit(model, data, ckpt_path=options.checkpoint if options.resume else None)
    trainer.save_checkpoint(options.checkpoint)
    (result,) = trainer.validate(model, data, verbose=False)
    print(f"loss on what was held back: {result['held_back']:.6f}")


if __name__ == "__main__":
    main()
