"""Cleaning: each rule, whole batches, and documents in parts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from milldam.errors import ConfigError
from milldam.rules import CleanRules
from milldam.text import cleaning as text
from milldam.text.arrays import Verdicts
from milldam.text.cleaning import Cleaner

OFF = {"control_characters": False, "strip": False}
SPACES = "[\t\x1f \xa0\u1680\u2000-\u200a\u202f\u205f\u3000]+"
LINE_ENDS = "\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]"


def reference(document: str, rules: CleanRules) -> str:
    """The rules as plainly as they can be written."""
    if rules.unicode is not None:
        document = unicodedata.normalize(rules.unicode, document)
    if rules.control_characters:
        document = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff]", "", document)
    if rules.whitespace:
        document = re.sub(LINE_ENDS, "\n", document)
        document = re.sub(SPACES, " ", document)
        document = re.sub(r" (?=\n|\Z)", "", document)
        document = re.sub("\n{3,}", "\n\n", document)
    return document.strip() if rules.strip else document


def array(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def clean(texts: list[str], rules: CleanRules) -> list[str]:
    """A batch cleaned; nothing may be dropped."""
    verdicts = Verdicts(len(texts))
    cleaned = Cleaner(rules).clean(array(texts), verdicts)
    cleaned.validate(full=True)
    assert verdicts.keep.all()
    assert cleaned.type == pa.large_string() and cleaned.null_count == 0
    return cleaned.to_pylist()


HARD = (
    " \t\n\r\v\f\x00\x1c\x1f\x7f\x85\x9f\xa0\u1680\u2003\u2028\u2029\u3000\ufeffab.é"
    "e\u0301\u0323\u0308ᄀ\u1161\u11a8각ㄱㅏｶﾞ\uffa1\uffc2ﬁ\u0958\u09c7\u09beк中½\u200b😀\U0001d15e"
)
hard_texts = st.text(st.sampled_from(HARD) | st.characters(exclude_categories=["Cs"]), max_size=30)
all_rules = st.builds(
    CleanRules,
    unicode=st.sampled_from([None, "NFC", "NFKC"]),
    control_characters=st.booleans(),
    whitespace=st.booleans(),
    strip=st.booleans(),
)

# ---- the rules ----


@pytest.mark.parametrize(
    ("rules", "given_text", "cleaned"),
    [
        ({"unicode": "NFC"}, "e\u0301 ﬁ", "é ﬁ"),
        ({"unicode": "NFKC"}, "e\u0301 ﬁ", "é fi"),
        ({"control_characters": True}, "\ufeffa\x00b\tc\r\nd\x7f\x85e\x9f\x0c", "ab\tc\r\nde"),
        ({"whitespace": True}, "a\r\nb\rc \n\n \n\t\nd  e\u3000\xa0f ", "a\nb\nc\n\nd e f"),
        ({"whitespace": True}, "  a\n   b", " a\n b"),
        ({"strip": True}, "\n a b\u3000\n", "a b"),
    ],
)
def test_each_rule_does_what_it_says(rules: dict[str, object], given_text: str, cleaned: str) -> None:
    """One rule at a time, by example."""
    assert clean([given_text], CleanRules(**{**OFF, **rules})) == [cleaned]  # type: ignore[arg-type]


@given(st.lists(hard_texts, max_size=5), all_rules)
@example(["a\r", "\nb"], CleanRules(whitespace=True, strip=False))
@example(["\n", "\n", "\n\n\n"], CleanRules(whitespace=True, strip=False))
@example(["\xc2\x80", "\x80"], CleanRules())
def test_batches_are_cleaned_as_the_reference_says(texts: list[str], rules: CleanRules) -> None:
    """Any text, any rules: the vectorised way and the plain way agree, and texts do not touch each other."""
    assert clean(texts, rules) == [reference(one, rules) for one in texts]


# ---- documents in pieces ----


@given(st.lists(hard_texts, min_size=1, max_size=6), all_rules)
@example([" ", " a"], CleanRules())
@example(["a \n", "b\r\n \n", "c "], CleanRules(whitespace=True))
def test_pieces_give_what_the_whole_gives(parts: list[str], rules: CleanRules) -> None:
    """Cut where cleaning says, put together again: the same text."""
    cleaner, done, tail, first = Cleaner(rules), "", "", True
    for number, part in enumerate(parts, start=1):
        tail += part
        cut = len(tail) if number == len(parts) else cleaner.last_cut(tail)
        piece, tail = array([tail[:cut]]), tail[cut:]
        done += cleaner.clean_piece(piece, Verdicts(1), first=first, last=number == len(parts))[0].as_py()
        first = first and not cut
    assert done == reference("".join(parts), rules)


# ---- a user's function ----

FUNCTIONS = """
def shout(text):
    return text.upper()

def picky(text):
    if "drop" in text:
        return None
    if "fail" in text:
        raise ValueError("no")
    return "\\ud800" if "half" in text else text

def number(text):
    return 1

def broken(text):
    raise ValueError("no")
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "functions.py").write_text(FUNCTIONS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield "functions.py"


def test_a_function_comes_last_and_may_drop(functions: str) -> None:
    """It sees the cleaned text; None, an exception and half a surrogate pair drop the document."""
    cleaner = Cleaner(CleanRules(function=f"{functions}:picky"))
    verdicts = Verdicts(5)
    verdicts.drop(np.array([False, False, False, False, True]), "earlier")
    texts = cleaner.clean(array([" a ", "drop", "fail", "half", "fail too"]), verdicts).to_pylist()
    assert texts == ["a", "", "", "", ""]
    reasons = [verdicts.reason(position) for position in range(5)]
    assert reasons == [None, text.DROPPED, text.FAILURE, text.FAILURE, "earlier"]


def test_a_function_that_returns_something_else_is_an_error(functions: str) -> None:
    """A number is no text."""
    with pytest.raises(ConfigError, match=r"functions.py:number.* returned int; it must return the text, or None"):
        Cleaner(CleanRules(function=f"{functions}:number")).clean(array(["a"]), Verdicts(1))
