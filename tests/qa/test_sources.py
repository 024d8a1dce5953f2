"""Examples of question answering, whatever form they come in."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milldam.errors import ConfigError, InputError
from milldam.qa.json_stream import JsonError, JsonStream, TooLarge
from milldam.qa.records import SQUAD, list_files
from milldam.qa.sources import Answer, Example, Limits, Reject, examples_of, read_examples

CONTEXT = "In 1990, Łódź (Poland) had 1,000 cafés."
EXAMPLES = [
    Example("a1", "Which year?", CONTEXT, (Answer("1990", 3), Answer("In 1990", 0)), "Łódź"),
    Example("a2", "Which river?", CONTEXT, (), "Łódź"),
    Example("b1", "How many?", "There were 3 \U0001f600 there.", (Answer("3", 11),), "Faces"),
]


def squad(examples: list[Example], *, title_first: bool = True) -> dict[str, Any]:
    """The examples in SQuAD's form: an article a title, a paragraph a context."""
    articles: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for one in examples:
        answers = [{"text": answer.text, "answer_start": answer.start} for answer in one.answers]
        qa = {"id": one.id, "question": one.question, "answers": answers, "is_impossible": not answers}
        articles.setdefault(one.title, {}).setdefault(one.context, []).append(qa)
    data = []
    for title, paragraphs in articles.items():
        inner = {"paragraphs": [{"qas": qas, "context": context} for context, qas in paragraphs.items()]}
        data.append({"title": title} | inner if title_first else inner | {"title": title})
    return {"version": "v2.0", "data": data}


def flat(examples: list[Example]) -> list[dict[str, Any]]:
    """The examples in HF's form."""
    return [
        {
            "id": one.id,
            "title": one.title,
            "context": one.context,
            "question": one.question,
            "answers": {"text": [a.text for a in one.answers], "answer_start": [a.start for a in one.answers]},
        }
        for one in examples
    ]


def lines(records: list[Any]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_saved(folder: Path, table: pa.Table) -> None:
    """As HF `save_to_disk` does."""
    folder.mkdir(parents=True)
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table, max_chunksize=2)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))


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
        "no-ending": lines(flat(EXAMPLES)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
        yield folder / name
    pq.write_table(table, folder / "t.parquet", row_group_size=2)
    (folder / "parquet-by-content").write_bytes((folder / "t.parquet").read_bytes())
    with pa.OSFile(str(folder / "t.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    write_saved(folder / "saved", table)
    yield from (folder / name for name in ("t.parquet", "parquet-by-content", "t.arrow", "saved"))
    plain = (folder / "one-line.json").read_bytes()
    for name, packed in (("z.json.gz", gzip.compress(plain)), ("z.json.bz2", bz2.compress(plain))):
        (folder / name).write_bytes(packed)
        yield folder / name
    (folder / "packed-by-content").write_bytes(gzip.compress((folder / "lines.json").read_bytes()))
    yield folder / "packed-by-content"


def test_every_form_gives_the_same_examples(tmp_path: Path) -> None:
    """SQuAD's JSON in any layout, flat records as JSON, lines, parquet and Arrow, compressed or not."""
    forms = list(in_every_form(tmp_path))
    assert len(forms) == 16
    for path in forms:
        assert list(examples_of(path)) == EXAMPLES, path


def test_an_impossible_question_has_no_answer(tmp_path: Path) -> None:
    """SQuAD v2: is_impossible says so, whatever else the record has; v1.1 does not know the key."""
    records = flat(EXAMPLES[:1]) * 3
    records = [records[0] | {"is_impossible": True}, records[1] | {"is_impossible": False}, records[2]]
    (tmp_path / "e.jsonl").write_text(lines(records))
    assert [len(one.answers) for one in examples_of(tmp_path / "e.jsonl")] == [0, 2, 2]
    (tmp_path / "e.jsonl").write_text(lines([flat(EXAMPLES)[0] | {"answers": None}]))
    assert [one.answers for one in examples_of(tmp_path / "e.jsonl")] == [()]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7, 9, 20])
def test_max_examples_is_exact_over_all_inputs(tmp_path: Path, count: int) -> None:
    """It counts what can be used, from the first input to the last."""
    (tmp_path / "1.json").write_text(json.dumps(squad(EXAMPLES)))
    (tmp_path / "2.jsonl").write_text(lines(["broken", *flat(EXAMPLES)]))
    (tmp_path / "3.json").write_text(json.dumps(flat(EXAMPLES)))
    found = list(examples_of([tmp_path / name for name in ("1.json", "2.jsonl", "3.json")], max_examples=count))
    assert found == (EXAMPLES * 3)[:count]


BROKEN: list[tuple[Any, str]] = [
    ("a text", "no_record"),
    ({"id": "x", "question": "?", "answers": []}, "no_context"),
    ({"id": "x", "question": "?", "context": "  ", "answers": []}, "no_context"),
    ({"id": "x", "question": ["?"], "context": "c", "answers": []}, "no_question"),
    ({"question": "?", "context": "c", "answers": []}, "no_id"),
    ({"id": True, "question": "?", "context": "c", "answers": []}, "no_id"),
    ({"id": "x", "question": "?", "context": "c", "answers": "c"}, "bad_answers"),
    ({"id": "x", "question": "?", "context": "c", "answers": {"text": ["c"], "answer_start": []}}, "bad_answers"),
    ({"id": "x", "question": "?", "context": "c", "answers": [{"text": "c"}]}, "bad_answers"),
    ({"id": "x", "question": "?", "context": "c", "answers": [{"text": "c", "answer_start": "0"}]}, "bad_answers"),
    ({"id": "x", "question": "?", "context": "half \ud83d", "answers": []}, "not_unicode"),
]


@pytest.mark.parametrize("form", ["lines", "list", "squad"])
def test_a_broken_record_is_told_and_left_out(tmp_path: Path, form: str) -> None:
    """Every one with its place and the reason; the others are read. With strict, it is an error."""
    records = [record for record, _ in BROKEN]
    path = tmp_path / "e.json"
    good = flat(EXAMPLES)[2]
    if form == "squad":
        content = {"data": [{"title": "t", "paragraphs": [{"context": "c", "qas": [record]}]} for record, _ in BROKEN]}
        path.write_text(json.dumps(content))
    elif form == "list":
        path.write_text(json.dumps([*records, good]))
    else:
        path.write_text(lines([good, *records]).replace("\ud83d", "x"))
    told: list[Reject] = []
    found = list(examples_of(path, on_reject=told.append))
    if form == "list":
        assert found == [EXAMPLES[2]]
        assert [(one.where, one.reason) for one in told] == [(f"[{k}]", why) for k, (_, why) in enumerate(BROKEN)]
    elif form == "lines":
        assert [one.where for one in told] == [f"line {number}" for number in range(2, 12)]
    else:
        assert told[0].where == "data[0].paragraphs[0].qas[0]"
    assert all(one.file == str(path) and one.detail for one in told)
    with pytest.raises(InputError, match=r"e\.json: .*(no_record|must be|wanted).*Without strict"):
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
        assert [one.reason for one in told] == ["not_unicode", "bad_json"][: 2 if name == "e.jsonl" else 1], name


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
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "t.parquet")
    for name, message in (
        ("missing.json", "no such file"),
        ("notes.txt", "no examples of question answering"),
        ("t.parquet", "no column id, context, question; found text"),
        ("empty", "no input files in it"),
    ):
        with pytest.raises(InputError, match=message):
            list(examples_of(tmp_path / name))
    with pytest.raises(InputError, match="name a file"):
        list(examples_of("-"))
    with pytest.raises(ConfigError, match="max_examples"):
        list(examples_of(tmp_path / "t.parquet", split="train[:10]"))


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


def test_an_address_is_read_where_it_lies() -> None:
    """What fsspec opens, by file and by folder."""
    with fsspec.open("memory://qa/part.json", "w") as file:
        file.write(json.dumps(squad(EXAMPLES)))
    with fsspec.open("memory://qa/rows.jsonl.gz", "wb") as file:
        file.write(gzip.compress(lines(flat(EXAMPLES)).encode()))
    assert list(examples_of("memory://qa/part.json")) == EXAMPLES
    assert list(examples_of("memory://qa")) == EXAMPLES * 2


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """One article with all paragraphs, its title last: neither the file nor the article is held."""
    path = tmp_path / "large.json"
    paragraph = {"context": "word " * 400, "qas": [{"id": "1", "question": "?", "answers": []}]}
    with path.open("w") as file:
        file.write('{"data": [{"paragraphs": [')
        for number in range(4000):
            file.write(("," if number else "") + json.dumps(paragraph))
        file.write('], "title": "T"}]}')
    assert path.stat().st_size > 8_000_000
    tracemalloc.start()
    count = sum(one.title == "T" for one in examples_of(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4000
    assert peak < 4_000_000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=6), st.integers(1, 40), st.booleans(), st.sampled_from([None, 1]))
def test_values_are_cut_out_as_they_are(values: list[Any], size: int, ascii: bool, indent: int | None) -> None:
    """However the text falls into blocks, the items of a list are those that the whole text has."""
    text = io.BytesIO(json.dumps(values, ensure_ascii=ascii, indent=indent).encode("utf-8", "surrogatepass"))
    stream = JsonStream(lambda _: text.read(size))
    assert [stream.value() for _ in stream.items()] == values
    assert stream.peek() == ""


def kept(value: Any, found: Any, largest: int) -> bool:
    """Whether a value was read as it is, but for strings and lists that are larger than they may be."""
    if isinstance(found, TooLarge):
        return isinstance(value, str | list) and len(json.dumps(value).encode()) == found.bytes > largest
    if isinstance(value, dict) and isinstance(found, dict):
        return value.keys() == found.keys() and all(kept(value[key], found[key], largest) for key in value)
    if isinstance(value, list) and isinstance(found, list):
        return len(value) == len(found) and all(map(kept, value, found, [largest] * len(value)))
    return bool(value == found) and type(value) is type(found)


@given(st.lists(JSON, max_size=6), st.integers(1, 40), st.integers(80, 200))
def test_what_is_too_large_is_passed_over(values: list[Any], size: int, largest: int) -> None:
    """Strings and lists alone are left out, with their size in their place; everything behind them is read."""
    values = [*values, ["word " * 40, {"long": '\\"' * 200, "short": "é"}], [[7] * 100, "end"], 5]
    text = json.dumps(values).encode()
    source = io.BytesIO(text)
    stream = JsonStream(lambda _: source.read(size), largest)
    found = [stream.value() for _ in stream.items()]
    assert kept(values, found, largest)
    assert kept('\\"' * 200, found[-3][1]["long"], largest) and isinstance(found[-3][1]["long"], TooLarge)
    assert isinstance(found[-2][0], TooLarge) and found[-2][1] == "end"
    source = io.BytesIO(text)
    stream = JsonStream(lambda _: source.read(size), largest)
    for number in stream.items():
        if number < len(values) - 1:
            stream.skip()
        else:
            assert stream.value() == 5
    assert stream.peek() == ""


GIANT = "word " * 10_000


@pytest.mark.parametrize("form", ["squad", "squad, titles last", "list", "lines", "parquet", "arrow"])
def test_a_giant_record_costs_itself_alone(tmp_path: Path, form: str) -> None:
    """A context, question, title or list of answers: rejected with its id and size; the others are read."""
    first, other, last = EXAMPLES
    giants = [
        replace(other, id="context", context=GIANT),
        replace(other, id="question", question=GIANT),
        replace(other, id="title", title=GIANT),
        replace(first, id="answers", answers=first.answers * 3000),
    ]
    given = [first, *giants, last]
    path = tmp_path / f"e.{ {'lines': 'jsonl', 'parquet': 'parquet', 'arrow': 'arrow'}.get(form, 'json') }"
    if form.startswith("squad"):
        path.write_text(json.dumps(squad(given, title_first=form == "squad")))
    elif form in ("list", "lines"):
        records = [{"html": GIANT} | record for record in flat(given)]
        path.write_text(json.dumps(records) if form == "list" else lines(records))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(flat(given)), path)
    else:
        with pa.ipc.new_file(path, pa.Table.from_pylist(flat(given)).schema) as file:
            file.write_table(pa.Table.from_pylist(flat(given)))
    told: list[Reject] = []
    (file,) = list_files([str(path)])
    assert list(read_examples(file, told.append, limits=Limits(20_000))) == [first, last]
    assert {one.reason for one in told} == {"too_large"}
    for name in ("context", "question", "title"):
        assert any(f'"{name}" of question "{name}" has 50 KB: more than is read at once' in one.detail for one in told)
    assert any('of question "answers" has ' in one.detail for one in told)
    assert len(told) == 4 and all(len(one.record) <= 4096 for one in told)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=5), st.integers(1, 40))
def test_objects_are_walked_field_by_field(value: dict[str, Any], size: int) -> None:
    """The fields of an object, each read in its turn."""
    text = io.BytesIO(json.dumps(value).encode())
    stream = JsonStream(lambda _: text.read(size))
    assert {key: stream.value() for key in stream.fields()} == value


@pytest.mark.parametrize("text", ["[1,", "[1 2]", '{"a" 1}', "{1: 2}", '["a', "[" * 100_000, '{"a": [1, }', "[1.5.5]"])
def test_what_is_no_json_is_told_with_its_place(text: str) -> None:
    """An error, never an endless wait; it names the character."""
    with pytest.raises(JsonError, match="at character"):
        source = io.BytesIO(text.encode())
        stream = JsonStream(lambda _: source.read(7))
        walk = stream.items() if text.startswith("[") else stream.fields()
        for _ in walk:
            stream.value()


def test_the_content_says_what_the_name_does_not(tmp_path: Path) -> None:
    """The first line of JSON lines is a record by itself; a JSON text's is not."""
    for text, kind in (('{"id": 1}\n{"id": 2}\n', "jsonl"), ('{\n"data": []}', SQUAD), ('{"data": []}', SQUAD)):
        (tmp_path / "x").write_text(text)
        (file,) = list_files([str(tmp_path / "x")])
        assert (file.format, file.compression) == (kind, None)
