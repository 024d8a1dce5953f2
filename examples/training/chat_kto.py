"""TRL's KTOTrainer on conversations with a label that milldam has tokenized: it does not do that again.

    pip install milldam transformers trl
    milldam tokenize kto.jsonl --chat -o kto.milldam --tokenizer TOKENIZER
    milldam export kto.milldam --to hf -o kto/
    python examples/training/chat_kto.py kto/ TOKENIZER

An export of conversations with a `label` has `prompt_ids` and `completion_ids`: what TRL's own preparation makes, which
the KTOTrainer has no setting to leave out. Of `_prepare_dataset` only what depends on the batch size is left: the
completions that do not belong to their prompts, from which it estimates how far the model has moved.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from datasets import load_from_disk
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import KTOConfig, KTOTrainer


class PreparedKTOTrainer(KTOTrainer):  # type: ignore[misc,unused-ignore]
    """Takes data that is tokenized."""

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        def others(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            answers = batch["completion_ids"]
            return {"KL_completion_ids": [answers[-1], *answers[:-1]]}

        return dataset.map(others, batched=True, batch_size=args.per_device_train_batch_size)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder of `milldam export --to hf`")
    parser.add_argument("tokenizer", help="folder of the tokenizer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--output", default="kto-run", help="folder for checkpoints")
    return parser.parse_args()


def main() -> None:
    options = parse()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=4096,
    )  # fmt: skip
    settings = KTOConfig(
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
        seed=1,
    )
    model = LlamaForCausalLM(shape)
    trainer = PreparedKTOTrainer(
        model=model,
        # A model that was loaded by name is its own reference; this one has none.
        ref_model=copy.deepcopy(model),
        args=settings,
        train_dataset=load_from_disk(options.data),
        processing_class=tokenizer,
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']}: loss {float(entry['loss']):.6f}")


if __name__ == "__main__":
    main()
