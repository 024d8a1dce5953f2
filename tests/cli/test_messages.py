"""Messages that a new user meets: what is wrong, where, and what to do about it."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from pathlib import Path

import pytest
from tests.kit.chat_stores import Chat, chat_store
from tests.kit.jobs import MILLDAM, TOKENIZER, invoke, run_here, run_milldam

import milldam
from milldam.errors import ConfigError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "one of two texts"}\n{"text": "and the other"}\n')
    return path


def test_a_budget_beyond_the_machine_is_named_in_the_plan(text: Path, tmp_path: Path) -> None:
    """The budget holds, but cannot protect the machine."""
    done = run_here("tokenize", text, "-o", tmp_path / "out", "--tokenizer", TOKENIZER, "--memory", "900TB")
    assert "Memory: 900 TB (given, more than the " in done.output


def test_status_of_an_ended_run_shows_the_command_to_resume_it(tmp_path: Path) -> None:
    """As it was typed, quoted for a shell, and the folder that it was typed in."""
    (tmp_path / "two words.jsonl").write_text('{"text": "one"}\n{"text": \n')
    asked = ("tokenize", "two words.jsonl", "-o", "out", "--tokenizer", TOKENIZER, "--strict", "--workers", "1")
    run_milldam(*asked, code=3, cwd=tmp_path)
    command = shlex.join(["milldam", *map(str, asked)])
    shown = invoke("status", tmp_path / "out").stdout
    assert f"To resume, run the same command again in {tmp_path}:\n  {command}\n" in shown
    assert "again:\n" in run_milldam("status", "out", cwd=tmp_path).stdout
    (tmp_path / "two words.jsonl").write_text('{"text": "one"}\n')
    run_milldam(*shlex.split(command)[1:], cwd=tmp_path)
    assert MILLDAM and len(milldam.open(tmp_path / "out")) == 1


@pytest.mark.parametrize("open_it", ["open", "tokenize"])
def test_a_missing_package_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, open_it: str
) -> None:
    """For input as for stores."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    with pytest.raises(ConfigError, match=r'pip install "milldam\[s3\]"'):
        if open_it == "open":
            milldam.open("s3://bucket-of-nobody/x.milldam")
        else:
            milldam.tokenize("s3://bucket-of-nobody/x.jsonl", tokenizer=TOKENIZER, out=tmp_path / "out")


def test_an_export_says_that_a_conversation_is_too_long(tmp_path: Path) -> None:
    """It is no tail of the store, and a longer row would hold it."""
    chat_store(tmp_path / "made", [[Chat([5] * length, [True] * length) for length in (10, 100)]])
    done = run_here("export", tmp_path / "made", "--to", "hf", "-o", tmp_path / "hf", "--seq-len", "64")
    assert "1 documents left out, 100 tokens left out" in done.output


CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_questions_and_answers_are_kept_by_doing_as_the_message_says(tmp_path: Path, kind: str) -> None:
    """Each message names the option that leads on, and at the end nothing is lost."""
    rows = [{"prompt": "What is one?", "completion": "Uno."}, {"prompt": "What is two?", "completion": "Dos."}]
    other = [{"question": one["prompt"], "reply": one["completion"]} for one in rows]
    paths = []
    for name, some in (("a", rows), ("b", other)):
        paths.append(tmp_path / f"{name}.{kind}")
        lines = [",".join(some[0]), *(",".join(one.values()) for one in some)]
        paths[-1].write_text(json.dumps(some) if kind == "json" else "\n".join(lines) + "\n")
    (tmp_path / "t.jinja").write_text(CHATML)
    given = ["-o", tmp_path / "out", "--tokenizer", TOKENIZER]
    assert (
        "keep them all, as conversations by a chat template: --chat"
        in run_here("tokenize", paths[0], *given, code=3).stderr
    )
    given.append("--chat")
    assert "Jinja file: --chat-template" in run_here("tokenize", paths[0], *given, code=2).stderr
    without = tmp_path / "model"
    without.mkdir()
    assert "a Jinja file: TEMPLATE" in run_here("chat-check", without, paths[0], code=2).stderr
    given += ["--chat-template", tmp_path / "t.jinja"]
    run_here("tokenize", paths[0], *given)
    told = run_here("tokenize", paths[1], *given, "--overwrite", code=3).stderr
    assert "--chat-form" in told
    assert "--chat-column prompt=question" in told
    named = ["--chat-column", "prompt=question", "--chat-column", "completion=reply"]
    run_here("tokenize", paths[1], *given[:1], tmp_path / "named", *given[2:], *named)
    made = [milldam.open(tmp_path / name) for name in ("out", "named")]
    for store in made:
        texts = [store.decode(store[number]) for number in range(2)]
        assert texts[1] == "<|im_start|>user\nWhat is two?<|im_end|>\n<|im_start|>assistant\nDos.<|im_end|>\n"
        assert [store.decode(store[n][slice(*store.spans(n)[0])]) for n in range(2)] == [
            f"{answer}<|im_end|>\n" for answer in ("Uno.", "Dos.")
        ]
    unknown = run_here("tokenize", paths[1], *given, "--chat-column", "prommt=question", "--overwrite", code=2).stderr
    assert "--chat-column: no column is called 'prommt'" in unknown
