"""Passages in documents: what is found is what a plain comparison of words finds, however it is written."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import set_aside
from tests.kit.preprocess_jobs import lines_job, make_words
from tests.kit.quick import first_quick

MARKS = ["'", "’", "-", "\u00ad", "‐", "\u200b", "-\n", "- \r\n  ", "\u00ad\n"]


def findings(folder: Path, items: list[str], documents: list[str], **rules: Any) -> list[dict[str, Any]]:
    """All that is found of the items; the documents stay."""
    folder.mkdir(exist_ok=True)
    path = folder / "evals.jsonl"
    path.write_text("".join(json.dumps({"question": item}) + "\n" for item in items), encoding="utf-8")
    told = {"path": path, "action": "report", "min_share": 0.001, "common_share": 1, **rules}
    store = lines_job(folder, documents, decontaminate=[told], dedup="off", clean="off")
    return set_aside(store.path, "contamination")


def plain_words(text: str) -> list[str]:
    """Character by character; a piece of a long word ends with the character that has its 64th byte."""
    words: list[str] = [""]
    for character in text:
        code = ord(character)
        four_bytes = code >= 0x10000
        if not four_bytes and unicodedata.category(character)[0] not in "LNM":
            words.append("")
            continue
        alone = four_bytes or 0x0E00 <= code < 0x10A0 or 0x1780 <= code < 0x1800 or 0x3000 <= code < 0xD800
        lower = character.lower()
        folded = lower if len(lower.encode()) == len(character.encode()) and len(lower) == 1 else character
        if alone:
            words += [folded, ""]
        elif len(words[-1].encode()) < 64:
            words[-1] += folded
        else:
            words.append(folded)
    return [word for word in words if word]


def rewritten(text: str, rng: random.Random) -> str:
    """Other case, punctuation between words, and white space."""
    gaps = [" ", "\n", "  \t", ", ", ' "', " - ", "... "]
    return "".join(rng.choice([word.upper(), word.title(), word]) + rng.choice(gaps) for word in text.split())


def marked(text: str, rng: random.Random) -> str:
    """Apostrophes and hyphens inside words, those at a line's end too."""
    return "".join(
        one + rng.choice(MARKS) * (rng.random() < 0.2 and one.isalpha() and other.isalpha())
        for one, other in zip(text, text[1:] + " ", strict=True)
    )


@pytest.mark.parametrize("words", first_quick([13, 4, 5, 8, 12, 14, 40, 300], 4))
def test_every_planted_passage_is_found_whole(tmp_path: Path, words: int) -> None:
    """In other case, punctuation and white space, with marks inside words of the document or the item: every n-gram, in
    the right document and place."""
    rng = random.Random(words)
    texts = [f"{make_words(rng, words)} sufficient letters" for _ in range(40)]
    for turn, (item, planted) in enumerate([(None, rewritten), (None, marked), (marked, None)]):
        items = [item(text, rng) if item else text for text in texts]
        inner = [planted(text, rng) if planted else text for text in texts]
        documents = [f"{make_words(rng, 30)}. {one}! {make_words(rng, 30)}" for one in inner]
        found = findings(tmp_path / str(turn), items, documents)
        whole = {(one["item"], one["row"]): one for one in found if one["share"] == 1}
        assert sorted(whole) == [(k, k) for k in range(40)]
        for one in whole.values():
            said = documents[one["row"]].encode()[one["start"] : one["end"]].decode()
            assert "".join(plain_words(said)) == "".join(plain_words(texts[one["row"]]))


def grams(words: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(words[k : k + size]) for k in range(len(words) - size + 1)]


def held(item: str, document: str, ngram: int) -> int:
    """How many n-grams of an item, those with sixteen letters, a document has: the slow way."""
    words = plain_words(item)
    size = min(ngram, len(words))
    counted = {gram for gram in grams(words, size) if len("".join(gram).encode()) >= 16}
    return len(counted & set(grams(plain_words(document), size)))


@pytest.mark.parametrize("ngram", first_quick([3, 13, 5, 8], 2))
def test_what_is_found_is_what_a_comparison_of_ngrams_finds(tmp_path: Path, ngram: int) -> None:
    """Items and documents of a few words that come again and again, against sets of n-grams in plain Python."""
    rng = random.Random(ngram)
    # No word is the beginning of another, nor two of them together a third: so letters say where words are.
    vocabulary = [f"{letter}x{letter}q{letter}z" for letter in "abcdeghk"]
    items = list(dict.fromkeys(" ".join(rng.choices(vocabulary, k=rng.randrange(4, 40))) for _ in range(8)))
    documents = []
    for _ in range(60):
        words, piece = rng.choices(vocabulary, k=200), rng.choice(items).split()
        at, until = rng.randrange(len(words)), rng.randrange(1, len(piece) + 1)
        documents.append(" ".join([*words[:at], *piece[:until], *words[at:]]))
    found = findings(tmp_path, items, documents, ngram=ngram, max_items=1000)
    told = {(one["item"], one["row"]): one["ngrams"] for one in found}
    wanted = {(k, row): held(item, text, ngram) for k, item in enumerate(items) for row, text in enumerate(documents)}
    assert told == {pair: count for pair, count in wanted.items() if count}


@pytest.mark.parametrize("ngram", first_quick([5, 3, 13]))
def test_pieces_of_passages_are_found_however_they_are_written(tmp_path: Path, ngram: int) -> None:
    """No n-gram is missed that a plain comparison of words finds, beside letters and marks of any script."""
    rng = random.Random(ngram)
    others = ["größe", "Ærø", "слово", "日本", "été", "ﬁne", "“so”", "—", "x" * 70, "é" * 40]

    def written(count: int) -> str:
        words = make_words(rng, count).split()
        return " ".join(word if rng.random() < 0.9 else rng.choice(others) for word in words)

    items = [f"{written(rng.randrange(6, 40))} sufficient letters" for _ in range(20)]
    documents = []
    for _ in range(60):
        pieces = [written(rng.randrange(30))]
        for item in rng.choices(items, k=rng.randrange(4)):
            words = item.split()
            low = rng.randrange(len(words))
            pieces += [rewritten(" ".join(words[low : low + rng.randrange(1, 40)]), rng), written(rng.randrange(4))]
        documents.append(f"{rng.choice(['', chr(10), '“'])}{' '.join(pieces)} ")
    told = {
        (one["item"], one["row"]): one["ngrams"]
        for one in findings(tmp_path, items, documents, ngram=ngram, max_items=1000)
    }
    for number, item in enumerate(items):
        for row, document in enumerate(documents):
            assert told.get((number, row), 0) >= held(item, document, ngram)


SENTENCE = "with {} the mayor and all of the committee went down to see the river".format
PHRASE = "Answer the following question about the passage with one of the four choices below:"
CASES: dict[str, tuple[dict[str, Any], list[str], dict[str, int]]] = {
    "in one or in parts": (
        {},
        [SENTENCE("wheeler's"), SENTENCE("24,000"), SENTENCE("co-operate")],
        {SENTENCE("wheelers"): 3, SENTENCE("24000"): 3, SENTENCE("cooperate"): 3, SENTENCE("24001"): 3},
    ),
    "few letters": (
        {"ngram": 5},
        ["we go to an inn or a den of the old landlord"],
        {"we go to an inn or a den of the old": 0, "THE den of -- the old LANDLORD!": 1},
    ),
    "edges of words": (
        {"ngram": 4},
        ["u z sufficient letters a b"],
        {
            "u z sufficient letters a b": 3,
            "menu zuz sufficient letters a b": 1,
            "menu zuz sufficient letters ax b": 0,
        },
    ),
    "words that go on": (
        {},
        ["happy people of the president"],
        {
            "so the happy people of the president said": 1,
            "so the unhappy people of the president said": 0,
            "so the happy people of the presidents said": 0,
        },
    ),
    "without spaces": (
        {},
        ["黑豹队的防守只丢了308分,在联赛中排名第六"],
        {
            "据说黑豹队的防守只丢了 308 分，在联赛中排名第六。然后": 9,
            "据说黑豹队的防守只丢了 309 分，在联赛中排名第七。然后": 0,
        },
    ),
    "one item in eleven": ({}, [f"{PHRASE} {make_words(random.Random(k), 12)}" for k in range(11)], {PHRASE: 0}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_counts_as_the_same_words(tmp_path: Path, case: str) -> None:
    """Words in one or in parts; n-grams of fewer than sixteen letters tell nothing; they begin and end where words of
    the document do; scripts without spaces go by characters; a phrase of eleven items is a template."""
    rules, items, documents = CASES[case]
    found = findings(tmp_path, items, list(documents), **rules)
    counts = [max((one["ngrams"] for one in found if one["row"] == row), default=0) for row in range(len(documents))]
    if case == "without spaces":
        assert counts[0] > 0 == counts[1]
    elif case == "in one or in parts":
        assert counts[:3] == [3, 3, 3] and counts[3] == 1
    else:
        assert counts == list(documents.values())


@pytest.mark.parametrize("ngram", [5, 13])
def test_a_document_may_be_the_evaluation_set_itself(tmp_path: Path, ngram: int) -> None:
    """Items that end in words of a letter or two, one after the other as in their file: each is found."""
    rng = random.Random(ngram)
    items = [f"{make_words(rng, 9)} sufficient a b c d e" for _ in range(50)]
    found = findings(tmp_path, items, ["\n".join(items)], ngram=ngram, max_items=1000)
    assert {one["item"] for one in found} == set(range(50))
