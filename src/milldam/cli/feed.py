"""`milldam feed`: what a loader delivers on this machine: time to the first batch, rate, memory.

The clock runs while a batch is waited for. Nothing is done with a batch, so training gets at most this rate.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.commands import json_option
from milldam.cli.naming import visible
from milldam.errors import EXIT_INTERRUPTED, ConfigError
from milldam.markup import counted
from milldam.memory import format_size

if TYPE_CHECKING:
    from milldam.loader.batches import Batches

_SHUFFLES: dict[str, tuple[Any, str]] = {
    "full": (True, "any order"),
    "block": ("block", "blocks in any order"),
    "shard": ("shard", "any order in some shards"),
    "none": (False, "in sequence"),
}
_MEMORY_SECONDS = 0.25
"""Between two samples of the memory."""


@click.command()
@click.argument("data", nargs=-1, required=True, metavar="STORE|INPUT...")
@click.option("--tokenizer", help="For text: folder, file or Hub name of the tokenizer.")
@click.option("--store", metavar="FOLDER", help="For text: keep the tokens in this store. [default: remove them]")
@click.option("--memory", metavar="SIZE", help="For text: limit for tokenizing. [default: half of what is free]")
@click.option("--cores", type=int, metavar="N", help="For text: cores for tokenizing. [default: all]")
@click.option("--seq-len", type=int, default=1024, show_default=True, metavar="N", help="Tokens per sample.")
@click.option("--batch-size", type=int, default=16, show_default=True, metavar="N", help="Samples per batch.")
@click.option("--split", metavar="NAME", help="Read only this split.")
@click.option("--packed", type=click.Choice(["wrapped", "best_fit"]), help="Packed rows instead of windows.")
@click.option("--shuffle", type=click.Choice(list(_SHUFFLES)), help="[default: full; for text: in groups of units]")
@click.option("--epochs", type=int, metavar="N", help="Stop after N passes over the data. [default: no limit]")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="Stop after this time.")
@click.option("--read", type=click.Choice(["auto", "map", "pread"]), default="auto", help="How to read files.")
@click.option("--cache", metavar="SIZE", help="For a store at an address: size of the cache. [default: 50GB]")
@json_option
def feed(data: tuple[str, ...], as_json: bool, seconds: float, **options: Any) -> None:
    """
    Shows the time to the first batch, tokens/s and memory.

    --shuffle: all samples, whole blocks, within groups of shards, or none. --read auto maps files that fit in half of
    the free memory.

    STORE: anything that `milldam.open` opens. INPUT: text, with --tokenizer, or a configuration (.yaml); text is
    tokenized while batches are delivered. Ends after --seconds or --epochs; Ctrl-C shows the figures so far.

    \b
    milldam feed corpus.milldam --seq-len 1024 --batch-size 16
    milldam feed corpus.milldam --seq-len 2048 --batch-size 8 --packed best_fit --split train --json
    milldam feed data/*.jsonl.zst --tokenizer gpt2/ --store corpus.milldam --memory 2GB
    """
    if seconds <= 0:
        raise ConfigError(f"--seconds {seconds}: use more than 0.")
    # Imports while the clock runs would be counted.
    import milldam.loader.batches

    if options["packed"]:
        import milldam.loader.packed  # noqa: F401
    length, view, shuffle = options["seq_len"], options["packed"] or "windows", options["shuffle"] or "full"

    def batches() -> Batches[Any]:
        opened = opener()
        make = partial(opened.packed, strategy=view) if options["packed"] else opened.windows
        order = {} if options["shuffle"] is None else {"shuffle": _SHUFFLES[shuffle][0]}
        made: Batches[Any] = make(length, read=options["read"]).batches(
            options["batch_size"], epochs=options["epochs"], **order
        )
        return made

    with _opener(data, options) as opener:
        figures = _measure(batches, seconds)
    figures |= {"data": data[0] if len(data) == 1 else list(data), "seq_len": length, "view": view, "shuffle": shuffle}
    figures |= {"batch_size": options["batch_size"]}
    if figures["steady"]:
        figures["samples_per_second"] = figures["steady"] / figures["steady_seconds"]
        figures["tokens_per_second"] = length * figures["samples_per_second"]
    if as_json:
        click.echo(json.dumps(figures))
    else:
        kind = f"rows ({view})" if options["packed"] else "windows"
        order = "any order in some units" if figures["making"] else _SHUFFLES[shuffle][1]
        named = data[0] if len(data) == 1 else f"{data[0]} and {len(data) - 1} more"
        size = options["batch_size"]
        click.echo(visible(f"{named}: {kind} of {length:,} tokens, {order}, batches of {size:,}"))
        for name, text in _lines(figures).items():
            click.echo(visible(f"{name + ':':<14}{text}"))
    if figures["ended"] == "interrupted":
        sys.exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def _opener(data: tuple[str, ...], options: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """Opens the data; the tokens of text for which no store is named are removed at the end."""
    from milldam.api import open
    from milldam.feeding import is_config, is_raw

    inputs: Any = list(data) if len(data) > 1 else data[0]
    names = {"tokenizer": "tokenizer", "store": "store", "memory": "memory", "cores": "workers"}
    text = {name: options[option] for option, name in names.items() if options[option] is not None}
    with contextlib.ExitStack() as stack:
        if not is_raw(inputs, text):
            if len(data) > 1 or text:
                raise ConfigError(
                    "--tokenizer: missing. Text needs one; a store is one path, without options for text."
                )
            yield partial(open, inputs, split=options["split"], cache=options["cache"])
            return
        if "store" not in text and not is_config(inputs):
            text["store"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="milldam-feed-"))
        yield lambda: stack.enter_context(contextlib.closing(open(inputs, split=options["split"], **text)))


def _measure(make: Callable[[], Batches[Any]], seconds: float) -> dict[str, Any]:
    """Opens the data and takes batches until the time is up or they end.

    An interrupt after the first batch ends it early, with the figures so far.
    """
    from milldam.memory import release, usage

    def rows(batch: Any) -> int:
        return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])

    release()
    before, begun = usage(), perf_counter()
    batches = make()
    delivered = iter(batches)
    first = rows(next(delivered))
    first_seconds = perf_counter() - begun
    count, steady, waited, slowest, ended = 1, 0, 0.0, 0.0, "epochs"
    used, sampled = usage(), perf_counter()
    deadline = start = perf_counter()
    deadline += seconds
    try:
        for batch in delivered:
            end = perf_counter()
            count, steady, waited = count + 1, steady + rows(batch), waited + end - start
            slowest = max(slowest, end - start)
            if end >= deadline:
                ended = "seconds"
                break
            if end >= sampled + _MEMORY_SECONDS:
                used, sampled = max(used, usage(), key=lambda one: one.anonymous), end
            start = perf_counter()
    except KeyboardInterrupt:
        ended = "interrupted"
    used = max(used, usage(), key=lambda one: one.anonymous)
    known = batches.samples._length_known
    return {
        "samples": batches.samples.epoch_samples if known else None,
        "announced": known and any(reader.announces for reader in batches.samples._readers),
        "first_batch_seconds": first_seconds,
        "batches": count,
        "delivered": first + steady,
        "steady": steady,
        "steady_seconds": waited,
        "slowest_seconds": slowest,
        "anonymous_bytes": max(0, used.anonymous - before.anonymous),
        "file_bytes": max(0, used.file - before.file),
        "ended": ended,
        "making": batches.samples._stats(),
    }


def _lines(figures: dict[str, Any]) -> dict[str, str]:
    """The figures for people, by the name of the line."""

    def rounded(number: float) -> str:
        return f"{float(f'{number:.3g}'):,.0f}"

    lines = {"First batch": f"{1000 * figures['first_batch_seconds']:.1f} ms from opening; imports not counted"}
    if "tokens_per_second" not in figures:
        lines["Rate"] = "none: there is one batch only"
    else:
        each = figures["steady_seconds"] / (figures["batches"] - 1)
        rates = f"{rounded(figures['tokens_per_second'])} tokens/s, {rounded(figures['samples_per_second'])} samples/s"
        lines["Rate"] = f"{rates}; {1000 * each:.3f} ms a batch, at most {1000 * figures['slowest_seconds']:.2f} ms"
    held = format_size(figures["anonymous_bytes"])
    how = "pread, announced ahead" if figures["announced"] else "mapped files (reclaimable)"
    lines["Memory"] = f"{held} beyond imports; {how} {format_size(figures['file_bytes'])}"
    if making := figures["making"]:
        units = f"{making['units_made']:,.0f} of {counted(int(making['units']), 'unit')}"
        rate = f"{rounded(making['tokens_made_per_second'])} tokens/s by {counted(int(making['workers']), 'worker')}"
        held, budget = (format_size(int(making[name])) for name in ("memory_bytes", "budget_bytes"))
        lines["Made"] = f"{units}, {making['units_ahead']:,.0f} ahead; {rate}; {held} of {budget}"
        waited = f"{counted(int(making['waits']), 'time')}, {making['waited_seconds']:.2f} s"
        lines["Waited"] = f"{waited}, for units that were not made yet"
    samples, batches = counted(figures["delivered"], "sample"), counted(figures["batches"], "batch", "batches")
    lines["Delivered"] = f"{samples} in {batches}, {figures['steady_seconds']:.2f} s; ended by {figures['ended']}"
    return lines
