"""The library's verbs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, did_you_mean
from milldam.memory import release, usage
from milldam.store import Store, open_store

open = open_store


def tokenize(
    inputs: str | Path | Sequence[str | Path], out: str | Path, *, tokenizer: str | Path, **options: Any
) -> Store:
    """Turn text into a token store and open it; what `milldam tokenize` does, with the same options.

    Finds finished work and goes on from there; a store that is up to date is opened as it is. `memory` limits what the
    job takes on top of what the program holds already.

    >>> milldam.tokenize("corpus.jsonl", "corpus.milldam", tokenizer="gpt2", memory="512MB")   # doctest: +SKIP
    Store('corpus.milldam': 18,511 documents, 15,293,621 tokens, uint16)
    """
    from milldam.config import TokenizeConfig, make_config
    from milldam.tokenizing import tokenize_to_store

    for name in options:
        if name not in TokenizeConfig.OPTIONS:
            raise ConfigError(f'tokenize: no option "{name}".{did_you_mean(name, TokenizeConfig.OPTIONS)}')
    release()
    given = {"tokenizer": str(tokenizer), "format": "store", "held_bytes": usage().anonymous}
    config = make_config(inputs, out, options | given)
    tokenize_to_store(config)
    return open_store(out)
