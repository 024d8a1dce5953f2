"""What the tests of question answering share: tiny tokenizers of four kinds, odd texts, and the widely used recipe.

The recipe is what fast tokenizers are used for in question answering: a pair, truncation of the context alone with
stride, and the windows that overflow. Ours must make the same windows; where its spans are not exact, ours are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from milldam.qa.examples import Answer, Example
from milldam.qa.settings import QARules
from milldam.qa.store import NUMBERS
from milldam.qa.template import template_of
from milldam.qa.windows import Windower, Windows

WORDS = re.split(
    " ", "what year did the city of paris pay how much for bridge a in it was is and he they 1990 500 un be"
)
MARKS = list("abcdefghijklmnopqrstuvwxyz0123456789.,;:!?$()[]<>'\"-&%")
KINDS = ("bert", "roberta", "xlnet", "llama")

PIECES = [
    *WORDS,
    *("$500", "(Paris)", "1990s", "the 1990s,", "don't", "``quoted''", "St. Denis", "un-be-ing", "New\nYork", "x" * 30),
    *("e\u0301", "caf\u00e9", "cafe\u0301s", "\u1e9b\u0323", "\ufb01ne", "\u00bd", "\u2026", "\u2122"),
    *("\u00a0", "\u3000", "\u200b", "\u200d", "\U0001f44d\U0001f3fd", "\U0001f1eb\U0001f1f7"),
    *("\U0001f469\u200d\U0001f469\u200d\U0001f467", "\u65e5\u672c", "\uac00\u1100\u1161"),
    *(
        "\u05e9\u05dc\u05d5\u05dd",
        "\u0645\u064f\u062d\u064e\u0645\u064e\u0651\u062f",
        "\u0939\u093f\u0928\u094d\u0926\u0940",
    ),
    *("[SEP]", "[CLS]", "<sep>", "<cls>", "<s>", "\u2581", "  ", "\t", ""),
]
"""Words, and what is hard: marks beside words, normal forms, joined emoji, other scripts, special tokens."""


@cache
def tokenizer_json(kind: str) -> str:
    made: tokenizers.Tokenizer = {"bert": _bert, "roberta": _roberta, "xlnet": _xlnet, "llama": _llama}[kind]()
    return made.to_str()


def tokenizer_of(kind: str) -> Any:
    """A new one, since truncation is a state of it."""
    return tokenizers.Tokenizer.from_str(tokenizer_json(kind))


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def _bert() -> tokenizers.Tokenizer:
    """WordPiece that lowers, takes accents off, and has no template of its own, as one made from a vocab.txt."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *MARKS, *(f"##{mark}" for mark in MARKS[:36])]
    vocab = _numbered([*pieces, *"日本ש\u05dc\u05d5\u05dd", "##ש", "##\u05dc", "##\u05d5", "##\u05dd", "مح", "##مد"])
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return made


def _roberta() -> tokenizers.Tokenizer:
    """Bytes, with a few merges, and offsets without the white space."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "9"), ("9", "0"), ("19", "90"), ("ð", "Ł"), ("Ã", "©")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = _numbered(["<s>", "<pad>", "</s>", *alphabet, *(first + second for first, second in merges)])
    made = tokenizers.Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "<pad>", "</s>"])
    return made


def _xlnet() -> tokenizers.Tokenizer:
    """Unigram on marked words: the context first, CLS last, padding on the left."""
    parts = [("<unk>", 0.0), ("<sep>", 0.0), ("<cls>", 0.0), ("<pad>", 0.0), ("\u2581", -3.0)]
    words = [word for word in WORDS if len(word) > 1]
    parts += [(f"\u2581{word}", -2.0 - number / 9) for number, word in enumerate(words)]
    parts += [(mark, -4.0 - number / 99) for number, mark in enumerate(MARKS)]
    parts += [("un", -3.5), ("be", -3.6), ("90", -3.7)]
    made = tokenizers.Tokenizer(models.Unigram(parts, unk_id=0))
    made.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.post_processor = processors.TemplateProcessing(
        single="$A <sep> <cls>:2", pair="$A <sep> $B:1 <sep>:1 <cls>:2", special_tokens=[("<sep>", 1), ("<cls>", 2)]
    )
    made.add_special_tokens(["<unk>", "<sep>", "<cls>", "<pad>"])
    return made


def _llama() -> tokenizers.Tokenizer:
    """Characters, what is unknown as bytes, markers for spaces, and nothing between the texts."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "\u2581")]
    pieces = ["<unk>", "<s>", "</s>", *byte_tokens, "\u2581", *MARKS, *(first + second for first, second in merges)]
    made = tokenizers.Tokenizer(models.BPE(_numbered(pieces), merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", 1)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


class Features:
    """The columns of some windows, by name."""

    def __init__(self, made: Windows) -> None:
        self.input_ids, self.token_type_ids, self.offsets = made.input_ids, made.token_type_ids, made.offsets
        self._made = made

    def __getattr__(self, name: str) -> Any:
        if name == "has_answer":
            return self.start_positions != self.cls_index
        if name not in NUMBERS:
            raise AttributeError(name)
        return self._made.column(name)

    def __len__(self) -> int:
        return len(self.input_ids)

    def rows(self, numbers: Any) -> dict[str, Any]:
        """All columns of some windows."""
        return {name: getattr(self, name)[numbers] for name in COLUMNS}


COLUMNS = ("input_ids", "token_type_ids", "offsets", *NUMBERS)


def windower_of(
    tokenizer: Any, pad: str | None = None, *, memory: int = 0, **rules: Any
) -> Callable[[list[Example]], Any]:
    """Examples -> their windows: `features`, `chosen`, `dropped`. Its `template` and `memory` are attributes."""
    made = QARules(memory_tokens=memory, **rules)
    template = template_of(tokenizer, made, {"pad": pad})
    windower = Windower(tokenizer, made, template)

    def make(examples: list[Example]) -> Any:
        found = windower(examples)
        return SimpleNamespace(features=Features(found), chosen=found.chosen, dropped=found.dropped)

    make.template, make.memory = template, template.memory  # type: ignore[attr-defined]
    return make


class Shelf:
    """What is needed of a feature store, over the windows of some examples."""

    def __init__(self, kind: str, given: list[Example], pad: str | None = None, **rules: Any) -> None:
        self._given, self.features = given, windower_of(tokenizer_of(kind), pad, **rules)(given).features
        self.form = SimpleNamespace(max_seq_length=self.features.input_ids.shape[1])

    @property
    def examples(self) -> int:
        return len(self._given)

    def __len__(self) -> int:
        return len(self.features)

    def example(self, number: int) -> dict[str, Any]:
        return {"id": self._given[number].id, "context": self._given[number].context}

    def rows(self, numbers: Any, columns: Any) -> dict[str, Any]:
        return {name: getattr(self.features, name)[numbers] for name in columns}


@dataclass(frozen=True, slots=True)
class RecipeWindow:
    """A window as the recipe has it, without padding."""

    ids: list[int]
    types: list[int]
    offsets: list[tuple[int, int] | None]
    """None for what is no token of the context."""


class RecipeError(Exception):
    """The recipe can't cut this one."""


def recipe_windows(
    tokenizer: Any, example: Example, *, length: int, overlap: int, context_first: bool
) -> list[RecipeWindow]:
    """The windows of one example; changes the tokenizer's truncation."""
    if tokenizer.post_processor is None and tokenizer.token_to_id("[CLS]") is not None:
        ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
        )
    tokenizer.enable_truncation(length, stride=overlap, strategy="only_first" if context_first else "only_second")
    question = example.question.lstrip()
    texts = (example.context, question) if context_first else (question, example.context)
    try:
        encoded = tokenizer.encode(*texts)
    except BaseException as error:  # the assertion about the stride comes as a panic, which is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        raise RecipeError(str(error)) from None
    finally:
        tokenizer.no_truncation()
    return [_window(found, 0 if context_first else 1) for found in (encoded, *encoded.overflowing)]


def _window(encoded: Any, context: int) -> RecipeWindow:
    pairs = zip(encoded.offsets, encoded.sequence_ids, strict=True)
    return RecipeWindow(encoded.ids, encoded.type_ids, [place if of == context else None for place, of in pairs])


texts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=40).map(" ".join),
    st.lists(st.sampled_from(PIECES), max_size=30).map("".join),
    st.text(max_size=60),
)


@st.composite
def examples(draw: st.DrawFn, *, answered: bool = False) -> Example:
    """A question on a context, the answer any stretch of it that is not white space alone."""
    context = draw(texts.filter(str.strip) if answered else texts)
    question = draw(st.one_of(st.just(""), st.lists(st.sampled_from(PIECES), max_size=6).map(" ".join)))
    answers: tuple[Answer, ...] = ()
    if context.strip() and (answered or draw(st.booleans())):
        start = draw(st.integers(0, len(context) - 1))
        stop = draw(st.integers(start + 1, min(len(context), start + 25)))
        answers = (Answer(context[start:stop], start),)
    return Example("q", question, context, answers)
