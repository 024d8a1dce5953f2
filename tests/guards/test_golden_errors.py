"""Exit codes and messages of common mistakes are frozen, as a user sees them.

They change on purpose only: `golden_errors.json` is written anew, and its diff read, by
MILLDAM_WRITE_GOLDEN=1 pytest tests/guards/test_golden_errors.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from tests.kit.jobs import DEMO, TOKENIZER, invoke

GOLDEN = Path(__file__).with_name("golden_errors.json")
MISTAKES = (
    "tokenize",
    "tokenize missing.jsonl --tokenizer tokenizer.json -o out",
    "tokenize corpus.jsnol --tokenizer tokenizer.json -o out",
    "tokenize corpus.jsonl --tokenizer missing.json -o out",
    "tokenize corpus.jsonl --tokenizer tokenizer.json -o out --memory 512",
    "tokenize corpus.jsonl --tokenizer tokenizer.json -o out --memory 20MB",
    "tokenize corpus.jsonl --tokenizer tokenizer.json -o out --workers 0",
    "tokenize corpus.jsonl --tokenizer tokenizer.json -o out --text-column body",
    "tokenize corpus.jsonl --tokenizer tokenizer.json -o out --eos <none-such>",
    "tokenize corpus.jsonl --tokenizer tokenizer.json -o out --force",
    "tokenize empty.jsonl --tokenizer tokenizer.json -o out",
    "tokenize image.jsonl --tokenizer tokenizer.json -o out",
    "tokenize broken.jsonl --tokenizer tokenizer.json -o out --strict",
    "tokenize answers.csv --tokenizer tokenizer.json -o out",
    "tokenize messages.jsonl --tokenizer tokenizer.json -o out",
    "tokenize messages.jsonl --tokenizer tokenizer.json -o out --chat",
    "tokenize corpus.jsonl --tokenizer tokenizer.json -o made",
    "preprocess missing.yaml",
    "preprocess unknown-key.yaml",
    "preprocess wrong-value.yaml",
    "preprocess not-yaml.yaml",
    "preprocess good.yaml --set dedup=nearly",
    "plan wrong-value.yaml",
    "stats missing",
    "stats corpus.jsonl",
    "verify missing",
    "verify damaged",
    "inspect made --documents 0",
    "inspect made --split val",
    "status missing",
    "feed made --batch-size 0",
    "export made --to csv -o out.csv",
    "export made --to npy -o made",
    "import corpus.jsonl -o out",
    "map nothing.py:f corpus.jsonl -o out",
    "map functions.py:missing corpus.jsonl -o out",
    "map functions.py:fails corpus.jsonl -o out",
    "qa corpus.jsonl -o out --tokenizer tokenizer.json",
    "train-tokenizer good.yaml --vocab-size 3",
    "dedup-index missing",
    "report missing",
    "nonsense",
)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the mistakes are made on."""
    desk = tmp_path_factory.mktemp("mistakes")
    shutil.copy(DEMO / "corpus.jsonl", desk)
    shutil.copy(TOKENIZER, desk / "tokenizer.json")
    (desk / "empty.jsonl").touch()
    (desk / "image.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8)
    (desk / "broken.jsonl").write_text('{"text": "one"}\nnot json\n')
    (desk / "answers.csv").write_text("prompt,completion\nWhat is it?,A test.\n")
    (desk / "messages.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    (desk / "functions.py").write_text("def fails(batch):\n    raise ValueError('no such luck')\n")
    good = {"datasets": "corpus.jsonl", "tokenizer": "tokenizer.json", "out": "out"}
    (desk / "good.yaml").write_text(json.dumps(good))
    (desk / "unknown-key.yaml").write_text(json.dumps(good | {"dedupe": "exact"}))
    (desk / "wrong-value.yaml").write_text(json.dumps(good | {"seq_len": "many"}))
    (desk / "not-yaml.yaml").write_text("datasets: [corpus.jsonl\n")
    before = Path.cwd()
    os.chdir(desk)
    try:
        assert invoke("tokenize", "corpus.jsonl", "--tokenizer", "tokenizer.json", "-o", "made").exit_code == 0
    finally:
        os.chdir(before)
    (desk / "made/run/receipt.json").unlink(missing_ok=True)
    shutil.copytree(desk / "made", desk / "damaged")
    shard = next((desk / "damaged").glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    return desk


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_as_it_was(mistake: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code and the message: what is wrong, where, and what to do."""
    monkeypatch.chdir(desk)
    shutil.rmtree("out", ignore_errors=True)
    monkeypatch.setenv("COLUMNS", "200")
    done = invoke(*mistake.split())
    message = done.stderr.replace(str(desk), "DESK")
    message = re.sub(r"-[0-9a-f]{32}\b", "-HASH", re.sub(r"\d+ ?MB|\d+\.\d+ s|\d+(\.\d+)? (GB|MB)", "N", message))
    found = {"exit": done.exit_code, "message": re.sub(r"(?s)^.*?(?=milldam: |Error: )", "", message).strip()}
    golden = json.loads(GOLDEN.read_bytes()) if GOLDEN.exists() else {}
    if os.environ.get("MILLDAM_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(golden | {mistake: found}, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    else:
        assert found == golden[mistake]
