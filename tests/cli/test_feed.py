"""What a loader delivers, measured: by the library, and by `milldam feed`."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit.jobs import TOKENIZER, invoke, run_apart, run_milldam, write_corpus
from tests.kit.token_stores import write_store

from milldam.errors import ConfigError
from milldam.loader import measuring
from milldam.loader.batches import Batches
from milldam.loader.measuring import measure


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 2,001 tokens: 125 windows of 16."""
    store = write_store(tmp_path_factory.mktemp("feed") / "s", [[100] * 10, [1, 500, 500]])
    return store.path


def loader(folder: Path, **options: Any) -> Batches:
    import milldam

    return milldam.open(folder).windows(16).batches(4, **options)


# ---- the measurement ----


def test_all_that_was_delivered_is_counted(folder: Path) -> None:
    """Samples, batches and epochs are those of the loader, its last short batch too."""
    figures = measure(lambda: loader(folder, epochs=3))
    assert (figures.samples, figures.sample_tokens, figures.ended) == (125, 16, "epochs")
    assert (figures.delivered, figures.batches, figures.epochs_delivered) == (375, 94, 3.0)
    assert figures.steady == 375 - 4


def test_it_ends_when_the_time_is_up(folder: Path) -> None:
    """A loader without an end is stopped."""
    figures = measure(lambda: loader(folder, epochs=None), seconds=0.1)
    assert figures.ended == "seconds" and figures.delivered > 0


def slowly(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        time.sleep(0.01)
        yield batch


def test_rates_are_those_of_the_waiting(folder: Path) -> None:
    """A loader that takes 10 ms a batch gives no more than 100 batches/s, from the first one on."""
    figures = measure(lambda: loader(folder), through=slowly)
    assert figures.batches == 32 and figures.first_batch_seconds >= 0.01
    assert figures.batch_seconds is not None and figures.slowest_seconds >= figures.batch_seconds >= 0.01
    assert figures.samples_per_second == pytest.approx(figures.steady / figures.steady_seconds)
    assert figures.tokens_per_second == pytest.approx(16 * figures.steady / figures.steady_seconds)
    assert figures.samples_per_second <= 400


def test_opening_is_part_of_the_time_to_the_first_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make` does is counted there, and not in the rate."""
    clock = itertools.count()
    monkeypatch.setattr(measuring, "perf_counter", lambda: next(clock))

    def make() -> Batches:
        for _ in range(1_000_000):
            next(clock)
        return loader(folder)

    figures = measure(make)
    assert figures.first_batch_seconds >= 1_000_000 > figures.steady_seconds


def test_memory_is_what_came_on_top(folder: Path) -> None:
    """What the process held before does not count; what the loader holds does."""
    program = """
import json, sys
import numpy as np
import milldam
from milldam.loader.measuring import measure

def loader():
    return milldam.open(sys.argv[1]).windows(16).batches(4)

def make():
    kept.append(np.ones(40_000_000, np.uint8))
    return loader()

held, kept = np.ones(30_000_000, np.uint8), []
print(json.dumps([measure(loader).anonymous_bytes, measure(make).anonymous_bytes]))
"""
    little, much = json.loads(run_apart(program, folder))
    assert little < 20_000_000 and 38_000_000 <= much < 60_000_000


def interrupted_after(count: int) -> Any:
    """A way for batches that ends like Ctrl-C."""

    def through(batches: Iterable[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number == count:
                raise KeyboardInterrupt
            yield batch

    return through


def test_an_interrupt_gives_the_figures_so_far(folder: Path) -> None:
    """After some batches they are worth something; before the first there are none."""
    figures = measure(lambda: loader(folder), through=interrupted_after(5))
    assert (figures.ended, figures.batches, figures.delivered) == ("interrupted", 5, 20)
    with pytest.raises(KeyboardInterrupt):
        measure(lambda: loader(folder), through=interrupted_after(0))


def test_one_batch_has_no_rate(folder: Path) -> None:
    """With nothing after the first batch there is no steady state, and none is made up."""
    import milldam

    figures = measure(lambda: milldam.open(folder).windows(16).batches(200))
    assert figures.delivered == 125 and figures.steady == 0
    assert figures.tokens_per_second is figures.samples_per_second is figures.batch_seconds is None


def test_no_time_is_refused(folder: Path) -> None:
    """Nothing can be measured in no time."""
    with pytest.raises(ConfigError, match="seconds: 0; use more than 0"):
        measure(lambda: loader(folder), seconds=0)


# ---- the command ----


def figures_of(folder: Path, *arguments: object) -> dict[str, Any]:
    done = invoke("feed", folder, "--seq-len", 16, "--batch-size", 4, "--epochs", 1, "--json", *arguments)
    assert done.exit_code == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"view": "windows", "shuffle": "full", "samples": 125, "read": "map", "announced": False}),
        (["--stride", 8], {"view": "windows", "samples": 249}),
        (["--shuffle", "block", "--reuse"], {"shuffle": "block", "samples": 125, "copy": False}),
        (["--shuffle", "none", "--prefetch", 2], {"shuffle": "none", "samples": 125}),
        (["--read", "pread"], {"samples": 125, "read": "pread"}),
        (["--streams"], {"view": "streams", "shuffle": "none", "samples": 124}),
        (["--packed", "wrapped"], {"view": "wrapped", "samples": 125}),
        (["--packed", "best_fit"], {"view": "best_fit"}),
        (["--epochs", 2, "--seed", 7], {"samples": 125, "epochs_delivered": 2.0}),
    ],
)
def test_every_view_and_order_can_be_measured(folder: Path, arguments: list[Any], expected: dict[str, Any]) -> None:
    """All that is there is delivered, whatever the view, the order and the way of reading."""
    figures = figures_of(folder, *arguments)
    assert figures | expected == figures
    assert figures["delivered"] == figures["epochs"] * figures["samples"] and figures["ended"] == "epochs"
    assert figures["tokens_per_second"] == pytest.approx(16 * figures["samples_per_second"])
    assert figures["first_batch_seconds"] > 0 and figures["worker_bytes"] is None


def test_people_get_lines(folder: Path) -> None:
    """What was read and how, the time to the first batch, rate, share of training, memory, and why it ended."""
    shown = invoke("feed", folder, "--seq-len", 16, "--batch-size", 4, "--epochs", 1).stdout.splitlines()
    assert shown[0] == f"{folder}: 125 windows of 16 tokens, any order, batches of 4"
    assert [line.split(":")[0] for line in shown[1:]] == [
        "Files", "First batch", "Rate", "Training", "Memory", "Delivered",
    ]  # fmt: skip
    assert "4 KB in 2 files, mapped (" in shown[1] and "half of it for mapped files)" in shown[1]
    assert "ms from opening; imports not counted" in shown[2]
    assert " tokens/s, " in shown[3] and "% to a step at 100,000 tokens/s of training" in shown[4]
    assert "beyond imports; mapped files" in shown[5]
    assert "125 samples in 32 batches, 1.00 epochs" in shown[6] and "--epochs goes over it again" in shown[6]


def test_the_way_of_reading_has_its_reason(folder: Path) -> None:
    """A way that was asked for is named as such."""
    shown = invoke("feed", folder, "--seq-len", 16, "--batch-size", 4, "--epochs", 1, "--read", "pread").stdout
    assert "pread, announced ahead (--read pread)" in shown


def test_what_does_not_fit_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data beyond half of the free memory is not mapped, and the line says who leaves how much."""
    for module in ("milldam.memory", "milldam.loader.reading"):
        monkeypatch.setattr(f"{module}.available_bytes", lambda: (5000, "in the memory cgroup"))
    shown = invoke("feed", folder, "--seq-len", 16, "--batch-size", 4, "--epochs", 1).stdout
    assert "pread, announced ahead (5 KB free in the memory cgroup, half of it for mapped files)" in shown


def test_the_end_of_the_time_is_said(folder: Path) -> None:
    """With epochs to spare, the seconds end it."""
    shown = invoke("feed", folder, "--seq-len", 16, "--batch-size", 4, "--epochs", 10**6, "--seconds", 0.1).stdout
    assert shown.endswith("; ended by --seconds\n")


def test_one_batch_is_said_to_have_no_rate(folder: Path) -> None:
    """No figure is made up for data of one batch."""
    shown = invoke("feed", folder, "--seq-len", 16, "--batch-size", 500, "--epochs", 1).stdout
    assert "none: there is one batch only" in shown and "Training" not in shown


def test_interrupted_it_shows_what_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C prints the figures so far, and the exit code says that it was one."""
    monkeypatch.setattr(importlib.import_module("milldam.cli.feed"), "_plain", interrupted_after(3))
    done = invoke("feed", folder, "--seq-len", 16, "--batch-size", 4, "--epochs", 1)
    assert done.exit_code == 130 and "12 samples in 3 batches" in done.stdout
    assert done.stdout.endswith("; interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--streams", "--packed", "wrapped"], "--packed and --streams"),
        (["--streams", "--shuffle", "full"], "--shuffle and --streams"),
        (["--streams", "--stride", "8"], "--stride and --streams"),
        (["--packed", "best_fit", "--stride", "8"], "--stride and --packed"),
        (["--workers", "1", "--reuse"], "--workers: use 0 or more, and leave --reuse out"),
        (["--workers", "-1"], "--workers: use 0 or more"),
        (["--seconds", "0"], "seconds: 0.0; use more than 0"),
        (["--epochs", "0"], "epochs: 0; use 1 or more"),
        (["--split", "val"], "val"),
    ],
)
def test_what_can_not_be_meant_is_refused(folder: Path, arguments: list[str], message: str) -> None:
    """Options that contradict each other, or say nothing, end with a sentence."""
    done = invoke("feed", folder, "--seq-len", 16, "--batch-size", 4, *arguments)
    assert done.exit_code in (2, 3) and message in done.stderr and done.stdout == ""


def test_a_split_must_be_named_where_there_are_several(tmp_path: Path) -> None:
    """Nobody measures training on validation data by mistake."""
    write_store(tmp_path / "s", [[100], [50]], splits=["train", "val"])
    done = invoke("feed", tmp_path / "s", "--seq-len", 16, "--batch-size", 4)
    assert done.exit_code == 2 and "train, val" in done.stderr
    assert figures_of(tmp_path / "s", "--split", "val")["data"] == f"{tmp_path / 's'} (val)"


def test_without_torch_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing extra names the pip command."""
    monkeypatch.delitem(sys.modules, "milldam.torch", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    done = invoke("feed", folder, "--seq-len", 16, "--batch-size", 4, "--epochs", 1, "--torch")
    assert done.exit_code == 2 and 'pip install "milldam[torch]"' in done.stderr


@pytest.mark.parametrize("arguments", [["--torch"], ["--workers", 0], ["--torch", "--streams"]])
def test_tensors_are_measured_too(folder: Path, arguments: list[Any]) -> None:
    """As tensors, and through a DataLoader, the same samples are delivered."""
    pytest.importorskip("torch")
    figures = figures_of(folder, *arguments)
    assert figures["delivered"] == figures["samples"] and figures["worker_bytes"] is None


@pytest.mark.slow
def test_worker_processes_are_measured_with_their_memory(folder: Path) -> None:
    """Workers deliver the same samples, and what they hold is told apart."""
    pytest.importorskip("torch")
    options = ["--seq-len", 16, "--batch-size", 4, "--epochs", 1, "--json", "--workers", 2]
    figures = json.loads(run_milldam("feed", folder, *options).stdout)
    assert figures["delivered"] == figures["samples"] == 125 and figures["worker_bytes"] > 0


def test_files_of_other_tools_can_be_measured(tmp_path: Path) -> None:
    """A .bin file as nanoGPT writes it, with the dtype that it does not say, and a .npy file."""
    tokens = np.arange(1000, dtype=np.uint16)
    tokens.tofile(tmp_path / "uint16.bin")
    tokens.astype(np.uint32).tofile(tmp_path / "uint32.bin")
    np.save(tmp_path / "tokens.npy", tokens)
    for name, options in {"uint16.bin": [], "uint32.bin": ["--dtype", "uint32"], "tokens.npy": []}.items():
        assert figures_of(tmp_path / name, *options)["samples"] == 62, name


IMPORTS = """
import sys
import milldam.loader.measuring as measuring
def noting(make, **options):
    before = set(sys.modules)
    for _ in zip(range(2), make()):
        pass
    raise SystemExit(", ".join(sorted(set(sys.modules) - before)) or 0)
measuring.measure = noting
from milldam.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("arguments", [[], ["--read", "pread"], ["--streams"], ["--packed", "wrapped"]])
def test_no_imports_are_measured(folder: Path, arguments: list[str]) -> None:
    """Whatever the measured part needs is imported before the clock runs."""
    options = ["feed", str(folder), "--seq-len", "16", "--batch-size", "4", *arguments]
    done = subprocess.run([sys.executable, "-c", IMPORTS, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_fresh_process_takes_little_memory(folder: Path) -> None:
    """From opening to the last batch, a few megabytes on top of the imports."""
    options = ["--seq-len", 16, "--batch-size", 4, "--epochs", 200, "--json"]
    figures = json.loads(run_milldam("feed", folder, *options).stdout)
    assert figures["anonymous_bytes"] < 20_000_000


def test_text_is_fed_while_its_tokens_are_made(tmp_path: Path) -> None:
    """From the command line: what was made, and waited for; with a place for its tokens, a store is left."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", 300_000).path
    options = ["--tokenizer", TOKENIZER, "--cores", 1, "--seq-len", 32, "--batch-size", 4, "--epochs", 1]
    text = invoke("feed", corpus, *options, "--shard-size", "100KB", "--store", tmp_path / "store")
    assert text.exit_code == 0, text.output
    assert "windows of 32 tokens, any order in some units" in text.output
    assert "Made:" in text.output and "Waited:" in text.output
    figures = json.loads(invoke("feed", tmp_path / "store", "--units", *options[4:], "--json").output)
    assert figures["ended"] == "epochs" and figures["delivered"] > 100 and figures["making"] == {}


def test_text_without_a_place_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are removed at the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    corpus = write_corpus(tmp_path / "corpus.jsonl", 50_000).path
    options = ["--tokenizer", TOKENIZER, "--cores", 1, "--seq-len", 32, "--epochs", 1]
    figures = json.loads(invoke("feed", corpus, *options, "--json").output)
    assert figures["making"]["units_made"] == 1 and figures["samples"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.milldam", "b.milldam"], "--tokenizer: missing. Text needs one"),
        (["a.milldam", "--memory", "1GB"], "--tokenizer: missing. Text needs one"),
        (["corpus.jsonl", "--store", "s"], "--tokenizer: missing. Text needs one"),
    ],
)
def test_text_needs_a_tokenizer(arguments: list[str], said: str) -> None:
    """Several inputs, or options of text, are refused without one."""
    done = invoke("feed", *arguments)
    assert done.exit_code == 2 and said in done.output
