"""Passages in documents: what is found is what a plain comparison of words finds, however it is written."""

from __future__ import annotations

import itertools
import random
import time
import unicodedata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from milldam.decontamination.index import Index, Passages, build_index
from milldam.decontamination.letters import LONGEST_WORD, words_of
from milldam.decontamination.matches import Matches, MatchFinder, Scanner, joined
from milldam.rules import EvaluationSet

RULES = EvaluationSet(path="evals.jsonl")


def index_of(folder: Path, texts: list[str], rules: EvaluationSet = RULES) -> Index:
    passages = Passages()
    for item, text in enumerate(texts):
        passages.add(0, item, "question", text)
    path = folder / f"index-{passages.digest}-{rules.ngram}-{rules.max_items}.bin"
    build_index(path, passages, (rules,))
    return Index(path)


def strings(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


class Match(NamedTuple):
    """As a scanner gives them."""

    document: int
    passage: int
    first: int
    stop: int
    start: int
    end: int


def matches_in(index: Index, *documents: str) -> list[Match]:
    return [Match(*match) for match in Scanner(index).find(strings(list(documents))).T.tolist()]


def found(index: Index, document: str) -> dict[int, set[int]]:
    """Passage -> its n-grams that count and that a document has."""
    runs: dict[int, set[int]] = {}
    for match in matches_in(index, document):
        base = int(index.gram_bounds[match.passage])
        counted = {gram - base for gram in range(match.first, match.stop) if not index.ignored[gram]}
        if counted:
            runs.setdefault(match.passage, set()).update(counted)
    return runs


# ---- words ----

CHARACTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from("aB1 .-é“世")


LONG_WORDS = st.lists(st.text("aé अ", min_size=1, max_size=3), max_size=3).map(
    lambda parts: "".join(part * 40 for part in parts)
)
"""Words of more than 64 bytes, in characters of one to three."""


def plain_words(text: str) -> list[str]:
    """Character by character."""
    words: list[list[str]] = [[]]
    for character in text:
        code = ord(character)
        four_bytes = code >= 0x10000
        if not four_bytes and unicodedata.category(character)[0] not in "LNM":
            words.append([])
            continue
        alone = four_bytes or 0x0E00 <= code < 0x10A0 or 0x1780 <= code < 0x1800 or 0x3000 <= code < 0xD800
        lower = character.lower()
        folded = lower if len(lower.encode()) == len(character.encode()) and len(lower) == 1 else character
        if alone:
            words += [[folded], []]
        else:
            words[-1].append(folded)
    return [piece for word in words for piece in cut_word(word)]


def cut_word(word: list[str]) -> list[str]:
    """A piece ends with the character that has its 64th byte."""
    pieces: list[str] = []
    for character in word:
        if pieces and len(pieces[-1].encode()) < LONGEST_WORD:
            pieces[-1] += character
        else:
            pieces.append(character)
    return pieces


@given(st.lists(st.text(CHARACTERS, max_size=200) | LONG_WORDS, min_size=1, max_size=4))
@settings(deadline=None)
def test_words_are_those_of_a_plain_reading(texts: list[str]) -> None:
    """Any characters, in any number of texts: no word runs over the end of its text."""
    data = [text.encode() for text in texts]
    offsets = np.concatenate(([0], np.cumsum([len(one) for one in data])))
    words = words_of(b"".join(data), offsets)
    spans = zip(words.starts.tolist(), words.stops.tolist(), strict=True)
    said = [bytes(words.folded[start:stop]).decode() for start, stop in spans]
    assert said == [word for text in texts for word in plain_words(text)]


# ---- passages ----

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_text(rng: random.Random, words: int) -> str:
    return " ".join("".join(rng.choices(LETTERS, k=rng.randrange(1, 9))) for _ in range(words))


def rewritten(text: str, rng: random.Random) -> str:
    """Other case, punctuation between words, and white space."""
    gaps = [" ", "\n", "  \t", ", ", ' "', " - ", "... "]
    return "".join(rng.choice([word.upper(), word.title(), word]) + rng.choice(gaps) for word in text.split())


@pytest.mark.parametrize("words", [4, 5, 8, 12, 13, 14, 40, 300])
def test_every_planted_passage_is_found_whole(tmp_path: Path, words: int) -> None:
    """Verbatim, or in other case, punctuation and white space: every n-gram, in the right document and place."""
    rng = random.Random(words)
    texts = [make_text(rng, words) + " sufficient letters" for _ in range(40)]
    index = index_of(tmp_path, texts)
    for passage, text in enumerate(texts):
        for planted in (text, rewritten(text, rng)):
            document = f"{make_text(rng, 30)}. {planted}! {make_text(rng, 30)}"
            total = int(index.gram_bounds[passage + 1] - index.gram_bounds[passage])
            assert found(index, document)[passage] == set(range(total))
            (match,) = matches_in(index, "other", document)
            assert match.document == 1
            said = document.encode()[match.start : match.end].decode()
            assert plain_words(said) == plain_words(text)


MARKS = ["'", "’", "-", "\u00ad", "‐", "\u200b", "-\n", "- \r\n  ", "\u00ad\n"]


@given(st.integers(0, 10**6), st.integers(4, 60), st.booleans())
@settings(deadline=None)
def test_marks_inside_words_make_no_difference(
    tmp_path_factory: pytest.TempPathFactory, seed: int, words: int, in_passage: bool
) -> None:
    """Apostrophes, hyphens, those at a line's end too, in any number of words, of the document or of the item: all of
    it is found, from its beginning to its end."""
    rng = random.Random(seed)
    plain = make_text(rng, words) + " sufficient letters"
    marked = "".join(
        one + rng.choice(MARKS) * (rng.random() < 0.2 and one.isalpha() and other.isalpha())
        for one, other in itertools.pairwise(plain + " ")
    )
    item, text = (marked, plain) if in_passage else (plain, marked)
    index = index_of(tmp_path_factory.mktemp("marks"), [item])
    document = f"before, {text}, after"
    assert found(index, document) == {0: set(np.flatnonzero(~index.ignored).tolist())}
    matches = matches_in(index, document)
    assert document.encode()[matches[0].start : matches[-1].end].decode() == text


@pytest.mark.parametrize(
    ("item", "document"), [("wheeler's", "wheelers"), ("24,000", "24000"), ("co-operate", "cooperate")]
)
def test_words_may_be_written_in_one_or_in_parts(tmp_path: Path, item: str, document: str) -> None:
    words = "with {} the mayor and all of the committee went down to see the river".format
    assert found(index_of(tmp_path, [words(item)]), words(document)) == {0: {0, 1, 2}}
    (tmp_path / "other").mkdir()
    assert found(index_of(tmp_path / "other", [words(document)]), words(item)) == {0: {0, 1, 2}}
    other = document[:-1] + "x"
    assert found(index_of(tmp_path, [words(item)]), words(other)) == {0: {2}}


def test_items_that_repeat_themselves_are_found_in_linear_time(tmp_path: Path) -> None:
    """An n-gram that an item has many times counts once, and a document that repeats it gives one match."""
    index = index_of(
        tmp_path, ["ha " * 200, "ha " * 100 + "but then he told them of the river and the mill in the valley"]
    )
    document = "ha " * 1_000_000
    started = time.perf_counter()
    matches = matches_in(index, document)
    assert time.perf_counter() - started < 2
    assert [(match.passage, match.stop - match.first) for match in matches] == [(0, 1), (1, 1)]


def test_ngrams_of_few_letters_do_not_count(tmp_path: Path) -> None:
    """Fewer than sixteen tell nothing."""
    index = index_of(tmp_path, ["we go to an inn or a den of the old landlord"], EvaluationSet(path="x", ngram=5))
    assert found(index, "we go to an inn or a den of the old") == {}
    assert found(index, "THE den of -- the old LANDLORD!") == {0: {7}}


def test_an_ngram_begins_and_ends_where_words_of_the_document_do(tmp_path: Path) -> None:
    """Words of one letter at either end, which the document has as parts of longer words, letters beside them equal."""
    index = index_of(tmp_path, ["u z sufficient letters a b"], EvaluationSet(path="x", ngram=4))
    assert found(index, "u z sufficient letters a b")[0] == {0, 1, 2}
    assert found(index, "menu zuz sufficient letters a b") == {0: {2}}
    assert found(index, "menu zuz sufficient letters ax b") == {}


def grams(words: list[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(words[k : k + size]) for k in range(len(words) - size + 1)]


def counted(words: list[str], size: int) -> dict[tuple[str, ...], int]:
    """The n-grams that count, each where it comes first: those with sixteen letters."""
    every = grams(words, size)
    return {gram: every.index(gram) for gram in every if len("".join(gram).encode()) >= 16}


@given(st.integers(0, 10**6), st.integers(3, 13))
@settings(deadline=None, max_examples=60)
@example(1, 3)
def test_what_is_found_is_what_a_comparison_of_ngrams_finds(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ngram: int
) -> None:
    """Passages and documents of a few words that come again and again, against sets of n-grams in plain Python."""
    rng = random.Random(seed)
    # No word is the beginning of another, nor two of them together a third: so letters say where words are.
    vocabulary = [f"{letter}x{letter}q{letter}z" for letter in "abcdeghk"]
    texts = [" ".join(rng.choices(vocabulary, k=rng.randrange(4, 40))) for _ in range(5)]
    words, piece = rng.choices(vocabulary, k=200), rng.choice(texts).split()
    # Between words: halves of two of them would make a word, as white space does not count.
    at, until = rng.randrange(len(words)), rng.randrange(1, len(piece) + 1)
    document = " ".join([*words[:at], *piece[:until], *words[at:]])
    rules = EvaluationSet(path="x", ngram=ngram, max_items=1000)
    index = index_of(tmp_path_factory.mktemp("index"), texts, rules)
    there, distinct = found(index, document), list(dict.fromkeys(texts))
    for passage, text in enumerate(distinct):
        size = min(ngram, len(text.split()))
        held = set(grams(document.split(), size))
        wanted = {k for gram, k in counted(text.split(), size).items() if gram in held}
        assert there.get(passage, set()) == wanted


def documents_of_pieces(rng: random.Random) -> tuple[list[str], list[str]]:
    """Passages, and documents of pieces of them in other case, punctuation and white space, beside letters and marks
    of any script."""
    others = ["größe", "Ærø", "слово", "日本", "été", "ﬁne", "“so”", "—", "x" * 70]

    def written(count: int) -> str:
        words = make_text(rng, count).split()
        return " ".join(word if rng.random() < 0.9 else rng.choice(others) for word in words)

    texts = [written(rng.randrange(6, 40)) + " sufficient letters" for _ in range(20)]
    documents = []
    for _ in range(30):
        pieces = [written(rng.randrange(30))]
        for text in rng.choices(texts, k=rng.randrange(4)):
            words = text.split()
            low = rng.randrange(len(words))
            pieces += [rewritten(" ".join(words[low : low + rng.randrange(1, 40)]), rng), written(rng.randrange(4))]
        documents.append(rng.choice(["", "\n", "“"]).join([" ".join(pieces), rng.choice(["", "."])]))
    return texts, documents


@given(st.integers(0, 10**6), st.integers(3, 13))
@settings(deadline=None)
def test_pieces_of_passages_are_found_however_they_are_written(
    tmp_path_factory: pytest.TempPathFactory, seed: int, ngram: int
) -> None:
    """No n-gram is missed that a plain comparison of words finds."""
    texts, documents = documents_of_pieces(random.Random(seed))
    index = index_of(tmp_path_factory.mktemp("pieces"), texts, EvaluationSet(path="x", ngram=ngram, max_items=1000))
    there: dict[tuple[int, int], set[int]] = {}
    for match in matches_in(index, *documents):
        base = int(index.gram_bounds[match.passage])
        there.setdefault((match.document, match.passage), set()).update(range(match.first - base, match.stop - base))
    for number, document in enumerate(documents):
        for passage, text in enumerate(texts):
            words = plain_words(text)
            size = min(ngram, len(words))
            held = set(grams(plain_words(document), size))
            wanted = {k for gram, k in counted(words, size).items() if gram in held}
            assert wanted <= there.get((number, passage), set())


@pytest.mark.parametrize("ngram", [5, 13])
def test_a_document_may_be_the_evaluation_set_itself(tmp_path: Path, ngram: int) -> None:
    """Items that end in words of a letter or two, one after the other as in their file: each is found."""
    rng = random.Random(ngram)
    texts = [make_text(rng, 9) + " sufficient a b c d e" for _ in range(50)]
    index = index_of(tmp_path, texts, EvaluationSet(path="x", ngram=ngram, max_items=1000))
    assert set(found(index, "\n".join(texts))) == set(range(50))


def test_words_that_go_on_are_other_words(tmp_path: Path) -> None:
    """The beginning or the end of a longer word is no match."""
    index = index_of(tmp_path, ["happy people of the president"])
    assert found(index, "so the happy people of the president said")
    assert not found(index, "so the unhappy people of the president said")
    assert not found(index, "so the happy people of the presidents said")


def test_scripts_without_spaces_are_compared_by_characters(tmp_path: Path) -> None:
    """Chinese, with other punctuation, inside of other text."""
    index = index_of(tmp_path, ["黑豹队的防守只丢了308分,在联赛中排名第六"])
    assert found(index, "据说黑豹队的防守只丢了 308 分，在联赛中排名第六。然后")
    assert not found(index, "据说黑豹队的防守只丢了 309 分，在联赛中排名第七。然后")


def test_phrases_of_many_items_and_short_answers_do_not_count(tmp_path: Path) -> None:
    """The same thirteen words in eleven items are a template; in ten they are not."""
    rng = random.Random(3)
    phrase = "Answer the following question about the passage with one of the four choices below:"
    few, many = (index_of(tmp_path, [f"{phrase} {make_text(rng, 12)}" for _ in range(count)]) for count in (10, 11))
    assert found(few, phrase)
    assert not found(many, phrase)
    passages = Passages()
    passages.add(0, 0, "question", "Where did the fleet of Admiral Hughes put in?")
    passages.add(0, 0, "answer", "at the Cape of Good Hope")
    build_index(tmp_path / "answers.bin", passages, (RULES,))
    index = Index(tmp_path / "answers.bin")
    assert not found(index, "They sailed round, and lay at the Cape of Good Hope for a month.")
    assert index.searched(0)["too_short"] == 1


def test_repeated_passages_are_looked_for_once(tmp_path: Path) -> None:
    """A context that twenty questions share is one passage, and no common phrase."""
    context = make_text(random.Random(5), 60)
    index = index_of(tmp_path, [context] * 20)
    assert index.searched(0) == {"passages": 1, "items": 1, "too_short": 0, "common": 0, "repeated": 19}
    assert found(index, f"before {context} after")


def test_nothing_to_look_for_finds_nothing(tmp_path: Path) -> None:
    """Sets of nothing but short or empty passages are no error here."""
    for number, texts in enumerate(([], [""], ["yes", "no", "?!"])):
        (tmp_path / str(number)).mkdir()
        index = index_of(tmp_path / str(number), texts)
        assert matches_in(index, "yes", "", "no") == []


# ---- long documents ----


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_a_long_document_is_read_in_pieces_without_a_trace(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Cut at white space, in the middle of passages, beside other documents: the matches of the whole."""
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("long")
    texts = [make_text(rng, rng.randrange(5, 30)) + " größe 日本語の文字 sufficient" for _ in range(6)]
    index = index_of(folder, texts)
    pieces = [make_text(rng, rng.randrange(1, 400)) for _ in range(8)] + texts + [rng.choice(texts)]
    rng.shuffle(pieces)
    documents = strings([texts[0], " ".join(pieces), "", "".join(pieces), texts[1]])
    found = []
    for long, overlap in ((1 << 20, 1 << 16), (3000, 1000), (rng.randrange(600, 5000), 500)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("milldam.decontamination.matches.LONG_BYTES", long)
            patch.setattr("milldam.decontamination.matches.OVERLAP_BYTES", overlap)
            finder = MatchFinder(Scanner(index), folder / f"{long}")
            finder.add(documents[:2], 7, np.ones(2, np.bool_))
            finder.add(documents[2:], 9, np.ones(3, np.bool_))
        found.append(runs_of(finder))
    assert found[0] == found[1] == found[2]


def runs_of(finder: MatchFinder) -> list[tuple[int, ...]]:
    """Document, passage and n-grams of each run, and the bytes that all matches cover."""
    finder.commit()
    read = Matches.read(finder.path)
    owner, first, stop = joined(read)
    covered = sorted({*zip(read.row.tolist(), read.start.tolist(), read.end.tolist(), strict=True)})
    runs = zip(read.row[owner].tolist(), read.passage[owner].tolist(), first.tolist(), stop.tolist(), strict=True)
    return [*runs, *covered]
