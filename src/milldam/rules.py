"""Settings of each step between reading and packing, with defaults: the rules of every room in one place.

The docstring under a field is its description in `--help`, docs/config.md and the JSON schema. Ranges are part of a
field's type; contradictions between fields are found by `config/settings.py`, whose `Config` holds these classes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from milldam.choices import Action, ChatForm, Executor, InputFormat
from milldam.errors import ConfigError
from milldam.memory import format_size, parse_size

AtLeastOne = Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Marks a setting as a size such as 512MB; smaller and larger ones are refused."""

    least: int = 1
    most: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, given: str | int) -> str | int:
        try:
            size = parse_size(given)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if size < self.least:
            raise ValueError(f"must be at least {format_size(self.least)}.")
        if self.most is not None and size > self.most:
            raise ValueError(f"must be at most {format_size(self.most)}.")
        return given


Size = Annotated[str | int, SizeRange()]


class Settings:
    """A dataclass of settings, which pydantic checks; keys that it does not have are refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "coerce_numbers_to_str": True,
        "allow_inf_nan": False,
    }
    words: ClassVar[dict[str, dict[str, Any]] | None] = {}
    """Words that stand for a block of these keys where it is `Short`; None: any text does, it is the path."""

    @classmethod
    def spelled_out(cls, value: Any) -> Any:
        """The block that a word stands for; anything else as it is. A block that has no words may be left empty."""
        if value is None and cls.words == {}:
            return {}
        if not isinstance(value, str):
            return value
        # A copy: overrides are put into it.
        return {"path": value} if cls.words is None else copy.deepcopy(cls.words.get(value, value))


class Short:
    """Marks a block that a word may stand for, or a list of which one item may be given alone."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        spelled_out = getattr(source, "spelled_out", _as_list)
        return core_schema.no_info_before_validator_function(spelled_out, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        block, full = getattr(schema["function"]["function"], "__self__", None), handler(schema)
        if block is None:
            return {"anyOf": [full["items"], full]}
        short = {"type": "string"} if block.words is None else {"enum": list(block.words)}
        return full if block.words == {} else {"anyOf": [short, full]}


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


Texts = Annotated[tuple[str, ...], Short()]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(Settings):
    """How a job is run. Nothing here changes its result."""

    memory: Size | None = None
    """Limit for the whole process tree, such as 512MB. Default: half of what is free. Does not change the result."""
    workers: AtLeastOne | None = None
    """Cores to use. Default: all. Does not change the result."""
    executor: Executor = "local"
    """Where to run: this machine, or a Ray cluster whose machines all see `out`. Does not change the result."""
    address: str | None = None
    """Address of the Ray cluster, such as 10.0.0.1:6379. Default: the one running here, else a new one is started."""
    overwrite: bool = False
    """Replace a result that was made with other settings or input."""


# ---- cleaning ----


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanRules(Settings):
    """How to clean every text before anything else, in this order."""

    words: ClassVar = {"default": {}}
    unicode: Literal["NFC", "NFKC"] | None = None
    """Unicode normalisation."""
    control_characters: bool = True
    """Remove control characters other than tab and line ends (C0, DEL, C1), and byte order marks (U+FEFF)."""
    whitespace: bool = False
    """Turn line ends into \\n and spaces of all kinds into one space; remove spaces at line ends; keep at most one
    blank line."""
    strip: bool = True
    """Remove white space at both ends."""
    function: str | None = None
    """Your own cleaning, `module:function`, last: takes the text and returns it, or None to drop it. Up to 16 MB."""


# ---- duplicates ----


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferredField(Settings):
    """Which of several similar documents stays, by a field of their records. Those without a value give way to those
    that have one; of equal values, the first in the order of the input stays."""

    field: Annotated[str, MinLen(1)]
    """Field that holds a number, true or false, or a date as in ISO 8601; dots for nested fields."""
    order: Literal["highest", "lowest"] = "highest"
    """Which value stays: the highest number and the latest date, or the lowest and the earliest."""

    def described(self, kind: str) -> str:
        """
        >>> PreferredField(field="day", order="lowest").described("date")
        'the earliest date in "day"'
        """
        which = {"highest": "latest", "lowest": "earliest"}[self.order] if kind == "date" else self.order
        return f'the {which} {kind} in "{self.field}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class NearRules(Settings):
    """MinHash-LSH over word n-grams."""

    ngram: Annotated[int, Ge(1), Le(100)] = 5
    """Words in an n-gram."""
    bands: Annotated[int, Ge(1), Le(1024)] = 32
    """Bands of the signature; two documents are compared if one of their bands is equal."""
    rows: Annotated[int, Ge(1), Le(1024)] = 8
    """Values in a band. The signature has bands x rows values, 1,024 at most."""
    threshold: Annotated[float, Gt(0), Le(1)] = 0.8
    """Jaccard similarity of the sets of n-grams from which two documents are near-duplicates."""
    prefer: Literal["first", "longest", "shortest"] | PreferredField = "first"
    """Which of several similar documents stays: the first in the order of the input, the longest or the shortest, or
    the one with the highest or lowest value of a field."""

    @property
    def preferred_field(self) -> PreferredField | None:
        return self.prefer if isinstance(self.prefer, PreferredField) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupRules(Settings):
    """Which duplicates to drop. The first one in the order of the input stays."""

    words: ClassVar = {"off": {"method": "off"}, "exact": {}, "near": {"near": {}}, "bloom": {"method": "bloom"}}
    method: Literal["exact", "bloom", "index", "off"] = "exact"
    """exact: equal texts, by a 128-bit hash, on disk. bloom: the same in a fixed amount of memory, with a stated rate
    of false positives. index: only what the index holds, in one pass; documents are not compared with each other, and
    none enters. off: only near, if set."""
    normalize: bool = False
    """Ignore case, white space and punctuation."""
    index: str | None = None
    """Folder that keeps the hashes of finished runs: documents that one of them has seen are dropped too."""
    near: NearRules | None = None
    """Drop near-duplicates as well."""
    false_positive_rate: Annotated[float, Gt(0), Lt(0.5)] = 1e-6
    """For bloom: the share of new documents that are dropped by mistake."""

    @property
    def is_off(self) -> bool:
        """Whether no duplicate is looked for: the first pass is for evaluation sets alone."""
        return self.method == "off" and self.near is None


# ---- evaluation sets ----

DROP, REPORT = "drop", "report"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet(Settings):
    """An evaluation set whose items must not be trained on."""

    words: ClassVar = None
    path: str
    """File, folder, glob or address; a dataset saved by HF `save_to_disk`; or the name of one on the Hub."""
    columns: str | tuple[str, ...] = ()
    """Fields to look for; dots for nested fields, also through lists. Default: every field that holds text."""
    split: str | None = None
    """Split of an HF dataset, with an optional slice of its rows."""
    subset: str | None = None
    """Configuration of a dataset on the Hub."""
    input_format: InputFormat | None = None
    """Format of the files, if their names do not say."""
    ngram: Annotated[int, Ge(3), Le(50)] = 13
    """Words in an n-gram; a passage of fewer words is one n-gram. In scripts without spaces a character is a word."""
    min_share: Annotated[float, Gt(0), Le(1)] = 0.5
    """A passage is found in a document that holds at least this share of its n-grams."""
    max_items: Annotated[int, Ge(1)] = 10
    """N-grams that occur in more passages than this, of all sets together, do not count."""
    common_share: Annotated[float, Gt(0), Le(1)] = 0.05
    """N-grams that occur in more than this share of the documents, and in more than 20, do not count."""
    action: Action = "drop"
    """Drop the document, or only report it."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,)

    @property
    def column_names(self) -> tuple[str, ...]:
        return (self.columns,) if isinstance(self.columns, str) else tuple(self.columns)


# ---- filters ----

Count = Annotated[int, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Ratio = Annotated[float, Ge(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageRules(Settings):
    """Language by a small offline model: `pip install "milldam[language]"`. Judges by the first 2 KiB."""

    keep: Texts
    """Languages to keep, by their ISO 639-1 codes: en, de, zh."""
    min_score: Share = 0.65
    """How sure the model must be, from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GopherQualityRules(Settings):
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
    stop_words: Texts = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Stop words, in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GopherRepetitionRules(Settings):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class C4Rules(Settings):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterRules(Settings):
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

    @property
    def on_text(self) -> bool:
        """Whether any rule looks at the text."""
        set_ones = (field.name for field in fields(self) if getattr(self, field.name) not in (None, False))
        return any(name not in ("min_tokens", "max_tokens") for name in set_ones)


# ---- conversations ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRules(Settings):
    """Records are conversations."""

    form: ChatForm = "auto"
    """Form of the conversations; auto recognises it from the first ones."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of your columns, such as {messages: dialogue}."""
    template: str | None = None
    """A Jinja file. Default: the chat template that the tokenizer comes with."""
    named_template: str | None = None
    """Which template to use, if there are several."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the template, such as {enable_thinking: false}."""
    train_on: str | tuple[str, ...] | dict[str, bool] = "assistant"
    """Messages to train on: assistant, last, all, one or more roles; a field of the message: weight, loss_weight,
    train; or what of them, such as {assistant: true, reasoning: false, tool_calls: true}."""
    per_turn: bool = False
    """Make one example of each trained turn, as a model sees it at inference, where the template writes earlier turns
    in another way once others follow, such as without their thinking. What comes before the turn is not trained on."""
    max_tokens: Annotated[int, Ge(1)] | None = None
    """Most tokens of a conversation."""
    too_long: Literal["drop", "cut_turn", "cut"] = "drop"
    """What to do with a longer one: drop it, cut it after the last trained turn that fits, or cut it anywhere."""
    dedup_on: Literal["text", "prompt"] = "text"
    """What makes two conversations duplicates: the same text, or the same prompt (everything before the last
    answer)."""
    group_by: Literal["text", "prompt"] = "text"
    """What is kept in the same split: conversations with the same text, or with the same prompt."""
    date: str | None = None
    """Date for templates that write one (strftime_now), such as 2026-01-31. Default: today."""


# ---- packing ----


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRules(Settings):
    """Rows of seq_len tokens."""

    words: ClassVar = {"wrapped": {}, "best_fit": {"strategy": "best_fit"}}
    strategy: Literal["wrapped", "best_fit"] = "wrapped"
    """wrapped: documents end to end, cut wherever a row is full.
    best_fit: a document is cut only if it is longer than a row; free space is padded."""
    write: bool = False
    """Write the rows out, to packed/ in the store, for trainers that want fixed rows.
    Otherwise they are made when the store is read."""
    pad_last: bool = False
    """wrapped: pad the last row instead of leaving its tokens out."""
    buffer: int = 10_000
    """best_fit: number of documents to choose from."""
