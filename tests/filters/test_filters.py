"""Filters: each rule below, at and above its threshold, and against a plain reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milldam.errors import ConfigError
from milldam.filters import judging, language
from milldam.filters.gopher import BULLETS
from milldam.filters.judging import Filters
from milldam.rules import C4Rules, FilterRules, GopherQualityRules, GopherRepetitionRules, LanguageRules
from milldam.text.arrays import Verdicts

QUALITY_OFF = {name: None for name in asdict(GopherQualityRules()) if name != "stop_words"}
REPETITION_OFF = dict.fromkeys(asdict(GopherRepetitionRules()))


def array(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def reasons(texts: list[str], rules: FilterRules) -> list[str | None]:
    """Why each text is dropped, or None."""
    verdicts = Verdicts(len(texts))
    Filters(rules).judge(array(texts), verdicts)
    return [verdicts.reason(position) for position in range(len(texts))]


def quality(**rules: Any) -> FilterRules:
    """One or a few quality rules, the others off."""
    return FilterRules(gopher_quality=GopherQualityRules(**{**QUALITY_OFF, **rules}))


def repetition(**rules: Any) -> FilterRules:
    return FilterRules(gopher_repetition=GopherRepetitionRules(**{**REPETITION_OFF, **rules}))


# ---- the rules as plainly as they can be written ----


def share(number: float, of: float) -> float:
    return number / of if of else 0.0


def lines_of(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


def paragraphs_of(text: str) -> list[str]:
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(one) for one in found if one]


def plain_quality(text: str, rules: GopherQualityRules) -> str | None:
    words, lines = text.split(), lines_of(text)
    mean = share(sum(map(len, words)), len(words))
    ellipses = text.count("...") + text.count("…")
    bullets = sum(line.lstrip().startswith(BULLETS) for line in lines)
    endings = sum(line.rstrip().endswith(("...", "…")) for line in lines)
    alphabetic = sum(any(map(str.isalpha, word)) for word in words)
    lowered = {"".join(c.lower() if c.isascii() else c for c in word) for word in words}
    faults = {
        "too_few_words": len(words) < rules.min_words,
        "too_many_words": len(words) > rules.max_words,
        "words_too_short": mean < rules.min_mean_word_length,
        "words_too_long": mean > rules.max_mean_word_length,
        "too_many_hashes": share(text.count("#"), len(words)) > rules.max_symbols_per_word,
        "too_many_ellipses": share(ellipses, len(words)) > rules.max_symbols_per_word,
        "too_many_bullet_lines": share(bullets, len(lines)) > rules.max_bullet_lines,
        "too_many_ellipsis_lines": share(endings, len(lines)) > rules.max_ellipsis_lines,
        "too_few_alphabetic_words": share(alphabetic, len(words)) < rules.min_alphabetic_words,
        "too_few_stop_words": len(lowered & set(rules.stop_words)) < rules.min_stop_words,
    }
    return next((reason for reason, fault in faults.items() if fault), None)


def ink(words: list[str] | tuple[str, ...]) -> int:
    return sum(map(len, words))


def plain_duplicates(stretches: list[str]) -> tuple[int, int]:
    """(how many were there before, their characters)"""
    seen: set[tuple[str, ...]] = set()
    number = characters = 0
    for words in (tuple(one.split()) for one in stretches):
        if words in seen:
            number, characters = number + 1, characters + ink(words)
        seen.add(words)
    return number, characters


def plain_top(words: list[str], size: int) -> int:
    counts = Counter(tuple(words[at : at + size]) for at in range(len(words) - size + 1))
    several = [(count, ink(sequence)) for sequence, count in counts.items() if count > 1]
    count, characters = max(several, default=(0, 0))
    return count * characters


def plain_covered(words: list[str], size: int) -> int:
    seen: set[tuple[str, ...]] = set()
    covered: set[int] = set()
    for at in range(len(words) - size + 1):
        sequence = tuple(words[at : at + size])
        if sequence in seen:
            covered |= set(range(at, at + size))
        seen.add(sequence)
    return ink([words[at] for at in covered])


def plain_repetition(text: str, rules: GopherRepetitionRules) -> str | None:
    words = text.split()
    limits: dict[str, Any] = asdict(rules)
    shares: list[tuple[str, float, float]] = []
    for name, stretches in (("line", lines_of(text)), ("paragraph", paragraphs_of(text))):
        number, characters = plain_duplicates(stretches)
        shares += [
            (f"too_many_duplicate_{name}s", share(number, len(stretches)), limits[f"max_duplicate_{name}s"]),
            (
                f"too_many_duplicate_{name}_characters",
                share(characters, ink(words)),
                limits[f"max_duplicate_{name}_characters"],
            ),
        ]
    for size in range(2, 5):
        top = share(plain_top(words, size), ink(words))
        shares.append((f"too_frequent_{size}_gram", top, limits[f"max_top_{size}_gram"]))
    for size in range(5, 11):
        covered = share(plain_covered(words, size), ink(words))
        shares.append((f"too_many_duplicate_{size}_grams", covered, limits[f"max_duplicate_{size}_grams"]))
    return next((reason for reason, value, limit in shares if value > limit), None)


POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


def plain_c4(text: str, rules: C4Rules) -> str | None:
    if "lorem ipsum" in text.lower():
        return "lorem_ipsum"
    if "{" in text:
        return "curly_bracket"
    sentences = 0
    for line in (line.strip() for line in lines_of(text)):
        words = line.split()
        if not line.endswith((".", "?", "!", '"')) or line.endswith("..."):
            continue
        if len(words) < rules.min_words_per_line or max(map(len, words)) > (rules.max_word_length or 0):
            continue
        if "javascript" in line.lower() or any(phrase in line.lower() for phrase in POLICY):
            continue
        bare = [word[:-1] if word[-1] in "\"')]”’" else word for word in words]
        ends = [word.endswith((".", "?", "!")) for word in bare]
        sentences += sum(ends[:-1]) + 1
    return "too_few_sentences" if sentences < (rules.min_sentences or 0) else None


PIECES = [
    "the", "The", "be", "to", "of", "and", "a", "word", "longer-word", "überlänge", "слово", "中文", "1", "--", "#",
    "#tag", "...", "......", "so...", "end…", "end.", "really?", "(yes.)", '"no!"', "ok.”", "-", "*", "•", "• item",
    "JavaScript", "terms of use", "lorem ipsum", "{", "x" * 9, "y" * 70, "\x1cq", "𝒳", "½",
]  # fmt: skip
GAPS = [" ", " ", " ", "\n", "\n\n", "\n \n", "\t", "\u3000", "\xa0", "\u2003", "\x85", "\r\n", "  "]
texts = st.lists(st.sampled_from(PIECES) | st.sampled_from(GAPS), max_size=60).map("".join)
spaced = st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(GAPS)), max_size=40).map(
    lambda pairs: "".join(piece + gap for piece, gap in pairs)
)
few_words = st.tuples(st.sampled_from(["a", "bc", "dé"]), st.sampled_from([" ", " ", "\n", "\n\n"]))
repetitive = st.lists(few_words, max_size=60).map(lambda pairs: "".join(piece + gap for piece, gap in pairs))
documents = st.lists(texts | spaced | repetitive | st.text(max_size=20), max_size=5)
fractions = st.sampled_from([0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.9, 1.0])


@given(documents, st.data())
def test_quality_is_as_the_reference_says(batch: list[str], data: st.DataObject) -> None:
    """Any text, any thresholds."""
    rules = GopherQualityRules(
        min_words=data.draw(st.integers(0, 6)),
        max_words=data.draw(st.integers(6, 30)),
        min_mean_word_length=data.draw(st.sampled_from([0, 1, 2.5, 3])),
        max_mean_word_length=data.draw(st.sampled_from([3, 4.5, 10])),
        max_symbols_per_word=data.draw(fractions),
        max_bullet_lines=data.draw(fractions),
        max_ellipsis_lines=data.draw(fractions),
        min_alphabetic_words=data.draw(fractions),
        min_stop_words=data.draw(st.integers(0, 3)),
        stop_words=("the", "be", "word", "longer-word", "слово"),
    )
    assert reasons(batch, FilterRules(gopher_quality=rules)) == [plain_quality(one, rules) for one in batch]


@settings(max_examples=200)
@given(documents, st.data())
def test_repetition_is_as_the_reference_says(batch: list[str], data: st.DataObject) -> None:
    """Any text, any thresholds."""
    rules = GopherRepetitionRules(**{name: data.draw(fractions) for name in REPETITION_OFF})
    assert reasons(batch, FilterRules(gopher_repetition=rules)) == [plain_repetition(one, rules) for one in batch]


@given(documents, st.integers(0, 4), st.integers(0, 3), st.sampled_from([8, 1000]))
def test_c4_is_as_the_reference_says(batch: list[str], sentences: int, words: int, longest: int) -> None:
    """Any text, any thresholds."""
    rules = C4Rules(min_sentences=sentences, min_words_per_line=words, max_word_length=longest)
    assert reasons(batch, FilterRules(c4=rules)) == [plain_c4(one, rules) for one in batch]


@given(documents, st.integers(1, 60))
def test_verdicts_do_not_depend_on_the_batch(batch: list[str], group: int) -> None:
    """Each document alone, all together, and in groups of any size: the same."""
    rules = FilterRules(c4=True, gopher_quality=GopherQualityRules(min_words=3), gopher_repetition=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "GROUP_BYTES", group)
        in_groups = reasons(batch, rules)
    assert in_groups == reasons(batch, rules) == [reasons([one], rules)[0] for one in batch]


# ---- by example ----


def sentence(words: int) -> str:
    return " ".join(["word"] * words)


@pytest.mark.parametrize(
    ("rules", "kept", "dropped", "reason"),
    [
        (quality(min_words=50), sentence(50), sentence(49), "too_few_words"),
        (quality(max_mean_word_length=10), "a" * 9 + " " + "é" * 11, "a" * 9 + " " + "é" * 12, "words_too_long"),
        (quality(max_symbols_per_word=0.1), sentence(9) + " w.....", sentence(9) + " ......", "too_many_ellipses"),
        (quality(max_bullet_lines=0.5), "- a\n\nb", "- a\n • b\nc", "too_many_bullet_lines"),
        (quality(min_stop_words=2), "The cat is WITH us", "the cat, the dog, with.", "too_few_stop_words"),
        (repetition(max_duplicate_lines=0.4), "a\nb\nc\na\nb", "a\nb\na\na", "too_many_duplicate_lines"),
        (repetition(max_top_2_gram=0.2), "a b c a b " + "x" * 15, "a b c a b " + "x" * 14, "too_frequent_2_gram"),
        (FilterRules(min_characters=3), "éöü", "éö", "too_few_characters"),
        (FilterRules(max_characters=3), "éöü", "éöüa", "too_many_characters"),
    ],
)
def test_a_threshold_is_the_last_that_is_kept(rules: FilterRules, kept: str, dropped: str, reason: str) -> None:
    """At the threshold a document stays, beyond it goes."""
    assert reasons([kept, dropped], rules) == [None, reason]


GOOD = "Here are five good words. There are more of them! Is this the end?"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD, None),
        ("Here are five good words. Only two sentences are here.", "too_few_sentences"),
        ("This line has no mark at its end\n" * 9, "too_few_sentences"),
        ('He said "this is the end."\n' * 3, None),
        ("Please enable JavaScript to see this.\n" * 9, "too_few_sentences"),
        (f"One word here is {'x' * 1001} long.\n" * 9, "too_few_sentences"),
        (GOOD + "\nLorem Ipsum", "lorem_ipsum"),
        (GOOD + "\nif (a) {", "curly_bracket"),
    ],
)
def test_c4_by_example(text: str, reason: str | None) -> None:
    """The published thresholds: three sentences, in lines of five words and more."""
    assert reasons([text], FilterRules(c4=True)) == [reason]


# ---- a user's function ----

FUNCTIONS = """
def f(text):
    if text == "fail":
        raise ValueError("no")
    return {"true": True, "none": None, "false": False, "ugly": "too_ugly", "number": 1, "empty": ""}[text]

def number(text):
    return text
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "filters.py").write_text(FUNCTIONS, encoding="utf-8")
    return str(tmp_path / "filters.py")


def test_a_function_may_give_a_reason(functions: str) -> None:
    """False drops, a text drops for that reason, an exception drops and is counted."""
    batch = ["true", "none", "false", "ugly", "fail"]
    expected = [None, None, judging.DROPPED, "too_ugly", judging.FAILURE]
    assert reasons(batch, FilterRules(function=f"{functions}:f")) == expected


@pytest.mark.parametrize(("text", "kind"), [("number", "int"), ("empty", "str")])
def test_a_function_that_returns_something_else_is_an_error(functions: str, text: str, kind: str) -> None:
    """A number, or a reason that says nothing."""
    with pytest.raises(ConfigError, match=f"returned {kind}; it must return True or False, or a text"):
        reasons([text], FilterRules(function=f"{functions}:f"))


# ---- language ----


def test_the_real_model_tells_languages_apart() -> None:
    """Where the extra is installed."""
    pytest.importorskip("py3langid")
    rules = FilterRules(language=LanguageRules(keep=("en", "fr")))
    batch = [
        "The miller took the grain to the mill and waited for the water to rise.",
        "Le meunier a apporté le grain au moulin et attendait que l'eau monte.",
        "Der Müller brachte das Korn zur Mühle und wartete, bis das Wasser stieg.",
    ]
    assert reasons(batch, rules) == [None, None, language.OTHER_LANGUAGE]
