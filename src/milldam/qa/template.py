"""How a window is put together: special and memory tokens around the two texts.

    before + [MEM_READ_i] + first text + between + second text + [MEM_WRITE_i] + after, and padding on one side

Derived from what the tokenizer does with a pair of texts, so BERT ([CLS] question [SEP] context [SEP]), RoBERTa, XLNet
(context <sep> question <sep> <cls>, padded on the left) and tokenizers without special tokens all work. Memory tokens
are added to the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from milldam.errors import InputError
from milldam.qa.settings import QARules
from milldam.qa.store import MemoryTokens

READ, WRITE = "[MEM_READ_{}]", "[MEM_WRITE_{}]"
_CLS_NAMES = ("[CLS]", "<cls>", "<s>", "<|cls|>")
_PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<PAD>", "<|endoftext|>", "</s>", "<unk>", "[UNK]")
_PLAIN_PAD_NAMES = ("[PAD]", "<pad>")
"""Accepted even if they are not marked as special; text has no such words."""
_XLNET_CLS_TYPE, _XLNET_PAD_TYPE = 2, 3

Special = tuple[tuple[int, int], ...]
"""(id, type) of the special tokens in one place of a window."""


@dataclass(frozen=True, slots=True)
class Template:
    """The parts of a window except its texts."""

    before: Special
    between: Special
    after: Special
    text_types: tuple[int, int]
    """Token types of the first and of the second text."""
    context_first: bool
    pad_id: int
    pad_type: int
    pad_left: bool
    cls_id: int | None
    """None: the tokenizer has no such token, and a token of the question stands for it, where no answer can be."""
    memory: MemoryTokens

    @property
    def taken(self) -> int:
        """Tokens of a window that belong to neither text."""
        return len(self.before) + len(self.between) + len(self.after) + 2 * len(self.memory)

    @property
    def cls_at(self) -> int:
        """Where the CLS token is in a window without padding: the special one, not one that the text has. Below 0:
        counted from the end."""
        if self.cls_id is None:
            return -1 if self.context_first else 0
        before, after = ([token for token, _ in part] for part in (self.before, self.after))
        if self.cls_id in after and self.cls_id not in before:
            return after.index(self.cls_id) - len(after)
        return before.index(self.cls_id) if self.cls_id in before else 0


def template_of(tokenizer: Any, rules: QARules, named: dict[str, Any]) -> Template:
    """The template of a `tokenizers.Tokenizer`, which gets its memory tokens. `named`: `Tokenizer.named`."""
    (before, between, after), text_types = _pair(tokenizer)
    special = {token for token, _ in (*before, *between, *after)}
    cls_id = _first_known(tokenizer, (named.get("cls"), *_CLS_NAMES), among=special)
    sides = [side for side in (rules.padding_side, named.get("padding_side")) if side in ("left", "right")]
    # A model that reads its answer off the last token, such as XLNet, has its text at the end.
    cls_is_last = cls_id in [token for token, _ in after] and cls_id not in [token for token, _ in before]
    left = sides[0] == "left" if sides else cls_is_last
    pad_id = _first_known(tokenizer, (named.get("pad"), *_PLAIN_PAD_NAMES))
    if pad_id is None:
        # Among special tokens alone: "<unk>" may well be a word of a byte-level vocabulary.
        marked = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        pad_id = _first_known(tokenizer, _PAD_NAMES, among=marked)
    if pad_id is None:
        raise InputError(
            f"The tokenizer has no token to pad with (looked for {', '.join(_PAD_NAMES)}). Name one as pad_token in "
            "the tokenizer_config.json beside it."
        )
    return Template(
        before,
        between,
        after,
        text_types,
        context_first=left if rules.first == "auto" else rules.first == "context",
        pad_id=pad_id,
        pad_type=_XLNET_PAD_TYPE if any(kind == _XLNET_CLS_TYPE for _, kind in after) else 0,
        pad_left=left,
        cls_id=cls_id,
        memory=add_memory_tokens(tokenizer, rules.memory_tokens),
    )


def _pair(tokenizer: Any) -> tuple[list[Special], tuple[int, int]]:
    """What the tokenizer puts before, between and after two texts, and the types of the texts; a WordPiece vocabulary
    without a template gets BERT's."""
    # Letters that the vocabulary lacks may become no token at all.
    candidates = ("a", "1", ".", *tokenizer.get_vocab())
    text = next((one for one in candidates if tokenizer.encode(one, add_special_tokens=False).ids), None)
    if text is None:
        raise InputError("The tokenizer makes no tokens of any text.")
    encoded = tokenizer.encode(text, text)
    cls, sep = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    if None not in encoded.sequence_ids and None not in (cls, sep):
        return [((cls, 0),), ((sep, 0),), ((sep, 1),)], (0, 1)
    parts: list[list[tuple[int, int]]] = [[], [], []]
    types = [0, 0]
    seen = 0
    for token, kind, sequence in zip(encoded.ids, encoded.type_ids, encoded.sequence_ids, strict=True):
        if sequence is None:
            parts[seen].append((token, kind))
        else:
            seen, types[sequence] = sequence + 1, kind
    return [tuple(part) for part in parts], (types[0], types[1])


def _first_known(tokenizer: Any, names: tuple[Any, ...], among: set[int] | None = None) -> int | None:
    ids = (tokenizer.token_to_id(name) for name in names if isinstance(name, str))
    return next((int(id) for id in ids if id is not None and (among is None or id in among)), None)


def add_memory_tokens(tokenizer: Any, count: int) -> MemoryTokens:
    """Add them to a `tokenizers.Tokenizer` unless they are there; the model's embeddings must have room for them."""
    from tokenizers import AddedToken

    vocab = tokenizer.get_vocab(with_added_tokens=True)
    names = [name.format(i) for name in (READ, WRITE) for i in range(count)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    ids = tuple(int(tokenizer.token_to_id(name)) for name in names)
    # In a vocabulary with gaps, HF tokenizers gives new tokens the ids of old ones: it counts from the size.
    if len(set(ids)) < len(ids) or set(ids) & {vocab[name] for name in vocab.keys() - set(names)}:
        raise InputError(
            "The tokenizer's vocabulary has gaps, and memory tokens would get the ids of other tokens. Number its "
            "tokens without gaps, or fill the gaps with unused ones."
        )
    return MemoryTokens(ids[:count], ids[count:])
