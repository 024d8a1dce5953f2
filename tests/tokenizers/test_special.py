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
    read_named_tokens,
)

BOTH_AUTO = {"bos": "auto", "eos": "auto"}


def with_tokens(*special: str) -> Any:
    """A tokenizer that has these special tokens, numbered from 1."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("has", "named", "asked", "chosen"),
    [
        (["<s>", "</s>"], NamedTokens("<s>", "</s>"), {"bos": "none", "eos": "none"}, SpecialTokens(None, None)),
        (
            ["</s>", "<|im_end|>", "<s>", "[start]"],
            NamedTokens("[start]", "<|im_end|>"),
            BOTH_AUTO,
            SpecialTokens(4, 2, "[start]", "<|im_end|>"),
        ),
        (
            ["</s>", "<end>", "<begin>"],
            NamedTokens(bos_id=3, eos_id=2),
            BOTH_AUTO,
            SpecialTokens(3, 2, "<begin>", "<end>"),
        ),
        (["<x>"], NamedTokens(), BOTH_AUTO, SpecialTokens(None, None)),
        (["<s>", "</s>"], NamedTokens("<gone>", "<gone>"), BOTH_AUTO, SpecialTokens(1, 2, "<s>", "</s>")),
        (["<s>", "</s>"], NamedTokens(bos_id=99, eos_id=99), BOTH_AUTO, SpecialTokens(1, 2, "<s>", "</s>")),
        (
            ["</s>", "<sep>"],
            NamedTokens(None, "</s>"),
            {"bos": "[UNK]", "eos": "<sep>"},
            SpecialTokens(0, 2, "[UNK]", "<sep>"),
        ),
        (["<|x|>"], NamedTokens(None, "<|x|>"), {"bos": "<|x|>", "eos": "auto"}, SpecialTokens(1, 1, "<|x|>", "<|x|>")),
    ],
    ids=["none", "names", "ids of the config", "no candidate", "a name it lacks", "an id it lacks", "asked", "both"],
)
def test_what_is_put_around_a_document(
    has: list[str], named: NamedTokens, asked: dict[str, str], chosen: SpecialTokens
) -> None:
    """What the user says, else what the files name, if the tokenizer has it."""
    assert choose_special_tokens(with_tokens(*has), named, **asked) == chosen


@pytest.mark.parametrize("option", ["bos", "eos"])
def test_an_unknown_token_is_a_setting_that_is_wrong(option: str) -> None:
    """With the token that was probably meant."""
    settings = {"bos": "none", "eos": "none"} | {option: "<|endoftxt|>"}
    with pytest.raises(ConfigError, match=rf'^{option} "<\|endoftxt\|>": .*Did you mean "<\|endoftext\|>"\?'):
        choose_special_tokens(with_tokens("<|endoftext|>"), NamedTokens(), **settings)


# ---- the files ----


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("value", ["</s>", {"content": "</s>", "lstrip": False, "special": True}])
def test_names_are_read_from_either_file_in_either_form(tmp_path: Path, file: str, value: Any) -> None:
    """A string, or an object with its content."""
    folder = write(tmp_path, **{file: {"eos_token": value, "bos_token": None}})
    assert read_named_tokens(folder) == NamedTokens(None, "</s>")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"bos_token_id": 1, "eos_token_id": 2}, NamedTokens(bos_id=1, eos_id=2)),
        ({"eos_token_id": [1, 2]}, NamedTokens()),
        ({"eos_token_id": True, "bos_token_id": "1"}, NamedTokens()),
        ({"eos_token_id": -1, "bos_token_id": 1 << 40}, NamedTokens()),
    ],
)
def test_ids_are_read_from_the_models_config(tmp_path: Path, config: dict[str, Any], named: NamedTokens) -> None:
    """Single numbers that a token can have; a list of ends says nothing about which one ends a document."""
    assert read_named_tokens(write(tmp_path, config=config)) == named
