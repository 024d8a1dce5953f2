"""A user's word for a tokenizer -> the one form that everything else uses: the bytes of a tokenizer.json.

Takes a folder, a file (tokenizer.json, vocab.json with merges.txt, a BERT vocab.txt, a sentencepiece .model,
a .tiktoken file) or a Hub name that is cached or can be reached. Truncation, padding and dropout that a file carries
are taken out: they would change ids in silence.

Which tokens begin and end a document: found in the files beside the tokenizer, or by their usual names.
"""

from __future__ import annotations

import json
import re
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
_GENERAL_NAMES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tokenizer.model")
"""A file of such a name is called after its folder."""


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """The names that the files beside a tokenizer give to its special tokens, and the side on which it pads."""

    bos: str | None = None
    eos: str | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    cls: str | None = None
    pad: str | None = None
    padding_side: str | None = None


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
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_str(self.json)
        except Exception as error:
            reason = str(error).splitlines()[0][:200]
            raise InputError(f"{self.origin}: not a usable tokenizer ({reason}).\n{_ACCEPTED}") from None
        return LoadedTokenizer(self.name, without_losses(tokenizer) or self.json, self.named, tokenizer)


def without_losses(tokenizer: Any) -> str | None:
    """Take out truncation, padding and dropout; the text of what is left, None where there was nothing to take out."""
    dropout = getattr(tokenizer.model, "dropout", None)
    if tokenizer.truncation is None and tokenizer.padding is None and dropout is None:
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if dropout is not None:
        tokenizer.model.dropout = None
    return str(tokenizer.to_str())


def load_tokenizer(spec: str) -> LoadedTokenizer:
    """Find, convert and load."""
    return read_tokenizer(spec).load()


def read_tokenizer(spec: str) -> TokenizerText:
    """Find and convert."""
    path = Path(spec).expanduser()
    if path.is_dir():
        return TokenizerText(path.name, _read_file(_file_in(path)), read_named_tokens(path), str(path))
    if path.is_file():
        name = path.resolve().parent.name if path.name in _GENERAL_NAMES else path.name
        return TokenizerText(name, _read_file(path), read_named_tokens(path.parent), str(path))
    if path.suffix in (".json", ".txt", ".model", ".tiktoken") or not _HUB_NAME.fullmatch(spec):
        raise InputError(f"{spec}: no such tokenizer file or folder.{nearby(spec)}\n{_ACCEPTED}")
    return _from_hub(spec)


def _file_in(folder: Path) -> Path:
    for name in ("tokenizer.json", "vocab.json", "vocab.txt"):
        if (folder / name).is_file():
            return folder / name
    models = sorted(path for pattern in _MODELS for path in folder.glob(pattern))
    if len(models) == 1:
        return models[0]
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise InputError(f"{folder}: no tokenizer in this folder (found {found}).\n{_ACCEPTED}")


def _read_file(path: Path) -> str:
    """The text of a tokenizer.json, or of what another kind of file is equivalent to."""
    converters = {
        ".txt": conversion.from_wordpiece,
        ".model": conversion.from_sentencepiece,
        ".tiktoken": conversion.from_tiktoken,
    }
    try:
        if path.name in ("vocab.json", "merges.txt"):
            return conversion.from_vocab_and_merges(path)
        if path.suffix in converters:
            return converters[path.suffix](path)
        return path.read_text(encoding="utf-8")
    except InputError:
        raise
    except Exception as error:  # of whatever a file may hold, and of HF tokenizers, which has no type of its own
        raise InputError(f"{path}: can't be read as a tokenizer ({error}).\n{_ACCEPTED}") from None


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
class SpecialTokens:
    """What is put around each document; None: nothing."""

    bos: int | None
    eos: int | None
    bos_token: str | None = None
    eos_token: str | None = None


def read_named_tokens(folder: Path) -> NamedTokens:
    """Names from tokenizer_config.json and special_tokens_map.json, ids from config.json."""
    names, ids = dict[str, str](), dict[str, int]()
    for file in ("special_tokens_map.json", "tokenizer_config.json", "config.json"):
        try:
            content = json.loads((folder / file).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("padding_side") in ("left", "right"):
            names["side"] = content["padding_side"]
        for role in ("bos", "eos", "cls", "pad") if isinstance(content, dict) else ():
            token, number = content.get(f"{role}_token"), content.get(f"{role}_token_id")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and file != "config.json":
                names[role] = token
            # Some configs say -1, or a list of several.
            if type(number) is int and 0 <= number < 1 << 32 and file == "config.json":
                ids[role] = number
    found = names.get("bos"), names.get("eos"), ids.get("bos"), ids.get("eos"), names.get("cls"), names.get("pad")
    return NamedTokens(*found, names.get("side"))


def choose_special_tokens(tokenizer: Any, named: NamedTokens, *, bos: str, eos: str) -> SpecialTokens:
    """Apply the policy: "auto" (what the tokenizer has; BOS only on request), "none", or a token by name."""

    def find(wanted: str, name: str | None, number: int | None, usual: tuple[str, ...], setting: str) -> str | None:
        if wanted == "none":
            return None
        by_number = tokenizer.id_to_token(number) if number is not None else None
        candidates = (name, by_number, *usual) if wanted == "auto" else (wanted,)
        found = (token for token in candidates if token is not None and tokenizer.token_to_id(token) is not None)
        token = next(found, None)
        if token is None and wanted != "auto":
            hint = did_you_mean(wanted, [added.content for added in tokenizer.get_added_tokens_decoder().values()])
            told = f' "{wanted}": the tokenizer has no such token.{hint} Use "auto", "none" or one it has.'
            raise ConfigError(Setting(setting), told)
        return token

    bos_token = find(bos, named.bos, named.bos_id, _USUAL_BOS, "tokenizer.bos")
    eos_token = find(eos, named.eos, named.eos_id, _USUAL_EOS, "tokenizer.eos")
    ids = {token: tokenizer.token_to_id(token) if token else None for token in (bos_token, eos_token)}
    return SpecialTokens(ids[bos_token], ids[eos_token], bos_token, eos_token)
