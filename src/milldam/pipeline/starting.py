"""The start of a job: the options of `tokenize` as a configuration, and the process that will start workers.

Where workers will surely be needed, the server that forks them is begun first: both processes import for a quarter of a
second, side by side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.run.tasks import CAN_FORK
from milldam.sources.compression import storage_options
from milldam.sources.units import SHARD_SIZE
from milldam.stores.kinds import TOKENS

if TYPE_CHECKING:
    from milldam.config.settings import Config
    from milldam.pipeline.finishing import TextSummary
    from milldam.run.fork import ForkServer
    from milldam.run.summary import Observer

WORKER_MODULES = (
    "milldam.pipeline.first_pass",
    "milldam.pipeline.tokenizing",
    "milldam.sources.jsonl",
    "gigatoken.gigatoken_rs",
)
_CHAT_MODULES = ("milldam.chat.reading", "milldam.pipeline.chat_encoding")


def run_checked(
    check: Callable[[], Config], observer: Observer | None = None, *, report: bool = True, held_bytes: int = 0
) -> TextSummary:
    """Do what a configuration asks for, or what is left of it.

    `check` makes it, or raises what is wrong. `report`: make the page about the job. `held_bytes`: memory that the
    calling program holds already.
    """
    config = check()
    with storage_options(config.storage_options), _server_ahead(config) as server:
        from milldam.pipeline.job import run_job

        return run_job(config, observer, held_bytes=held_bytes, report=report, server=server)


@contextlib.contextmanager
def _server_ahead(config: Config) -> Iterator[ForkServer | None]:
    """The server of a job that surely needs one, while it imports what workers need; None: that is not sure yet."""
    if not (CAN_FORK and config.executor == "local" and _is_large(config)):
        yield None
        return
    from milldam.run.fork import ForkServer

    server = ForkServer()
    try:
        server.expect(WORKER_MODULES if config.chat is None else WORKER_MODULES + _CHAT_MODULES)
        yield server
    finally:
        server.close()


def _is_large(config: Config) -> bool:
    """Whether there is surely work for several processes, at a glance."""
    if config.workers == 1 or config.limit is not None or (Path(config.out) / TOKENS.manifest).exists():
        return False
    with contextlib.suppress(OSError):  # what can't be looked at is told by who reads it
        left = config.shard_bytes or SHARD_SIZE
        for path in (Path(path) for one in config.sources for path in one.paths):
            for file in path.iterdir() if path.is_dir() else [path]:
                left -= file.stat().st_size if file.is_file() else 0
                if left < 0:
                    return True
    return False


# ---- the options of `tokenize`: data as it is, nothing done to its documents ----

_OF_DATA_SET = ("text_column", "documents", "separator", "input_format")
_OF_TOKENIZER = ("bos", "eos", "special_text", "encoder")
_OF_CHAT = {"chat_form": "form", "chat_template": "template", "train_on": "train_on"} | {
    f"chat_{key}": key for key in ("columns", "named_template", "variables")
}


def tokenize_settings(
    inputs: str | Path | Sequence[str | Path], out: str | Path, tokenizer: str | Path, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The options where they belong; what is None is left at its default."""
    chosen = {"invalid_utf8": "reject"} | {name: value for name, value in options.items() if value is not None}
    data_set = {name: chosen.pop(name) for name in _OF_DATA_SET if name in chosen}
    rules = {name: chosen.pop(name) for name in _OF_TOKENIZER if name in chosen}
    of_chat = {key: chosen.pop(name) for name, key in _OF_CHAT.items() if chosen.get(name) not in (None, {})}
    chosen = {name: value for name, value in chosen.items() if name not in _OF_CHAT}
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
