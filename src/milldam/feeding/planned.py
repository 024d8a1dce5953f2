"""What loaders need to know of a run that makes units for them: `run/feed.json`, there while a maker is at work."""

from __future__ import annotations

import os
import socket
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.feeding.demand import is_alive
from milldam.loader.unit_order import splits_asked
from milldam.run.units import KnownKeys
from milldam.sealed import read_sealed, seal_file

if TYPE_CHECKING:
    from milldam.pipeline.job import TokenPlan
    from milldam.pipeline.preparing import Prepared

NAME, DECIDED = "feed.json", "decided-"


def known_keys(run_folder: Path, identity: str, units: int) -> KnownKeys:
    """The keys of units that are decided on one after the other."""
    return KnownKeys(run_folder / f"{DECIDED}{identity}.keys", units)


@dataclass(frozen=True, slots=True)
class Planned:
    name: str
    """What was asked for: who asks for something else does not share it."""
    host: str
    pid: int
    """Of the maker."""
    identity: str = ""
    """Of the store that is being made; empty: nothing is planned yet."""
    units: int = 0
    index_key: int = 0
    """What the keys of units take in of a dedup index."""
    in_order: bool = False
    """Units are made in plan order alone, and their keys are known one after the other."""
    splits: tuple[str, ...] = ()
    vocab_size: int = 0
    tokenizer: str = ""
    pad_id: int = 0
    chat: bool = False
    pairs: bool = False
    workers: int = 0
    budget_bytes: int = 0

    @classmethod
    def here(cls, name: str) -> Planned:
        """By a maker that is this process, before it has planned."""
        return cls(name, socket.gethostname(), os.getpid())

    def with_plan(self, prepared: Prepared, plan: TokenPlan) -> Planned:
        chat = prepared.chat_facts(Counter())
        return replace(
            self,
            identity=prepared.identity.run_id,
            units=plan.units,
            index_key=prepared.index_key,
            in_order=bool(prepared.identity.settings["dedup"]) and not prepared.index_key,
            splits=splits_asked(prepared.identity.settings, ()),
            vocab_size=prepared.vocab_size,
            tokenizer=prepared.tokenizer_hash,
            pad_id=prepared.special.eos or 0,
            chat=chat is not None,
            pairs=chat is not None and chat["pairs"],
            workers=plan.workers,
            budget_bytes=plan.budget.limit_bytes,
        )

    def write(self, run_folder: Path) -> None:
        new = run_folder / f"{NAME}.new"
        new.write_bytes(seal_file(asdict(self)))
        new.replace(run_folder / NAME)

    @staticmethod
    def read(run_folder: Path) -> Planned | None:
        """What a maker that is at work has told; None: there is none."""
        told: dict[str, Any] | None = read_sealed(run_folder / NAME)
        if told is None:
            return None
        planned = Planned(**told | {"splits": tuple(told["splits"])})
        return planned if planned.host != socket.gethostname() or is_alive(planned.pid) else None

    @staticmethod
    def forget(run_folder: Path) -> None:
        (run_folder / NAME).unlink(missing_ok=True)
