"""The options of `milldam tokenize` as settings of its job: data as it is, nothing done to its documents.

Apart from what checks settings, which takes a while to load: a store that is up to date needs no check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milldam.config.settings import Config

_OF_DATA_SET = ("text_column", "documents", "separator", "input_format")
_OF_TOKENIZER = ("bos", "eos", "special_text", "encoder")
_OF_CHAT = {"chat_form": "form", "chat_template": "template", "train_on": "train_on"}


def tokenize_settings(
    inputs: str | Path | Sequence[str | Path], out: str | Path, tokenizer: str | Path, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The options where they belong; what is None is left at its default."""
    chosen = {"invalid_utf8": "reject"} | {name: value for name, value in options.items() if value is not None}
    data_set = {name: chosen.pop(name) for name in _OF_DATA_SET if name in chosen}
    rules = {name: chosen.pop(name) for name in _OF_TOKENIZER if name in chosen}
    of_chat = {key: chosen.pop(name) for name, key in _OF_CHAT.items() if name in chosen}
    chat = chosen.pop("chat", None)
    if of_chat or chat:
        # Any of them says that the records are conversations.
        chosen["chat"] = {**(chat if isinstance(chat, Mapping) else {}), **of_chat}
    paths = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    return {
        "datasets": {"path": paths, **data_set},
        "tokenizer": {"path": tokenizer, **rules},
        "out": out,
        "clean": "off",
        "dedup": "off",
        **chosen,
    }


def tokenize_config(
    inputs: str | Path | Sequence[str | Path], out: str | Path, tokenizer: str | Path, options: Mapping[str, Any]
) -> Config:
    """The same, checked; raises ConfigError."""
    from milldam.config.checking import checked_settings
    from milldam.config.settings import Config

    return checked_settings(Config, tokenize_settings(inputs, out, tokenizer, options))
