"""`inspect`, `stats` and the report of a store of conversations say which tokens are trained on."""

from __future__ import annotations

import json
import os
import pty
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.kit.jobs import TOKENIZER, invoke, started

import milldam

_TEMPLATE = """{% for message in messages %}<{{ message.role }}>
{{ message.content }}<|endoftext|>
{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""
_ANSWERS = ["Hello you", "The mill stands at the brook 水車."]


def _turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def _made(folder: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    (folder / "t.jinja").write_text(_TEMPLATE)
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = folder / "s"
    done = invoke("tokenize", folder / "chat.jsonl", "--chat-template", folder / "t.jinja", "-o", out,
                  "--tokenizer", TOKENIZER, "--workers", 1)  # fmt: skip
    assert done.exit_code == 0, done.stderr
    return out


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return _made(tmp_path, [{"messages": _turns("Hi", _ANSWERS[0], "Where?", _ANSWERS[1])}])


def test_inspect_marks_what_is_trained_on(store: Path) -> None:
    """Without colours in marks, with the legend in the line above; all else is outside."""
    shown = invoke("inspect", store).stdout
    trained = sum(end - begin for begin, end in milldam.open(store).spans(0).tolist())
    assert f"{trained} trained on (in ⟦ ⟧)" in shown.splitlines()[0]
    found = re.findall(r"⟦(.*?)⟧", shown.replace("▕", "").replace("⏎", ""), flags=re.DOTALL)
    assert [one.strip() for one in found[1:]] == [f"{answer}<|endoftext|>" for answer in _ANSWERS]
    assert shown.count("▕") == len(re.findall(r"\[[\d ]+\]", invoke("inspect", store, "--ids").stdout))


def test_inspect_colours_what_is_trained_on(store: Path) -> None:
    """On a terminal what is trained on has a ground that nothing else has."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    environment.pop("NO_COLOR", None)
    with started("inspect", store, stdout=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        try:
            while part := os.read(ours, 1 << 16):
                seen += part
        except OSError:  # how a terminal ends on Linux
            pass
        process.wait()
    os.close(ours)
    green = re.findall(r"\x1b\[[\d;]*48;5;(?:34|40|22)m(.*?)\x1b\[0m", seen.decode(), flags=re.DOTALL)
    said = "".join(green).replace("⏎", "").replace("\r", "").split("<|endoftext|>")
    assert [one.strip() for one in said] == [*_ANSWERS, ""]
    assert "trained on (green)" in seen.decode() and "⟦" not in seen.decode()


def test_the_sides_of_a_pair_are_named(tmp_path: Path) -> None:
    """Documents of a pair say which side they are; stats count pairs."""
    pair = {"prompt": _turns("Hi"), "chosen": _turns("", "Good")[1:], "rejected": _turns("", "Bad")[1:]}
    out = _made(tmp_path, [pair])
    heads = [line for line in invoke("inspect", out).stdout.splitlines() if line.startswith("──")]
    assert "chosen side of pair 0" in heads[0] and "rejected side of pair 0" in heads[1]
    found = json.loads(invoke("stats", out, "--json").stdout)["chat"]
    assert (found["form"], found["pairs"], found["conversations"]) == ("preference", 1, 2)


def test_stats_tell_the_trained_share(store: Path) -> None:
    """Figures equal those counted from the stretches; a store of text has none of them."""
    found = json.loads(invoke("stats", store, "--json").stdout)
    opened = milldam.open(store)
    trained = sum(end - begin for begin, end in opened.spans(0).tolist())
    told = found["chat"]
    assert (told["conversations"], told["turns"], told["pairs"], told["trained_tokens"]) == (1, 4, 0, trained)
    assert (told["turns_user"], told["turns_assistant"], "turns_tool" in told) == (2, 2, False)
    assert told["trained_share"] == pytest.approx(trained / opened.tokens, abs=1e-4)
    assert "  trained_share:" in invoke("stats", store).stdout
