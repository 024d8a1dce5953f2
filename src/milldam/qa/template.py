"""How a window is put together: special and memory tokens around the two texts.

    before + [MEM_READ_i] + first text + between + second text + [MEM_WRITE_i] + after, and padding on one side

Taken from what the tokenizer does with a pair of texts, so BERT ([CLS] question [SEP] context [SEP]), RoBERTa, XLNet
(context <sep> question <sep> <cls>, padded on the left) and tokenizers without special tokens all work. Memory tokens
are really added to the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from milldam.errors import InputError
from milldam.qa.settings import QARules
from milldam.qa.store import MemoryTokens

_CLS_NAMES = ("[CLS]", "<cls>", "<s>", "<|cls|>")
_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<PAD>", "<|endoftext|>", "</s>", "<unk>", "[UNK]")
_PLAIN_PAD_NAMES = ("[PAD]", "<pad>")
"""Also where they are not marked as special; text has no such words."""
_XLNET_CLS_TYPE, _XLNET_PAD_TYPE = 2, 3


@dataclass(frozen=True, slots=True)
class Special:
    """Special tokens in one place of a window."""

    ids: tuple[int, ...] = ()
    types: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Template:
    """The parts of a window but its texts."""

    before: Special
    between: Special
    after: Special
    first_type: int
    second_type: int
    context_first: bool
    pad_id: int
    pad_type: int
    pad_left: bool
    cls_id: int | None
    """None: the tokenizer has no such token, and the first token of a window stands for it."""
    memory_read: tuple[int, ...] = ()
    memory_write: tuple[int, ...] = ()

    @property
    def taken(self) -> int:
        """Tokens of a window that are of neither text."""
        memory = len(self.memory_read) + len(self.memory_write)
        return len(self.before) + len(self.between) + len(self.after) + memory


def template_of(tokenizer: Any, rules: QARules, facts: dict[str, Any] | None = None) -> Template:
    """The template of a `tokenizers.Tokenizer` under these rules. `facts`: what lies beside it says of padding."""
    facts = facts or {}
    (before, between, after), (first_type, second_type) = _pair(tokenizer)
    special = {*before.ids, *between.ids, *after.ids}
    cls_id = _first_known(tokenizer, [facts.get("cls_token"), *_CLS_NAMES], among=special)
    sides = [side for side in (rules.padding_side, facts.get("padding_side")) if side in ("left", "right")]
    # A model that reads its answer off the last token, as XLNet, has its text at the end.
    left = sides[0] == "left" if sides else cls_id in after.ids and cls_id not in before.ids
    return Template(
        before,
        between,
        after,
        first_type,
        second_type,
        context_first=left if rules.first == "auto" else rules.first == "context",
        pad_id=_pad_id(tokenizer, facts),
        pad_type=_XLNET_PAD_TYPE if _XLNET_CLS_TYPE in after.types else 0,
        pad_left=left,
        cls_id=cls_id,
    )


def _pair(tokenizer: Any) -> tuple[list[Special], list[int]]:
    """What the tokenizer puts before, between and after two texts, and the types of the texts; a WordPiece vocabulary
    without a template gets BERT's."""
    text = _some_text(tokenizer)
    encoded = tokenizer.encode(text, text)
    cls, sep = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    if None not in encoded.sequence_ids and None not in (cls, sep):
        return [Special((cls,), (0,)), Special((sep,), (0,)), Special((sep,), (1,))], [0, 1]
    parts: list[list[tuple[int, int]]] = [[], [], []]
    text_types = [0, 0]
    seen = 0
    for token, kind, sequence in zip(encoded.ids, encoded.type_ids, encoded.sequence_ids, strict=True):
        if sequence is None:
            parts[seen].append((token, kind))
        else:
            seen, text_types[sequence] = sequence + 1, kind
    return [Special(tuple(id for id, _ in part), tuple(kind for _, kind in part)) for part in parts], text_types


def _some_text(tokenizer: Any) -> str:
    """A text that becomes tokens: one of letters that the vocabulary lacks may become none."""
    for text in ("a", "1", ".", *tokenizer.get_vocab()):
        if tokenizer.encode(text, add_special_tokens=False).ids:
            return str(text)
    raise InputError("The tokenizer makes no tokens of any text.")


def _first_known(tokenizer: Any, names: list[Any], among: set[int] | None = None) -> int | None:
    for name in names:
        found = tokenizer.token_to_id(name) if isinstance(name, str) else None
        if found is not None and (among is None or found in among):
            return int(found)
    return None


def _pad_id(tokenizer: Any, facts: dict[str, Any]) -> int:
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    found = _first_known(tokenizer, [facts.get("pad_token"), *_PLAIN_PAD_NAMES])
    if found is None:
        # Among special tokens alone: "<unk>" may well be a word of a byte-level vocabulary.
        found = _first_known(tokenizer, list(_PAD_NAMES), among=special)
    if found is None:
        raise InputError(
            f"The tokenizer has no token to pad with (looked for {', '.join(_PAD_NAMES)}). Name one as pad_token in "
            "the tokenizer_config.json beside it."
        )
    return found


READ, WRITE = "[MEM_READ_{}]", "[MEM_WRITE_{}]"


def add_memory_tokens(tokenizer: Any, count: int) -> MemoryTokens:
    """Put them into a `tokenizers.Tokenizer`, unless they are there; the model's embeddings must have room for them."""
    from tokenizers import AddedToken

    before = tokenizer.get_vocab(with_added_tokens=True)
    names = [name.format(i) for name in (READ, WRITE) for i in range(count)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    ids = tuple(int(tokenizer.token_to_id(name)) for name in names)
    # Into a vocabulary with gaps, HF tokenizers puts new tokens upon old ones: it counts from the vocabulary's size.
    if len(set(ids)) < len(ids) or set(ids) & {before[name] for name in before.keys() - set(names)}:
        raise InputError(
            "The tokenizer's vocabulary has gaps, and memory tokens would get the ids of other tokens. Number its "
            "tokens without gaps, or fill the gaps with unused ones."
        )
    return MemoryTokens(ids[:count], ids[count:])


def with_memory(template: Template, memory: MemoryTokens) -> Template:
    return replace(template, memory_read=memory.read, memory_write=memory.write)
