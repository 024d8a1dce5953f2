"""The options of `milldam tokenize` -> the configuration of its job: data as it is, nothing done to its documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from milldam.config.settings import Config, DataSet, TokenizerRules
from milldam.errors import ConfigError, Setting

ENCODERS = ("auto", "gigatoken", "huggingface")
CHOICES = {
    "documents": ("file", "line", "paragraph"),
    "invalid_utf8": ("reject", "drop", "replace", "strict"),
    "special_text": ("special", "plain"),
    "encoder": ENCODERS,
    "engine": ("local", "ray", *ENCODERS),
    "input_format": ("txt", "jsonl", "json", "csv", "tsv", "parquet", "arrow"),
}
_OF_DATA_SET = ("text_column", "documents", "separator", "input_format")
_OF_TOKENIZER = ("bos", "eos", "special_text")
_OF_JOB = ("invalid_utf8", "strict", "limit", "shard_size", "memory", "workers", "engine", "address", "overwrite")
OPTIONS = (*_OF_DATA_SET, *_OF_TOKENIZER, "encoder", *_OF_JOB)
"""What may be set besides input, output and tokenizer."""


def tokenize_config(
    inputs: str | Path | Sequence[str | Path], out: str | Path, tokenizer: str | Path, options: dict[str, Any]
) -> Config:
    """Check the options and put them where they belong; what is None is left at its default."""
    given = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    chosen = {"invalid_utf8": "reject"} | {name: value for name, value in options.items() if value is not None}
    for name, allowed in CHOICES.items():
        if chosen.get(name, allowed[0]) not in allowed:
            raise ConfigError(Setting(name), f' "{chosen[name]}": must be one of {", ".join(allowed)}.')
    if chosen.get("engine") in ENCODERS:
        # What encodes was called the engine before there was a choice of where the work is done.
        chosen["encoder"] = chosen.pop("engine")
    encoder = {"engine": chosen["encoder"]} if "encoder" in chosen else {}
    return Config(
        datasets=DataSet(path=tuple(str(one) for one in given), **_some(chosen, _OF_DATA_SET)),
        tokenizer=TokenizerRules(path=str(tokenizer), **_some(chosen, _OF_TOKENIZER), **encoder),
        out=str(out),
        clean="off",
        dedup="off",
        **_some(chosen, _OF_JOB),
    )


def _some(options: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}
