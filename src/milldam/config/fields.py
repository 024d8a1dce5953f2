"""Types of settings that several jobs have, with their ranges. Options of the command line have the same choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge

from milldam.errors import ConfigError
from milldam.memory import format_size, parse_size

Documents = Literal["file", "line", "paragraph"]
InvalidUtf8 = Literal["drop", "reject", "replace", "strict"]
InputFormat = Literal["txt", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]
SpecialText = Literal["special", "plain"]
Encoder = Literal["auto", "gigatoken", "huggingface"]
Executor = Literal["local", "ray"]
AtLeastOne = Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Marks a setting as a size such as 512MB; smaller and larger ones are refused."""

    least: int = 1
    most: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, given: str | int) -> str | int:
        try:
            size = parse_size(given)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if size < self.least:
            raise ValueError(f"must be at least {format_size(self.least)}.")
        if self.most is not None and size > self.most:
            raise ValueError(f"must be at most {format_size(self.most)}.")
        return given


Size = Annotated[str | int, SizeRange()]

SETTINGS: dict[str, Any] = {"extra": "forbid"}
"""For `__pydantic_config__` of a dataclass of settings: no other keys."""
