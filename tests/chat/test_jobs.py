"""Conversations through whole jobs: what is in the store, whoever made it, however often it was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tests.kit.chat_jobs import TEMPLATE, make_conversations, write_messages, write_template
from tests.kit.jobs import TOKENIZER, run_here, set_aside

import milldam
from milldam.errors import ConfigError, InputError, StoreError


def expected(messages: list[dict[str, Any]]) -> tuple[list[int], list[list[int]]]:
    """(ids, stretches) of a conversation by the template above."""
    text, stretches = "", []
    for message in messages:
        text += f"<{message['role']}>\n"
        begin = len(text)
        text += message["content"]
        if message["role"] == "assistant":
            text += "<|endoftext|>"
            stretches.append((begin, len(text)))
        text += "\n"
    encoded = tokenizers.Tokenizer.from_file(str(TOKENIZER)).encode(text, add_special_tokens=False)
    holds = encoded.char_to_token
    return encoded.ids, [[holds(begin), holds(end - 1) + 1] for begin, end in stretches]


def found(store: milldam.Store) -> list[tuple[list[int], list[list[int]]]]:
    return [(document.tolist(), store.spans(number).tolist()) for number, document in enumerate(store)]


def make(tmp_path: Path, path: Path, out: str = "out", **options: Any) -> milldam.Store:
    chat = {"template": str(write_template(tmp_path))} | options.pop("chat", {})
    return milldam.tokenize(path, tmp_path / out, tokenizer=TOKENIZER, chat=chat, **options)


def preprocess(tmp_path: Path, path: Path, out: str = "out", **settings: Any) -> milldam.Store:
    chat = {"template": str(write_template(tmp_path))} | settings.pop("chat", {})
    base = {"datasets": str(path), "tokenizer": str(TOKENIZER), "out": str(tmp_path / out), "chat": chat}
    return milldam.preprocess(base | settings)


# ---- what is in the store ----


def test_tokens_and_stretches_are_those_of_hf(tmp_path: Path) -> None:
    """Each conversation gives the ids of its text, and its answers are the stretches; nothing is put around it."""
    conversations = make_conversations(200)
    store = make(tmp_path, write_messages(tmp_path / "chat.jsonl", conversations))
    assert found(store) == [expected(one) for one in conversations]
    chat = store.manifest.chat
    assert store.has_spans and chat is not None
    trained = sum(end - begin for number in range(len(store)) for begin, end in store.spans(number))
    assert (chat["form"], chat["pairs"], chat["conversations"]) == ("messages", False, 200)
    assert (chat["turns"], chat["trained_tokens"]) == (sum(map(len, conversations)), trained)
    run_here("verify", tmp_path / "out")


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_pairs_stay_together(tmp_path: Path) -> None:
    """Chosen and rejected are documents 2k and 2k + 1, in every split, whatever is dropped."""
    rows = [
        {"prompt": f"Question {n % 80}?", "chosen": f"Good {n % 80}.", "rejected": "Bad." * (1 + n % 80)}
        for n in range(160)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    store = preprocess(tmp_path, path, splits={"val": 0.3}, chat={"max_tokens": 60})
    assert store.manifest.chat is not None and store.manifest.chat["pairs"]
    tally = store.manifest.tally
    assert tally.dropped["dedup"] == {"duplicate": 80}
    assert tally.dropped["encode"]["too_long"] > 0
    assert tally.read == 160 == tally.documents + tally.dropped_count
    assert len(store) == 2 * tally.documents
    for split in ("train", "val"):
        part = milldam.open(tmp_path / "out", split=split)
        texts = [part.decode(document) for document in part]
        assert texts
        for chosen, rejected in zip(texts[::2], texts[1::2], strict=True):
            question = chosen.split("\n")[1]
            assert rejected.split("\n")[1] == question
            assert "Good" in chosen and "Bad" in rejected


def test_labels_lie_beside_the_tokens(tmp_path: Path) -> None:
    """KTO's label is one byte a document."""
    rows = [{"prompt": f"Q{n}", "completion": f"A{n}", "label": n % 3 == 0} for n in range(30)]
    path = tmp_path / "kto.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    store = make(tmp_path, path)
    assert [store.label(n) for n in range(30)] == [int(n % 3 == 0) for n in range(30)]
    run_here("verify", tmp_path / "out")


# ---- what can't be used ----


def test_what_is_no_conversation_is_rejected_with_its_line(tmp_path: Path) -> None:
    """Broken JSON, missing roles, blank lines, a template that says no: counted, named, nothing else lost."""
    good = {"messages": [_said("user", "Hi"), _said("assistant", "Hello")]}
    lines = [
        json.dumps(good),
        "",
        '{"messages": [{"role": "user"',
        json.dumps({"messages": []}),
        json.dumps({"messages": [{"content": "who says that?"}]}),
        "",
        json.dumps({"messages": [_said("fail", "x"), _said("assistant", "y")]}),
        json.dumps({"messages": [_said("user", "nobody answers")]}),
        json.dumps({"messages": [_said("user", [{"type": "image_url", "image_url": "u"}]), _said("assistant", "y")]}),
        json.dumps(good),
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    store = make(tmp_path, path)
    assert found(store) == [expected(good["messages"])] * 2
    told = {one["line"]: one["reason"] for one in set_aside(tmp_path / "out")}
    assert told == {
        3: "bad_json",
        4: "empty_conversation",
        5: "no_role",
        7: "template_refused",
        8: "no_assistant",
        9: "has_image",
    }
    (refused,) = [one for one in set_aside(tmp_path / "out") if one["reason"] == "template_refused"]
    assert "No such role: fail" in refused["detail"]
    assert store.manifest.tally.rejected_count == 6
    with pytest.raises(InputError, match=r"chat\.jsonl:3"):
        make(tmp_path, path, out="strict", strict=True)


def test_a_conversation_beyond_every_bound_is_rejected(tmp_path: Path) -> None:
    """A record of many megabytes costs itself alone, in every format; even as the first one."""
    small = [[_said("user", said), _said("assistant", "Hello")] for said in ("Hi", "Hey")]
    talks = [[_said("user", "much " * 2_000_000), _said("assistant", "Hello")], *small]
    rows = [{"messages": talk} for talk in talks]
    write_messages(tmp_path / "chat.jsonl", talks)
    (tmp_path / "chat.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    for name, where in (("chat.jsonl", {"line": 1}), ("chat.parquet", {"row": 1}), ("chat.json", {})):
        assert found(make(tmp_path, tmp_path / name, out=f"out-{name}")) == [expected(one) for one in small]
        (reject,) = set_aside(tmp_path / f"out-{name}")
        assert reject["reason"] == "too_large" and where.items() <= reject.items()


@pytest.mark.parametrize(("rule", "kept"), [("drop", None), ("cut", 50), ("cut_turn", -1)])
def test_what_is_too_long_is_dropped_or_cut(tmp_path: Path, rule: str, kept: int | None) -> None:
    """Dropped by name; cut to the token; or cut behind the last answer that fits."""
    short = [_said("user", "a"), _said("assistant", "b")]
    talk = [*short, _said("user", "c"), _said("assistant", "d"), _said("user", "e " * 40), _said("assistant", "f " * 9)]
    path = write_messages(tmp_path / "chat.jsonl", [short, talk])
    ids, spans = expected(talk)
    store = make(tmp_path, path, chat={"max_tokens": 50, "too_long": rule})
    if kept is None:
        assert (found(store), store.manifest.tally.reasons) == ([expected(short)], {"too_long": 1})
        return
    end = kept if kept > 0 else spans[1][1]
    assert found(store) == [expected(short), (ids[:end], spans[:2])]
    assert store.manifest.chat is not None and store.manifest.chat["truncated"] == 1


# ---- dedup, filters, splits, cleaning ----


def test_duplicates_are_told_by_text_or_by_prompt(tmp_path: Path) -> None:
    """The same text twice goes in both cases; another answer to the same question only by prompt."""
    talks = [[_said("user", f"Q{n}"), _said("assistant", f"A{n}")] for n in range(5)]
    other = [_said("user", "Q1"), _said("assistant", "another")]
    path = write_messages(tmp_path / "chat.jsonl", [*talks, talks[0], other])
    by_text = preprocess(tmp_path, path, out="text")
    assert found(by_text) == [expected(one) for one in [*talks, other]]
    by_prompt = preprocess(tmp_path, path, out="prompt", chat={"dedup_on": "prompt"})
    assert found(by_prompt) == [expected(one) for one in talks]
    assert by_prompt.manifest.tally.reasons == {"duplicate": 2}


def test_conversations_that_share_a_prompt_go_to_one_split(tmp_path: Path) -> None:
    """With group_by prompt no question is in two splits; without, some are."""
    talks = [[_said("user", f"Q{n % 40}"), _said("assistant", f"A{n}")] for n in range(200)]
    path = write_messages(tmp_path / "chat.jsonl", talks)
    for rule, apart in (("prompt", True), ("text", False)):
        out = tmp_path / rule
        preprocess(tmp_path, path, out=rule, splits={"val": 0.4}, chat={"group_by": rule})
        asked = []
        for split in ("train", "val"):
            part = milldam.open(out, split=split)
            asked.append({part.decode(one).split("\n")[1] for one in part})
        assert all(asked)
        assert asked[0].isdisjoint(asked[1]) == apart


def test_what_is_said_is_cleaned_before_it_is_rendered(tmp_path: Path) -> None:
    """White space at the ends of a message and control characters go; what the template writes stays."""
    talk = [_said("user", "  What\x07 is it?\n"), _said("assistant", " This. \n")]
    store = preprocess(tmp_path, write_messages(tmp_path / "chat.jsonl", [talk]))
    assert found(store) == [expected([_said("user", "What is it?"), _said("assistant", "This.")])]


def test_what_chat_can_not_be_combined_with_is_refused(tmp_path: Path) -> None:
    """In plain words, before anything is read."""
    path = write_messages(tmp_path / "chat.jsonl", make_conversations(3))
    with pytest.raises(ConfigError, match="cut a conversation"):
        preprocess(tmp_path, path, splits={"val_tokens": 100})
    with pytest.raises(ConfigError, match="without a chat template"):
        milldam.tokenize(path, tmp_path / "no", tokenizer=TOKENIZER, chat=True)
    (tmp_path / "text.jsonl").write_text('{"text": "no chat"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="No conversations found"):
        make(tmp_path, tmp_path / "text.jsonl")
    plain = milldam.tokenize(tmp_path / "text.jsonl", tmp_path / "plain", tokenizer=TOKENIZER)
    with pytest.raises(StoreError, match="no store of conversations"):
        plain.spans(0)


def test_a_template_that_writes_the_date_gives_the_day_that_is_set(tmp_path: Path) -> None:
    """So that a run made again on another day gives the same bytes; the day is part of the settings."""
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}\n" + TEMPLATE, encoding="utf-8")
    path = write_messages(tmp_path / "chat.jsonl", make_conversations(3))
    chat = {"template": str(template), "date": "2024-07-26"}
    store = milldam.tokenize(path, tmp_path / "out", tokenizer=TOKENIZER, chat=chat)
    assert store.decode(store[0]).startswith("26 Jul 2024\n<user>")
    assert store.manifest.settings["chat"]["date"] == "2024-07-26"
    with pytest.raises(ConfigError, match="is not a date"):
        milldam.tokenize(path, tmp_path / "no", tokenizer=TOKENIZER, chat=chat | {"date": "today"})
