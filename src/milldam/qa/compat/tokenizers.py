"""Tokenizers as scripts have them (of transformers or tokenizers, or paths): memory tokens added, files on disk."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError
from milldam.files import hash_bytes, write_file
from milldam.qa.template import READ, WRITE, add_memory_tokens

_FACTS = ("padding_side", "pad_token", "cls_token")
_MEMORY_IDS = {"mem_read_ids": READ, "mem_write_ids": WRITE}


def configure_memory_tokens(tokenizer: Any, memory_num_tokens: int) -> dict[str, list[int]]:
    """Add [MEM_READ_i] and [MEM_WRITE_i] to a tokenizer of transformers or tokenizers.

    Gives their ids: {"mem_read_ids": [...], "mem_write_ids": [...]}.

    What is processed with the tokenizer afterwards has them in every window. The model's embeddings must have room:
    `model.resize_token_embeddings(len(tokenizer))`.
    """
    if memory_num_tokens < 0:
        raise ConfigError(f"memory_num_tokens: {memory_num_tokens}; use 0 or more.")
    backend = _backend(tokenizer)
    there = memory_count(backend)
    if there > memory_num_tokens:
        raise ConfigError(
            f"memory_num_tokens: {memory_num_tokens}; the tokenizer has {there} memory tokens already. Load it again."
        )
    names = {kind: [name.format(i) for i in range(memory_num_tokens)] for kind, name in _MEMORY_IDS.items()}
    if backend is tokenizer:
        add_memory_tokens(tokenizer, memory_num_tokens)
    else:
        from tokenizers import AddedToken

        # By its own method, so that the wrapper knows of them too.
        added = [AddedToken(name, normalized=False, special=True) for name in itertools.chain(*names.values())]
        tokenizer.add_tokens(added, special_tokens=True)
    backend = _backend(tokenizer)
    return {kind: [int(backend.token_to_id(name)) for name in named] for kind, named in names.items()}


def _backend(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` in it."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "token_to_id") or not hasattr(backend, "to_str"):
        raise ConfigError(
            f"tokenizer: {type(tokenizer).__name__} has no offsets. Give a fast tokenizer of transformers, a "
            "tokenizers.Tokenizer, or the path of one."
        )
    return backend


def memory_count(tokenizer: Any) -> int:
    """How many memory tokens a `tokenizers.Tokenizer` has of each kind."""
    count = 0
    while None not in (tokenizer.token_to_id(READ.format(count)), tokenizer.token_to_id(WRITE.format(count))):
        count += 1
    return count


class CachedTokenizer:
    """A tokenizer as it is put on disk, where workers find it."""

    def __init__(self, given: Any) -> None:
        import tokenizers

        text, facts = _content(given)
        # Whoever calls a tokenizer of transformers leaves truncation and padding in it: they are not part of it.
        tokenizer = tokenizers.Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._json, self._facts = tokenizer.to_str(), facts
        self.memory_tokens = memory_count(tokenizer)
        self.hash = hash_bytes(json.dumps([self._json, facts]).encode("utf-8", "surrogatepass"))

    def saved(self, cache: Path) -> Path:
        folder = cache / "tokenizers" / self.hash[:16]
        if not (folder / "tokenizer.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / "tokenizer_config.json", json.dumps(self._facts).encode())
            write_file(folder / "tokenizer.json", self._json.encode("utf-8", "surrogatepass"))
        return folder


def _content(given: Any) -> tuple[str, dict[str, str]]:
    """A tokenizer as JSON, and what it says of padding and CLS."""
    if given is None:
        raise ConfigError("tokenizer: none given. Windows can't be made, nor found again, without it.")
    if not isinstance(given, str | Path):
        facts = {name: getattr(given, name, None) for name in _FACTS}
        return _backend(given).to_str(), {name: str(one) for name, one in facts.items() if one is not None}
    from milldam.qa.tokenizer import facts_beside
    from milldam.tokenizers.loading import load_tokenizer

    # Loaded first: what lies beside a name on the Hub may come with it.
    text = load_tokenizer(str(given)).json
    return text, facts_beside(str(given))
