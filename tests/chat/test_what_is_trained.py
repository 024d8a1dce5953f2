"""What people's records say of themselves decides what a store trains on: nulls, weights, turns that end in a space."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.kit.jobs import TOKENIZER, set_aside

import milldam
from milldam.errors import MilldamError

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls %}<call>{{ call.function.name }}</call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TAGGED = CHATML.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"
)
SPACED = """{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
{% else %} {{ m.content }}</s> {% endif %}{% endfor %}"""
USER = {"role": "user", "content": "One?"}
CALL = {"type": "function", "function": {"name": "dice", "arguments": {}}}


def _answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "Uno."} | fields


def _trained(
    folder: Path, *rows: dict[str, Any], template: str = CHATML, tokenizer: Path = TOKENIZER, **chat: Any
) -> list[list[str]]:
    """What each conversation of a store is trained on, and nothing else of it."""
    (folder / "t.jinja").write_text(template)
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = {"template": str(folder / "t.jinja")} | chat
    store = milldam.tokenize(folder / "chat.jsonl", folder / "out", tokenizer=str(tokenizer), chat=chat)
    return [
        [store.decode(store[number][begin:end]) for begin, end in store.spans(number).tolist()]
        for number in range(len(store))
    ]


def _reasons(folder: Path) -> dict[int, str]:
    return {one["line"]: one["reason"] for one in set_aside(folder / "out")}


# ---- null ----


def test_null_is_not_trained_on_as_a_word(tmp_path: Path) -> None:
    """OpenAI's content: null beside tool calls is a key that is not there, as in transformers."""
    called = {"messages": [USER, _answer(content=None, tool_calls=[CALL], refusal=None), _answer(tool_calls=None)]}
    assert _trained(tmp_path, called) == [["<call>dice</call><|im_end|>\n", "Uno.<|im_end|>\n"]]


# ---- weights ----


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["derived", "tagged"])
def test_a_weight_of_zero_is_honoured_without_being_asked_for(tmp_path: Path, template: str) -> None:
    """Whatever `train_on` is, under each name; a conversation of which nothing is left is refused by name."""
    said = _answer(content="Dos.", weight=1)
    zeros: list[dict[str, Any]] = [{"weight": 0}, {"loss_weight": 0.0}, {"train": False}]
    rows = [{"messages": [USER, _answer(**zero), USER, said]} for zero in zeros]
    rows.append({"messages": [USER, _answer(weight=0)]})
    end = "<|im_end|>\n" if template == CHATML else ""
    assert _trained(tmp_path, *rows, template=template) == [[f"Dos.{end}"]] * 3
    assert _reasons(tmp_path) == {4: "nothing_to_train_on"}


def test_weights_of_calls_of_sharegpt_are_honoured(tmp_path: Path) -> None:
    """A turn of its own there."""
    call = {"from": "function_call", "value": '{"name": "dice", "arguments": {}}', "weight": 0}
    turns = [{"from": "human", "value": "Roll"}, call, {"from": "gpt", "value": "Six."}]
    assert _trained(tmp_path, {"conversations": turns}) == [["Six.<|im_end|>\n"]]


def test_weights_that_can_not_be_honoured_are_refused_by_name(tmp_path: Path) -> None:
    """Of a part of a message, as axolotl has them; or where everything is to be trained on."""
    part = {"type": "text", "text": "Uno."}
    detail = [{"begin_offset": 0, "end_offset": 1, "train": False}]
    contents = [[part], [part, part | {"train": False}], [part | {"weight": 0}]]
    rows = [{"messages": [USER, _answer(content=content)]} for content in contents]
    rows.append({"messages": [USER, _answer(train_detail=detail)]})
    assert _trained(tmp_path, *rows) == [["Uno.<|im_end|>\n"]]
    assert _reasons(tmp_path) == dict.fromkeys((2, 3, 4), "trained_in_part")
    (tmp_path / "all").mkdir()
    with pytest.raises(MilldamError, match="mask_not_proven 1"):
        _trained(tmp_path / "all", {"messages": [USER, _answer(train=False)]}, train_on="all")


# ---- the end of a turn ----


def test_the_first_token_of_the_next_turn_is_not_trained_on(tmp_path: Path) -> None:
    """Where a turn ends in a space that the tokenizer joins to the bracket that follows, such as Mistral's."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate([*letters, "Ġ["])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("Ġ", "[")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    talk = [USER, _answer(), USER | {"content": "Two?"}, _answer(content="Dos.")]
    (trained,) = _trained(tmp_path, {"messages": talk}, template=SPACED, tokenizer=tmp_path / "tokenizer.json")
    assert trained == [" Uno.</s>", " Dos.</s> "]


# ---- one example a turn ----

REWRITES = """{% for m in messages %}<{{ m.role }}>{% if loop.last and m.reasoning_content %}\
<think>{{ m.reasoning_content }}
</think>{% endif %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def test_turns_that_a_template_rewrites_are_examples_of_their_own(tmp_path: Path) -> None:
    """Each with its thinking, as a model writes it; turns that share what comes before them are one example."""
    thought, question = {"reasoning_content": "Hm."}, USER | {"content": "Two?"}
    plain = [USER, _answer(), question, _answer(content="Dos.")]
    thinking = [USER, _answer(**thought), question, _answer(content="Dos.", **thought)]
    in_part = [USER, _answer(), question, _answer(content="Dos.", **thought), USER, _answer(content="Tres.")]
    rows = [{"messages": talk} for talk in (plain, thinking, in_part)]
    assert _trained(tmp_path, *rows, template=REWRITES, per_turn=True) == [
        ["Uno.</s>", "Dos.</s>"],
        ["<think>Hm.\n</think>Uno.</s>"],
        ["<think>Hm.\n</think>Dos.</s>"],
        ["Uno.</s>", "<think>Hm.\n</think>Dos.</s>"],
        ["Tres.</s>"],
    ]
