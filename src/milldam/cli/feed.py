"""`milldam feed`: what a loader delivers on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from milldam.choices import Side
from milldam.cli.commands import choice
from milldam.cli.naming import visible
from milldam.errors import EXIT_INTERRUPTED, ConfigError
from milldam.markup import counted
from milldam.memory import format_size

if TYPE_CHECKING:
    from milldam.loader.batches import Batches
    from milldam.loader.feeds import Feed
    from milldam.loader.measuring import Figures
    from milldam.loader.samples import Samples
    from milldam.loader.stream import TokenStream
    from milldam.loader.views import Trainable

_SHUFFLES: dict[str, Any] = {"full": True, "block": "block", "shard": "shard", "none": False, "units": True}
_TRAINING_RATES = (100_000, 1_000_000)
"""Tokens/s. A GPU that does 400 TFLOP/s trains 1B parameters at 67,000 tokens/s and 100M at 670,000 (6 FLOP each)."""
_STEADY_SECONDS = 0.5
"""A rate over less than this says little."""


@click.command()
@click.argument("data", nargs=-1, required=True, metavar="STORE|INPUT...")
@click.option("--tokenizer", help="For text: folder, file or Hub name of the tokenizer.")
@click.option(
    "--store", metavar="FOLDER", help="For text: keep the tokens in this store. [default: remove them at the end]"
)
@click.option("--text-column", metavar="NAME", help="For text: the field that holds it. [default: the obvious one]")
@click.option("--shard-size", metavar="SIZE", help="For text: input per unit. [default: 64MB]")
@click.option("--memory", metavar="SIZE", help="For text: limit for tokenizing. [default: half of what is free]")
@click.option("--cores", type=int, metavar="N", help="For text: cores for tokenizing. [default: all]")
@click.option(
    "--units", is_flag=True, help="Read a store in the order that training straight from its text would have."
)
@click.option("--seq-len", type=int, default=1024, show_default=True, metavar="N", help="Tokens per sample.")
@click.option("--batch-size", type=int, default=16, show_default=True, metavar="N", help="Samples per batch.")
@click.option("--split", metavar="NAME", help="Read only this split.")
@click.option("--dtype", metavar="NAME", help="Type of the tokens in a .bin file without an index. [default: uint16]")
@click.option("--stride", type=int, metavar="N", help="Tokens from one window to the next. [default: --seq-len]")
@click.option(
    "--packed", type=click.Choice(["wrapped", "best_fit"]), help="Packed rows of documents instead of windows."
)
@click.option("--side", type=choice(Side), help="Of preference pairs, with --packed best_fit: rows of this side.")
@click.option("--streams", is_flag=True, help="Contiguous streams, one per row, instead of windows.")
@click.option(
    "--shuffle",
    type=click.Choice([name for name in _SHUFFLES if name != "units"]),
    help="Shuffle all samples, whole blocks, within groups of shards, or not at all. "
    "[default: full; for streams: none; for text: within groups of units]",
)
@click.option("--seed", type=int, metavar="N", help="Seed of the order. [default: 0]")
@click.option("--epochs", type=int, metavar="N", help="Stop after N passes over the data. [default: no limit]")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="Stop after this time.")
@click.option(
    "--prefetch", type=int, default=0, show_default=True, metavar="N", help="Batches that a thread prepares ahead."
)
@click.option(
    "--read",
    type=click.Choice(["auto", "map", "pread"]),
    default="auto",
    show_default=True,
    help="How to read files; auto maps what fits in half of the free memory.",
)
@click.option(
    "--copy/--reuse", default=True, show_default=True, help="New arrays for each batch, or reuse the same ones."
)
@click.option(
    "--cache",
    metavar="SIZE",
    help="For a store at an address: size of the local cache. [default: 50GB, or half of the disk]",
)
@click.option("--torch", is_flag=True, help="Deliver torch tensors.")
@click.option("--workers", type=int, metavar="N", help="Read through a torch DataLoader with N worker processes.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def feed(
    data: tuple[str, ...], as_json: bool, seconds: float, torch: bool, workers: int | None, **options: Any
) -> None:
    """Measure what a loader delivers on this machine.

    Shows the time to the first batch, tokens/s and memory.

    STORE: anything that `milldam.open` opens. INPUT: text, with --tokenizer, or a configuration (.yaml); text is
    tokenized while batches are delivered. Ends after --seconds or --epochs; Ctrl-C shows the figures so far.

    \b
    milldam feed corpus.milldam --seq-len 1024 --batch-size 16
    milldam feed corpus.milldam --seq-len 2048 --batch-size 8 --packed best_fit --split train --json
    milldam feed data/*.jsonl.zst --tokenizer gpt2/ --store corpus.milldam --memory 2GB
    """
    from milldam.loader.measuring import measure

    if options["packed"]:
        # What is imported while the clock runs would be counted.
        import milldam.loader.packed  # noqa: F401

    _refuse_contradictions(options, workers)
    with _feeding(data, options) as feeding:
        through = _plain if not torch and workers is None else _torch(feeding, workers)
        figures = measure(feeding.batches, seconds=seconds, through=through)
        if as_json:
            click.echo(json.dumps(_facts(feeding, figures)))
        else:
            click.echo(visible(f"{feeding.name}: {_what(feeding, figures)}"))
            for name, text in _lines(feeding, figures).items():
                click.echo(visible(f"{name + ':':<14}{text}"))
    if figures.ended == "interrupted":
        sys.exit(EXIT_INTERRUPTED)


def _refuse_contradictions(options: dict[str, Any], workers: int | None) -> None:
    if options["streams"]:
        for name in ("packed", "shuffle", "stride", "seed"):
            if options[name] is not None:
                raise ConfigError(f"--{name} and --streams: streams are contiguous. Leave one of them out.")
        if workers is not None:
            raise ConfigError("--workers and --streams: streams come in one order, in one process.")
    if options["side"] and not options["packed"]:
        raise ConfigError("--side: takes --packed best_fit. Windows and streams have the tokens of both sides.")
    if options["packed"] and options["stride"] is not None:
        raise ConfigError("--stride and --packed: rows have no stride. Leave one of them out.")
    if workers is not None and (workers < 0 or not options["copy"]):
        raise ConfigError("--workers: use 0 or more, and leave --reuse out: workers hand over copies.")


def _plain(batches: Batches[Any]) -> Iterable[Any]:
    return batches


def _torch(feeding: _Feeding, workers: int | None) -> Callable[[Batches[Any]], Iterable[Any]]:
    """Batches as tensors, made in this process or in those of a DataLoader."""
    try:
        from milldam.torch import BatchDataset, tensors
    except ModuleNotFoundError as error:
        raise ConfigError(f"--torch, --workers: {error}.") from None
    if workers is None:
        return tensors
    from torch.utils.data import DataLoader

    size, how = feeding.options["batch_size"], feeding.how
    # What crosses a process border is copied anyway.
    del how["copy"]
    return lambda batches: DataLoader(BatchDataset(batches.samples, size, **how), batch_size=None, num_workers=workers)


@contextlib.contextmanager
def _feeding(data: tuple[str, ...], options: dict[str, Any]) -> Iterator[_Feeding]:
    """What is to be fed; where text is, and no place for its tokens is named, they go at the end."""
    from milldam.feeding import is_config, is_raw
    from milldam.memory import available_bytes

    inputs: Any = list(data) if len(data) > 1 else data[0]
    names = {"tokenizer": "tokenizer", "store": "store", "text_column": "text_column", "memory": "memory"}
    names |= {"shard_size": "shard_size", "cores": "workers"}
    text = {name: options[option] for option, name in names.items() if options[option] is not None}
    with contextlib.ExitStack() as stack:
        if not is_raw(inputs, text):
            if len(data) > 1 or text:
                raise ConfigError(
                    "--tokenizer: missing. Text needs one; a store is one path, without options for text."
                )
            from milldam.loader.opening import open_data

            asked = {name: options[name] for name in ("split", "dtype", "cache")}
            opener = partial(_open_units, inputs, **asked) if options["units"] else partial(open_data, inputs, **asked)
            yield _Feeding(opener, inputs, options, available_bytes(), options["units"])
            return
        if "store" not in text and not is_config(inputs):
            text["store"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="milldam-feed-"))
        from milldam.api import open

        opener = partial(open, inputs, split=options["split"], **text)
        feeding = _Feeding(opener, inputs, options, available_bytes(), in_units=True)
        stack.callback(feeding.close)
        yield feeding


def _open_units(path: str, split: str | None, dtype: Any, cache: str | None) -> Any:
    from milldam.api import open

    if dtype is not None:
        raise ConfigError("--dtype and --units: a store knows its dtype. Leave one of them out.")
    return open(path, units=True, split=split, cache=cache)


@dataclasses.dataclass(slots=True)
class _Feeding:
    """The data, and how it is to be fed."""

    open: Callable[[], Trainable | Feed]
    given: str | list[str]
    options: dict[str, Any]
    free: tuple[int, str]
    """Bytes of free memory, and where."""
    in_units: bool = False
    """It comes in the order of units."""
    _data: Any = None

    def close(self) -> None:
        if self._data is not None:
            self._data.close()

    @property
    def name(self) -> str:
        if not self.in_units:
            return self.stream.name
        return self.given if isinstance(self.given, str) else f"{self.given[0]} and {len(self.given) - 1} more"

    def batches(self) -> Batches[Any]:
        """Open the data and make its loader: what is measured."""
        given = self.options
        data = self._data = self.open()
        samples: Samples[Any, Any]
        if given["streams"]:
            return data.streams(given["batch_size"], given["seq_len"], read=given["read"]).batches(**self.how)
        if given["packed"]:
            samples = data.packed(given["seq_len"], strategy=given["packed"], side=given["side"], read=given["read"])
        else:
            samples = data.windows(given["seq_len"], stride=given["stride"], read=given["read"])
        return samples.batches(given["batch_size"], **self.how)

    @property
    def how(self) -> dict[str, Any]:
        """How samples come: options of the loader."""
        # Of units, "full" is the order that needs all of them.
        shuffle = "full" if self.in_units and self.shuffle == "full" else _SHUFFLES[self.shuffle]
        order = {} if self.options["streams"] else {"shuffle": shuffle, "seed": self.options["seed"] or 0}
        return {name: self.options[name] for name in ("epochs", "prefetch", "copy")} | order

    @property
    def stream(self) -> TokenStream:
        stream: TokenStream = self._data.stream()
        return stream

    @property
    def view(self) -> str:
        return "streams" if self.options["streams"] else self.options["packed"] or "windows"

    @property
    def shuffle(self) -> str:
        return self.options["shuffle"] or ("none" if self.options["streams"] else "units" if self.in_units else "full")


def _facts(feeding: _Feeding, figures: Figures) -> dict[str, Any]:
    """All figures, for scripts; null where there was no steady state."""
    given = feeding.options
    size = None if feeding.in_units else feeding.stream.size_bytes
    own = {"data": feeding.name, "size_bytes": size, "read": _way(feeding, figures), "view": feeding.view}
    own |= {name: given[name] for name in ("seq_len", "batch_size", "epochs", "copy")} | {"shuffle": feeding.shuffle}
    rates = ("tokens_per_second", "samples_per_second", "batch_seconds", "epochs_delivered")
    return own | dataclasses.asdict(figures) | {name: getattr(figures, name) for name in rates}


def _what(feeding: _Feeding, figures: Figures) -> str:
    given = feeding.options
    kind = {"windows": "windows", "streams": "stretches"}.get(feeding.view, f"rows ({feeding.view})")
    order = {
        "full": "any order",
        "block": "blocks in any order",
        "shard": "any order in some shards",
        "none": "in sequence",
        "units": "any order in some units",
    }[feeding.shuffle]
    kind = kind if figures.samples is None else f"{figures.samples:,} {kind}"
    return f"{kind} of {given['seq_len']:,} tokens, {order}, batches of {given['batch_size']:,}"


def _lines(feeding: _Feeding, figures: Figures) -> dict[str, str]:
    """What people want to know, the names of the lines in front."""
    lines = {} if feeding.in_units else {"Files": _reading(feeding, figures)}
    lines["First batch"] = f"{1000 * figures.first_batch_seconds:.1f} ms from opening; imports not counted"
    if figures.tokens_per_second is None:
        lines["Rate"] = "none: there is one batch only"
    else:
        lines["Rate"] = _rate(figures)
        lines["Training"] = _training(figures)
    lines["Memory"] = _memory(figures)
    if figures.making:
        lines |= _making(figures.making)
    lines["Delivered"] = _delivered(figures)
    return lines


def _way(feeding: _Feeding, figures: Figures) -> str:
    return "pread" if figures.announced or feeding.options["read"] == "pread" else "map"


def _reading(feeding: _Feeding, figures: Figures) -> str:
    """How files are read, and why."""
    stream, asked = feeding.stream, feeding.options["read"]
    how = {"map": "mapped", "pread": "pread"}[_way(feeding, figures)] + ", announced ahead" * figures.announced
    free, origin = feeding.free
    why = f"--read {asked}" if asked != "auto" else f"{format_size(free)} free {origin}, half of it for mapped files"
    return f"{format_size(stream.size_bytes)} in {counted(len(stream.files), 'file')}, {how} ({why})"


def _rate(figures: Figures) -> str:
    tokens, samples = figures.tokens_per_second, figures.samples_per_second
    assert tokens is not None and samples is not None
    slowest = f"slowest batch {1000 * figures.slowest_seconds:.2f} ms"
    return f"{_rounded(tokens)} tokens/s, {_rounded(samples)} samples/s; {slowest}"


def _training(figures: Figures) -> str:
    """How much longer a step of training gets, when nothing is made while it runs."""
    assert figures.tokens_per_second is not None and figures.batch_seconds is not None
    slow, fast = (f"{_rounded(100 * rate / figures.tokens_per_second, 2)} %" for rate in _TRAINING_RATES)
    first, second = (f"{rate:,}" for rate in _TRAINING_RATES)
    took = f"a batch takes {1000 * figures.batch_seconds:.3f} ms"
    return f"{took}, which adds {slow} to a step at {first} tokens/s of training, {fast} at {second}"


def _memory(figures: Figures) -> str:
    text = f"{format_size(figures.anonymous_bytes)} beyond imports"
    if figures.worker_bytes is not None:
        text += f"; {format_size(figures.worker_bytes)} in the workers, what they share with this process too"
    return f"{text}; mapped files (reclaimable) {format_size(figures.file_bytes)}"


def _making(told: dict[str, float]) -> dict[str, str]:
    """How the tokens were made that were fed."""
    units = f"{told['units_made']:,.0f} of {counted(int(told['units']), 'unit')}, {told['units_ahead']:,.0f} ahead"
    rate = f"{_rounded(told['tokens_made_per_second'])} tokens/s by {counted(int(told['workers']), 'worker')}"
    held, budget = (format_size(int(told[name])) for name in ("memory_bytes", "budget_bytes"))
    waited = f"{counted(int(told['waits']), 'time')}, {told['waited_seconds']:.2f} s, for units that were not made yet"
    return {"Made": f"{units}; {rate}; {held} of {budget}", "Waited": waited}


def _delivered(figures: Figures) -> str:
    samples, epochs = counted(figures.delivered, "sample"), figures.epochs_delivered
    text = f"{samples} in {counted(figures.batches, 'batch', 'batches')}, "
    text += ("" if epochs is None else f"{epochs:.2f} epochs, ") + f"{figures.steady_seconds:.2f} s"
    if figures.ended == "interrupted":
        return f"{text}; interrupted"
    if figures.ended == "epochs" and figures.steady_seconds < _STEADY_SECONDS:
        return f"{text}; the data ended before a rate is sure, --epochs goes over it again"
    return f"{text}; ended by --{figures.ended}"


def _rounded(number: float, digits: int = 3) -> str:
    """The digits that count: those behind are others every time.

    >>> _rounded(243_116_021.4), _rounded(0.04123, 2)
    ('243,000,000', '0.041')
    """
    rounded = float(f"{number:.{digits}g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
