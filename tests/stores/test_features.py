"""The feature store: what is written comes back by every way, nothing is half there, and damage is found."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.damage import edit_manifest
from tests.kit.qa_recipe import KINDS, examples, tokenizer_of
from tests.kit.token_stores import shard_file

from milldam.errors import ConfigError, StoreError
from milldam.qa.settings import QARules
from milldam.qa.sources import Answer, Example
from milldam.qa.spans import Chosen, choose_answer
from milldam.qa.template import Special, Template, add_memory_tokens, with_memory
from milldam.qa.template import template_of as tokenizer_template
from milldam.qa.windows import COLUMNS, Features, Windower
from milldam.stores.features.format import FeatureForm
from milldam.stores.features.manifest import NAME, FeatureManifest, FeatureShard, template_facts
from milldam.stores.features.reader import FeatureStore
from milldam.stores.features.writer import FeatureShardWriter
from milldam.stores.verify import verify

WAYS: tuple[Literal["map", "pread"], ...] = ("map", "pread")
LENGTH = 16
MEMORY = 2
FORMS = [FeatureForm(LENGTH, dtype, 7, 3, left) for dtype in ("uint16", "int32") for left in (False, True)]
TEXT = "the quick brown fox"

words = st.text(max_size=12) | st.sampled_from(["", "\ud800 half", "a\u0301 👩‍👩‍👧", "שלום"])


@dataclasses.dataclass
class Appended:
    """What one append gets."""

    features: Features
    examples: list[Example]
    chosen: list[Chosen]


def template_of(form: FeatureForm) -> Template:
    """[1] memory first [2] second memory [2], padded as the form says."""
    return Template(
        before=Special((1,), (0,)),
        between=Special((2,), (0,)),
        after=Special((2,), (1,)),
        first_type=0,
        second_type=1,
        context_first=False,
        pad_id=form.pad_id,
        pad_type=form.pad_type,
        pad_left=form.pad_left,
        cls_id=1,
        memory_read=(90, 91),
        memory_write=(92, 93),
    )


def features_of(form: FeatureForm, windows: list[int], seed: int) -> Features:
    """So many windows of each example, of random tokens, as the template puts them together."""
    random = np.random.default_rng(seed)
    count = sum(windows)
    ids = np.full((count, LENGTH), form.pad_id, form.token_dtype)
    types = np.full((count, LENGTH), form.pad_type, np.uint8)
    offsets = np.full((count, LENGTH, 2), -1, np.int32)
    context = random.integers(1, LENGTH - 3 - 2 * MEMORY, count)
    length = context + 4 + 2 * MEMORY
    begin = LENGTH - length if form.pad_left else np.zeros_like(length)
    context_begin = begin + 3 + MEMORY
    for row in range(count):
        tokens = random.integers(100, 200, context[row])
        parts = [1, 90, 91, 5, 2, *tokens, 92, 93, 2]
        ids[row, begin[row] : begin[row] + length[row]] = parts[: length[row]]
        types[row, begin[row] : begin[row] + length[row]] = 1
        place = slice(context_begin[row], context_begin[row] + context[row])
        offsets[row, place] = np.arange(context[row])[:, None] + [0, 1]
    answered = random.integers(0, 2, count)
    start = np.where(answered, context_begin + random.integers(0, context), begin)
    segment = np.concatenate([np.arange(n) for n in windows] or [np.empty(0)])
    numbers = [length, start, start, begin, context_begin, context, segment, np.repeat(windows, windows)]
    example = np.repeat(np.arange(len(windows)), windows)
    return Features(ids, types, offsets, *(part.astype(np.int32) for part in numbers), example.astype(np.int64))


def append_of(form: FeatureForm, windows: list[int], seed: int, texts: list[str] | None = None) -> Appended:
    texts = texts or [TEXT]
    examples = [
        Example(
            id=f"{seed}-{k}-{texts[k % len(texts)]}",
            question=texts[k % len(texts)],
            # Runs of equal contexts.
            context=f"{TEXT} {texts[k // 2 % len(texts)]}" if k % 5 else "",
            answers=(Answer("quick", 4), Answer("none", 3))[: k % 3],
            title=texts[(k + 1) % len(texts)],
        )
        for k in range(len(windows))
    ]
    return Appended(features_of(form, windows, seed), examples, [choose_answer(example) for example in examples])


def write_shard(folder: Path, name: str, form: FeatureForm, appends: list[Appended]) -> FeatureShard:
    with FeatureShardWriter(folder, name, form) as writer:
        for part in appends:
            writer.append(part.features, part.examples, part.chosen)
        return writer.commit()


def write_manifest(
    folder: Path, form: FeatureForm, shards: list[FeatureShard], template: Template | None = None, vocab_size: int = 200
) -> None:
    template = template or template_of(form)
    (folder / "tokenizer.json").write_bytes(b"{}")
    FeatureManifest(
        form=form,
        tokenizer={"name": "t", "xxh3": xxhash.xxh3_128(b"{}").hexdigest(), "vocab_size": vocab_size},
        memory={"read": list(template.memory_read), "write": list(template.memory_write)},
        template=template_facts(template),
        settings={"max_seq_length": LENGTH},
        input={"files": 1, "bytes": 1, "fingerprint": ""},
        shards=tuple(shards),
        counts={"repaired": 0},
    ).write(folder)


def make_store(folder: Path, form: FeatureForm, shards: list[list[Appended]]) -> FeatureStore:
    folder.mkdir(parents=True, exist_ok=True)
    made = [write_shard(folder, f"train-{k:05d}", form, appends) for k, appends in enumerate(shards)]
    write_manifest(folder, form, made)
    return FeatureStore(folder)


def small_store(folder: Path, form: FeatureForm = FORMS[0]) -> FeatureStore:
    """Two shards of three examples."""
    return make_store(folder, form, [[append_of(form, [1, 3, 2], seed)] for seed in (1, 2)])


@contextmanager
def some_folder() -> Iterator[Path]:
    """In memory where that can be: many small files are synced."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


def joined(shards: list[list[Appended]]) -> tuple[dict[str, Any], list[tuple[Example, Chosen]]]:
    """All windows and stored examples, as the store should have them."""
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    examples: list[tuple[Example, Chosen]] = []
    for part in (part for shard in shards for part in shard):
        stored = sorted(set(part.features.example.tolist()))
        numbers = {k: len(examples) + at for at, k in enumerate(stored)}
        examples += [(part.examples[k], part.chosen[k]) for k in stored]
        for name in COLUMNS:
            values = getattr(part.features, name)
            columns[name].append(np.array([numbers[k] for k in values.tolist()], int) if name == "example" else values)
    return {name: np.concatenate(values) for name, values in columns.items() if values}, examples


shard_lists = st.lists(
    st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=7), st.integers(0, 99)), max_size=3), max_size=4
)

# ---- what is written comes back ----


@settings(max_examples=60)
@given(shape=shard_lists, form=st.sampled_from(FORMS), texts=st.lists(words, min_size=1, max_size=3), data=st.data())
def test_everything_written_is_read_by_every_way(
    shape: Any, form: FeatureForm, texts: list[str], data: st.DataObject
) -> None:
    """Random windows over several shards and appends, dropped examples among them, come back by number and example."""
    shards = [[append_of(form, windows, seed, texts) for windows, seed in appends] for appends in shape]
    columns, examples = joined(shards)
    with some_folder() as folder:
        make_store(folder, form, shards)
        assert list(verify(folder)) == []
        store = FeatureStore(folder, read=data.draw(st.sampled_from(WAYS)))
        assert len(store) == len(columns.get("length", ())) and store.examples == len(examples)
        numbers = st.lists(st.integers(0, len(store) - 1), max_size=20) if len(store) else st.just([])
        wanted = np.array(data.draw(numbers), np.int64)
        rows = store.rows(wanted, COLUMNS)
        for name, values in columns.items():
            np.testing.assert_array_equal(rows[name], values[wanted])
        for number in wanted[:3].tolist():
            assert_same_window(store[number], columns, number, examples)
        for number, (example, chosen) in enumerate(examples):
            assert_same_example(store, number, example, chosen)


def assert_same_window(
    window: dict[str, Any], columns: dict[str, Any], number: int, examples: list[tuple[Example, Chosen]]
) -> None:
    names = {"offset_mapping": "offsets", "segment_index": "segment", "total_segments": "segments"}
    mask = window.pop("attention_mask")
    assert mask.sum() == columns["length"][number] and mask.dtype == window["input_ids"].dtype == np.int64
    assert window.pop("has_answer") is bool(columns["start_positions"][number] != columns["cls_index"][number])
    assert window.pop("example_id") == examples[columns["example"][number]][0].id
    for name, value in window.items():
        np.testing.assert_array_equal(value, columns[names.get(name, name)][number])


def assert_same_example(store: FeatureStore, number: int, example: Example, chosen: Chosen) -> None:
    found = store.example(number)
    assert [found[name] for name in ("id", "title", "question", "context")] == [
        example.id,
        example.title,
        example.question,
        example.context,
    ]
    assert found["answers"]["text"] == [answer.text for answer in example.answers]
    assert found["answers"]["answer_start"] == [answer.start for answer in example.answers]
    span = (chosen.start, chosen.stop) if chosen else None
    assert (found["chosen_answer_text"], found["chosen_answer_char_span"]) == (chosen.text, span)
    assert found["status"] == chosen.status
    first = store.find(example.id)
    assert store.example(first)["id"] == example.id and first <= number
    document = store.document(number)
    begin, count = (int(part[0]) for part in store.windows_of(np.array([number])))
    assert document["segment_index"].tolist() == list(range(count))
    assert (document["total_segments"] == count).all() and document["example_id"] == example.id
    np.testing.assert_array_equal(
        document["input_ids"], store.rows(np.arange(begin, begin + count), ["input_ids"])["input_ids"]
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(examples=st.lists(examples(), max_size=4), memory=st.integers(0, 2))
def test_real_windows_make_a_store_that_is_whole(kind: str, examples: list[Example], memory: int) -> None:
    """What the windower makes passes verify, and the memory tokens are where the store says."""
    tokenizer = tokenizer_of(kind)
    rules = QARules(max_seq_length=32, overlap=4, memory_tokens=memory)
    tokens = add_memory_tokens(tokenizer, memory)
    template = with_memory(tokenizer_template(tokenizer, rules, {"pad_token": "<unk>"}), tokens)
    prepared = Windower(tokenizer, rules, template)(examples)
    dtype = prepared.features.input_ids.dtype.name
    form = FeatureForm(32, dtype, template.pad_id, template.pad_type, template.pad_left)
    with some_folder() as folder:
        shard = write_shard(folder, "a", form, [Appended(prepared.features, examples, prepared.chosen)])
        write_manifest(folder, form, [shard], template, tokenizer.get_vocab_size())
        assert list(verify(folder)) == []
        store = FeatureStore(folder)
        assert store.examples == len(examples) - len(prepared.dropped)
        numbers = np.arange(len(store))
        ids = store.rows(numbers, ["input_ids"])["input_ids"]
        for places, wanted in zip(store.memory_positions(numbers), (tokens.read, tokens.write), strict=True):
            assert (np.take_along_axis(ids, places, axis=1) == wanted).all()


def test_a_window_has_the_fields_that_users_know(tmp_path: Path) -> None:
    """`store[i]` and `document(k)` have the names of the question-answering recipes, and numbers are numbers."""
    store = small_store(tmp_path)
    window, document = store[-1], store.document(-2)
    names = {"input_ids", "attention_mask", "token_type_ids", "start_positions", "end_positions", "cls_index"}
    names |= {"offset_mapping", "segment_index", "total_segments", "example_id", "has_answer"}
    assert set(window) == set(document) == names
    assert window["input_ids"].shape == (LENGTH,) and window["offset_mapping"].shape == (LENGTH, 2)
    assert type(window["start_positions"]) is int and type(window["has_answer"]) is bool
    assert document["input_ids"].shape == (3, LENGTH) and document["start_positions"].dtype == np.int64
    assert len(list(store)) == len(store) == 12


@pytest.mark.parametrize("form", FORMS[:2], ids=["right", "left"])
def test_memory_tokens_are_where_the_store_says(tmp_path: Path, form: FeatureForm) -> None:
    """The positions of memory tokens hold their ids in every window, padding on either side."""
    store = small_store(tmp_path, form)
    numbers = np.arange(len(store))
    ids = store.rows(numbers, ["input_ids"])["input_ids"]
    read, write = store.memory_positions(numbers)
    assert read.shape == write.shape == (12, MEMORY)
    assert (np.take_along_axis(ids, read, axis=1) == store.memory_tokens.read).all()
    assert (np.take_along_axis(ids, write, axis=1) == store.memory_tokens.write).all()


@pytest.mark.parametrize("form", FORMS[:2], ids=["right", "left"])
def test_the_attention_mask_leaves_padding_out(tmp_path: Path, form: FeatureForm) -> None:
    """The mask is 0 exactly on the pad token, padding on either side."""
    rows = small_store(tmp_path, form).rows(np.arange(12), ["attention_mask", "input_ids"])
    np.testing.assert_array_equal(rows["attention_mask"] == 0, rows["input_ids"] == form.pad_id)


def test_a_store_without_memory_tokens_has_no_places_for_them(tmp_path: Path) -> None:
    """Without memory tokens the positions are arrays of no columns."""
    small_store(tmp_path)
    edit_manifest(tmp_path, lambda value: value.update(memory={"read": [], "write": []}))
    store = FeatureStore(tmp_path)
    assert len(store.memory_tokens) == 0
    assert [part.shape for part in store.memory_positions(np.arange(3))] == [(3, 0), (3, 0)]


def test_equal_contexts_that_follow_one_another_are_stored_once(tmp_path: Path) -> None:
    """Also over the end of an append, and not where another context lies between."""
    form = FORMS[0]
    contexts = ["long context"] * 3 + ["other"] + ["long context"]
    with FeatureShardWriter(tmp_path, "a", form) as writer:
        for k, context in enumerate(contexts):
            example = Example(str(k), "q", context)
            writer.append(features_of(form, [1], k), [example], [Chosen()])
        write_manifest(tmp_path, form, [writer.commit()])
    assert shard_file(tmp_path, 0, "contexts.bin").read_bytes() == b"long contextotherlong context"
    store = FeatureStore(tmp_path)
    assert [store.example(k)["context"] for k in range(5)] == contexts


def test_the_bytes_are_those_of_the_documentation(tmp_path: Path) -> None:
    """numpy alone reads the columns, as docs/format.md says."""
    part = append_of(FORMS[0], [2, 0, 1], 5)
    make_store(tmp_path, FORMS[0], [[part]])
    ids = np.fromfile(shard_file(tmp_path, 0, "input_ids.bin"), "<u2").reshape(3, LENGTH)
    np.testing.assert_array_equal(ids, part.features.input_ids)
    offsets = np.fromfile(shard_file(tmp_path, 0, "offsets.bin"), "<i4").reshape(3, LENGTH, 2)
    np.testing.assert_array_equal(offsets, part.features.offsets)
    numbers = np.fromfile(shard_file(tmp_path, 0, "numbers.bin"), "<i4").reshape(3, 9)
    np.testing.assert_array_equal(numbers[:, 0], part.features.length)
    assert numbers[:, 8].tolist() == [0, 0, 1]
    assert np.fromfile(shard_file(tmp_path, 0, "first_window.bin"), "<i8").tolist() == [0, 2, 3]
    ends = np.fromfile(shard_file(tmp_path, 0, "texts.idx"), "<i8")
    texts = shard_file(tmp_path, 0, "texts.bin").read_bytes()
    assert json.loads(texts[ends[1] : ends[2]])["id"] == part.examples[2].id
    hashes = np.fromfile(shard_file(tmp_path, 0, "ids.bin"), "<u8").tolist()
    assert hashes[0] == xxhash.xxh3_64_intdigest(part.examples[0].id.encode())


def test_the_same_features_give_the_same_bytes_however_they_are_appended(tmp_path: Path) -> None:
    """One append or several make no difference to any file."""
    parts = [append_of(FORMS[0], [2, 1], seed) for seed in (1, 2)]
    columns, examples = joined([parts])
    together = Appended(Features(**columns), [e for e, _ in examples], [c for _, c in examples])
    for folder, appends in ((tmp_path / "a", parts), (tmp_path / "b", [together])):
        make_store(folder, FORMS[0], [appends])
    assert FeatureStore(tmp_path / "a").fingerprint == FeatureStore(tmp_path / "b").fingerprint
    assert (tmp_path / "a" / NAME).read_bytes() == (tmp_path / "b" / NAME).read_bytes()


def test_the_fingerprint_names_content_and_form(tmp_path: Path) -> None:
    """Other windows, another order or another form give another fingerprint."""
    one, two = ([append_of(FORMS[0], [1, 2], seed)] for seed in (1, 2))
    stores = [make_store(tmp_path / str(k), FORMS[0], shards) for k, shards in enumerate(([one, two], [two, one]))]
    padded = dataclasses.replace(stores[0].manifest, form=dataclasses.replace(FORMS[0], pad_id=8))
    assert len({stores[0].fingerprint, stores[1].fingerprint, padded.fingerprint}) == 3


def test_a_shard_comes_back_from_its_dict(tmp_path: Path) -> None:
    """A shard's record survives JSON, as the records of a run need it."""
    shard = write_shard(tmp_path, "a", FORMS[0], [append_of(FORMS[0], [1], 1)])
    assert FeatureShard(**json.loads(json.dumps(shard.as_dict()))) == shard
    assert all((tmp_path / name).stat().st_size == record["bytes"] for name, record in shard.files.items())


# ---- nothing is half there ----


def test_nothing_is_left_without_a_commit(tmp_path: Path) -> None:
    """A writer that is left early removes what it wrote, and nothing had its final name before."""
    part = append_of(FORMS[0], [2, 1], 1)
    with FeatureShardWriter(tmp_path, "a", FORMS[0]) as writer:
        writer.append(part.features, part.examples, part.chosen)
        assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_is_killed_leaves_no_file_under_its_name(tmp_path: Path) -> None:
    """Killed before the commit, there are temporary files alone, and the folder is no store."""
    killed = """
import os, signal, sys
from pathlib import Path
from tests.stores import test_features as made
part = made.append_of(made.FORMS[0], [2, 1], 1)
writer = made.FeatureShardWriter(Path(sys.argv[1]), "a", made.FORMS[0])
writer.append(part.features, part.examples, part.chosen)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", killed, str(tmp_path)], env=environment)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    with pytest.raises(StoreError, match="not a store of question-answering features"):
        FeatureStore(tmp_path)


def test_a_writer_refuses_what_could_not_be_read(tmp_path: Path) -> None:
    """Windows of another length, out of order, or with ids that the dtype can't hold are a mistake of the caller."""
    part = append_of(FORMS[0], [1, 1], 1)
    wide = np.full((2, LENGTH), 1 << 16, np.int32)
    wrong = [
        dataclasses.replace(part.features, input_ids=part.features.input_ids[:, :-1]),
        dataclasses.replace(part.features, example=part.features.example[::-1]),
        dataclasses.replace(part.features, input_ids=wide),
    ]
    with FeatureShardWriter(tmp_path, "a", FORMS[0]) as writer:
        for features in wrong:
            with pytest.raises(ValueError):
                writer.append(features, part.examples, part.chosen)
        with pytest.raises(ValueError):
            writer.append(part.features, part.examples, part.chosen[:1])


# ---- opening and memory ----


def test_opening_many_shards_opens_no_file(tmp_path: Path) -> None:
    """A hundred shards are opened by the manifest alone: their files need not even be there."""
    shard = write_shard(tmp_path, "a", FORMS[0], [append_of(FORMS[0], [2, 1], 1)])
    for path in tmp_path.iterdir():
        path.unlink()
    named = [
        dataclasses.replace(
            shard, name=f"b{k}", files={f"b{k}{n[len(shard.name) :]}": r for n, r in shard.files.items()}
        )
        for k in range(100)
    ]
    write_manifest(tmp_path, FORMS[0], named)
    store = FeatureStore(tmp_path)
    assert (len(store), store.examples) == (300, 200)
    with pytest.raises(StoreError, match="can't be read"):
        store[0]


@pytest.mark.parametrize("way", WAYS)
def test_reading_many_shards_holds_few_files_open(way: Literal["map", "pread"]) -> None:
    """Mapped files are not held open; those read by position are closed when there are many."""
    with some_folder() as folder:
        make_store(folder, FORMS[0], [[append_of(FORMS[0], [1], k)] for k in range(80)])
        store = FeatureStore(folder, read=way)
        before = len(os.listdir("/proc/self/fd"))
        store.rows(np.arange(len(store)), ("input_ids", "length"))
        assert len(os.listdir("/proc/self/fd")) - before <= (0 if way == "map" else 2 * 64)


def test_a_store_pickles_as_its_path(tmp_path: Path) -> None:
    """What goes to another process is a path, whatever was read before."""
    store = small_store(tmp_path)
    expected = store[3]
    data = pickle.dumps(store)
    assert len(data) < 300 + len(str(tmp_path))
    np.testing.assert_array_equal(pickle.loads(data)[3]["input_ids"], expected["input_ids"])


def test_reading_takes_the_memory_of_a_batch(tmp_path: Path) -> None:
    """Reading all windows and texts of a store takes the same memory however large it is."""
    peaks = []
    for shards in (2, 40):
        store = make_store(
            tmp_path / str(shards), FORMS[0], [[append_of(FORMS[0], [2] * 100, k)] for k in range(shards)]
        )
        read_all(store)
        tracemalloc.start()
        read_all(store)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 20_000


def read_all(store: FeatureStore) -> None:
    for begin in range(0, len(store), 50):
        store.rows(np.arange(begin, begin + 50), COLUMNS)
    for number in range(0, store.examples, 10):
        store.example(number)


def test_writing_takes_the_memory_of_an_append(tmp_path: Path) -> None:
    """A shard of many appends takes the memory of one."""
    part = append_of(FORMS[0], [2] * 100, 1)
    peaks = []
    for count in (2, 40):
        with FeatureShardWriter(tmp_path, "a", FORMS[0]) as writer:
            writer.append(part.features, part.examples, part.chosen)
            tracemalloc.start()
            for _ in range(count):
                writer.append(part.features, part.examples, part.chosen)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < peaks[0] + 20_000


# ---- damage ----


def everything(store: FeatureStore) -> None:
    """Touch every file."""
    store.rows(np.arange(len(store)), COLUMNS)
    for number in range(store.examples):
        store.document(number)
        store.find(store.example(number)["id"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file", FORMS[0].files)
def test_a_file_that_was_cut_short_is_an_error(tmp_path: Path, file: str, way: Literal["map", "pread"]) -> None:
    """Not a crash of the process, as reading a mapping behind its file's end would be."""
    small_store(tmp_path)
    path = shard_file(tmp_path, 1, file)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(StoreError, match=file):
        everything(FeatureStore(tmp_path, read=way))
    assert any(file in problem for problem in verify(tmp_path))


@pytest.mark.parametrize("file", ["first_window.bin", "texts.idx", "contexts.idx", "texts.bin", "numbers.bin"])
@pytest.mark.parametrize("value", [255, 0])
def test_bytes_that_changed_are_found_and_do_not_crash(tmp_path: Path, file: str, value: int) -> None:
    """Nonsense in an index is refused by the reader, or read as such; verify names the file either way."""
    store = small_store(tmp_path)
    path = shard_file(tmp_path, 0, file)
    path.write_bytes(bytes([value]) * path.stat().st_size)
    assert any(file in problem for problem in verify(tmp_path))
    # Contexts of no characters may be, and so may any numbers.
    if file != "numbers.bin" and (file, value) != ("contexts.idx", 0):
        with pytest.raises(StoreError, match="damaged"):
            everything(store)


def rewritten(folder: Path, file: str, array: np.ndarray[Any, Any]) -> None:
    """Change a file of the first shard, and the manifest with it, as a faulty writer would have."""
    path = shard_file(folder, 0, file)
    path.write_bytes(array.tobytes())
    record = {"bytes": path.stat().st_size, "xxh3": xxhash.xxh3_128(path.read_bytes()).hexdigest()}
    edit_manifest(folder, lambda value: value["shards"][0]["files"].update({path.name: record}))


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (0, LENGTH + 1, "a length"),
        (1, LENGTH, "answer is not in the context"),
        (3, -1, "cls_index"),
        (4, LENGTH, "context is on padding"),
        (6, 3, "segment"),
        (7, 9, "segment"),
        (8, 2, "example"),
        (8, 6, "example is not there"),
    ],
)
def test_verify_finds_positions_that_can_not_be(tmp_path: Path, place: int, value: int, problem: str) -> None:
    """Lengths, positions and segments outside their ranges, though all hashes are right."""
    small_store(tmp_path)
    numbers = np.fromfile(shard_file(tmp_path, 0, "numbers.bin"), "<i4").reshape(-1, 9)
    numbers[1, place] = value
    rewritten(tmp_path, "numbers.bin", numbers)
    found = [problem for problem in verify(tmp_path) if "the fingerprint is not" not in problem]
    assert len(found) == 1 and "window 1:" in found[0] and problem in found[0]


def test_verify_finds_wrong_tokens_ids_and_indexes(tmp_path: Path) -> None:
    """Token ids outside the vocabulary, an id's hash that is another's, windows that nobody has."""
    small_store(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    wrong: list[tuple[str, str, int, int, str]] = [
        ("input_ids.bin", "<u2", 0, 200, "outside the vocabulary"),
        ("offsets.bin", "<i4", 0, 0, "offsets"),
        ("ids.bin", "<u8", 0, 5, "by its id"),
        ("first_window.bin", "<i8", 0, 1, "begins with 1"),
        ("first_window.bin", "<i8", -1, 7, "ends with 7"),
        ("first_window.bin", "<i8", 1, 0, "do not rise"),
    ]
    for file, dtype, place, value, problem in wrong:
        array = np.fromfile(shard_file(tmp_path, 0, file), dtype)
        array[place] = value
        rewritten(tmp_path, file, array)
        found = [problem for problem in verify(tmp_path) if "the fingerprint is not" not in problem]
        assert len(found) == 1 and problem in found[0], (file, found)
        for name, data in before.items():
            (tmp_path / name).write_bytes(data)
    (tmp_path / "tokenizer.json").write_bytes(b"{ }")
    assert "not the tokenizer" in next(verify(tmp_path))


def refused(folder: Path, change: Any, message: str) -> None:
    before = (folder / NAME).read_bytes()
    edit_manifest(folder, change)
    with pytest.raises(StoreError, match=message):
        FeatureStore(folder)
    (folder / NAME).write_bytes(before)


def test_a_manifest_that_lies_is_refused(tmp_path: Path) -> None:
    """Names that leave the folder, other versions, sizes that do not fit: a sentence each, and no file is opened."""
    small_store(tmp_path)

    def renamed(value: Any) -> None:
        shard = value["shards"][0]
        shard["files"] = {name.replace("train-00000", "../x"): r for name, r in shard["files"].items()}
        shard["name"] = "../x"

    refused(tmp_path, renamed, "leaves the folder")
    refused(tmp_path, lambda v: v.update(format_version=2), "format_version is 2; this milldam reads 1")
    refused(tmp_path, lambda v: v.update(format="milldam store"), "not the manifest")
    refused(tmp_path, lambda v: v["shards"][0].update(windows=7), "rows take")
    refused(tmp_path, lambda v: v["shards"][0].update(windows=-1), r"shards\[0\].windows is -1")
    refused(tmp_path, lambda v: v["shards"][0]["files"].popitem(), "other files")
    refused(tmp_path, lambda v: v["shards"][0]["files"].update({"../x": {"bytes": 0, "xxh3": ""}}), "other files")
    refused(tmp_path, lambda v: v["form"].update(token_dtype="object"), "form.token_dtype is")
    refused(tmp_path, lambda v: v["form"].update(max_seq_length=8), "columns")
    refused(tmp_path, lambda v: v["form"].update(max_seq_length=0), "max_seq_length is 0")
    refused(tmp_path, lambda v: v["memory"].update(read=[1]), "memory tokens")
    refused(tmp_path, lambda v: v["template"].pop("after"), "template does not say")
    refused(tmp_path, lambda v: v.pop("shards"), "no shards")
    (tmp_path / NAME).write_bytes(b"{")
    with pytest.raises(StoreError, match="can't be read"):
        FeatureStore(tmp_path)


def test_what_is_no_feature_store_is_told(tmp_path: Path) -> None:
    """A folder that is not there, an empty one, an unfinished one and a token store."""
    for name, there, message in [
        ("missing", None, "no such folder"),
        ("empty", "x", "not a store of question-answering features"),
        ("begun", "run", "unfinished"),
        ("tokens", "milldam.json", "a token store"),
    ]:
        if there:
            (tmp_path / name).mkdir()
            (tmp_path / name / there).touch()
        with pytest.raises(StoreError, match=message):
            FeatureStore(tmp_path / name)


def test_numbers_and_names_outside_are_refused(tmp_path: Path) -> None:
    """A window, example, id or column that is not there is an error that says what there is."""
    store = small_store(tmp_path)
    for read in (lambda: store[12], lambda: store[-13], lambda: store.document(6), lambda: store.example(-7)):
        with pytest.raises(IndexError, match="of a store of"):
            read()
    for numbers in ([-1], [12]):
        with pytest.raises(IndexError):
            store.rows(np.array(numbers), ["length"])
    with pytest.raises(TypeError):
        store.rows(np.array([0.5]), ["length"])
    with pytest.raises(ConfigError, match="input_ids"):
        store.rows(np.array([0]), ["input_idss"])
    with pytest.raises(KeyError, match="nobody"):
        store.find("nobody")


def test_reading_needs_neither_text_nor_tokenizers(tmp_path: Path) -> None:
    """A training node imports the reader with numpy alone."""
    heavy = ("tokenizers", "pyarrow", "pydantic", "torch", "datasets")
    code = f"import sys, milldam.stores.features; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
