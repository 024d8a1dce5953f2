"""A configuration as a YAML file, with comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from milldam.config.lines import number_in
from milldam.config.origins import KeyPath


def as_yaml(config: dict[str, Any], comments: dict[KeyPath, str], header: list[str]) -> str:
    """A configuration as YAML, with what each key was beside it."""
    top = [f"# {line}".rstrip() for text in header for line in text.splitlines()]
    return "\n".join([*top, "", *_block_lines(config, (), comments)]) + "\n"


def _block_lines(block: dict[str, Any], path: KeyPath, comments: dict[KeyPath, str]) -> Iterator[str]:
    for key, value in block.items():
        here = (*path, key)
        said = f"  # {comments[here]}" if here in comments else ""
        if isinstance(value, dict) and value:
            yield f"{_scalar(key)}:{said}"
            yield from (f"  {line}" for line in _block_lines(value, here, comments))
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            yield f"{_scalar(key)}:{said}"
            for number, one in enumerate(value):
                yield from _item_lines(one, (*here, number), comments)
        else:
            yield f"{_scalar(key)}: {_scalar(value)}{said}"


def _item_lines(item: Any, path: KeyPath, comments: dict[KeyPath, str]) -> Iterator[str]:
    lines = _block_lines(item, path, comments) if isinstance(item, dict) and item else iter([_scalar(item)])
    yield f"  - {next(lines)}"
    yield from (f"    {line}" for line in lines)


def _in_list(value: Any) -> str:
    """The same between brackets, where a comma means something."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_in_list(key)}: {_in_list(one)}' for key, one in value.items())}}}"
    written = _scalar(value)
    plain = not isinstance(value, str) or written.startswith(("'", '"')) or re.fullmatch(r"[\w./-]+", written)
    return written if plain else json.dumps(value)


def _scalar(value: Any) -> str:
    """A value on one line. Text that could be read as something else gets quotes."""
    if isinstance(value, str) and (not value.isprintable() or not isinstance(number_in(value), str)):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(_in_list(one) for one in value)}]"
    written = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return written.removesuffix("\n").removesuffix("\n...")
