"""Duplicates and near-duplicates against plain Python: which documents go, and which one each of them is like."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit.jobs import invoke, set_aside, store_bytes
from tests.kit.preprocess_jobs import cleaned, lines_job, summary_of, texts_in

# ---- exact ----


def as_words(text: str) -> str:
    """What `normalize` leaves of a text; of one without letters and digits, all of it."""
    lower = "".join(one.lower() if len(one.lower()) == 1 else one for one in text)
    return "".join(one for one in lower if unicodedata.category(one)[0] in "LNM") or text


def test_normalized_texts_are_compared_by_letters_digits_and_marks(tmp_path: Path) -> None:
    """In any script, vowel signs included; texts without any are equal only where they are the same."""
    rng = random.Random(1)
    texts = ["".join(rng.choices("aB1 .,!éÉ“—日ßÄќक्षि🙂", k=rng.randrange(1, 6))).strip() for _ in range(1500)]
    texts = ["कम", "काम", "Straße, 1", "straße 1", *filter(None, texts)]
    first: dict[str, str] = {}
    for text in texts:
        first.setdefault(as_words(text), text)
    store = lines_job(tmp_path, texts, dedup={"normalize": True})
    assert texts_in(store) == list(first.values())


def test_a_corpus_of_many_small_documents_keeps_what_a_set_keeps(tmp_path: Path) -> None:
    """A third of them one and the same; more hashes than are sorted at once in a small budget."""
    rng = np.random.default_rng(0)
    numbers = np.where(rng.random(180_000) < 0.3, 7, rng.integers(0, 200_000, 180_000))
    texts = list(map(str, numbers.tolist()))
    small = lines_job(tmp_path, texts, "small", dedup="exact", memory="400MB")
    assert texts_in(small) == list(dict.fromkeys(texts))
    large = lines_job(tmp_path, texts, "large", dedup="exact", workers=2)
    assert store_bytes(large.path) == store_bytes(small.path)
    assert summary_of(small.path)["dedup"] == summary_of(large.path)["dedup"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a.json"])
def test_ids_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    """An id must not lead out of the folder of an index."""
    lines_job(tmp_path, ["one"], dedup={"index": tmp_path / "seen"})
    refused = invoke("dedup-index", tmp_path / "seen", "--remove", name)
    assert refused.exit_code == 2 and f'no run "{name}" in this index' in " ".join(refused.output.split())


# ---- near: what is alike ----


def near_drops(folder: Path, texts: list[str], **near: Any) -> dict[int, tuple[int, float]]:
    """Row of each near-duplicate -> row of what stays, and how much they are alike."""
    folder.mkdir(exist_ok=True)
    store = lines_job(folder, texts, dedup={"near": near}, write_dropped=True)
    dropped = {one["row"]: one for one in set_aside(store.path, "dropped")}
    assert texts_in(store) == [cleaned(text) for row, text in enumerate(texts) if row not in dropped]
    assert all("row" in one["duplicate_of"] for one in dropped.values())
    return {
        row: (one["duplicate_of"]["row"], one["duplicate_of"]["similarity"])
        for row, one in dropped.items()
        if one["reason"] == "near_duplicate"
    }


LINE = "the miller of that valley took his yellow barley down to our river every autumn"
SAME = [
    (LINE, LINE.title().replace(" ", " ... ")),
    (LINE, f"“{LINE.replace(' ', chr(0xA0))}” – (!)"),
    ("Привет МИР Ελλάδα ÉCOLE naïve مرحبا بالعالم", "привет мир, ελλάδα: école; NAÏVE مرحبا بالعالم"),
    ("我们今天去公园散步了", "我们 今天, 去公园 散步了!"),
    ("two words", "Two: WORDS"),
]
OTHER = [
    (LINE, " ".join(reversed(LINE.split()))),
    ("ab cd", "abc d"),
    ("ab cd", "cd ab"),
    ("word1", "word2"),
    ("a" * 64, "a" * 63 + "b"),
    ("b" * 65, "b" * 64),
    ("c" * 200, "c" * 100 + "d" + "c" * 99),
]


def test_texts_of_the_same_words_are_alike_and_no_others(tmp_path: Path) -> None:
    """Case, white space, punctuation and quotes make no difference, in any script; order and borders of words do."""
    drops = near_drops(tmp_path, [text for pair in SAME for text in pair] + ["...", "?!"])
    assert drops == {1: (0, 1.0), 3: (0, 1.0), 5: (4, 1.0), 7: (6, 1.0), 9: (8, 1.0)}
    texts = list(dict.fromkeys(text for pair in OTHER for text in pair))
    assert near_drops(tmp_path / "other", texts) == {}


def test_chinese_near_duplicates_are_found(tmp_path: Path) -> None:
    """Without a space in them: one character in a hundred is another."""
    rng, texts = random.Random(3), []
    for _ in range(30):
        characters = [chr(rng.randrange(0x4E00, 0x6000)) for _ in range(500)]
        texts.append("".join(characters))
        characters[50::100] = [chr(ord(one) + 0x2000) for one in characters[50::100]]
        texts.append("".join(characters))
    assert {row: of for row, (of, _) in near_drops(tmp_path, texts).items()} == {2 * k + 1: 2 * k for k in range(30)}


def words(seed: int, count: int) -> list[str]:
    rng = random.Random(f"words {seed}")
    return [f"w{rng.randrange(20_000)}" for _ in range(count)]


def grams(text: str) -> set[tuple[str, ...]]:
    """The shingles of a text of ASCII words, the slow way."""
    every = text.split()
    return {tuple(every[k : k + 5]) for k in range(max(len(every) - 4, min(len(every), 1)))}


def chain_of(count: int, moved: int = 20) -> list[str]:
    """Documents of 400 words, each a window over one long text that has moved a little on."""
    everything = words(1, 400 + count * moved)
    return [" ".join(everything[k * moved : k * moved + 400]) for k in range(count)]


@pytest.mark.parametrize("prefer", ["first", "longest", "shortest"])
def test_what_stays_is_what_a_plain_loop_keeps(tmp_path: Path, prefer: str) -> None:
    """In the order of preference, a document is dropped when one that stays is like it; its drop tells how much."""
    rng = random.Random(11)
    texts = chain_of(25)
    for seed in range(60):
        original = words(seed + 2, rng.randrange(20, 300))
        for _ in range(rng.randrange(1, 9)):
            copy = original + [f"y{rng.randrange(10**6)}" for _ in range(rng.randrange(40))]
            copy[rng.randrange(len(copy))] = f"x{rng.randrange(10**6)}"
            texts.append(" ".join(copy))
    rng.shuffle(texts)
    sets = list(map(grams, texts))

    def similarity(row: int, other: int) -> float:
        return len(sets[row] & sets[other]) / len(sets[row] | sets[other])

    sign = {"first": 0, "longest": -1, "shortest": 1}[prefer]
    stays: list[int] = []
    for row in sorted(range(len(texts)), key=lambda row: (sign * len(texts[row].encode()), row)):
        if not any(similarity(row, other) >= 0.8 for other in stays):
            stays.append(row)
    drops = near_drops(tmp_path, texts, prefer=prefer)
    assert set(drops) == set(range(len(texts))) - set(stays)
    for row, (of, told) in drops.items():
        assert of in stays and told == int(similarity(row, of) * 1000 + 1e-9) / 1000


def test_what_the_first_of_a_bucket_hides_is_found(tmp_path: Path) -> None:
    """Documents like one that is dropped, and like each other: the first of them stays, the others do not."""
    texts = chain_of(3, moved=35)  # the first like the second, the second like the third, the first unlike the third
    third = texts[2].split()
    texts += [" ".join([*third[:k], f"z{k}", *third[k + 1 :]]) for k in range(100, 300)]
    found = {row: of for row, (of, _) in near_drops(tmp_path, texts).items()}
    assert found == {row: 0 if row == 1 else 2 for row in [1, *range(3, 203)]}


def test_thousands_of_like_documents_are_compared_by_their_number_not_its_square(tmp_path: Path) -> None:
    """A template with other words at its end, over and over: the first one stays."""
    base = words(3, 300)
    texts = [" ".join([*base, *words(k, 20)]) for k in range(3000)]
    drops = near_drops(tmp_path, texts)
    assert {of for of, _ in drops.values()} == {0} and len(drops) == len(texts) - 1
    assert summary_of(tmp_path / "out")["near"]["candidates"] < 40 * len(texts)


def test_the_similarity_of_giants_is_an_estimate(tmp_path: Path) -> None:
    """Above some 16,000 shingles, of the smallest hashes of both, within some standard deviations."""
    giant = words(5, 60_000)
    other = [f"x{k}" if k % 80 == 0 else word for k, word in enumerate(giant)]
    texts = [" ".join(giant), " ".join(other), " ".join(giant[:30_000])]
    drops = near_drops(tmp_path, texts)
    true = len(grams(texts[0]) & grams(texts[1])) / len(grams(texts[0]) | grams(texts[1]))
    assert list(drops) == [1] and drops[1][1] == pytest.approx(true, abs=0.02)
