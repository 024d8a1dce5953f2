"""`milldam feed`: what a loader delivers on this machine: time to the first batch, rate, memory.

The clock runs while a batch is waited for. Nothing is done with a batch, so training gets at most this rate.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
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

_SHUFFLES = {"full": True, "block": "block", "shard": "shard", "none": False}
_MEMORY_SECONDS = 0.25
"""Between two samples of the memory."""


@click.command()
@click.argument("data", nargs=-1, required=True, metavar="STORE|INPUT...")
@click.option("--tokenizer", help="For text: folder, file or Hub name of the tokenizer.")
@click.option("--store", metavar="FOLDER", help="For text: keep the tokens in this store. [default: remove them]")
@click.option("--memory", metavar="SIZE", help="For text: limit for tokenizing. [default: half of what is free]")
@click.option("--cores", "workers", type=int, metavar="N", help="For text: cores for tokenizing. [default: all]")
@click.option("--seq-len", type=int, default=1024, show_default=True, metavar="N", help="Tokens per sample.")
@click.option("--batch-size", type=int, default=16, show_default=True, metavar="N", help="Samples per batch.")
@click.option("--split", metavar="NAME", help="Read only this split.")
@click.option("--packed", type=click.Choice(["wrapped", "best_fit"]), help="Packed rows instead of windows.")
@click.option("--shuffle", type=click.Choice(list(_SHUFFLES)), help="[default: full; for text: in groups of units]")
@click.option("--epochs", type=int, metavar="N", help="Stop after N passes over the data. [default: no limit]")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=5.0, help="Stop after this time. [default: 5]"
)
@click.option("--cache", metavar="SIZE", help="For a store at an address: size of the cache. [default: 50GB]")
@json_option
def feed(data: tuple[str, ...], seconds: float, as_json: bool, **options: Any) -> None:
    """
    Shows the time to the first batch, tokens/s and memory.

    --shuffle: all samples, whole blocks, within groups of shards, or none.

    STORE: anything that `milldam.open` opens. INPUT: text, with --tokenizer, or a configuration (.yaml); text is
    tokenized while batches are delivered. Ends after --seconds or --epochs; Ctrl-C shows the figures so far.

    \b
    milldam feed corpus.milldam --seq-len 1024 --batch-size 16
    milldam feed corpus.milldam --seq-len 2048 --batch-size 8 --packed best_fit --split train --json
    milldam feed data/*.jsonl.zst --tokenizer gpt2/ --store corpus.milldam --memory 2GB
    """
    from milldam.api import open
    from milldam.feeding import is_config, is_raw

    # Imports while the clock runs would be counted.
    import_module("milldam.loader.batches")
    import_module("milldam.loader.packed")
    inputs: Any = list(data) if len(data) > 1 else data[0]
    length, size, packed, shuffle = (options[name] for name in ("seq_len", "batch_size", "packed", "shuffle"))
    text = {name: options[name] for name in ("tokenizer", "store", "memory", "workers") if options[name] is not None}
    with contextlib.ExitStack() as stack:
        is_text = is_raw(inputs, text)
        if not is_text and (len(data) > 1 or text):
            raise ConfigError("--tokenizer: missing. Text needs one; a store is one path, without options for text.")
        if is_text and "store" not in text and not is_config(inputs):  # removed at the end
            text["store"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="milldam-feed-"))

        def make() -> Batches[Any]:
            opened: Any = open(inputs, split=options["split"], **(text if is_text else {"cache": options["cache"]}))
            if is_text:
                stack.enter_context(contextlib.closing(opened))
            order = {} if shuffle is None else {"shuffle": _SHUFFLES[shuffle]}
            samples = opened.packed(length, strategy=packed) if packed else opened.windows(length)
            made: Batches[Any] = samples.batches(size, epochs=options["epochs"], **order)
            return made

        figures = _measure(make, seconds)
    figures |= {"data": inputs, "seq_len": length, "batch_size": size, "view": packed or "windows"}
    figures["shuffle"] = shuffle or ("in groups of units" if figures["making"] else "full")
    lines = {"First batch": f"{1000 * figures['first_batch_seconds']:.1f} ms from opening; imports not counted"}
    lines["Rate"] = "none: there is one batch only"
    if figures["steady"]:
        figures["samples_per_second"] = figures["steady"] / figures["steady_seconds"]
        figures["tokens_per_second"] = length * figures["samples_per_second"]
        rates = f"{figures['tokens_per_second']:,.0f} tokens/s, {figures['samples_per_second']:,.0f} samples/s"
        lines["Rate"] = f"{rates}; {1000 * figures['steady_seconds'] / (figures['batches'] - 1):.3f} ms a batch"
    held, mapped = format_size(figures["anonymous_bytes"]), format_size(figures["file_bytes"])
    lines["Memory"] = f"{held} beyond imports; mapped files (reclaimable) {mapped}"
    if making := figures["making"]:
        units = f"{making['units_made']:,.0f} of {counted(int(making['units']), 'unit')}"
        rate = f"{making['tokens_made_per_second']:,.0f} tokens/s by {counted(int(making['workers']), 'worker')}"
        held, budget = (format_size(int(making[name])) for name in ("memory_bytes", "budget_bytes"))
        lines["Made"] = f"{units}, {making['units_ahead']:,.0f} ahead; {rate}; {held} of {budget}"
        waited = f"{counted(int(making['waits']), 'time')}, {making['waited_seconds']:.2f} s"
        lines["Waited"] = f"{waited}, for units that were not made yet"
    samples, batches = counted(figures["delivered"], "sample"), counted(figures["batches"], "batch", "batches")
    lines["Delivered"] = f"{samples} in {batches}, {figures['steady_seconds']:.2f} s; ended by {figures['ended']}"
    kind = f"rows ({packed})" if packed else "windows"
    head = f"{data[0]}: {kind} of {length:,} tokens, shuffle {figures['shuffle']}, batches of {size:,}"
    shown = "\n".join([visible(head), *(f"{name + ':':<14}{line}" for name, line in lines.items())])
    click.echo(json.dumps(figures) if as_json else shown)
    if figures["ended"] == "interrupted":
        sys.exit(EXIT_INTERRUPTED)


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
    count, steady, waited, ended = 1, 0, 0.0, "epochs"
    used, sampled = usage(), perf_counter()
    deadline = start = perf_counter()
    deadline += seconds
    try:
        for batch in delivered:
            end = perf_counter()
            count, steady, waited = count + 1, steady + rows(batch), waited + end - start
            if end >= deadline:
                ended = "seconds"
                break
            if end >= sampled + _MEMORY_SECONDS:
                used, sampled = max(used, usage(), key=lambda one: one.anonymous), end
            start = perf_counter()
    except KeyboardInterrupt:
        ended = "interrupted"
    used = max(used, usage(), key=lambda one: one.anonymous)
    return {
        "samples": batches.samples.epoch_samples if batches.samples._length_known else None,
        "first_batch_seconds": first_seconds,
        "batches": count,
        "delivered": first + steady,
        "steady": steady,
        "steady_seconds": waited,
        "anonymous_bytes": max(0, used.anonymous - before.anonymous),
        "file_bytes": max(0, used.file - before.file),
        "ended": ended,
        "making": batches.samples._stats(),
    }
