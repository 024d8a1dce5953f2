"""Which tokens begin and end a document: as the user says, as the files say, or by their usual names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from milldam.errors import ConfigError
from milldam.tokenizers.loading import (
    NamedTokens,
    SpecialTokens,
    choose_special_tokens,
    load_tokenizer,
    read_named_tokens,
)


def with_tokens(*special: str) -> Any:
    """A tokenizer that has these special tokens, numbered from 1."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


# ---- the policy ----


def test_none_puts_nothing_around_a_document() -> None:
    """Whatever the tokenizer has."""
    chosen = choose_special_tokens(with_tokens("<s>", "</s>"), NamedTokens("<s>", "</s>"), bos="none", eos="none")
    assert chosen == SpecialTokens(None, None)


def test_auto_takes_what_the_files_name() -> None:
    """Before any usual name."""
    tokenizer = with_tokens("</s>", "<|im_end|>", "<s>", "[start]")
    chosen = choose_special_tokens(tokenizer, NamedTokens("[start]", "<|im_end|>"), bos="auto", eos="auto")
    assert chosen == SpecialTokens(4, 2, "[start]", "<|im_end|>")


def test_auto_takes_the_ids_that_the_config_states_when_no_name_is_given() -> None:
    """A config.json alone is enough."""
    tokenizer = with_tokens("</s>", "<end>", "<begin>")
    chosen = choose_special_tokens(tokenizer, NamedTokens(bos_id=3, eos_id=2), bos="auto", eos="auto")
    assert chosen == SpecialTokens(3, 2, "<begin>", "<end>")


@pytest.mark.parametrize("token", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<eod>"])
def test_auto_knows_the_usual_names_of_the_end(token: str) -> None:
    """When no file says anything."""
    chosen = choose_special_tokens(with_tokens("<x>", token), NamedTokens(), bos="none", eos="auto")
    assert chosen == SpecialTokens(None, 2, None, token)


@pytest.mark.parametrize("token", ["<|begin_of_text|>", "<s>", "<bos>", "[BOS]"])
def test_auto_knows_the_usual_names_of_the_beginning(token: str) -> None:
    """When a beginning is asked for."""
    chosen = choose_special_tokens(with_tokens("<x>", token), NamedTokens(), bos="auto", eos="none")
    assert chosen == SpecialTokens(2, None, token, None)


def test_auto_without_any_candidate_puts_nothing() -> None:
    """A tokenizer need not have an end."""
    assert choose_special_tokens(with_tokens("<x>"), NamedTokens(), bos="auto", eos="auto") == SpecialTokens(None, None)


@pytest.mark.parametrize("named", [NamedTokens("<gone>", "<gone>"), NamedTokens(bos_id=99, eos_id=99)])
def test_what_the_files_name_but_the_tokenizer_lacks_is_passed_over(named: NamedTokens) -> None:
    """The usual names are tried then."""
    chosen = choose_special_tokens(with_tokens("<s>", "</s>"), named, bos="auto", eos="auto")
    assert chosen == SpecialTokens(1, 2, "<s>", "</s>")


def test_a_token_by_name_goes_before_everything() -> None:
    """It need not be special."""
    tokenizer = with_tokens("</s>", "<sep>")
    chosen = choose_special_tokens(tokenizer, NamedTokens(None, "</s>"), bos="[UNK]", eos="<sep>")
    assert chosen == SpecialTokens(0, 2, "[UNK]", "<sep>")


@pytest.mark.parametrize("option", ["bos", "eos"])
def test_an_unknown_token_is_a_setting_that_is_wrong(option: str) -> None:
    """With the token that was probably meant."""
    settings = {"bos": "none", "eos": "none"} | {option: "<|endoftxt|>"}
    with pytest.raises(ConfigError, match=rf'^{option} "<\|endoftxt\|>": .*Did you mean "<\|endoftext\|>"\?'):
        choose_special_tokens(with_tokens("<|endoftext|>"), NamedTokens(), **settings)


def test_one_token_may_be_both() -> None:
    """As in GPT-2."""
    chosen = choose_special_tokens(with_tokens("<|endoftext|>"), NamedTokens(), bos="<|endoftext|>", eos="auto")
    assert (chosen.bos, chosen.eos) == (1, 1)


# ---- the files ----


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("form", ["plain", "object"])
def test_names_are_read_from_either_file_in_either_form(tmp_path: Path, file: str, form: str) -> None:
    """A string, or an object with its content."""
    value: Any = "</s>" if form == "plain" else {"content": "</s>", "lstrip": False, "special": True}
    assert read_named_tokens(write(tmp_path, **{file: {"eos_token": value, "bos_token": None}})) == NamedTokens(
        None, "</s>"
    )


def test_the_tokenizers_own_config_goes_before_the_map(tmp_path: Path) -> None:
    """Where they differ; what only one says is taken from it."""
    write(
        tmp_path, tokenizer_config={"eos_token": "<new>"}, special_tokens_map={"eos_token": "<old>", "bos_token": "<s>"}
    )
    assert read_named_tokens(tmp_path) == NamedTokens("<s>", "<new>")


def test_ids_are_read_from_the_models_config(tmp_path: Path) -> None:
    """Single numbers; a list of ends says nothing about which one ends a document."""
    assert read_named_tokens(write(tmp_path, config={"bos_token_id": 1, "eos_token_id": 2})) == NamedTokens(
        bos_id=1, eos_id=2
    )
    assert read_named_tokens(write(tmp_path, config={"eos_token_id": [1, 2]})) == NamedTokens()


def test_only_numbers_are_ids(tmp_path: Path) -> None:
    """Not truth values, nor words, nor what is below zero."""
    assert read_named_tokens(write(tmp_path, config={"eos_token_id": True, "bos_token_id": "1"})) == NamedTokens()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"eos_token": 5}', '{"eos_token": {"lstrip": true}}'])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map", "config"])
def test_what_is_broken_or_says_nothing_is_passed_over(tmp_path: Path, file: str, content: str) -> None:
    """The files beside a tokenizer are a help, not a condition."""
    assert read_named_tokens(write(tmp_path, **{file: content})) == NamedTokens()


@pytest.mark.parametrize("number", [-1, 1 << 40])
def test_an_id_that_no_token_can_have_is_passed_over(tmp_path: Path, number: int) -> None:
    """Some configs say -1 for none."""
    named = read_named_tokens(write(tmp_path, config={"eos_token_id": number}))
    assert choose_special_tokens(with_tokens("</s>"), named, bos="none", eos="auto") == SpecialTokens(
        None, 1, None, "</s>"
    )


def test_a_loaded_tokenizer_carries_the_names_beside_it(tmp_path: Path, demo_tokenizer: Path) -> None:
    """By folder and by file alike."""
    (tmp_path / "tokenizer.json").write_bytes(demo_tokenizer.read_bytes())
    write(tmp_path, tokenizer_config={"eos_token": "<|endoftext|>"})
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(str(spec)).named.eos == "<|endoftext|>"


@pytest.mark.parametrize(
    ("name", "eos"),
    [("gpt2", "<|endoftext|>"), ("qwen2.5", "<|endoftext|>"), ("t5", "</s>"), ("xlnet-base-cased", "</s>")],
)
def test_real_tokenizers_have_an_end(shared_data: Path, name: str, eos: str) -> None:
    """Found without being told."""
    loaded = load_tokenizer(str(shared_data / "tokenizers" / name))
    chosen = choose_special_tokens(loaded.huggingface, loaded.named, bos="none", eos="auto")
    assert chosen.eos_token == eos
    assert chosen.eos is not None
