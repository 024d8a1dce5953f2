"""What people's records say of themselves decides what a store trains on: nulls, weights, turns that end in a space."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.kit.jobs import TOKENIZER, invoke, run_here, set_aside

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


def test_every_template_writes_for_null_what_transformers_makes_of_it(shared_data: Path, tmp_path: Path) -> None:
    """The same text, or both refuse it."""
    transformers = pytest.importorskip("transformers")
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), **named)
    messages = [USER, _answer(content=None, tool_calls=[CALL]), {"role": "tool", "content": "6"}, _answer(name=None)]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    for path in sorted((shared_data / "chat/templates").glob("*.jinja")):
        variables = [word for name, value in named.items() for word in ("--variable", f"{name}={value}")]
        words = [path, tmp_path / "chat.jsonl", "--train-on", "all", "--json", *variables]
        done = invoke("chat-check", *words)
        try:
            text = reference.apply_chat_template(messages, chat_template=path.read_text("utf-8"), tokenize=False)
        except Exception:
            text = ""
        assert json.loads(done.stdout)["first"]["text"] == text, path.name


# ---- weights ----


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["derived", "tagged"])
@pytest.mark.parametrize("field", [{"weight": 0}, {"loss_weight": 0.0}, {"train": False}])
def test_a_weight_of_zero_is_honoured_without_being_asked_for(
    tmp_path: Path, field: dict[str, Any], template: str
) -> None:
    """Whatever `train_on` is; a conversation of which nothing is left is refused by name."""
    rows = [{"messages": [USER, _answer(**field), USER, _answer(content="Dos.", weight=1)]}]
    rows.append({"messages": [USER, _answer(**field)]})
    end = "<|im_end|>\n" if template == CHATML else ""
    assert _trained(tmp_path, *rows, template=template) == [[f"Dos.{end}"]]
    assert _reasons(tmp_path) == {2: "nothing_to_train_on"}


def test_weights_of_calls_of_sharegpt_are_honoured(tmp_path: Path) -> None:
    """A turn of its own there."""
    call = {"from": "function_call", "value": '{"name": "dice", "arguments": {}}', "weight": 0}
    turns = [{"from": "human", "value": "Roll"}, call, {"from": "gpt", "value": "Six."}]
    assert _trained(tmp_path, {"conversations": turns}) == [["Six.<|im_end|>\n"]]


def test_all_is_not_trained_on_where_a_message_says_otherwise(tmp_path: Path) -> None:
    """The two contradict each other: refused."""
    rows = [{"messages": [USER, _answer(train=False)]}, {"messages": [USER, _answer()]}]
    assert len(_trained(tmp_path, *rows, train_on="all")) == 1
    assert _reasons(tmp_path) == {1: "mask_not_proven"}


def test_weights_within_a_message_are_refused_by_name(tmp_path: Path) -> None:
    """axolotl's `train` of parts and `train_detail`: never trained on as a whole without a word."""
    part = {"type": "text", "text": "Uno."}
    detail = [{"begin_offset": 0, "end_offset": 1, "train": False}]
    contents = [[part], [part, part | {"train": False}], [part | {"weight": 0}]]
    rows = [{"messages": [USER, _answer(content=content)]} for content in contents]
    rows.append({"messages": [USER, _answer(train_detail=detail)]})
    assert _trained(tmp_path, *rows) == [["Uno.<|im_end|>\n"]]
    assert _reasons(tmp_path) == dict.fromkeys((2, 3, 4), "trained_in_part")


# ---- the end of a turn ----


def _joining(folder: Path, kind: str) -> Path:
    """A tokenizer that joins a space to the bracket behind it."""
    if kind == "bytes":
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocab = {letter: number for number, letter in enumerate([*letters, "Ġ["])}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("Ġ", "[")]))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
    else:
        letters = sorted({*SPACED, *"OneUnoTwoDos.?▁"})
        made = tokenizers.Tokenizer(tokenizers.models.Unigram([*((one, -9.0) for one in letters), ("▁[", -1.0)], 0))
        made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        made.decoder = tokenizers.decoders.Replace("▁", " ")
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_the_first_token_of_the_next_turn_is_not_trained_on(tmp_path: Path, kind: str) -> None:
    """Where a turn ends in a space that the tokenizer joins to what follows, such as Mistral's."""
    talk = [USER, _answer(), USER | {"content": "Two?"}, _answer(content="Dos.")]
    (trained,) = _trained(tmp_path, {"messages": talk}, template=SPACED, tokenizer=_joining(tmp_path, kind))
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


# ---- giants ----


@pytest.mark.parametrize("name", ["chat.jsonl", "chat.json"])
@pytest.mark.parametrize("size", [3 << 20, 9 << 20])
def test_a_giant_first_record_costs_itself_alone(tmp_path: Path, size: int, name: str) -> None:
    """More than 8 MiB: rejected by name and counted; less: kept. The others tell the form."""
    rows = [{"messages": [{"role": "user", "content": "much " * (size // 5)}, _answer()]}]
    rows += [{"messages": [USER, _answer(content=f"{number}")]} for number in range(3)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / name).write_text("\n".join(lines) if name == "chat.jsonl" else f"[{','.join(lines)}]")
    (tmp_path / "t.jinja").write_text(CHATML)
    chat = {"template": str(tmp_path / "t.jinja")}
    store = milldam.tokenize(tmp_path / name, tmp_path / "out", tokenizer=TOKENIZER, chat=chat)
    is_giant = size > 8 << 20
    assert len(store) == 4 - is_giant
    assert [one["reason"] for one in set_aside(tmp_path / "out")] == ["too_large"] * is_giant
    run_here("chat-check", tmp_path / "t.jinja", tmp_path / name)


def test_nothing_but_giants_is_refused_with_their_number(tmp_path: Path) -> None:
    """A record is set aside by its size."""
    row = {"messages": [{"role": "user", "content": "much " * 2_000_000}, _answer()]}
    with pytest.raises(MilldamError, match="too_large 1"):
        _trained(tmp_path, row)
