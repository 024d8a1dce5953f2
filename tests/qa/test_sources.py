"""Examples of question answering, whatever form they come in."""

from __future__ import annotations

import gzip
import json
import tempfile
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.qa_jobs import examples_of, flat, lines, squad

from milldam.errors import ConfigError, InputError
from milldam.qa.examples import Answer, Example, cut_file, list_files, read_examples
from milldam.sources.batch import Reading, Reject, TextRules

CONTEXT = "In 1990, Łódź (Poland) had 1,000 cafés."
EXAMPLES = [
    Example("a1", "Which year?", CONTEXT, (Answer("1990", 3), Answer("In 1990", 0)), "Łódź"),
    Example("a2", "Which river?", CONTEXT, (), "Łódź"),
    Example("b1", "How many?", "There were 3 \U0001f600 there.", (Answer("3", 11),), "Faces"),
]


def in_every_form(folder: Path) -> Iterator[Path]:
    """The same examples in every form."""
    table = pa.Table.from_pylist(flat(EXAMPLES))
    texts = {
        "indented.json": json.dumps(squad(EXAMPLES), indent=1),
        "one-line.json": json.dumps(squad(EXAMPLES), ensure_ascii=False),
        "title-last.json": json.dumps(squad(EXAMPLES, title_first=False)),
        "list.json": json.dumps(flat(EXAMPLES), indent=2),
        "rows.json": json.dumps({"data": flat(EXAMPLES)}),
        "lines.json": lines(flat(EXAMPLES)),
        "lines.jsonl": "\ufeff" + lines(flat(EXAMPLES)).replace("\n", "\r\n"),
        "articles.jsonl": lines(squad(EXAMPLES)["data"]),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
        yield folder / name
    pq.write_table(table, folder / "t.parquet", row_group_size=2)
    (folder / "saved").mkdir()
    for name in ("t.arrow", "saved/data-00000-of-00001.arrow"):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table, max_chunksize=2)
    # As HF `save_to_disk` does.
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}
    (folder / "saved/state.json").write_text(json.dumps(state))
    (folder / "z.json.gz").write_bytes(gzip.compress((folder / "one-line.json").read_bytes()))
    yield from (folder / name for name in ("t.parquet", "t.arrow", "saved", "z.json.gz"))


def test_every_form_gives_the_same_examples(tmp_path: Path) -> None:
    """SQuAD's JSON in any layout, flat records as JSON, lines, parquet and Arrow, compressed or not."""
    forms = list(in_every_form(tmp_path))
    assert len(forms) == 12
    for path in forms:
        assert list(examples_of(path)) == EXAMPLES, path
    # v2's `is_impossible` says that there is no answer, whatever else the record has; v1.1 does not know the key.
    odd = [{"is_impossible": True}, {"is_impossible": False}, {}, {"answers": None}]
    (tmp_path / "e.jsonl").write_text(lines([flat(EXAMPLES)[0] | one for one in odd]))
    assert [len(one.answers) for one in examples_of(tmp_path / "e.jsonl")] == [0, 2, 2, 0]


BROKEN: list[tuple[Any, str]] = [
    ("a text", "no_object"),
    ({"id": "x", "question": "?", "answers": []}, "no_context"),
    ({"id": "x", "question": "?", "context": "  ", "answers": []}, "no_context"),
    ({"id": "x", "question": ["?"], "context": "c", "answers": []}, "no_question"),
    ({"question": "?", "context": "c", "answers": []}, "no_id"),
    ({"id": "x", "question": "?", "context": "c", "answers": "c"}, "bad_answers"),
    ({"id": "x", "question": "?", "context": "c", "answers": {"text": ["c"], "answer_start": []}}, "bad_answers"),
    ({"id": "x", "question": "?", "context": "c", "answers": [{"text": "c", "answer_start": "0"}]}, "bad_answers"),
    ({"id": "x", "question": "?", "context": "half \ud83d", "answers": []}, "not_utf8"),
]


@pytest.mark.parametrize("form", ["lines", "list", "squad"])
def test_a_broken_record_is_told_and_left_out(tmp_path: Path, form: str) -> None:
    """Every one with its place and the reason; the others are read. With strict, it is an error."""
    records, good, path = [record for record, _ in BROKEN], flat(EXAMPLES)[2], tmp_path / "e.json"
    data = [{"title": "t", "paragraphs": [{"context": "c", "qas": [record]}]} for record in records]
    texts = {"squad": json.dumps({"data": data}), "list": json.dumps([*records, good])}
    path.write_text(texts.get(form) or lines([good, *records]).replace("\ud83d", "x"))
    told: list[Reject] = []
    found = list(examples_of(path, on_reject=told.append))
    if form == "list":
        assert found == [EXAMPLES[2]]
        assert sorted((one.row, one.reason) for one in told) == [(k, why) for k, (_, why) in enumerate(BROKEN)]
    elif form == "lines":
        assert sorted(one.row or 0 for one in told) == [*range(1, 9)]
    else:
        assert told[0].detail.startswith("paragraphs[0].qas[0]: ")
    assert all(one.file == str(path) and one.detail for one in told)
    with pytest.raises(InputError, match=r"e\.json.*(no_record|no_object|must be|wanted)"):
        list(examples_of(path, strict=True))


def test_bytes_that_are_no_text_cost_their_record_alone(tmp_path: Path) -> None:
    """Invalid UTF-8 in a line, in a JSON text and in a table: that example is rejected, the next one read."""
    line = lines(flat(EXAMPLES[2:])).encode()
    bad = line.replace("\U0001f600".encode(), b"\xf0\x9f")
    (tmp_path / "e.jsonl").write_bytes(bad + b"{broken\n" + line)
    (tmp_path / "e.json").write_bytes(b"[" + bad.strip() + b"," + line.strip() + b"]")
    table = pa.Table.from_pylist(flat(EXAMPLES[2:]) * 2)
    contexts = pa.array([b"caf\xe9", EXAMPLES[2].context.encode()], pa.binary()).view(pa.string())
    broken = table.set_column(table.schema.get_field_index("context"), "context", contexts)
    pq.write_table(broken, tmp_path / "e.parquet")
    for name in ("e.jsonl", "e.json", "e.parquet"):
        told: list[Reject] = []
        assert list(examples_of(tmp_path / name, on_reject=told.append)) == [EXAMPLES[2]], name
        assert [one.reason for one in told] == ["not_utf8", "bad_json"][: 2 if name == "e.jsonl" else 1], name


def test_a_file_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    """How much is missing can't be known: what was read of a JSON text or a table is not taken for the whole."""
    text = json.dumps(squad(EXAMPLES)).encode()
    (tmp_path / "cut.json").write_bytes(text[:-40])
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(text)[:-20])
    (tmp_path / "wrong.json").write_bytes(text.replace(b'"qas"', b'"qas" "x"', 1))
    pq.write_table(pa.Table.from_pylist(flat(EXAMPLES)), tmp_path / "e.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "e.parquet").read_bytes()[:-30])
    for name in ("cut.json", "cut.json.gz", "wrong.json", "cut.parquet"):
        with pytest.raises(InputError, match=f"{name}: not (a )?whole"):
            list(examples_of(tmp_path / name))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(lines(flat(EXAMPLES) * 900).encode())[:-30])
    told: list[Reject] = []
    assert len(list(examples_of(tmp_path / "cut.jsonl.gz", on_reject=told.append))) > 2000
    assert told[-1].reason in ("truncated", "bad_json")


def test_what_is_no_input_says_so(tmp_path: Path) -> None:
    """A wrong name, a text, a table without the columns, an empty folder, standard input."""
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("hello")
    for name, message in (
        ("missing.json", "no such file"),
        ("notes.txt", "no examples of question answering"),
        ("empty", "its splits can.t be told"),
    ):
        with pytest.raises(InputError, match=message):
            list(examples_of(tmp_path / name))
    with pytest.raises(InputError, match="name a file"):
        list(examples_of("-"))
    with pytest.raises(ConfigError, match="max_examples"):
        list(examples_of(tmp_path / "text.json", split="train[:10]"))


def test_a_folder_gives_the_files_of_the_split(tmp_path: Path) -> None:
    """train-v2.0.json and dev-v2.0.json in one folder are not mixed; a file that is named is taken as it is."""
    for name, example in (("train-v2.0.json", EXAMPLES[0]), ("dev-v2.0.json", EXAMPLES[2])):
        (tmp_path / name).write_text(json.dumps(squad([example])))
    assert [one.id for one in examples_of(tmp_path)] == ["a1"]
    assert [one.id for one in examples_of(tmp_path, split="validation")] == ["b1"]
    assert [one.id for one in examples_of(tmp_path / "dev-v2.0.json")] == ["b1"]
    assert [one.id for one in examples_of(str(tmp_path / "*.json"))] == ["b1", "a1"]
    with pytest.raises(InputError, match='no split "test"'):
        list(examples_of(tmp_path, split="test"))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """An article is held, not the file."""
    path = tmp_path / "large.json"
    paragraph = {"context": "word " * 400, "qas": [{"id": "1", "question": "?", "answers": []}]}
    path.write_text(json.dumps({"data": [{"title": "T", "paragraphs": [paragraph] * 10}] * 400}))
    assert path.stat().st_size > 8_000_000
    tracemalloc.start()
    count = sum(one.title == "T" for one in examples_of(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4000
    assert peak < 12_000_000


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    size=st.integers(1, 3000),
    indent=st.sampled_from([None, 1]),
    ascii=st.booleans(),
)
def test_pieces_of_a_file_are_the_whole_of_it(counts: list[int], size: int, indent: int | None, ascii: bool) -> None:
    """Wherever it is cut, and however it falls into blocks."""
    given = [
        replace(EXAMPLES[k % 3], id=f"{number}-{k}", title=f"t{number}", context=EXAMPLES[k % 3].context + " x" * k)
        for number, count in enumerate(counts)
        for k in range(count)
    ]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "e.json"
        path.write_text(json.dumps(squad(given), indent=indent, ensure_ascii=ascii), encoding="utf-8")
        patch.setattr("milldam.qa.examples.PIECE_BYTES", size)
        patch.setattr("milldam.sources.compression.BLOCK_BYTES", 64 + size // 7)
        (file,) = list_files([str(path)])
        pieces = list(cut_file(file))
        reading = Reading(TextRules(strict=True), lambda reject: None)
        assert [one for piece in pieces for one in read_examples(piece, reading)] == given
        assert len(pieces) <= 1 + path.stat().st_size // size + len(counts)


def test_a_record_that_is_too_large_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lines and tables it is rejected with its place and size; SQuAD's JSON says which article it is."""
    monkeypatch.setattr("milldam.qa.examples.LARGEST_RECORD", 20_000)
    given = [EXAMPLES[0], replace(EXAMPLES[1], context="word " * 10_000), EXAMPLES[2]]
    (tmp_path / "e.jsonl").write_text(lines(flat(given)))
    pq.write_table(pa.Table.from_pylist(flat(given)), tmp_path / "e.parquet")
    for name in ("e.jsonl", "e.parquet"):
        told: list[Reject] = []
        assert list(examples_of(tmp_path / name, on_reject=told.append)) == [EXAMPLES[0], EXAMPLES[2]]
        assert [(one.reason, one.place) for one in told] == [("too_large", f"{tmp_path / name}:2")]
    monkeypatch.setattr("milldam.sources.compression.BLOCK_BYTES", 1000)
    (tmp_path / "e.json").write_text(json.dumps(squad(given)))
    with pytest.raises(InputError, match=r"the article at byte \d+ is not JSON or has more than 20,000"):
        list(examples_of(tmp_path / "e.json"))
