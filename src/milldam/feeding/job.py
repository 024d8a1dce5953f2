"""The maker of a feed: the job of `milldam tokenize` in a process beside training, its units in the order of demand.

No byte depends on the order: `milldam tokenize` on the same folder continues what a feed began, and a feed what
`milldam tokenize` did. The process has the run's lock and keeps to the run's budget; it is niced, in a process group of
its own, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from milldam.config.settings import Config
from milldam.errors import ConfigError, Setting
from milldam.feeding.demand import DEMAND, FEED, demanded
from milldam.files import replace_unsynced, seal_file
from milldam.loader.unit_order import splits_asked
from milldam.memory import keep_arrow_lean
from milldam.pipeline.fitting import Disk
from milldam.pipeline.job import TokenJob
from milldam.pipeline.starting import WORKER_MODULES
from milldam.pipeline.tokenizing import TokenizeLoad
from milldam.run import engine
from milldam.run.engine import Options, Session, Stage
from milldam.run.fork import as_sent
from milldam.run.records import Records
from milldam.run.tasks import DONE, ERROR
from milldam.run.units import Identity
from milldam.sources.compression import STDIN, storage_options
from milldam.stores.tokens.format import token_dtype

_NICENESS = 5
_PARENT_SECONDS = 0.2


class FeedJob(TokenJob):
    """`name`: of the order; loaders with another order do not share its store."""

    def __init__(self, config: Config, *, name: str, report: bool) -> None:
        _refuse_at_once(config)
        super().__init__(config, report=report)
        self._feed = {"name": name, "maker": uuid.uuid4().hex}

    def prepare(self, run: Session) -> Identity:
        path = run.folder.folder / FEED
        replace_unsynced(path, seal_file(self._feed))
        run.held.callback(path.unlink, missing_ok=True)
        run.pool.expect(WORKER_MODULES)
        return super().prepare(run)

    def _settle(self, run: Session) -> None:
        """The first thing to do where the store is not there yet."""
        _refuse_unknowable(self._config)
        super()._settle(run)

    def require_disk(self, disk: Disk) -> None:
        """Nothing is refused: training may end before the disk is full."""

    def stages(self, run: Session) -> Iterator[Stage]:
        folder, prepared, known = run.folder, self._prepared, self._prepared.known
        chat = prepared.chat_facts(Counter())
        facts = {  # of `FeedFacts`
            "identity": prepared.identity.run_id,
            "units": len(folder.units),
            "splits": splits_asked(prepared.identity.settings, ()),
            "dtype": token_dtype(known.vocab_size),
            "vocab_size": known.vocab_size,
            "tokenizer": prepared.identity.settings["tokenizer"],
            "pad_id": known.special.eos or 0,
            "chat": chat is not None,
            "pairs": chat is not None and chat["pairs"],
        }
        limits = {"workers": self._workers["workers"], "budget_bytes": run.budget.limit_bytes}
        planned = self._feed | {"facts": facts, "index_key": prepared.index_key} | limits
        for stage in super().stages(run):
            replace_unsynced(folder.folder / FEED, seal_file(planned))
            yield replace(stage, todo=demanded_units(folder.folder, stage.records))
        shutil.rmtree(folder.folder / DEMAND, ignore_errors=True)

    def _load(self, run: Session) -> TokenizeLoad:
        return replace(super()._load(run), only_as_listed=True)


def demanded_units(run_folder: Path, records: Records) -> Iterator[int | None]:
    """Units of a plan that loaders want and that are not made, until all of the plan are handed out; None while there
    is no demand. How far ahead of training they are made is up to the loaders."""
    handed_out, left = set[int](), len(records.keys) - records.complete
    while len(handed_out) < left:
        wanted = (unit for unit in demanded(run_folder) if 0 <= unit < len(records.keys))
        unit = next((unit for unit in wanted if unit not in records and unit not in handed_out), None)
        if unit is not None:
            handed_out.add(unit)
        yield unit


def _refuse_at_once(config: Config) -> None:
    if config.overwrite:
        message = ": a rank that comes late would replace what the first ones made. Remove the folder instead."
        raise ConfigError(Setting("overwrite"), message)
    if config.executor != "local":
        raise ConfigError(Setting("executor"), f": {config.executor}: a feed is made on the machine that trains.")
    if any(STDIN in one.paths for one in config.sources):
        raise ConfigError(f"{STDIN}: standard input can't be read in any order. Save it to a file.")


def _refuse_unknowable(config: Config) -> None:
    """Refuse what can't be known at the first batch."""
    needs = {
        "decontaminate": bool(config.decontaminate),
        "dedup": config.dedup_rules is not None,
        "limit": config.limit is not None,
        "splits": config.counts_tokens,
        "datasets": any(one.max_documents is not None or "[" in (one.split or "") for one in config.sources),
    }
    whole = "needs all of the input, and training begins before it is read"
    for name in (name for name, is_needed in needs.items() if is_needed):
        raise ConfigError(Setting(name), f": {whole}. Run `milldam preprocess` first and open its store.")


# ---- its process ----


def main() -> None:
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.nice(_NICENESS)
    keep_arrow_lean()
    end: tuple[str, Any] = DONE, None
    try:
        config, name, report = connection.recv()
        with storage_options(config.storage_options):
            engine.run(FeedJob(config, name=name, report=report), Options.of(config))
    except KeyboardInterrupt:
        return
    except Exception as error:
        end = ERROR, as_sent(error)
    with contextlib.suppress(OSError):
        connection.send(end)


def _end_with(parent: int) -> None:
    """End this process with its parent. Nothing needs to be wound up: what is not recorded is made again."""
    # Not by the kernel's signal, which comes when the thread ends that started us.
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
