"""A user's word for a tokenizer -> the one form that everything else uses: the bytes of a tokenizer.json.

Takes a folder, a file (tokenizer.json, vocab.json with merges.txt, a BERT vocab.txt, a sentencepiece .model,
a .tiktoken file) or a Hub name that is cached or can be reached. Truncation, padding and dropout that a file carries
are taken out: they would change ids in silence.

Which tokens begin and end a document: found in the files beside the tokenizer, or by their usual names.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, InputError, Setting, did_you_mean
from milldam.input_files import nearby, why_no_hub
from milldam.tokenizers import conversion

_ACCEPTED = (
    "Give a folder with tokenizer.json, the file itself, vocab.json + merges.txt, a BERT vocab.txt, "
    "a sentencepiece .model, a .tiktoken file, or a Hub name such as openai-community/gpt2."
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
_MODELS = ("*.model", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer as HF tokenizers loads it, and its tokenizer.json."""

    name: str
    json: str
    named: NamedTokens
    huggingface: Any

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: a vocabulary may have gaps."""
        return 1 + max(self.huggingface.get_vocab(with_added_tokens=True).values(), default=0)


@dataclass(frozen=True, slots=True)
class TokenizerText:
    """A tokenizer.json that nobody has loaded yet."""

    name: str
    json: str
    named: NamedTokens
    origin: str
    """Where it comes from, for messages."""

    def load(self) -> LoadedTokenizer:
        """Raises InputError when it is no tokenizer."""
        return _checked(self)


def load_tokenizer(spec: str) -> LoadedTokenizer:
    """Find, convert and load."""
    return read_tokenizer(spec).load()


def read_tokenizer(spec: str) -> TokenizerText:
    """Find and convert."""
    path = Path(spec).expanduser()
    if path.is_dir():
        return TokenizerText(path.name, _read_folder(path), read_named_tokens(path), str(path))
    if path.is_file():
        return TokenizerText(_name_of(path), _read_file(path), read_named_tokens(path.parent), str(path))
    if path.suffix in (".json", ".txt", ".model", ".tiktoken") or not _HUB_NAME.fullmatch(spec):
        raise InputError(f"{spec}: no such tokenizer file or folder.{nearby(spec)}\n{_ACCEPTED}")
    return _from_hub(spec)


def _name_of(path: Path) -> str:
    generic = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tokenizer.model")
    return path.resolve().parent.name if path.name in generic else path.name


def _checked(text: TokenizerText) -> LoadedTokenizer:
    import tokenizers

    json = text.json
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json)
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
        raise InputError(f"{text.origin}: not a usable tokenizer ({reason}).\n{_ACCEPTED}") from None
    dropout = getattr(tokenizer.model, "dropout", None)
    if tokenizer.truncation is not None or tokenizer.padding is not None or dropout is not None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if dropout is not None:
            tokenizer.model.dropout = None
        json = tokenizer.to_str()
    return LoadedTokenizer(text.name, json, text.named, tokenizer)


def _read_folder(folder: Path) -> str:
    for name in ("tokenizer.json", "vocab.json", "vocab.txt"):
        if (folder / name).is_file():
            return _read_file(folder / name)
    models = sorted(path for pattern in _MODELS for path in folder.glob(pattern))
    if len(models) == 1:
        return _read_file(models[0])
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise InputError(f"{folder}: no tokenizer in this folder (found {found}).\n{_ACCEPTED}")


def _read_file(path: Path) -> str:
    convert = _converter(path)
    try:
        return convert(path)
    except InputError:
        raise
    except (ValueError, KeyError, OSError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise InputError(f"{path}: can't be read as a tokenizer ({error}).\n{_ACCEPTED}") from None


def _converter(path: Path) -> Callable[[Path], str]:
    if path.name == "vocab.json" or (path.name == "merges.txt"):
        return conversion.from_vocab_and_merges
    if path.suffix == ".txt":
        return conversion.from_wordpiece
    if path.suffix == ".model":
        return conversion.from_sentencepiece
    if path.suffix == ".tiktoken":
        return conversion.from_tiktoken
    return lambda path: path.read_text(encoding="utf-8")


def _from_hub(name: str) -> TokenizerText:
    try:
        local = hub_file(name, "tokenizer.json")
    except (OSError, ValueError) as error:  # also those of huggingface_hub
        reason = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])
        raise InputError(
            f"{name}: no such tokenizer file or folder.{nearby(name)}\n"
            f"Nor is a tokenizer of that name in the Hub's cache, or to be had from the Hub: {reason}\n{_ACCEPTED}"
        ) from None
    for file in _BESIDE:
        try:
            hub_file(name, file)
        except ConnectionError:
            break  # what is cached has to do
        except (OSError, ValueError):
            continue
    return TokenizerText(name, local.read_text(encoding="utf-8"), read_named_tokens(local.parent), name)


def hub_file(name: str, file: str) -> Path:
    """A file out of the Hub's cache, else from the Hub. Raises ConnectionError when that does not answer."""
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(name, file)
    if isinstance(cached, str):
        return Path(cached)
    if cached is not None:
        raise FileNotFoundError(f"it has no {file}.")
    silence = why_no_hub(name, file)
    if silence is not None:
        raise ConnectionError(f"{silence}.")
    return Path(huggingface_hub.hf_hub_download(name, file))


# ---- tokens that begin and end a document ----

_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<eod>", "<end_of_text>")
_USUAL_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "<|startoftext|>", "[BOS]")


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """The names that the files beside a tokenizer give to its special tokens."""

    bos: str | None = None
    eos: str | None = None
    bos_id: int | None = None
    eos_id: int | None = None


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What is put around each document; None: nothing."""

    bos: int | None
    eos: int | None
    bos_token: str | None = None
    eos_token: str | None = None


def read_named_tokens(folder: Path) -> NamedTokens:
    """Names from tokenizer_config.json and special_tokens_map.json, ids from config.json."""
    named: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        content = _read_object(folder / file)
        for role in ("bos", "eos"):
            token = content.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                named[role] = token
    config = _read_object(folder / "config.json")
    ids = {role: config.get(f"{role}_token_id") for role in ("bos", "eos")}
    number = {role: value if _is_id(value) else None for role, value in ids.items()}
    return NamedTokens(named.get("bos"), named.get("eos"), number["bos"], number["eos"])


def _is_id(value: Any) -> bool:
    """Some configs say -1, or a list of several."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def choose_special_tokens(tokenizer: Any, named: NamedTokens, *, bos: str, eos: str) -> SpecialTokens:
    """Apply the policy: "auto" (what the tokenizer has; BOS only on request), "none", or a token by name."""
    bos_token = None if bos == "none" else _find(tokenizer, bos, named.bos, named.bos_id, _USUAL_BOS, "tokenizer.bos")
    eos_token = None if eos == "none" else _find(tokenizer, eos, named.eos, named.eos_id, _USUAL_EOS, "tokenizer.eos")
    ids = {token: tokenizer.token_to_id(token) if token else None for token in (bos_token, eos_token)}
    return SpecialTokens(ids[bos_token], ids[eos_token], bos_token, eos_token)


def _find(
    tokenizer: Any, wanted: str, named: str | None, named_id: int | None, usual: tuple[str, ...], setting: str
) -> str | None:
    if wanted != "auto":
        return _require(tokenizer, wanted, setting)
    from_id = tokenizer.id_to_token(named_id) if named_id is not None else None
    for token in (named, from_id, *usual):
        if token is not None and tokenizer.token_to_id(token) is not None:
            return str(token)
    return None


def _require(tokenizer: Any, token: str, setting: str) -> str:
    if tokenizer.token_to_id(token) is None:
        added = [added.content for added in tokenizer.get_added_tokens_decoder().values()]
        hint = did_you_mean(token, added)
        raise ConfigError(
            Setting(setting), f' "{token}": the tokenizer has no such token.{hint} Use "auto", "none" or one it has.'
        )
    return token
