"""Templates and special tokens are found where models ship them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milldam.chat.loading import find_template
from milldam.errors import ConfigError, InputError


def _folder(tmp_path: Path, **files: str) -> str:
    for name, content in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return str(tmp_path)


def _config(**values: object) -> str:
    return json.dumps(values)


def test_the_template_of_a_tokenizer_is_found(tmp_path: Path) -> None:
    """In its configuration, with its special tokens, whatever form they have."""
    config = _config(chat_template="A", eos_token={"content": "</s>"}, add_bos_token=True, bos_token=None)
    found = find_template(_folder(tmp_path, **{"tokenizer_config.json": config}))
    assert (found.text, found.tool_text) == ("A", None)
    assert found.variables == {"eos_token": "</s>"}


def test_a_file_of_its_own_goes_before_the_configuration(tmp_path: Path) -> None:
    """As transformers has it; those in the folder of others have names."""
    folder = _folder(
        tmp_path,
        **{
            "tokenizer_config.json": _config(chat_template="A"),
            "chat_template.jinja": "B",
            "additional_chat_templates/rag.jinja": "C",
            "additional_chat_templates/tool_use.jinja": "T",
        },
    )
    assert (find_template(folder).text, find_template(folder).tool_text) == ("B", "T")
    assert find_template(folder, name="rag").text == "C"
    with pytest.raises(ConfigError, match=r'no chat template "rga"; there are default, rag, tool_use.*rag'):
        find_template(folder, name="rga")


def test_named_templates_are_chosen_by_name(tmp_path: Path) -> None:
    """`default` without one; where there is none, the user has to say."""
    both = [{"name": "x", "template": "X"}, {"name": "y", "template": "Y"}]
    folder = _folder(tmp_path, **{"tokenizer_config.json": _config(chat_template=both)})
    assert find_template(folder, name="y").text == "Y"
    with pytest.raises(ConfigError, match="there are x, y"):
        find_template(folder)


def test_a_file_of_the_user_goes_before_all(tmp_path: Path) -> None:
    """With the tokenizer's special tokens, and the user's variables before them."""
    folder = _folder(tmp_path, **{"tokenizer_config.json": _config(chat_template="A", eos_token="e"), "my.txt": "M"})
    found = find_template(folder, template=f"{folder}/my.txt", variables={"eos_token": "E"})
    assert (found.text, found.variables) == ("M", {"eos_token": "E"})


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """A tokenizer without a template, a file that is missing or broken."""
    folder = _folder(tmp_path, **{"tokenizer.json": "{}", "broken.jinja": ""})
    with pytest.raises(ConfigError, match="without a chat template"):
        find_template(folder)
    with pytest.raises(InputError, match="no such chat template"):
        find_template(folder, template="nowhere.jinja")
    (tmp_path / "broken.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match="can't be read"):
        find_template(folder, template=f"{folder}/broken.jinja")
