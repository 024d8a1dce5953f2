"""The maker of a feed: the job of `milldam tokenize` in a process beside training, its units in the order of demand.

No byte depends on the order: `milldam tokenize` on the same folder continues what a feed began, and a feed what
`milldam tokenize` did. The process has the run's lock and keeps to the run's budget; it is niced, in a process group of
its own, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from milldam.config.settings import Config
from milldam.errors import ConfigError, Setting
from milldam.feeding.demand import Planned, demanded, forget_all
from milldam.loader.unit_order import splits_asked
from milldam.memory import format_size, keep_arrow_lean
from milldam.pipeline.fitting import Disk
from milldam.pipeline.job import TokenJob
from milldam.pipeline.starting import WORKER_MODULES
from milldam.pipeline.tokenizing import TokenizeLoad
from milldam.run import engine
from milldam.run.engine import Options, Session, Stage
from milldam.run.folder import RunFolder
from milldam.run.fork import as_sent
from milldam.run.records import Records
from milldam.run.tasks import DONE, ERROR
from milldam.run.units import Identity
from milldam.sources.compression import STDIN, storage_options
from milldam.stores.tokens.format import token_dtype

log = logging.getLogger("milldam")
NICENESS = 5
_PARENT_SECONDS = 0.2


class FeedJob(TokenJob):
    """`name`: of the order, see `Planned`."""

    def __init__(self, config: Config, *, name: str, report: bool) -> None:
        _refuse_at_once(config)
        super().__init__(config, report=report)
        self._name = name

    def prepare(self, run: Session) -> Identity:
        run_folder = run.folder.folder
        Planned.here(self._name).write(run_folder)
        run.held.callback(Planned.forget, run_folder)
        run.pool.expect(WORKER_MODULES)
        return super().prepare(run)

    def _settle(self, run: Session) -> None:
        """The first thing to do where the store is not there yet."""
        _refuse_unknowable(self._config)
        super()._settle(run)

    def require_disk(self, disk: Disk) -> None:
        """Nothing is refused: training may end before the disk is full."""
        if disk.most_bytes > disk.free_bytes:
            sizes = format_size(disk.most_bytes), format_size(disk.free_bytes)
            log.warning("%s: all of it takes about %s of disk, and %s are free.", self._config.out, *sizes)

    def stages(self, run: Session) -> Iterator[Stage]:
        folder, prepared = run.folder, self._prepared
        chat = prepared.chat_facts(Counter())
        planned = replace(
            Planned.here(self._name),
            identity=prepared.identity.run_id,
            units=len(folder.units),
            index_key=prepared.index_key,
            dtype=token_dtype(prepared.known.vocab_size),
            facts={
                "splits": splits_asked(prepared.identity.settings, ()),
                "vocab_size": prepared.known.vocab_size,
                "tokenizer": prepared.identity.settings["tokenizer"],
                "pad_id": prepared.known.special.eos or 0,
                "chat": chat is not None,
                "pairs": chat is not None and chat["pairs"],
            },
            workers=self._workers["workers"],
            budget_bytes=run.budget.limit_bytes,
        )
        for stage in super().stages(run):
            planned.write(folder.folder)
            yield replace(stage, todo=demanded_units(folder, stage.records))
        forget_all(folder.folder)

    def _load(self, run: Session) -> TokenizeLoad:
        return replace(super()._load(run), only_as_listed=True)


def demanded_units(folder: RunFolder, records: Records) -> Iterator[int | None]:
    """Units of a plan that loaders want and that are not made, until all of the plan are handed out; None while there
    is no demand. How far ahead of training they are made is up to the loaders."""
    handed_out, left = set[int](), len(records.keys) - records.complete
    while len(handed_out) < left:
        wanted = (unit for unit in demanded(folder.folder) if 0 <= unit < len(records.keys))
        unit = next((unit for unit in wanted if unit not in records and unit not in handed_out), None)
        handed_out |= set() if unit is None else {unit}
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
    """Refuse what can't be known at the first batch, with the reason."""
    whole = "can't be known before all of the input is read, and training begins before."
    if config.decontaminate:
        message = f": which n-grams are too common to count {whole} Open what `milldam preprocess` made."
        raise ConfigError(Setting("decontaminate"), message)
    if config.dedup_rules is not None:
        message = (
            f": which documents are alike {whole} Open what `milldam preprocess` made, set dedup: off, "
            "or compare with an index alone (dedup.method: index)."
        )
        raise ConfigError(Setting("dedup"), message)
    if config.limit is not None:
        raise ConfigError(Setting("limit"), f": which documents come first {whole} Leave it out.")
    if config.counts_tokens:
        message = f": splits and limits in tokens: which documents they hold {whole} Use shares of the documents."
        raise ConfigError(Setting("splits"), message)
    for one in config.sources:
        if one.max_documents is not None or (one.split is not None and "[" in one.split):
            raise ConfigError(f"{one.name}: which of its documents are meant {whole} Take all of them.")


# ---- its process ----


def main() -> None:
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICENESS)
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
