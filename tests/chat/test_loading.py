"""Templates and special tokens are found where models ship them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milldam.chat.loading import find_template
from milldam.errors import ConfigError, InputError

CONFIG = {"chat_template": "A", "eos_token": {"content": "</s>"}, "add_bos_token": True, "bos_token": None}
NAMED = {"chat_template": [{"name": "x", "template": "X"}, {"name": "y", "template": "Y"}]}


def _folder(tmp_path: Path, config: object = None, **files: str) -> str:
    if config is not None:
        files["tokenizer_config.json"] = json.dumps(config)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return str(tmp_path)


def test_the_template_of_a_tokenizer_is_found(tmp_path: Path) -> None:
    """In its configuration, with its special tokens, whatever form they have."""
    found = find_template(_folder(tmp_path, CONFIG))
    assert (found.text, found.tool_text, found.variables) == ("A", None, {"eos_token": "</s>"})


def test_a_file_of_its_own_goes_before_the_configuration(tmp_path: Path) -> None:
    """As transformers has it; those in the folder of others have names. The user's file goes before all."""
    more = {"additional_chat_templates/rag.jinja": "C", "additional_chat_templates/tool_use.jinja": "T"}
    folder = _folder(tmp_path, CONFIG, **{"chat_template.jinja": "B", "my.txt": "M"} | more)
    assert (find_template(folder).text, find_template(folder).tool_text) == ("B", "T")
    assert find_template(folder, name="rag").text == "C"
    mine = find_template(folder, template=f"{folder}/my.txt", variables={"eos_token": "E"})
    assert (mine.text, mine.variables) == ("M", {"eos_token": "E"})


def test_named_templates_are_chosen_by_name(tmp_path: Path) -> None:
    """`default` without one; where there is none, the user has to say."""
    folder = _folder(tmp_path, NAMED)
    assert find_template(folder, name="y").text == "Y"
    with pytest.raises(ConfigError, match="there are x, y"):
        find_template(folder)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """A tokenizer without a template, a file that is missing or broken."""
    folder = _folder(tmp_path, **{"tokenizer.json": "{}"})
    (tmp_path / "broken.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="without a chat template"):
        find_template(folder)
    with pytest.raises(InputError, match="no such chat template"):
        find_template(folder, template="nowhere.jinja")
    with pytest.raises(InputError, match="can't be read"):
        find_template(folder, template=f"{folder}/broken.jinja")
