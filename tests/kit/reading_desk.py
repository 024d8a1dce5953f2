"""The desk at which a reader tries what a page shows: a folder with the files that our pages speak of."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
from tests.kit.jobs import DEMO, TOKENIZER, demo_texts, write_lines, zstd
from tests.kit.qa_recipe import tokenizer_json

_TOKENIZERS = ("tokenizer", "gpt2", "openai-community/gpt2", "qwen2.5", "Qwen/Qwen2.5-0.5B", "llama3")
_RULES = """
def clean(text):
    return text

def keep(text):
    return True
"""
_LENGTHS = """
def add_length(batch):
    return {"length": [len(text) for text in batch["text"]]}
"""
_KRILL = """
seq_len: 256
hub_tokenizer_id: tokenizer/
dataset_prepared_path: prepared
datasets: [{path: corpus.jsonl, split: train, text_column: text}]
"""
_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TRAIN = "import sys\nassert sys.argv[1:] == ['--lr', '1e-3']\n"


def lay_out(desk: Path) -> None:
    """Small data under every name that a page uses."""
    texts = demo_texts()
    shutil.copy(DEMO / "corpus.jsonl", desk)
    shutil.copy(DEMO / "notes.txt", desk / "corpus.txt")
    for name in _TOKENIZERS:
        (desk / name).mkdir(parents=True)
        shutil.copy(TOKENIZER, desk / name)
    _lay_out_text(desk, texts)
    _lay_out_tables(desk, texts)
    _lay_out_questions(desk)
    _lay_out_conversations(desk, texts)
    files = {"rules.py": _RULES, "lengths.py": _LENGTHS, "train.py": _TRAIN, "krill.yaml": _KRILL}
    for name, content in files.items():
        (desk / name).write_text(content)
    (desk / ".config/fish/completions").mkdir(parents=True)


def _lay_out_text(desk: Path, texts: list[str]) -> None:
    (desk / "poems.txt").write_text("\n\n".join(text.replace("\n\n", "\n") for text in texts[:20]), encoding="utf-8")
    (desk / "dump.txt").write_text("<|doc|>".join(texts[:10]) + "\n=====\n".join(texts[10:20]), encoding="utf-8")
    for name in ("forum", "scans", "dump-a", "held-out", "sample", "eval"):
        write_lines(desk / f"{name}.jsonl", texts[:30])
    (desk / "dump.gz").write_bytes(gzip.compress((desk / "sample.jsonl").read_bytes()))
    (desk / "corpus.jsonl.zst").write_bytes(zstd.compress((desk / "corpus.jsonl").read_bytes()))
    pages = (json.dumps({"page": {"body": text}}) for text in texts)
    (desk / "crawl.jsonl").write_text("\n".join(pages), encoding="utf-8")
    (desk / "data").mkdir()
    write_lines(desk / "data/part-0.jsonl", texts)
    (desk / "books").mkdir()
    for number, text in enumerate(texts[:16]):
        (desk / "books" / f"{number:02d}.txt").write_text(text, encoding="utf-8")


def _lay_out_tables(desk: Path, texts: list[str]) -> None:
    for folder in ("crawl", "crawl/a"):
        (desk / folder).mkdir()
        pa.parquet.write_table(pa.table({"content": texts[:40]}), desk / folder / "part-0.parquet")


def _lay_out_conversations(desk: Path, texts: list[str]) -> None:
    asked = [f"Tell me something about {text[:12]}." for text in texts[:40]]
    rows = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]}
        for prompt, text in zip(asked, texts, strict=False)
    ]
    (desk / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    pa.parquet.write_table(pa.Table.from_pylist(rows), desk / "chat.parquet")
    pairs = [{"prompt": prompt, "chosen": texts[at], "rejected": "No."} for at, prompt in enumerate(asked)]
    (desk / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    (desk / "template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    (desk / "model").mkdir()
    shutil.copy(TOKENIZER, desk / "model")
    (desk / "model/chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")


def _lay_out_questions(desk: Path) -> None:
    for name, kind in {"bert-base-uncased": "bert", "xlnet-base-cased": "xlnet"}.items():
        (desk / name).mkdir()
        (desk / name / "tokenizer.json").write_text(tokenizer_json(kind), encoding="utf-8")
    context = "the city of paris did pay 500 for a bridge in 1990 " * 60
    question = {"question": "what year did the city pay", "answers": [{"text": "1990", "answer_start": 46}]}
    numbered = [question | {"id": f"q{number}"} for number in range(12)]
    paragraphs = [{"context": context, "qas": [one]} for one in numbered]
    squad = {"version": "v2.0", "data": [{"title": "Paris", "paragraphs": paragraphs}]}
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        (desk / name).write_text(json.dumps(squad))
    (desk / "predictions.json").write_text(json.dumps({one["id"]: "1990" for one in numbered}))
    (desk / "null_odds.json").write_text(json.dumps({one["id"]: 0.0 for one in numbered}))
