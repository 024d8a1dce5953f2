"""tokenizer.json -> the kinds of characters that a byte-level BPE takes as runs, where text may be encoded in links.

A link is a piece that overlaps the next one (see cutting.py). That their tokens may be put together follows from BPE
where no word begins or ends inside the overlap, or where both pieces must see the same words there. This depends on
the rule that divides text into words, so it is claimed for rules that are known, and for overlaps of characters of one
kind, that no added token begins or ends with and that the normaliser leaves alone.

Reads the few fields it needs without parsing the vocabulary, which would take ten times the file in memory.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = (rf"(?i:{_CONTRACTIONS})", r"'(?i:[sdmt]|ll|ve|re)")
_DIGITS = {1: r"\p{N}", 3: r"\p{N}{1,3}"}
_GPT2_WORDS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CL100K_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ANY_CASE[0]}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ANY_CASE[0]}?"
)
_O200K_SIGNS = _CL100K_SIGNS.replace(r"[\r\n]*", r"[\r\n/]*")
_LONG_TOKEN = re.compile(r'"(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u]){200,}"\s*:')
_JAMO = re.compile("[\u1160-\u11ff\ud7b0-\ud7ff]")
_SIGNS = {"Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Cf"}
_MARKS = {"Mn", "Mc", "Me"}


@dataclass(frozen=True, slots=True)
class Words:
    """How a rule divides text into words."""

    by_case: bool = False
    """A word ends where lower case meets upper case; marks belong to letters."""
    digits: int = 0
    """A number is a word for each so many digits from its start; 0: one word."""


def _known_rules() -> dict[str, Words]:
    gpt2 = {f"{start}|{_GPT2_WORDS}": Words() for start in (_CONTRACTIONS, r"'(?:[sdmt]|ll|ve|re)")}
    cl100k = {
        f"{start}|{_CL100K_WORDS}|{rule}|{_CL100K_SIGNS}": Words(digits=digits)
        for start, (digits, rule) in itertools.product(_ANY_CASE, _DIGITS.items())
    }
    o200k = {
        f"{_O200K_WORDS}|{rule}|{_O200K_SIGNS}": Words(by_case=True, digits=digits) for digits, rule in _DIGITS.items()
    }
    return gpt2 | cl100k | o200k


_KNOWN = _known_rules()


@dataclass(frozen=True, slots=True)
class Runs:
    """Whether an overlap of two pieces is a run in which they may be put together."""

    words: Words
    edges: frozenset[str]
    """Characters that an added token begins or ends with."""
    normalises: bool
    """To NFC."""

    def holds(self, overlap: bytes) -> bool:
        """Characters of one kind; nothing that reaches into the run from outside it, or out of it."""
        text = overlap.decode()
        characters = set(text)
        kinds = {unicodedata.category(character) for character in characters}
        if not self.edges.isdisjoint(characters) or not self._is_normal(text, kinds):
            return False
        if all(kind[0] == "L" for kind in kinds):
            # By case, what is neither lower nor upper case continues either: the word depends on all before and after.
            return not self.words.by_case or kinds == {"Ll"}
        if all(kind[0] == "N" for kind in kinds):
            return text.isascii() or self.words.digits < 2
        return kinds <= _SIGNS or (not self.words.by_case and kinds <= _SIGNS | _MARKS)

    def in_step(self, overlap: bytes, tokens: int) -> bool:
        """Digits in groups: whether each token is a whole group, so that the same tokens mean the same groups."""
        group = self.words.digits
        return group < 2 or not overlap.isdigit() or tokens == -(-len(overlap) // group)

    def _is_normal(self, text: str, kinds: set[str]) -> bool:
        if not self.normalises or text.isascii():
            return True
        letters = all(kind[0] == "L" for kind in kinds)
        return letters and unicodedata.is_normalized("NFC", text) and not _JAMO.search(text)


def find_runs(tokenizer_json: str) -> Runs | None:
    """For a byte-level BPE whose rule for words is known; None for every other tokenizer.

    >>> find_runs('{"model": {"type": "Unigram"}}') is None
    True
    """
    if not re.search(r'"type"\s*:\s*"BPE"', tokenizer_json) or not _is_plain_bpe(tokenizer_json):
        return None
    words = _words(_field(tokenizer_json, "pre_tokenizer"))
    normaliser = _field(tokenizer_json, "normalizer")
    added = _field(tokenizer_json, "added_tokens")
    if words is None or not isinstance(added, list) or normaliser not in (None, {"type": "NFC"}):
        return None
    contents = [token["content"] for token in added]
    edges = frozenset(end for content in contents if content for end in (content[0], content[-1]))
    return Runs(words, edges, normaliser is not None)


_AMBIGUOUS = object()


def _field(tokenizer_json: str, name: str) -> Any:
    """The value of a key; None when it isn't there; a value like no other when several places have one.

    A number is not it: the name is also a token of the vocabulary.
    """
    decode = json.JSONDecoder().raw_decode
    places = (match.end() for match in re.finditer(rf'"{name}"\s*:\s*', tokenizer_json))
    values = [decode(tokenizer_json, place)[0] for place in places]
    values = [value for value in values if type(value) is not int]
    return values[0] if len(values) == 1 else (_AMBIGUOUS if values else None)


def _is_plain_bpe(tokenizer_json: str) -> bool:
    """Merges alone make the tokens; a long word that is a token all the same is shorter than an overlap."""
    names = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if any(_field(tokenizer_json, name) not in (None, "", False) for name in names):
        return False
    ignores_merges = _field(tokenizer_json, "ignore_merges") not in (None, False)
    return not (ignores_merges and _LONG_TOKEN.search(tokenizer_json))


def _words(before: Any) -> Words | None:
    if not isinstance(before, dict):
        return None
    first, *others = before["pretokenizers"] if before.get("type") == "Sequence" else [before]
    if not others:
        return Words() if _is_byte_level(first, splits=True) else None
    if len(others) > 1:
        return None
    if first.get("type") == "Digits" and first.get("individual_digits"):
        return Words(digits=1) if _is_byte_level(others[0], splits=True) else None
    if first.get("type") != "Split" or not _is_byte_level(others[0], splits=False):
        return None
    isolates = first.get("behavior") == "Isolated" and not first.get("invert")
    return _KNOWN.get(first["pattern"].get("Regex", "")) if isolates else None


def _is_byte_level(step: Any, *, splits: bool) -> bool:
    if step.get("type") != "ByteLevel" or step.get("add_prefix_space", True):
        return False
    return bool(step.get("use_regex", True)) is splits
