"""`milldam chat-check` says what would be trained on, in sum and for the first conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from click.testing import CliRunner

from milldam.cli import main

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
ROWS: list[dict[str, Any]] = [{"messages": [USER, ANSWER]}, {"messages": [USER]}, {"messages": []}]
ROWS.append({"messages": [USER, ANSWER], "tools": "[{"})


def _run(folder: Path, *words: str, template: str = TEMPLATE) -> tuple[int, str]:
    (folder / "t.jinja").write_text(template)
    (folder / "chat.jsonl").write_text("\n".join([*map(json.dumps, ROWS), "no json"]))
    done = CliRunner().invoke(main, ["chat-check", str(folder / "t.jinja"), str(folder / "chat.jsonl"), *words])
    return done.exit_code, done.output


def test_the_first_conversation_is_shown_with_marks_and_all_are_counted(tmp_path: Path) -> None:
    """What is trained on stands in marks; what is refused is named with its place; for programs as JSON."""
    code, said = _run(tmp_path)
    assert code == 0
    assert "<|im_start|>assistant\n⟦Hello<|im_end|>\n⟧" in said
    assert "usable           1 (25.0%)" in said
    for reason in ("no_assistant, first row 2 of", "empty_conversation, first row 3 of", "bad_tools, first row 4 of"):
        assert f"1 {reason}" in said
    assert "chat.jsonl, line 5" in said
    found = json.loads(_run(tmp_path, "--json", "--limit", "1")[1])
    assert (found["rows"], found["usable"], found["tagged"], found["counts"]["turns_assistant"]) == (1, 1, False, 1)
    ((begin, end),) = found["first"]["trained"]
    assert found["first"]["text"][begin:end] == "Hello<|im_end|>\n"


def test_an_end_that_is_written_with_the_next_message_is_warned_of(tmp_path: Path) -> None:
    """The model would not learn to stop."""
    late = """{% for m in messages %}{% if not loop.first %}<|end|>{% endif %}<|{{ m.role }}|>\
{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|end|><|assistant|>{% endif %}"""
    warning = "no end of 1 trained turn is trained on"
    assert warning in _run(tmp_path, template=late)[1]
    assert warning not in _run(tmp_path)[1]


def test_a_template_that_can_not_be_proven_is_said_to_be_so(tmp_path: Path) -> None:
    """And the command fails."""
    code, said = _run(tmp_path, template="{% for m in messages %}{{ m.content }}{{ messages[-1].content }}{% endfor %}")
    assert code == 1
    assert "mask_not_proven" in said


def test_tables_and_tokenizers_folders_do_as_well(tmp_path: Path, demo_tokenizer: Path) -> None:
    """A template from the tokenizer's folder, with its special tokens; conversations from Parquet."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_bytes(demo_tokenizer.read_bytes())
    config = {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}" + TEMPLATE}
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config))
    pa.parquet.write_table(pa.Table.from_pylist(ROWS[:1]), tmp_path / "chat.parquet")
    words = ["chat-check", str(tmp_path / "model"), str(tmp_path / "chat.parquet"), "--json"]
    found = json.loads(CliRunner().invoke(main, words).output)
    assert found["first"]["text"].startswith("<s><|im_start|>user")
    assert found["usable"] == 1
