"""Which of near-duplicates stays by a field of the record: compared with a plain choice, cluster by cluster."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.kit.chat_jobs import write_template
from tests.kit.jobs import TOKENIZER
from tests.kit.preprocess_jobs import (
    cleaned,
    fresh_texts,
    preprocess,
    summary_of,
    texts_in,
    tokenizer,
)

import milldam
from milldam.errors import InputError

BY_SCORE: dict[str, Any] = {"near": {"prefer": {"field": "score"}}}
CLUSTERS = 25


@dataclass(frozen=True)
class Row:
    """A record: which cluster it is of, its text, and its value."""

    cluster: int
    text: str
    score: Any = None


def make_rows(seed: int, *, clusters: int = CLUSTERS, each: int = 6) -> list[Row]:
    """Near-duplicates in no order, some equal, some that cleaning changes or empties, some without a value."""
    rng = random.Random(seed)
    rows = [Row(-1, rng.choice(["", " \n"]), 9.0) for _ in range(10)]
    for cluster, text in enumerate(fresh_texts(clusters, words=(150, 200))):
        for _ in range(rng.randrange(1, each)):
            words = text.split()
            words[rng.randrange(3)] = f"changed{rng.randrange(4)}"
            version = f"{rng.choice(['', ' ', chr(7)])}{' '.join(words)}"
            score = rng.choice([None, float("nan"), round(rng.random(), 1), rng.randrange(3), str(rng.random())])
            rows.append(Row(cluster, version, score))
    rng.shuffle(rows)
    return rows


def value_of(score: Any) -> float:
    return float("-inf") if score is None or score != score else float(score)


def chosen(rows: list[Row], *, sign: int = 1) -> list[str]:
    """What stays: of every cluster the text with the best value, which is the best of its copies; else the first."""
    best: dict[int, dict[str, tuple[float, int]]] = {}
    for position, row in enumerate(rows):
        text = cleaned(row.text)
        if text:
            values = best.setdefault(row.cluster, {})
            known = values.get(text, (float("inf"), position))
            value = value_of(row.score)
            key = -sign * value if value > float("-inf") else float("inf")
            values[text] = (min(known[0], key), known[1])
    stays = (min((key, position, text) for text, (key, position) in texts.items()) for texts in best.values())
    return [text for _, _, text in sorted(stays, key=lambda one: one[1])]


def write_rows(path: Path, rows: list[Row]) -> Path:
    records = [{"id": k, "text": row.text, "score": row.score} for k, row in enumerate(rows)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
    elif path.suffix == ".csv":
        import csv

        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "text", "score"])
            writer.writeheader()
            writer.writerows(records)
    else:
        scores = [None if one["score"] is None else float(one["score"]) for one in records]
        table = pa.table({"text": [one["text"] for one in records], "score": scores})
        pq.write_table(table, path, row_group_size=13)
    return path


# ---- what stays ----


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_what_stays_is_the_plain_choice_in_every_format(tmp_path: Path, ending: str) -> None:
    """Texts that are cleaned, emptied, equal or without a value among them; in units of any size."""
    rows = make_rows(1)
    # A CSV record that is blank is none; its empty fields are texts.
    path = write_rows(tmp_path / f"rows.{ending}", rows)
    store = preprocess(tmp_path / "out", path, dedup=BY_SCORE, shard_size="100KB")
    assert texts_in(store) == chosen(rows)
    without = sum(value_of(row.score) == float("-inf") for row in rows if cleaned(row.text))
    told = summary_of(tmp_path / "out")["near"]["prefer"]
    there = sum(bool(cleaned(row.text)) for row in rows) - without
    assert told == {"stays": 'the highest number in "score"', "with": there, "without": without}
    report = (tmp_path / "out" / "run" / "report.html").read_text(encoding="utf-8")
    assert f"{there} of {there + without} documents have one" in report


def test_the_latest_date_stays(tmp_path: Path) -> None:
    """Zones and precisions are compared as moments; what is no date comes last."""
    text = fresh_texts(1, words=(150, 200))[0]
    days = ["2023", "2024-05-01T12:00:00+02:00", "2024-05-01T10:00:00.000001Z", "2024-05-01", "yesterday", 2_000_000]
    lines = (json.dumps({"text": f"{text} {k}", "meta": {"day": day}}) + "\n" for k, day in enumerate(days))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    store = preprocess(tmp_path / "out", tmp_path / "a.jsonl", dedup={"near": {"prefer": {"field": "meta.day"}}})
    assert texts_in(store) == [f"{text} 2"]
    assert summary_of(tmp_path / "out")["near"]["prefer"] == {
        "stays": 'the latest date in "meta.day"',
        "with": 4,
        "without": 2,
    }


def test_the_value_decides_before_the_order_of_datasets(tmp_path: Path) -> None:
    """Which decides between equal values; plain text, which has no field, gives way, and validation never does."""
    one, two, three, four = fresh_texts(4, words=(150, 200))
    first = [Row(0, f"{one} a", 1), Row(1, f"{two} a", 2), Row(2, f"{three} a", None)]
    second = [Row(0, f"{one} b", 5), Row(1, f"{two} b", 2), Row(3, f"{four} b", 7)]
    (tmp_path / "plain.txt").write_text(f"{three} c\n{one} c\n")
    (tmp_path / "val.jsonl").write_text(json.dumps({"text": four}) + "\n")
    datasets = [
        {"path": tmp_path / "plain.txt", "documents": "line"},
        write_rows(tmp_path / "a.jsonl", first),
        write_rows(tmp_path / "b.csv", second),
    ]
    store = preprocess(tmp_path / "out", datasets, validation=tmp_path / "val.jsonl", dedup=BY_SCORE)
    assert texts_in(store, "train") == [f"{three} c", f"{two} a", f"{one} b"]
    assert texts_in(store, "val") == [four]
    # Validation is not counted.
    assert summary_of(tmp_path / "out")["near"]["prefer"]["without"] == 3


def test_conversations_stay_by_a_field_beside_them(tmp_path: Path) -> None:
    """Of records that are rejected or not rendered, no value goes to another."""
    texts = fresh_texts(12, words=(150, 200))
    lines, kept = [], []
    for number, text in enumerate(texts):
        scores = random.Random(number).sample(range(10), 3)
        for k, score in enumerate(scores):
            role = "fail" if k == 1 and number % 3 == 0 else "assistant"
            said = [{"role": "user", "content": text}, {"role": role, "content": f"answer {k}"}]
            lines.append(json.dumps({"messages": said if number % 4 or k != 2 else 7, "facts": {"score": score}}))
        there = [(score, k) for k, score in enumerate(scores) if not (k == 1 and number % 3 == 0)]
        kept.append(max((score, k) for score, k in there if number % 4 or k != 2)[1])
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(lines) + "\n")
    settings = {"datasets": str(path), "tokenizer": str(TOKENIZER), "out": str(tmp_path / "out")}
    chat = {"template": str(write_template(tmp_path))}
    store = milldam.preprocess(settings | {"chat": chat, "dedup": {"near": {"prefer": {"field": "facts.score"}}}})
    rendered = tokenizer().decode_batch([one.tolist() for one in milldam.open(store.path)], skip_special_tokens=False)
    answers = [text.partition("<assistant>\n")[2][:8] for text in rendered]
    assert answers == [f"answer {k}" for k in kept]


# ---- what is refused ----


def test_a_field_without_a_value_anywhere_is_refused(tmp_path: Path) -> None:
    """By name, with what there is; nothing is made."""
    rows = [Row(k, text, None) for k, text in enumerate(fresh_texts(5))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError, match='None of 5 documents has a number in the field "score"'):
        preprocess(tmp_path / "out", path, dedup=BY_SCORE)
    with pytest.raises(InputError, match=r'no field "scoer" .* found "id", "text", "score". Did you mean "score"'):
        preprocess(tmp_path / "out", path, dedup={"near": {"prefer": {"field": "scoer"}}})
    assert not (tmp_path / "out" / "milldam.json").exists()
