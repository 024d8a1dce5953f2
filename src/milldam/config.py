"""The settings of a job: what the user chose, and which of it changes the result.

`TokenizeConfig.settings` holds exactly what a result depends on besides the input: it goes into the manifest, and a
folder made from other settings is never taken for this job's. Memory, workers and engine are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from milldam.errors import ConfigError
from milldam.memory import parse_size

FORMATS = ("store", "npy")
DOCUMENTS = ("file", "line", "paragraph")
INVALID_UTF8 = ("reject", "replace", "strict")
SPECIAL_TEXT = ("special", "plain")
ENGINES = ("auto", "gigatoken", "huggingface")
INPUT_FORMATS = ("txt", "jsonl", "csv", "tsv", "parquet", "arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeConfig:
    inputs: tuple[str, ...]
    tokenizer: str
    out: Path
    text_column: str | None = None
    documents: str = "file"
    separator: str | None = None
    input_format: str | None = None
    bos: str = "none"
    eos: str = "auto"
    special_text: str = "special"
    invalid_utf8: str = "reject"
    strict: bool = False
    limit: int | None = None
    shard_size: int | None = None
    format: str = "store"
    # How it is done; none of these changes the result.
    engine: str = "auto"
    memory: str | int | None = None
    workers: int | None = None
    held_bytes: int = 0
    """Memory that the calling program holds already; the limit comes on top of it."""
    overwrite: bool = False

    OPTIONS: ClassVar[tuple[str, ...]] = (
        "text_column", "documents", "separator", "input_format", "bos", "eos", "special_text", "invalid_utf8", "strict",
        "limit", "shard_size", "engine", "memory", "workers", "overwrite",
    )  # fmt: skip
    """What a caller of the library may set besides input, output and tokenizer."""

    def settings(self, tokenizer_hash: str) -> dict[str, Any]:
        """Everything that changes the result, by name."""
        return {
            "tokenizer": tokenizer_hash,
            "bos": self.bos,
            "eos": self.eos,
            "special_text": self.special_text,
            "text_column": self.text_column,
            "documents": self.documents if self.separator is None else "separator",
            "separator": self.separator,
            "input_format": self.input_format,
            "invalid_utf8": self.invalid_utf8,
            "limit": self.limit,
            "shard_size": self.shard_size,
        }


def make_config(
    inputs: str | Path | Sequence[str | Path], out: str | Path | None, options: dict[str, Any]
) -> TokenizeConfig:
    """Check the options and fill in where the output goes."""
    given = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    names = tuple(str(one) for one in given)
    if not names:
        raise ConfigError("No input: name at least one file, folder or glob, or - for standard input.")
    options = {name: value for name, value in options.items() if value is not None}
    if "shard_size" in options:
        options["shard_size"] = parse_size(options["shard_size"])
        if options["shard_size"] < 10**5:
            raise ConfigError("--shard-size is too small: at least 100KB.")
    config = TokenizeConfig(inputs=names, out=Path(out) if out is not None else _beside(names, options), **options)
    _check_choices(config)
    return config


def _beside(names: tuple[str, ...], options: dict[str, Any]) -> Path:
    """Where an .npy goes when nothing is said: beside the one text file it is made from."""
    if options.get("format") != "npy":
        raise ConfigError("No output: say where the store goes with -o FOLDER.")
    if len(names) != 1 or not names[0].endswith(".txt"):
        raise ConfigError(
            "--format npy without -o takes exactly one .txt file; say where the file goes with -o FILE.npy."
        )
    return Path(names[0]).with_suffix(".npy")


def _check_choices(config: TokenizeConfig) -> None:
    choices = (
        ("format", config.format, FORMATS),
        ("documents", config.documents, DOCUMENTS),
        ("invalid-utf8", config.invalid_utf8, INVALID_UTF8),
        ("special-text", config.special_text, SPECIAL_TEXT),
        ("engine", config.engine, ENGINES),
        ("input-format", config.input_format or "txt", INPUT_FORMATS),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise ConfigError(f'--{name} "{value}": must be one of {", ".join(allowed)}.')
    if config.separator == "":
        raise ConfigError("--separator is empty.")
    if config.limit is not None and config.limit < 1:
        raise ConfigError("--limit must be at least 1.")
    if config.workers is not None and config.workers < 1:
        raise ConfigError("--workers must be at least 1.")
    if "-" in config.inputs and len(config.inputs) > 1:
        raise ConfigError("Standard input (-) can't be combined with other inputs.")
