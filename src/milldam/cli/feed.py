"""`milldam feed`: what a loader delivers on this machine."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.naming import visible
from milldam.cli.running import EXIT_INTERRUPTED
from milldam.errors import ConfigError

if TYPE_CHECKING:
    from milldam.loader.batches import Batches
    from milldam.loader.measuring import Figures
    from milldam.loader.samples import Samples
    from milldam.loader.stream import TokenStream
    from milldam.loader.views import Trainable

_SHUFFLES: dict[str, Any] = {"full": True, "block": "block", "shard": "shard", "none": False}
_TRAINING_RATES = (100_000, 1_000_000)
"""Tokens/s. A GPU that does 400 TFLOP/s trains 1B parameters at 67,000 tokens/s and 100M at 670,000 (6 FLOP each)."""
_STEADY_SECONDS = 0.5
"""A rate over less than this says little."""


@click.command()
@click.argument("store")
@click.option("--seq-len", type=int, required=True, metavar="N", help="Tokens of a sample.")
@click.option("--batch-size", type=int, required=True, metavar="N", help="Samples of a batch.")
@click.option("--split", metavar="NAME", help="A split of the store.")
@click.option("--dtype", metavar="NAME", help="How a .bin file without an index holds tokens. [default: uint16]")
@click.option("--stride", type=int, metavar="N", help="Tokens from one window to the next. [default: --seq-len]")
@click.option("--packed", type=click.Choice(["wrapped", "best_fit"]), help="Rows of documents in place of windows.")
@click.option("--streams", is_flag=True, help="Contiguous streams, one a row, in place of windows.")
@click.option(
    "--shuffle",
    type=click.Choice(list(_SHUFFLES)),
    help="Any sample after any other, whole blocks, some shards, or as they lie. [default: full; streams: none]",
)
@click.option("--seed", type=int, metavar="N", help="Decides the order. [default: 0]")
@click.option("--epochs", type=int, metavar="N", help="Stop after N times over the data. [default: go on]")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="Stop after so long.")
@click.option(
    "--prefetch", type=int, default=0, show_default=True, metavar="N", help="Batches that a thread makes ahead."
)
@click.option(
    "--read",
    type=click.Choice(["auto", "map", "pread"]),
    default="auto",
    show_default=True,
    help="How files are read; auto maps what fits in half of the free memory.",
)
@click.option(
    "--copy/--reuse", default=True, show_default=True, help="New arrays for each batch, or the same ones again."
)
@click.option(
    "--cache", metavar="SIZE", help="Of a store at an address: what may lie here. [default: 50GB, or half of the disk]"
)
@click.option("--torch", is_flag=True, help="Batches as torch tensors.")
@click.option("--workers", type=int, metavar="N", help="Through a torch DataLoader with N worker processes.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def feed(store: str, as_json: bool, seconds: float, torch: bool, workers: int | None, **options: Any) -> None:
    """Measure what a loader delivers on this machine.

    Time to the first batch, tokens/s, memory.

    STORE: anything that `milldam.open` opens. Ends after --seconds or --epochs; Ctrl-C gives the figures so far.

    \b
    milldam feed corpus.milldam --seq-len 1024 --batch-size 16
    milldam feed corpus.milldam --seq-len 2048 --batch-size 8 --packed best_fit --split train --json
    """
    from milldam.loader.measuring import measure
    from milldam.loader.opening import open_data
    from milldam.memory import available_bytes

    if options["packed"]:
        # What is imported while the clock runs would be counted.
        import milldam.loader.packed  # noqa: F401

    _refuse_contradictions(options, workers)
    feeding = _Feeding(open_data, store, options, available_bytes())
    through = _plain if not torch and workers is None else _torch(feeding, workers)
    figures = measure(feeding.batches, seconds=seconds, through=through)
    if as_json:
        click.echo(json.dumps(_facts(feeding, figures)))
    else:
        click.echo(visible(f"{feeding.stream.name}: {_what(feeding, figures)}"))
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


@dataclasses.dataclass(slots=True)
class _Feeding:
    """The data, and how it is to be fed."""

    open: Callable[..., Trainable]
    path: str
    options: dict[str, Any]
    free: tuple[int, str]
    """Bytes of memory, and who leaves so many."""
    _data: Trainable | None = None

    def batches(self) -> Batches[Any]:
        """Open the data and make its loader: what is measured."""
        given = self.options
        data = self._data = self.open(self.path, split=given["split"], dtype=given["dtype"], cache=given["cache"])
        samples: Samples[Any, Any]
        if given["streams"]:
            return data.streams(given["batch_size"], given["seq_len"], read=given["read"]).batches(**self.how)
        if given["packed"]:
            samples = data.packed(given["seq_len"], strategy=given["packed"], read=given["read"])
        else:
            samples = data.windows(given["seq_len"], stride=given["stride"], read=given["read"])
        return samples.batches(given["batch_size"], **self.how)

    @property
    def how(self) -> dict[str, Any]:
        """How samples come: options of the loader."""
        order = (
            {} if self.options["streams"] else {"shuffle": _SHUFFLES[self.shuffle], "seed": self.options["seed"] or 0}
        )
        return {name: self.options[name] for name in ("epochs", "prefetch", "copy")} | order

    @property
    def stream(self) -> TokenStream:
        assert self._data is not None
        return self._data.stream()

    @property
    def view(self) -> str:
        return "streams" if self.options["streams"] else self.options["packed"] or "windows"

    @property
    def shuffle(self) -> str:
        return self.options["shuffle"] or ("none" if self.options["streams"] else "full")


def _facts(feeding: _Feeding, figures: Figures) -> dict[str, Any]:
    """All figures, for scripts; null where there was no steady state."""
    stream, given = feeding.stream, feeding.options
    own = {"data": stream.name, "size_bytes": stream.size_bytes, "read": _way(feeding, figures), "view": feeding.view}
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
    }[feeding.shuffle]
    return f"{figures.samples:,} {kind} of {given['seq_len']:,} tokens, {order}, batches of {given['batch_size']:,}"


def _lines(feeding: _Feeding, figures: Figures) -> dict[str, str]:
    """What people want to know, the names of the lines in front."""
    lines = {"Files": _reading(feeding, figures)}
    lines["First batch"] = f"{1000 * figures.first_batch_seconds:.1f} ms from opening; imports not counted"
    if figures.tokens_per_second is None:
        lines["Rate"] = "none: there is one batch only"
    else:
        lines["Rate"] = _rate(figures)
        lines["Training"] = _training(figures)
    lines["Memory"] = _memory(figures)
    lines["Delivered"] = _delivered(figures)
    return lines


def _way(feeding: _Feeding, figures: Figures) -> str:
    return "pread" if figures.announced or feeding.options["read"] == "pread" else "map"


def _reading(feeding: _Feeding, figures: Figures) -> str:
    """How files are read, and why."""
    from milldam.memory import format_size

    stream, asked = feeding.stream, feeding.options["read"]
    how = {"map": "mapped", "pread": "pread"}[_way(feeding, figures)] + ", announced ahead" * figures.announced
    free, origin = feeding.free
    why = f"--read {asked}" if asked != "auto" else f"{origin} leaves {format_size(free)}, half of which may be mapped"
    return f"{format_size(stream.size_bytes)} in {_counted(len(stream.files), 'file')}, {how} ({why})"


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
    from milldam.memory import format_size

    text = f"{format_size(figures.anonymous_bytes)} beyond imports"
    if figures.worker_bytes is not None:
        text += f"; {format_size(figures.worker_bytes)} in the workers, what they share with this process too"
    return f"{text}; mapped files, which the kernel takes back at will, {format_size(figures.file_bytes)}"


def _delivered(figures: Figures) -> str:
    samples, epochs = _counted(figures.delivered, "sample"), f"{figures.epochs_delivered:.2f} epochs"
    text = f"{samples} in {_counted(figures.batches, 'batch', 'batches')}, {epochs}, {figures.steady_seconds:.2f} s"
    if figures.ended == "interrupted":
        return f"{text}; interrupted"
    if figures.ended == "epochs" and figures.steady_seconds < _STEADY_SECONDS:
        return f"{text}; the data ended before a rate is sure, --epochs goes over it again"
    return f"{text}; ended by --{figures.ended}"


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _rounded(number: float, digits: int = 3) -> str:
    """The digits that count: those behind are others every time.

    >>> _rounded(243_116_021.4), _rounded(0.04123, 2)
    ('243,000,000', '0.041')
    """
    rounded = float(f"{number:.{digits}g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
