"""Killed anywhere, no sample is lost or comes twice: real kills of makers, workers and training programs."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import psutil
import pytest
from tests.kit.feed_training import sample_digests
from tests.kit.jobs import TOKENIZER, kill_group, recorded, store_bytes, wait_until, write_corpus
from tests.kit.quick import first_quick

import milldam

SEQ_LEN, EPOCHS = 32, 2
# The slow encoder leaves time to be killed in.
OPTIONS: dict[str, Any] = {"tokenizer": str(TOKENIZER), "encoder": "huggingface", "shard_size": "100KB"}


@dataclass(frozen=True, slots=True)
class Truth:
    """What training must see, whatever happens to it."""

    input: Path
    store: Path
    digests: list[str]
    """Of the sample at each place of all epochs."""


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    folder = tmp_path_factory.mktemp("truth")
    corpus = write_corpus(folder / "corpus.jsonl", 2_000_000, broken_every=200)
    store = folder / "reference"
    milldam.tokenize(corpus.path, store, workers=1, **OPTIONS)
    batches = milldam.open(store, units=True).windows(SEQ_LEN).batches(64, seed=1, epochs=EPOCHS)
    digests = [digest for batch in batches for digest in sample_digests(batch)]
    return Truth(corpus.path, store, digests)


class Training:
    """A training program that is killed and started again, with other ranks and workers."""

    def __init__(self, truth: Truth, folder: Path, seed: int) -> None:
        self.truth, self.folder, self.random = truth, folder, random.Random(seed)
        self.store, self.steps, self.done = folder / "store", folder / "steps.jsonl", folder / "done"
        self.state = folder / "state.json"

    def start(self) -> subprocess.Popen[str]:
        options = OPTIONS | {"store": str(self.store), "workers": self.random.choice((1, 2, 3)), "memory": "1GB"}
        settings = {
            "input": str(self.truth.input),
            "options": options,
            "world": self.random.choice((1, 2, 3, 8)),
            "batch": self.random.choice((1, 4, 7)),
            "seq_len": SEQ_LEN,
            "seed": 1,
            "epochs": EPOCHS,
            "samples": len(self.truth.digests),
            "pause": 0.001,
            **{name: str(getattr(self, name)) for name in ("steps", "state", "done")},
        }
        path = self.folder / "settings.json"
        path.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "tests.kit.feed_training", str(path)]
        return subprocess.Popen(command, text=True, start_new_session=True, stderr=subprocess.PIPE)

    def kill(self, process: subprocess.Popen[str]) -> bool:
        """SIGKILL for the program, its maker, or a process of the maker; whether there was one."""
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            program = psutil.Process(process.pid)
            makers = program.children()
            workers = [one for one in program.children(recursive=True) if one not in makers]
            self.random.choice(self.random.choice(([program], makers, workers))).kill()
            return True
        return False

    def steps_taken(self) -> int:
        return self.steps.read_bytes().count(b"\n") if self.steps.exists() else 0

    def has_begun(self, before: int) -> bool:
        return self.steps_taken() > before or self.done.exists()

    def check(self) -> None:
        """Every line that was written tells of the samples that belong there, and every place was delivered."""
        delivered: set[int] = set()
        for line in self.steps.read_text().splitlines():
            seen, world, digests = json.loads(line)
            for rank, of_rank in enumerate(digests):
                places = range(seen + rank, seen + rank + world * len(of_rank), world)
                assert of_rank == [self.truth.digests[place] for place in places]
                delivered.update(places)
        assert delivered == set(range(len(self.truth.digests)))


def run_killed(training: Training, kills: int) -> int:
    """Train to the end while processes are killed; begin anew until there were enough kills."""
    done = 0
    while True:
        process = training.start()
        before = training.steps_taken()
        wait_until(partial(training.has_begun, before), process)
        while process.poll() is None and done < kills:
            time.sleep(training.random.random() * 0.3)
            done += process.poll() is None and training.kill(process)
        try:
            process.wait(120)
        finally:
            kill_group(process)
        if training.done.exists() and done >= kills:
            return done
        if training.done.exists():
            training.check()
            for path in (training.done, training.state, training.steps):
                path.unlink()
        if training.random.random() < 0.2:
            rmtree(training.store, ignore_errors=True)


def test_a_maker_that_dies_at_the_very_end_is_replaced(truth: Truth, tmp_path: Path) -> None:
    """All units are made and nobody waits for one: the store is finished all the same."""
    store = tmp_path / "store"
    copytree(truth.store, store)
    (store / "milldam.json").unlink()
    before = set(psutil.Process().children())
    with milldam.open(truth.input, store=store, **OPTIONS) as feed:
        for maker in set(psutil.Process().children()) - before:
            maker.kill()
        wait_until(lambda: feed.finished)
    assert store_bytes(store) == store_bytes(truth.store)


@pytest.mark.parametrize(("kills", "seed"), first_quick([(1, 0), (3, 0), (200, 1)]))
def test_no_sample_is_lost_or_comes_twice(truth: Truth, tmp_path: Path, kills: int, seed: int) -> None:
    """Whoever is killed, and with whatever ranks, workers and batches it goes on."""
    training = Training(truth, tmp_path, seed)
    assert run_killed(training, kills) == kills
    training.check()
    # The last kill may have hit a maker that had all units and was about to write the manifest.
    with milldam.open(truth.input, store=training.store, **OPTIONS) as feed:
        wait_until(lambda: feed.finished)
    assert store_bytes(training.store) == store_bytes(truth.store)
    assert recorded(training.store) == recorded(truth.store)
