"""Which documents are dropped for what they are: the settings of this room."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

_SCHEMA: dict[str, Any] = {"extra": "forbid"}

Count = Annotated[int, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Ratio = Annotated[float, Ge(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageRules:
    """Language by a small offline model: `pip install "milldam[language]"`. Judges by the first 2 KiB."""

    keep: tuple[str, ...]
    """Languages to keep, by their ISO 639-1 codes: en, de, zh."""
    min_score: Share = 0.65
    """How sure the model must be, from 0 to 1."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class GopherQualityRules:
    """The quality rules of Gopher (Rae et al. 2021, A.1.1), with its thresholds; null turns one off.

    Words are separated by white space. Blank lines do not count.
    """

    min_words: Count | None = 50
    """Drop documents of fewer words."""
    max_words: Count | None = 100_000
    """Drop documents of more words."""
    min_mean_word_length: Ratio | None = 3.0
    """Drop documents whose words have fewer characters on average."""
    max_mean_word_length: Ratio | None = 10.0
    """Drop documents whose words have more characters on average."""
    max_symbols_per_word: Ratio | None = 0.1
    """Drop documents with more # per word, or more ellipses (... or …) per word."""
    max_bullet_lines: Share | None = 0.9
    """Drop documents with a larger share of lines that begin with a bullet."""
    max_ellipsis_lines: Share | None = 0.3
    """Drop documents with a larger share of lines that end with an ellipsis."""
    min_alphabetic_words: Share | None = 0.8
    """Drop documents with a smaller share of words that have a letter."""
    min_stop_words: Count | None = 2
    """Drop documents with fewer different stop words."""
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Stop words, in lower case."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class GopherRepetitionRules:
    """The repetition rules of Gopher (Rae et al. 2021, table A1), with its thresholds; null turns one off.

    Lines and paragraphs (separated by blank lines) are equal if their words are. The first of several equal ones does
    not count as a duplicate. Characters are those of words, without white space.
    """

    max_duplicate_lines: Share | None = 0.30
    """Drop documents with a larger share of lines that are duplicates."""
    max_duplicate_paragraphs: Share | None = 0.30
    """Drop documents with a larger share of paragraphs that are duplicates."""
    max_duplicate_line_characters: Share | None = 0.20
    """Drop documents with a larger share of characters in such lines."""
    max_duplicate_paragraph_characters: Share | None = 0.20
    """Drop documents with a larger share of characters in such paragraphs."""
    max_top_2_gram: Share | None = 0.20
    """Drop documents in which the most frequent repeated pair of words has a larger share of the characters."""
    max_top_3_gram: Share | None = 0.18
    """The same for three words."""
    max_top_4_gram: Share | None = 0.16
    """The same for four words."""
    max_duplicate_5_grams: Share | None = 0.15
    """Drop documents with a larger share of characters in repeated sequences of five words."""
    max_duplicate_6_grams: Share | None = 0.14
    """The same for six words."""
    max_duplicate_7_grams: Share | None = 0.13
    """The same for seven words."""
    max_duplicate_8_grams: Share | None = 0.12
    """The same for eight words."""
    max_duplicate_9_grams: Share | None = 0.11
    """The same for nine words."""
    max_duplicate_10_grams: Share | None = 0.10
    """The same for ten words."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class C4Rules:
    """The rules of C4 (Raffel et al. 2020, 2.2) for whole documents, with its thresholds. For English.

    C4 itself also removes lines. A filter does not, so here those lines stay, but their sentences do not count: a
    document is dropped if too few sentences would remain. Not included: removing citation marks, the list of bad words,
    deduplication of spans of three sentences, language (see `language`).
    """

    min_sentences: Count | None = 3
    """Drop documents with fewer sentences in lines that count."""
    min_words_per_line: Count = 5
    """Lines of fewer words do not count."""
    max_word_length: Annotated[int, Gt(0)] | None = 1000
    """Lines with a word of more characters do not count."""
    terminal_punctuation: bool = True
    """Lines that do not end in . ? ! or " do not count, nor do those that end in three dots."""
    javascript: bool = True
    """Lines with the word javascript do not count."""
    policy: bool = True
    """Lines on terms of use, privacy policy and cookies do not count."""
    lorem_ipsum: bool = True
    """Drop documents with lorem ipsum."""
    curly_bracket: bool = True
    """Drop documents with a {."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterRules:
    """Every rule is off unless it is set. Rules on text look at the first MiB of a document."""

    min_characters: Count | None = None
    """Drop documents of fewer characters."""
    max_characters: Count | None = None
    """Drop documents of more characters."""
    min_tokens: Count | None = None
    """Drop documents of fewer tokens, special tokens included."""
    max_tokens: Count | None = None
    """Drop documents of more tokens."""
    c4: bool | C4Rules = False
    """The rules of C4: true, or an object with other thresholds."""
    gopher_quality: bool | GopherQualityRules = False
    """The quality rules of Gopher: true, or an object with other thresholds."""
    gopher_repetition: bool | GopherRepetitionRules = False
    """The repetition rules of Gopher: true, or an object with other thresholds."""
    language: LanguageRules | None = None
    """Keep only some languages."""
    function: str | None = None
    """Your own filter, `module:function`: takes the text; False drops the document, a text drops it for that reason."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _SCHEMA

    @property
    def on_text(self) -> bool:
        """Whether any rule looks at the text."""
        set_ones = (field.name for field in fields(self) if getattr(self, field.name) not in (None, False))
        return any(name not in ("min_tokens", "max_tokens") for name in set_ones)
