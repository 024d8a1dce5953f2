"""Training straight from text: the same batches as from the finished store, and the same store in the end."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.kit.feed_training import feed_digests as digests
from tests.kit.jobs import DEMO, TOKENIZER, store_bytes, wait_until, write_corpus, write_lines
from tests.kit.preprocess_jobs import fresh_texts
from tests.kit.quick import first_quick

import milldam
from milldam import ConfigError, Feed, InputError, MilldamError, MismatchError, RunHeldError, WorkerError
from milldam.files import read_sealed, write_sealed
from milldam.stores.verify import verify

OPTIONS: dict[str, Any] = {"tokenizer": TOKENIZER, "shard_size": "100KB", "workers": 1, "memory": "1GB"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", 700_000, broken_every=300).path


@pytest.fixture(scope="module")
def reference(corpus: Path) -> Path:
    store = corpus.with_name("reference")
    milldam.tokenize(corpus, store, **OPTIONS)
    return store


@pytest.mark.parametrize(("workers", "order"), first_quick([(2, True), (1, True), (4, True), (2, False)], 2))
def test_batches_are_those_of_the_finished_store(
    corpus: Path, reference: Path, tmp_path: Path, workers: int, order: bool
) -> None:
    """Not begun, half made and finished: the same batches over two epochs; then it is the same store."""
    how = {"epochs": 2, "shuffle": order}
    expected = digests(milldam.open(reference, units=True), **how)
    options = OPTIONS | {"store": tmp_path / "store", "workers": workers}
    with milldam.open(corpus, **options) as feed:
        assert not feed.finished
        half = digests(feed, len(expected) // 40, **how)
    assert half == expected[: len(half)]
    with milldam.open(corpus, **options) as feed:
        assert digests(feed, **how) == expected
        wait_until(lambda: feed.finished)
    assert store_bytes(tmp_path / "store") == store_bytes(reference)
    assert list(verify(tmp_path / "store")) == []
    with milldam.open(corpus, **options) as feed:
        assert feed.finished and feed.stats() == {}
        assert digests(feed, **how) == expected


@pytest.mark.parametrize("compressed", [True, False])
def test_tokenize_continues_a_feed(corpus: Path, tmp_path: Path, compressed: bool) -> None:
    """What a feed has made is not made again, the parts of a stream among it, and the bytes are the same."""
    data = tmp_path / ("corpus.jsonl.gz" if compressed else "corpus.jsonl")
    data.write_bytes(gzip.compress(corpus.read_bytes()) if compressed else corpus.read_bytes())
    store = tmp_path / "store"
    with milldam.open(data, store=store, **OPTIONS) as feed:
        digests(feed, 1)
    records = (store / "run/records.jsonl").read_bytes()
    assert records
    milldam.tokenize(data, store, **OPTIONS)
    assert (store / "run/records.jsonl").read_bytes().startswith(records)
    milldam.tokenize(data, tmp_path / "again", **OPTIONS)
    assert store_bytes(store) == store_bytes(tmp_path / "again")


def test_changed_input_is_made_anew_where_it_changed(tmp_path: Path) -> None:
    """A finished store whose input grew is not taken for finished; what is there of the new one is not made again."""
    data, store = tmp_path / "data", tmp_path / "store"
    data.mkdir()
    several(data, 6)
    milldam.tokenize(data, store, **OPTIONS)
    records = (store / "run/records.jsonl").read_bytes().splitlines()
    write_corpus(data / "part-99.jsonl", 110_000, seed=99)
    with milldam.open(data, store=store, **OPTIONS) as feed:
        assert not feed.finished
        found = digests(feed)
        wait_until(lambda: feed.finished)
    milldam.tokenize(data, tmp_path / "fresh", **OPTIONS)
    assert found == digests(milldam.open(tmp_path / "fresh", units=True))
    assert store_bytes(store) == store_bytes(tmp_path / "fresh")
    again = (store / "run/records.jsonl").read_bytes().splitlines()
    assert len(set(again) & set(records)) >= 5 and len(again) == 7


# ---- what can be fed ----


def test_a_configuration_cleans_filters_splits_and_drops_what_an_index_holds(tmp_path: Path) -> None:
    """As `milldam preprocess` would: the same batches, not begun or half made, and the same store."""
    old, new = (fresh_texts(count, seed, words=(40, 80)) for seed, count in ((0, 300), (1, 3000)))
    common = {"tokenizer": str(TOKENIZER), "memory": "1GB", "workers": 1}
    before = {"datasets": str(write_lines(tmp_path / "old.jsonl", old)), "out": str(tmp_path / "old")}
    milldam.preprocess(common | before | {"dedup": {"index": str(tmp_path / "seen")}})
    texts = [text for pair in zip(new, old * 10, strict=True) for text in pair]
    config = common | {
        "datasets": str(write_lines(tmp_path / "corpus.jsonl", texts)),
        "out": str(tmp_path / "fed"),
        "dedup": {"method": "index", "index": str(tmp_path / "seen")},
        "filters": {"min_characters": 200},
        "splits": {"val": 0.1},
        "shard_size": "100KB",
    }
    made = milldam.preprocess(config, out=tmp_path / "made")
    assert made.manifest.tally.dropped["dedup"] == {"seen_before": 3000} and len(made.manifest.shards) > 8
    expected = digests(milldam.open(tmp_path / "made", units=True), epochs=2, split="train")
    with milldam.open(config, split="train") as feed:
        assert feed.splits == ("train", "val")
        assert digests(feed, 20, epochs=2) == expected[: 20 * 8]
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    with milldam.open(path, workers=2) as feed:
        assert digests(feed, epochs=2, split="train") == expected
        wait_until(lambda: feed.finished)
    assert store_bytes(tmp_path / "fed") == store_bytes(tmp_path / "made")


def test_conversations_are_fed_with_their_masks(tmp_path: Path) -> None:
    """Chat data gives what its store gives."""
    turns = [
        [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": "answer " * (n % 9 + 1)}]
        for n in range(100)
    ]
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    options = OPTIONS | {"chat": True, "chat_template": template}
    with milldam.open(data, store=tmp_path / "fed", **options) as feed:
        fed = list(feed.conversations().batches(4, seed=1))
    milldam.tokenize(data, tmp_path / "made", **options)
    made = milldam.open(tmp_path / "made", units=True).conversations().batches(4, seed=1)
    for one, other in zip(fed, made, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


# ---- what can't ----


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dedup": "near"}, "dedup: needs all of the input"),
        ({"dedup": {"index": "seen"}}, "dedup: needs all"),
        ({"decontaminate": "corpus.jsonl"}, "decontaminate: needs all"),
        ({"limit": 10}, "limit: needs all"),
        ({"splits": {"val_tokens": 1000}}, "splits: needs all"),
        ({"datasets": {"path": "corpus.jsonl", "max_documents": 5}}, "datasets: needs all"),
        ({"datasets": "-"}, "standard input can't be read in any order"),
        ({"executor": "ray"}, "a feed is made on the machine that trains"),
        ({"overwrite": True}, "a rank that comes late would replace what the first ones made"),
    ],
)
def test_what_needs_the_whole_input_is_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "corpus.jsonl", ["one", "two"])
    config = {"datasets": "corpus.jsonl", "tokenizer": str(TOKENIZER), "out": "out", "dedup": "off"} | settings
    with pytest.raises(ConfigError, match=reason):
        milldam.open(config)
    assert not (tmp_path / "out").exists()


def test_other_settings_are_refused_by_name(corpus: Path, tmp_path: Path) -> None:
    """As by `milldam tokenize`: a store in the making is never continued with others."""
    with milldam.open(corpus, store=tmp_path / "store", **OPTIONS) as feed:
        with pytest.raises(RunHeldError, match="another feed with other arguments"):
            milldam.open(corpus, store=tmp_path / "store", eos="none", **OPTIONS)
        with pytest.raises(RunHeldError, match="another run is using it"):
            milldam.tokenize(corpus, tmp_path / "store", **OPTIONS)
        digests(feed, 1)
    with pytest.raises(MismatchError, match="eos"):
        milldam.open(corpus, store=tmp_path / "store", eos="none", **OPTIONS)


# ---- input that fails while training runs ----


def several(folder: Path, files: int) -> list[Path]:
    """Files that are units of their own."""
    return [write_corpus(folder / f"part-{k:02d}.jsonl", 110_000, seed=k).path for k in range(files)]


@pytest.mark.parametrize("vanishes", first_quick([False, True]))
def test_input_that_is_no_longer_what_was_planned_ends_the_feed(tmp_path: Path, vanishes: bool) -> None:
    """By an error that names the file: never by other data. Opened again, a state from before is refused."""
    last = several(tmp_path, 6)[-1]
    with milldam.open(f"{tmp_path}/*.jsonl", store=tmp_path / "store", **OPTIONS) as feed:
        content = last.read_bytes()
        last.unlink()  # before it is wanted
        if not vanishes:
            last.write_bytes(content.replace(b"e", b"o"))
        batches = feed.windows(32).batches(8, shuffle=False)
        with pytest.raises(InputError, match=r"part-05\.jsonl"):
            list(batches)
        state = batches.state_dict()
    with milldam.open(f"{tmp_path}/*.jsonl", store=tmp_path / "store", **OPTIONS) as feed:
        with pytest.raises(MilldamError):
            feed.windows(32).batches(8, shuffle=False).load_state_dict(state)
        assert digests(feed)


# ---- ranks ----

_RANK = """
import sys, milldam
from tests.kit.feed_training import sample_digests
input, store, tokenizer, rank = sys.argv[1:]
feed = milldam.open(input, tokenizer=tokenizer, store=store, shard_size="100KB", workers=1, encoder="huggingface")
for batch in feed.windows(32).batches(8, seed=3, rank=int(rank), world_size=3):
    print(*sample_digests(batch), flush=True)
"""


def test_ranks_share_a_store_and_survive_one_another(corpus: Path, reference: Path, tmp_path: Path) -> None:
    """Each unit is made once; when the rank that has the maker is killed, the others go on."""
    store = tmp_path / "store"
    command = [sys.executable, "-c", _RANK, str(corpus), str(store), str(TOKENIZER)]
    outs = [tmp_path / f"rank-{rank}" for rank in range(3)]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=out.open("w")) for rank, out in enumerate(outs)]
    wait_until(lambda: all(out.stat().st_size for out in outs))
    makers = {rank: psutil.Process(rank.pid).children() for rank in ranks}
    victim = next(rank for rank in ranks if any(one.status() != psutil.STATUS_ZOMBIE for one in makers[rank]))
    victim.kill()
    expected = digests(milldam.open(reference, units=True))
    for number, rank in enumerate(ranks):
        if rank is not victim:
            assert rank.wait(120) == 0
            assert outs[number].read_text().split() == expected[number::3]
    victim.wait()
    # Whoever finishes it, the last rank's maker or this: the manifest names the encoder.
    how = OPTIONS | {"encoder": "huggingface", "memory": "4GB"}
    milldam.tokenize(corpus, store, **how)
    milldam.tokenize(corpus, tmp_path / "made", **how)
    assert store_bytes(store) == store_bytes(tmp_path / "made")
    records = [json.loads(line)["key"] for line in (store / "run/records.jsonl").read_bytes().splitlines()]
    assert len(records) == len(set(records))


def test_what_a_killed_maker_left_is_not_believed(corpus: Path, reference: Path, tmp_path: Path) -> None:
    """Its file outlives it: the lock tells that nobody is at work."""
    store = tmp_path / "store"
    with milldam.open(corpus, store=store, **OPTIONS):
        left = read_sealed(store / "run/feed.json")
    assert left is not None
    write_sealed(store / "run/feed.json", left | {"name": "of another feed"})
    with milldam.open(corpus, store=store, **OPTIONS) as feed:
        assert digests(feed) == digests(milldam.open(reference, units=True))


def test_the_maker_ends_with_its_program_not_with_its_thread(corpus: Path, tmp_path: Path) -> None:
    """A feed that was opened in a thread lives on when the thread ends; when the feed is closed, its maker ends."""
    feeds: list[Feed] = []
    before = set(psutil.Process().children())  # what other tests have left in this process
    thread = threading.Thread(target=lambda: feeds.append(milldam.open(corpus, store=tmp_path / "store", **OPTIONS)))
    thread.start()
    thread.join()
    assert set(psutil.Process().children()) - before
    assert digests(feeds[0])
    feeds[0].close()
    assert not set(psutil.Process().children()) - before


@pytest.mark.slow
def test_a_maker_that_dies_again_and_again_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a loop without an end: its cause is told."""
    config = {
        "datasets": str(write_lines(tmp_path / "corpus.jsonl", ["some text"] * 10)),
        "tokenizer": str(TOKENIZER),
        "out": str(tmp_path / "store"),
        "dedup": "off",
        "clean": {"function": "deadly:clean"},
        "workers": 1,
    }
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "deadly.py").write_text("import os\n\n\ndef clean(text):\n    os.kill(os.getpid(), 9)\n")
    with milldam.open(config) as feed, pytest.raises(WorkerError, match="3 times"):
        digests(feed)


def test_a_minimal_configuration_is_fed_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Dedup that nobody asked for is off, and said to be; a store that preprocess has made stays as it is."""
    for made_first in (False, True):
        config = {
            "datasets": str(DEMO / "corpus.jsonl"),
            "tokenizer": str(DEMO),
            "out": str(tmp_path / f"{made_first}"),
        }
        if made_first:
            milldam.preprocess(config, memory="4GB")
        caplog.clear()
        with milldam.open(config, memory="4GB") as feed:
            assert next(iter(feed.windows(16).batches(2)))[0].shape == (2, 16)
        assert ("drops no duplicates" in caplog.text) == (not made_first)
