"""The start of a job, before anything is loaded that makes a store: what is asked for, whether it is there already, and
the process that will start workers.

A finished run leaves a receipt: what was asked for, and what it was made from. Asking again costs a look at files. The
same settings to the letter, the same milldam, the same bytes in the tokenizer's files, the same files of input and of
evaluation sets, and a store as it was left mean the same identity: so the store is up to date, and nothing more is
loaded, nor are settings checked. All else goes the long way, which compares identities; so does what files do not tell:
users' functions, standard input, rows that are packed, chat templates.

Where workers will surely be needed, the server that forks them is begun first: both processes import for a quarter of a
second, side by side.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam import __version__
from milldam.errors import MilldamError
from milldam.files import hash_bytes, in_home, record_of, replace_unsynced, seal_line, unseal_line
from milldam.input_files import RUN_FOLDER, InputState
from milldam.run.summary import Summary
from milldam.run.tasks import CAN_FORK
from milldam.sources.compression import STDIN, storage_options
from milldam.sources.data_sets import resolve_data_set
from milldam.sources.units import CHAT_SHARD_SIZE, SHARD_SIZE, list_inputs
from milldam.stores.kinds import TOKENS
from milldam.tokenizers.loading import tokenizer_state

if TYPE_CHECKING:
    from milldam.config.settings import Config, DataSet
    from milldam.pipeline.finishing import TextSummary
    from milldam.pipeline.preparing import Prepared
    from milldam.rules import EvaluationSet
    from milldam.run.fork import ForkedWorkers
    from milldam.run.summary import Observer

RECEIPT, REPORT = "receipt.json", "report.html"
_STORE = (TOKENS.manifest, f"{RUN_FOLDER}/plan.json")
"""What tells that a store is finished, and made from what was asked for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for, before anything of it is looked at."""

    out: Path | None
    """Where the store is to be; None: that is not said in a way that needs no check."""
    name: str
    """Another one whenever something else was said."""
    report: bool
    """Make the page about it."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], said: Any = None, *, report: bool = True) -> Asked:
        """`said`: where the settings come from, when they do not say all."""
        out = settings.get("out")
        # What a service shows may depend on who asks: that is not told by a receipt.
        known = isinstance(out, str | Path) and not settings.get("overwrite") and not settings.get("storage_options")
        left = {name: value for name, value in settings.items() if name not in ("out", "overwrite", "storage_options")}
        name = hash_bytes(repr((__version__, report, said, left)).encode("utf-8", "backslashreplace"))
        return cls(Path(in_home(out)) if out is not None and known else None, name, report)

    def is_answered(self) -> bool:
        """Whether the store is there and up to date, as far as a receipt tells."""
        return self.out is not None and _answer(self.out, self.name) is not None


def run_asked(
    asked: Asked, check: Callable[[], Config], observer: Observer | None = None, *, held_bytes: int = 0
) -> TextSummary:
    """Do what is asked for, or what is left of it; nothing, when its receipt is still true.

    `check` makes the configuration. `held_bytes`: memory that the calling program holds already.
    """
    found = None if asked.out is None else _answer(asked.out, asked.name)
    if found is not None:
        return found

    config = check()
    with storage_options(config.storage_options), server_ahead(config) as server:
        from milldam.pipeline.job import run_job

        return run_job(config, observer, held_bytes=held_bytes, report=asked.report, request=asked.name, server=server)


def _answer(out: Path, request: str) -> TextSummary | None:
    """The summary of a store that is up to date; None: that has to be looked into.

    No lock is taken: a run that changes the store changes its plan or its manifest first.
    """
    # What is wrong with the input is told by who looks into it.
    with contextlib.suppress(MilldamError, OSError):
        told = unseal_line((out / RUN_FOLDER / RECEIPT).read_bytes())
        if (
            told is not None
            and told["request"] == request
            and _store_state(out) == told["store"]
            and (told["summary"]["job"] == "tokenize" or (out / RUN_FOLDER / REPORT).exists())
            and tokenizer_state(told["tokenizer"]) == told["tokenizer_state"]
            and input_state(told["data_sets"]) == told["input"]
            and input_state(told["evaluation"]) == told["evaluation_input"]
        ):
            return Summary(**told["summary"] | {"out": str(out)})
    return None


def places_of(sets: Iterable[DataSet | EvaluationSet]) -> list[list[dict[str, Any]]]:
    """Where the files of each set are, as `input_state` looks them up."""
    return [
        [
            {"path": path, "split": one.split, "subset": one.subset, "input_format": one.input_format}
            for path in one.paths
        ]
        for one in sets
    ]


def input_state(sets: Iterable[Iterable[Mapping[str, Any]]]) -> dict[str, Any]:
    """The state of the files of some sets, as they are now."""
    state = InputState()
    for number, places in enumerate(sets):
        for place in places:
            found = resolve_data_set(**place)
            for file in list_inputs(found.inputs, found.input_format):
                state.add(file.path, file.size, file.version, number)
    return state.as_json()


def _store_state(out: Path) -> dict[str, Any]:
    """The store as it lies: what tells of it, and names and sizes of its files, which may be lost or cut off later."""
    sizes = sorted((entry.name, entry.stat().st_size) for entry in os.scandir(out) if entry.is_file())
    files = hash_bytes(repr(sizes).encode("utf-8", "backslashreplace"))
    return {name: _record(out / name) for name in _STORE} | {"files": files}


def _record(path: Path) -> dict[str, Any] | None:
    return record_of(path) if path.exists() else None


def leave_receipt(out: Path, request: str | None, config: Config, prepared: Prepared, summary: TextSummary) -> None:
    """`summary`: what is to be told of the store when it is asked for again."""
    if request is None or prepared.tokenizer_state is None or not _is_told_by_files(config):
        return
    receipt = {
        "request": request,
        "store": _store_state(out),
        "tokenizer": config.tokenizer_rules.path,
        "tokenizer_state": prepared.tokenizer_state,
        "data_sets": places_of(config.sources),
        # Not what an index held: its store stays up to date whatever it gains or loses.
        "input": {
            name: value for name, value in prepared.identity.input.items() if name not in ("index", "evaluation")
        },
        "evaluation": places_of(config.evaluation_sets),
        "evaluation_input": input_state(()) if prepared.evaluation is None else prepared.evaluation.input,
        "summary": asdict(summary),
    }
    with contextlib.suppress(OSError):  # without it, the long way is taken
        # In ASCII: a path need not be UTF-8.
        replace_unsynced(out / RUN_FOLDER / RECEIPT, seal_line(receipt))


def _is_told_by_files(config: Config) -> bool:
    clean = config.clean_rules
    has_function = config.filters.function is not None or (clean is not None and clean.function is not None)
    from_stdin = any(STDIN in one.paths for one in config.sources)
    plain = config.packing_rules is None and config.chat is None
    return not has_function and not from_stdin and plain and not config.storage_options


# ---- the server, begun ahead ----

WORKER_MODULES = (
    "milldam.pipeline.first_pass",
    "milldam.pipeline.tokenizing",
    "milldam.sources.jsonl",
    "gigatoken.gigatoken_rs",
)
_CHAT_MODULES = ("milldam.chat.reading", "milldam.pipeline.chat_encoding")


def shard_size_of(config: Config) -> int:
    """Bytes of input per unit."""
    return config.shard_bytes or (SHARD_SIZE if config.chat is None else CHAT_SHARD_SIZE)


@contextlib.contextmanager
def server_ahead(config: Config) -> Iterator[ForkedWorkers | None]:
    """The server of a job that surely needs one, while it imports what workers need; None: that is not sure yet."""
    if not (CAN_FORK and config.executor == "local" and _is_needed(config)):
        yield None
        return
    from milldam.run.fork import ForkedWorkers

    server = ForkedWorkers(1)
    try:
        server.expect(WORKER_MODULES if config.chat is None else WORKER_MODULES + _CHAT_MODULES)
        yield server
    finally:
        server.close()


def _is_needed(config: Config) -> bool:
    """Whether there is surely work for several processes: what is seen at a glance."""
    if config.workers == 1 or config.limit is not None:
        return False
    with contextlib.suppress(OSError):  # what can't be looked at is told by who reads it
        if (Path(config.out) / TOKENS.manifest).exists():
            return False
        left = shard_size_of(config)
        for path in (Path(path) for one in config.sources for path in one.paths):
            for file in path.iterdir() if path.is_dir() else [path]:
                left -= file.stat().st_size if file.is_file() else 0
                if left < 0:
                    return True
    return False


# ---- the options of `tokenize`: data as it is, nothing done to its documents ----

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
