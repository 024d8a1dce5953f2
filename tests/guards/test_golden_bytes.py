"""What jobs make is frozen: the bytes of token stores, packed rows, tables, feature stores and exports.

`golden_bytes.json` has a hash for each file. A change here is a change of a format or of a result: it needs a reason in
docs/format.md or CHANGELOG.md. To write the file anew:
MILLDAM_WRITE_GOLDEN=1 pytest tests/guards/test_golden_bytes.py
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.kit.chat_jobs import make_conversations, write_messages, write_template
from tests.kit.jobs import DEMO, TOKENIZER, make_texts, wait_until, write_lines, zstd
from tests.kit.preprocess_jobs import giant_text, texts_with_copies
from tests.kit.qa_recipe import WORDS, tokenizer_json
from tests.kit.source_reading import write_texts

import milldam
from milldam import qa

GOLDEN = Path(__file__).with_name("golden_bytes.json")
NOT_FROZEN = {"run", "tokenizer.json"}
"""Work, not results; and what carries versions or paths."""
MANIFESTS = ("milldam.json", "milldam-table.json")


# ---- input ----


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One input of each kind, the same on every machine."""
    tmp_path = tmp_path_factory.mktemp("golden")
    texts = list(make_texts(400_000, seed=3))
    write_lines(tmp_path / "a.jsonl", texts)
    write_texts(tmp_path / "b.parquet", texts[:200], rows=100)
    (tmp_path / "c.txt").write_text("\n\n".join(texts[200:300]), encoding="utf-8")
    with (tmp_path / "d.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *([str(number), text] for number, text in enumerate(texts[:150]))])
    lines = write_lines(tmp_path / "copies.jsonl", texts_with_copies(1500, seed=5)).read_bytes()
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (tmp_path / "f.jsonl.zst").write_bytes(zstd.compress((tmp_path / "a.jsonl").read_bytes()))
    write_lines(tmp_path / "near.jsonl", _near_copies(random.Random(7), texts))
    write_lines(tmp_path / "giant.jsonl", [giant_text(9_000_000, seed=2), "short"])
    write_lines(tmp_path / "held-out.jsonl", texts_with_copies(60, seed=6))
    rng = random.Random(8)
    copied = [" ".join([*rng.choices(texts, k=1), item]) for item in texts[:40]] + texts[40:200]
    write_lines(tmp_path / "contaminated.jsonl", copied)
    write_lines(tmp_path / "items.jsonl", texts[:40])
    (tmp_path / "broken.jsonl").write_bytes(b'{"text": "one"}\n{"text": 1}\nnot json\n{"text": "caf\xe9"}\n' + lines)
    said = make_conversations(120, seed=9)
    write_messages(tmp_path / "chat.jsonl", said)
    pairs = [{"prompt": one[:1], "chosen": one[1:2], "rejected": two[1:2]} for one, two in pairwise(said)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    write_template(tmp_path)
    (tmp_path / "bert.json").write_text(tokenizer_json("bert"), encoding="utf-8")
    (tmp_path / "squad.json").write_text(json.dumps(_questions(random.Random(11))), encoding="utf-8")
    return tmp_path


def _near_copies(rng: random.Random, texts: list[str]) -> list[str]:
    made = [text for text in texts if len(text.split()) > 60][:200]
    for text in made[:60]:
        words = text.split()
        words[rng.randrange(len(words))] = "changed"
        made.append(" ".join(words))
    return made


def _questions(rng: random.Random) -> dict[str, Any]:
    paragraphs = []
    for number in range(40):
        words = rng.choices(WORDS, k=rng.randrange(5, 400))
        at = rng.randrange(len(words))
        start = len(" ".join(words[:at])) + (at > 0)
        answers = [{"text": words[at], "answer_start": start}] if number % 5 else []
        question = {"id": f"q{number}", "question": "what year did the city pay", "answers": answers}
        paragraphs.append({"context": " ".join(words), "qas": [question | {"is_impossible": not answers}]})
    return {"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}


# ---- jobs ----


def _tokenize(*inputs: str, **options: Any) -> Callable[[str], object]:
    return lambda out: milldam.tokenize(list(inputs), out, **{"tokenizer": TOKENIZER, "workers": 1} | options)


def _preprocess(*inputs: str, **keys: Any) -> Callable[[str], object]:
    config = {"datasets": list(inputs), "tokenizer": str(TOKENIZER), "shard_size": "100KB", "workers": 1} | keys
    return lambda out: milldam.preprocess(config | {"out": out})


def _count(batch: dict[str, list[Any]]) -> dict[str, list[int]]:
    return {"length": [len(text) for text in batch["text"]]}


def _export(format: str, name: str, **options: Any) -> Callable[[str], object]:
    def make(out: str) -> object:
        _preprocess("a.jsonl", "b.parquet")("store")
        Path(out).mkdir()
        return milldam.export("store", format, f"{out}/{name}", **options)

    return make


def _import(out: str) -> object:
    _tokenize("a.jsonl")("plain")
    milldam.export("plain", "npy", "flat.npy")
    return milldam.import_tokens("flat.npy", out, eos=0, tokenizer=str(TOKENIZER), shard_size="100KB")


def _qa(**options: Any) -> Callable[[str], object]:
    return lambda out: qa.prepare(
        "squad.json", out, tokenizer="bert.json", max_seq_length=64, overlap=16, workers=1, **options
    )


def _second_run_on_an_index(out: str) -> object:
    index = {"dedup": {"method": "exact", "index": "seen"}}
    _preprocess("e.jsonl.gz", **index)("seen-first")
    return _preprocess("e.jsonl.gz", "a.jsonl", **index)(out)


def _feed(out: str) -> object:
    """Made in the order in which it is read, then finished."""
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "workers": 1, "memory": "1GB", "shard_size": "100KB"}
    with milldam.open("a.jsonl", store=out, **options) as feed:
        for _ in feed.windows(64).batches(16, seed=1):
            pass
        wait_until(lambda: feed.finished)
    return feed


BEST_FIT = {"packing": {"strategy": "best_fit", "write": True}, "seq_len": 256}
CHAT = {"template": "template.jinja"}
TWO: dict[str, Any] = {"workers": 2}
"""For some jobs: elsewhere it is tested that the number changes no byte."""
JOBS: dict[str, Callable[[str], object]] = {
    "tokenize": _tokenize(
        *("a.jsonl", "b.parquet", "c.txt", "d.csv", "e.jsonl.gz", "f.jsonl.zst"), shard_size="100KB", **TWO
    ),
    "tokenize paragraphs": _tokenize("c.txt", documents="paragraph", bos="auto", eos="none"),
    "tokenize plain": _tokenize(str(DEMO / "corpus.jsonl"), special_text="plain", limit=50),
    "tokenize giant": _tokenize("giant.jsonl"),
    "preprocess": _preprocess("a.jsonl", "e.jsonl.gz"),
    "near, splits, rows": _preprocess("near.jsonl", dedup="near", splits={"val": 0.1, "test": 0.1}, **BEST_FIT, **TWO),
    "normalised, wrapped": _preprocess(
        "e.jsonl.gz",
        dedup={"normalize": True},
        packing={"strategy": "wrapped", "write": True, "pad_last": True},
        seq_len=128,
    ),
    "exact tokens": _preprocess("a.jsonl", splits={"val_tokens": 5_000}, write_dropped=True),
    "weights and limits": _preprocess(
        *(
            {"path": "a.jsonl", "weight": 0.5},  # type: ignore[arg-type]
            {"path": "near.jsonl", "weight": 1.5, "max_tokens": 20_000},
            {"path": "b.parquet", "split": "train[10%:50%]"},
        ),
        validation="held-out.jsonl",
        filters={"min_characters": 50, "gopher_repetition": True},
        clean={"unicode": "NFC", "whitespace": True},
    ),
    "rejects, dropped": _preprocess("broken.jsonl", dedup="exact", write_dropped=True),
    "decontaminated": _preprocess("contaminated.jsonl", decontaminate="items.jsonl", dedup="near"),
    "second run on an index": _second_run_on_an_index,
    "chat": _tokenize("chat.jsonl", chat=CHAT),
    "pairs": _tokenize("pairs.jsonl", chat=CHAT),
    "feed": _feed,
    "map": lambda out: milldam.map(["a.jsonl", "c.txt"], _count, out, shard_size="100KB", workers=1, columns=["text"]),
    "qa": _qa(),
    "qa, memory tokens": _qa(memory_tokens=4, first="context", padding_side="left"),
    "import": _import,
    "export npy": _export("npy", "x.npy"),
    "export nanogpt": _export("nanogpt", "x.bin"),
    "export megatron": _export("megatron", "x"),
    "export parquet": _export("parquet", "x", seq_len=128),
    "export hf": _export("hf", "x"),
    "export mds": _export("mds", "x"),
}


# ---- what is frozen ----


def frozen(out: Path) -> dict[str, str]:
    """A hash for each file that holds results; of a manifest its totals and fingerprint alone."""
    found: dict[str, str] = {}
    for path in sorted(out.rglob("*")):
        # The hash in the name of an audit file is that of its bytes, which for zstd depend on the library.
        name = re.sub(r"^(rejects|dropped|contamination)-\w{32}", r"\1", str(path.relative_to(out)))
        if not path.is_file() or {name.split("/")[0], path.name} & NOT_FROZEN or "milldam-export" in name:
            continue
        if path.name in MANIFESTS:
            manifest = json.loads(path.read_bytes())
            found[name] = json.dumps({key: manifest.get(key) for key in ("totals", "fingerprint", "sources")})
        elif path.suffix == ".parquet":
            found[name] = _rows_of_parquet(path)
        elif path.suffix == ".zst":  # each version of the library packs in its own way
            found[name] = xxhash.xxh3_64_hexdigest(zstd.decompress(path.read_bytes()))
        else:
            found[name] = xxhash.xxh3_64_hexdigest(path.read_bytes())
    if any(name.startswith("rows-") for name in found):  # tables: names carry the function's hash, content does not
        return {f"rows {k}": found[name] for k, name in enumerate(_rows_in_order(out))}
    return found


def _rows_of_parquet(path: Path) -> str:
    """Of the values: the writer puts its version into the bytes."""
    import pyarrow.parquet as pq

    return xxhash.xxh3_64_hexdigest(json.dumps(pq.read_table(path).to_pydict()).encode())


def _rows_in_order(out: Path) -> list[str]:
    return [shard["name"] for shard in json.loads((out / "milldam-table.json").read_bytes())["shards"]]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_makes_the_bytes_it_always_made(
    job: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal input and settings give equal bytes: today, and after every change of the house."""
    monkeypatch.chdir(inputs)
    JOBS[job](str(tmp_path / "out"))
    made = frozen(tmp_path / "out")
    golden = json.loads(GOLDEN.read_bytes()) if GOLDEN.exists() else {}
    if os.environ.get("MILLDAM_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(golden | {job: made}, indent=1, sort_keys=True) + "\n")
    else:
        assert made == golden[job]
