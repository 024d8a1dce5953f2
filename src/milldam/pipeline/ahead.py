"""The process that starts workers, begun before this one has imported what it needs itself.

Both import for a quarter of a second: side by side, the first unit begins that much earlier.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from milldam.config.settings import Config
from milldam.run.tasks import CAN_FORK
from milldam.sources.units import CHAT_SHARD_SIZE, SHARD_SIZE
from milldam.stores.kinds import TOKENS

if TYPE_CHECKING:
    from milldam.run.server_handle import ServerProcess

WORKER_MODULES = (
    "milldam.pipeline.fingerprinting",
    "milldam.pipeline.tokenizing",
    "milldam.sources.jsonl",
    "gigatoken.gigatoken_rs",
)
_CHAT_MODULES = ("milldam.chat.reading", "milldam.pipeline.chat_encoding")


def shard_size_of(config: Config) -> int:
    """Bytes of input per unit."""
    return config.shard_bytes or (SHARD_SIZE if config.chat is None else CHAT_SHARD_SIZE)


@contextmanager
def server_ahead(config: Config) -> Iterator[ServerProcess | None]:
    """The server of a job that surely needs one, while it imports what workers need; None: that is not sure yet."""
    if not (CAN_FORK and config.executor == "local" and _is_needed(config)):
        yield None
        return
    from milldam.run.server_handle import ServerProcess

    server = ServerProcess({}, apart=False)
    try:
        server.expect(WORKER_MODULES if config.chat is None else WORKER_MODULES + _CHAT_MODULES)
        yield server
    finally:
        server.close()


def _is_needed(config: Config) -> bool:
    """Whether there is surely work for several processes: what is seen at a glance."""
    if config.workers == 1 or config.limit is not None:
        return False
    with suppress(OSError):  # what can't be looked at is told by who reads it
        if (Path(config.out) / TOKENS.manifest).exists():
            return False
        left = shard_size_of(config)
        for path in (Path(path) for one in config.sources for path in one.paths):
            for file in path.iterdir() if path.is_dir() else [path]:
                left -= file.stat().st_size if file.is_file() else 0
                if left < 0:
                    return True
    return False
