"""Every way to name a tokenizer ends in the same thing, a tokenizer.json; what is wrong with one is told in a
sentence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from milldam.errors import ConfigError, InputError
from milldam.tokenizers.loading import (
    SpecialTokens,
    Tokenizer,
    choose_special_tokens,
    load_tokenizer,
    read_named_tokens,
)

TEXTS = ("Hello world, it's 1984!", "  two  spaces\n\n", "é你好🙂", "<|endoftext|>", "")


def ids(tokenizer: Tokenizer | Any, text: str) -> list[int]:
    inner = tokenizer.huggingface if isinstance(tokenizer, Tokenizer) else tokenizer
    return list(inner.encode(text, add_special_tokens=False).ids)


def changed(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a tokenizer.json with some of its parts replaced."""
    target.write_text(json.dumps(json.loads(source.read_text()) | changes))
    return target


# ---- from files and folders ----


def test_vocab_and_merges_are_a_tokenizer_by_either_name_or_folder(tmp_path: Path, demo_tokenizer: Path) -> None:
    """GPT-2's pair of files gives the ids of the tokenizer.json they come from."""
    model = json.loads(demo_tokenizer.read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    expected = tokenizers.Tokenizer.from_file(str(demo_tokenizer))
    for given_path in (tmp_path, tmp_path / "vocab.json", tmp_path / "merges.txt"):
        loaded = load_tokenizer(str(given_path))
        assert [ids(loaded, text) for text in TEXTS] == [ids(expected, text) for text in TEXTS]


def test_truncation_padding_and_dropout_are_taken_out(tmp_path: Path, demo_tokenizer: Path) -> None:
    """They would cut, fill or change documents in silence; the stored tokenizer.json has none of them either."""
    padding = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    changes = {
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": padding | {"strategy": {"Fixed": 64}},
        "model": json.loads(demo_tokenizer.read_text())["model"] | {"dropout": 0.5},
    }
    loaded = load_tokenizer(str(changed(demo_tokenizer, tmp_path / "tokenizer.json", **changes)))
    text = "a text of more than four tokens, and less than sixty-four"
    assert ids(loaded, text) == ids(tokenizers.Tokenizer.from_file(str(demo_tokenizer)), text)
    kept = json.loads(loaded.json)
    assert not (kept["truncation"] or kept["padding"] or kept["model"]["dropout"])


VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "mill", "##s", "cafe", "café", ",", "你"]


def bert(folder: Path, vocab: list[str], config: dict[str, Any] | None = None) -> Any:
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(str(folder / "vocab.txt")).huggingface


def tokens_of(tokenizer: Any, text: str) -> list[str]:
    return list(tokenizer.encode(text, add_special_tokens=False).tokens)


def test_a_bert_vocabulary_without_capitals_lowers_case_and_accents(tmp_path: Path) -> None:
    """As bert-base-uncased does; Chinese characters stand alone."""
    assert tokens_of(bert(tmp_path, VOCAB), "The MILLS,Café你你") == ["the", "mill", "##s", ",", "cafe", "你", "你"]


def test_a_bert_vocabulary_with_capitals_keeps_case_and_accents(tmp_path: Path) -> None:
    """As bert-base-cased does."""
    tokenizer = bert(tmp_path, [*VOCAB, "The"])
    assert tokens_of(tokenizer, "The the MILL café") == ["The", "the", "[UNK]", "café"]


# ---- from the Hub's cache ----


def cached_model(home: Path, name: str, files: dict[str, str]) -> None:
    """A model in a Hub cache, laid out as huggingface_hub does."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("0123abc")
    for file, content in files.items():
        path = folder / "snapshots/0123abc" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def load_elsewhere(spec: str, home: Path, cwd: Path | None = None, **environment: str) -> tuple[int, str]:
    """Exit status and output of loading in a process of its own, since the cache's place is read at import."""
    program = (
        "import sys; from milldam.errors import InputError; from milldam.tokenizers.loading import load_tokenizer\n"
        "try: loaded = load_tokenizer(sys.argv[1])\n"
        "except InputError as error: sys.exit(f'InputError: {error}')\n"
        "print(loaded.name, loaded.vocab_size, loaded.named['eos'])"
    )
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", **environment}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", program, spec]
    run = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr


def test_a_hub_name_is_found_in_the_cache(tmp_path: Path, demo_tokenizer: Path) -> None:
    """Without the network, with the special tokens that its files name."""
    config = json.dumps({"eos_token": "<|endoftext|>"})
    cached_model(
        tmp_path, "someone/model", {"tokenizer.json": demo_tokenizer.read_text(), "tokenizer_config.json": config}
    )
    assert load_elsewhere("someone/model", tmp_path) == (0, "someone/model 4096 <|endoftext|>\n")


@pytest.mark.parametrize("name", ["someone/other", "other", "some--model", "some..model", "someone/model.git"])
def test_a_hub_name_that_is_not_cached_is_a_short_error(tmp_path: Path, name: str) -> None:
    """It says that it is neither a file nor in the cache, and what can be given; also of a name that none can have."""
    status, output = load_elsewhere(name, tmp_path)
    assert status == 1 and "Traceback" not in output
    assert output.startswith(f"InputError: {name}: no such tokenizer file or folder.")
    assert "Give a folder with tokenizer.json" in output
    if "other" in name:
        assert "Nor is a tokenizer of that name in" in output and "HF_HUB_OFFLINE" in output


# ---- what is wrong ----


BROKEN = {
    "tokenizer.json": [
        *(b"", b"{}", b"null", b"[]", b'{"model": {}}', b'{"version": "1.0"', b"\xff\xfe", b'{"a": 1}' * 3),
    ],
    "vocab.txt": [b"hello\nworld\n", b"\xff\n[UNK]\n"],
    "vocab.json": [b"[1]", b"5", b'{"a": "b"}', b'{"a": 0}', b"{"],
}


@pytest.mark.parametrize(("name", "content"), [(name, one) for name, several in BROKEN.items() for one in several])
def test_a_broken_file_is_a_short_error(tmp_path: Path, name: str, content: bytes) -> None:
    """With the path, and the words of whoever could not read it; never a traceback."""
    (tmp_path / "merges.txt").write_text("a b\n")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name.replace(".", r"\.")) as caught:
        load_tokenizer(str(tmp_path / name))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("name", ["spiece.model", "cl100k_base.tiktoken"])
def test_files_of_other_programs_say_how_to_convert_them(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"a model")
    with pytest.raises(InputError, match=rf"{name}: needs a tokenizer.json. transformers makes one of it"):
        load_tokenizer(str(tmp_path / name))


# ---- tokens that begin and end a document ----

AUTO = ("auto", "auto")


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
        (["<s>", "</s>"], {"bos": "<s>", "eos": "</s>"}, ("none", "none"), (None, None)),
        (["</s>", "<|im_end|>", "[start]"], {"bos": "[start]", "eos": "<|im_end|>"}, AUTO, ("[start]", "<|im_end|>")),
        (["</s>", "<end>", "<begin>"], {"bos_id": 3, "eos_id": 2}, AUTO, ("<begin>", "<end>")),
        (["<x>"], {}, AUTO, (None, None)),
        (["<s>", "</s>"], {"bos": "<gone>", "eos_id": 99}, AUTO, ("<s>", "</s>")),
        (["</s>", "<sep>"], {"eos": "</s>"}, ("[UNK]", "<sep>"), ("[UNK]", "<sep>")),
        (["<|x|>"], {"eos": "<|x|>"}, ("<|x|>", "auto"), ("<|x|>", "<|x|>")),
    ],
    ids=["none", "names", "ids of the config", "no candidate", "what it lacks", "asked", "both"],
)
def test_what_is_put_around_a_document(has: list[str], named: dict[str, Any], asked: Any, chosen: Any) -> None:
    """What the user says, else what the files name, if the tokenizer has it."""
    tokenizer = with_tokens(*has)
    ids = (None if token is None else tokenizer.token_to_id(token) for token in chosen)
    assert choose_special_tokens(tokenizer, named, bos=asked[0], eos=asked[1]) == SpecialTokens(*ids, *chosen)


@pytest.mark.parametrize("option", ["bos", "eos"])
def test_an_unknown_token_is_a_setting_that_is_wrong(option: str) -> None:
    """With the token that was probably meant."""
    settings = {"bos": "none", "eos": "none"} | {option: "<|endoftxt|>"}
    with pytest.raises(ConfigError, match=rf'^{option} "<\|endoftxt\|>": .*Did you mean "<\|endoftext\|>"\?'):
        choose_special_tokens(with_tokens("<|endoftext|>"), {}, **settings)


# ---- the files ----


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("value", ["</s>", {"content": "</s>", "lstrip": False, "special": True}])
def test_names_are_read_from_either_file_in_either_form(tmp_path: Path, file: str, value: Any) -> None:
    """A string, or an object with its content."""
    folder = write(tmp_path, **{file: {"eos_token": value, "bos_token": None}})
    assert read_named_tokens(folder) == {"eos": "</s>"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"bos_token_id": 1, "eos_token_id": 2}, {"bos_id": 1, "eos_id": 2}),
        ({"eos_token_id": [1, 2]}, {}),
        ({"eos_token_id": True, "bos_token_id": "1"}, {}),
        ({"eos_token_id": -1, "bos_token_id": 1 << 40}, {}),
    ],
)
def test_ids_are_read_from_the_models_config(tmp_path: Path, config: dict[str, Any], named: dict[str, Any]) -> None:
    """Single numbers that a token can have; a list of ends says nothing about which one ends a document."""
    assert read_named_tokens(write(tmp_path, config=config)) == named
