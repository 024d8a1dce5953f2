"""The job of `milldam tokenize`, its units in the order in which loaders want them.

Only the order is another one, on which no byte depends: `milldam tokenize` on the same folder continues what a feed
began, and a feed what `milldam tokenize` did.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import replace

from milldam.config.settings import Config
from milldam.errors import ConfigError, InputError, Setting
from milldam.feeding.demand import Planned, demanded, forget_all
from milldam.memory import format_size
from milldam.pipeline.finishing import Made
from milldam.pipeline.fitting import Disk
from milldam.pipeline.job import TokenJob, TokenPlan
from milldam.pipeline.preparing import Prepared
from milldam.pipeline.starting import WORKER_MODULES
from milldam.run.folder import RunFolder
from milldam.run.records import Record, Records
from milldam.run.session import Session, Stage
from milldam.run.tasks import NothingYetError
from milldam.sources.compression import STDIN
from milldam.sources.units import Unit, is_as_listed

log = logging.getLogger("milldam")


class FeedJob(TokenJob):
    """`name`: of what was asked for, see `Planned`."""

    def __init__(self, config: Config, *, name: str, report: bool, request: str) -> None:
        refuse_unknowable(config)
        super().__init__(config, report=report, request=request)
        self._name = name

    def prepare(self, session: Session) -> Prepared:
        run_folder = session.folder.folder
        Planned.here(self._name).write(run_folder)
        session.held.callback(Planned.forget, run_folder)
        session.pool.expect(WORKER_MODULES)
        return super().prepare(session)

    def require_disk(self, disk: Disk) -> None:
        """Nothing is refused: training may end before the disk is full."""
        if disk.most_bytes > disk.free_bytes:
            sizes = format_size(disk.most_bytes), format_size(disk.free_bytes)
            log.warning("%s: all of it takes about %s of disk, and %s are free.", self._config.out, *sizes)

    def stages(self, session: Session, prepared: Prepared, plan: TokenPlan) -> Generator[Stage, None, Made]:
        stages = super().stages(session, prepared, plan)
        stage, folder, records = next(stages), session.folder, plan.records
        assert records is not None
        Planned.here(self._name).with_plan(prepared, plan).write(folder.folder)
        units = DemandedUnits(folder, records)

        def keep(record: Record) -> None:
            _require_input(folder, records.keys.number_of(record.key))
            records.add(record)

        yield replace(stage, units=units, keep=keep)
        forget_all(folder.folder)
        try:
            next(stages)
        except StopIteration as end:
            made: Made = end.value
            return made
        raise AssertionError("what needs more stages was refused")


def refuse_unknowable(config: Config) -> None:
    """Refuse what can't be known at the first batch, with the reason."""
    whole = "can't be known before all of the input is read, and training begins before."
    if config.evaluation_sets:
        said = f": which n-grams are too common to count {whole} Open what `milldam preprocess` made."
        raise ConfigError(Setting("decontaminate"), said)
    if config.dedup_rules is not None:
        said = (
            f": which documents are alike {whole} Open what `milldam preprocess` made, set dedup: off, "
            "or compare with an index alone (dedup.method: index)."
        )
        raise ConfigError(Setting("dedup"), said)
    if config.limit is not None:
        raise ConfigError(Setting("limit"), f": which documents come first {whole} Leave it out.")
    if config.counts_tokens:
        said = f": splits and limits in tokens: which documents they hold {whole} Use shares of the documents."
        raise ConfigError(Setting("splits"), said)
    for one in config.sources:
        if one.max_documents is not None or (one.split is not None and "[" in one.split):
            raise ConfigError(f"{one.name}: which of its documents are meant {whole} Take all of them.")
        if STDIN in one.paths:
            raise ConfigError(f"{STDIN}: standard input can't be read in any order. Save it to a file.")
    if config.overwrite:
        said = ": a rank that comes late would replace what the first ones made. Remove the folder instead."
        raise ConfigError(Setting("overwrite"), said)
    if config.executor != "local":
        raise ConfigError(Setting("executor"), f": {config.executor}: a feed is made on the machine that trains.")


class DemandedUnits:
    """Units of a plan that loaders want and that are not made, until all of the plan are handed out.

    How far ahead of training they are made is what loaders ask for.
    """

    def __init__(self, folder: RunFolder, records: Records) -> None:
        self._folder, self._records = folder, records
        self._given: set[int] = set()
        self._left = len(records.keys) - records.complete

    def __iter__(self) -> DemandedUnits:
        return self

    def __next__(self) -> int:
        if len(self._given) == self._left:
            raise StopIteration
        for unit in demanded(self._folder.folder):
            if 0 <= unit < len(self._records.keys) and unit not in self._records and unit not in self._given:
                self._given.add(unit)
                return unit
        raise NothingYetError


def _require_input(folder: RunFolder, number: int | None) -> None:
    """Before what was made of a unit is recorded: refuse it if its input is no longer what was planned."""
    assert number is not None
    for slice in folder.units.at(number, Unit.from_json).slices:
        if not is_as_listed(slice.path, slice.state):
            raise InputError(
                f"{slice.path}: changed or gone while it was read, so that what was read of it is not used. "
                "Open the data again to train on the input as it is now."
            )
