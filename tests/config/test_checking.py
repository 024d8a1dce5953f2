"""The one check of settings: from a file, from options or from arguments, what is wrong is told where it was given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from annotated_types import MinLen

from milldam.config.checking import checked_settings
from milldam.config.loading import load_settings
from milldam.errors import ConfigError, Setting
from milldam.rules import SETTINGS, AtLeastOne, SizeRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Brewing:
    """Settings of a job that there is not."""

    __pydantic_config__: ClassVar[dict[str, Any]] = SETTINGS

    out: str
    leaves: tuple[str, ...] = ()
    kind: Literal["green", "black"] = "green"
    cups: AtLeastOne | None = None
    pot: Annotated[str | int, SizeRange(1000, 10**6)] = "2KB"
    name: Annotated[str, MinLen(1)] = "tea"
    hot: bool = True

    def __post_init__(self) -> None:
        if self.cups == 7:
            raise ConfigError(Setting("cups"), ": 7 are too many for ", Setting("kind", self.kind), ".")


def spelled(error: ConfigError) -> str:
    return error.spelled(lambda setting: f"<{setting.path}>")


def test_what_is_none_is_left_at_its_default_and_paths_are_texts() -> None:
    """As options and arguments come."""
    made = checked_settings(Brewing, {"out": Path("a"), "cups": None, "kind": None, "leaves": "assam", "hot": "off"})
    assert made == Brewing(out="a", leaves=("assam",), hot=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cups": 0}, "<cups>: must be at least 1."),
        ({"cups": True}, "<cups>: must be a whole number, not True."),
        ({"cups": 1.5}, "<cups>: must be a whole number, not 1.5."),
        ({"cups": 7}, "<cups>: 7 are too many for <kind>."),
        ({"kind": "blak"}, '<kind>: must be green or black, not "blak". Did you mean "black"?'),
        ({"pot": "10B"}, "<pot>: must be at least 1 KB."),
        ({"pot": 10**7}, "<pot>: must be at most 1 MB."),
        ({"pot": "much"}, '<pot>: "much" is not a size. Write it as 512MB, 2GB or 1.5GiB.'),
        ({"name": ""}, "<name>: is empty."),
        ({"leaves": ["a", 1.5, {}]}, "<leaves.2>: must be a text, not a block of keys."),
        ({"cupps": 1}, '<cupps>: no such key. Did you mean "cups"?'),
        ({"out": None}, "<out>: must be a text, not empty."),
        ({"cups": 0, "name": ""}, "<cups>: must be at least 1.\n<name>: is empty."),
    ],
)
def test_what_is_wrong_names_the_setting(given: dict[str, Any], said: str) -> None:
    """For whoever shows it to spell: `--cups` or `cups`."""
    with pytest.raises(ConfigError) as caught:
        checked_settings(Brewing, {"out": "a"} | given)
    assert spelled(caught.value) == said


def test_what_is_missing_is_told() -> None:
    """With what the caller has to say about it."""
    with pytest.raises(ConfigError) as caught:
        checked_settings(Brewing, {}, if_missing="Say where.")
    assert spelled(caught.value) == "<out> is missing. Say where."


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "{file}:2: cups: must be at least 1."),
        ({"cups": -1}, "<cups>: must be at least 1."),
        ({"cups": 7}, "<cups>: 7 are too many for <kind>."),
        ({"cups": 3, "pot": 1}, "<pot>: must be at least 1 KB."),
    ],
)
def test_options_take_the_place_of_what_a_file_says(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    """And what is wrong with one is told of the option, not of the file."""
    file = tmp_path / "tea.yaml"
    file.write_text("out: a\ncups: 0\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(Brewing, file, options)
    assert spelled(caught.value) == said.format(file=file)
    assert load_settings(Brewing, file, {"cups": 2}).cups == 2
