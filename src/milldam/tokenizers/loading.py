"""A user's word for a tokenizer -> the one form that everything else uses: the text of a tokenizer.json.

Takes a folder, a file (tokenizer.json, vocab.json with merges.txt, a BERT vocab.txt) or a Hub name that is cached or
can be reached. Truncation, padding and dropout that a file carries are taken out: they would
change ids in silence.

Which tokens begin and end a document: found in the files beside the tokenizer, or by their usual names.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, InputError, Setting, did_you_mean
from milldam.input_files import nearby, why_no_hub

_ACCEPTED = (
    "Give a folder with tokenizer.json, the file itself, vocab.json + merges.txt, a BERT vocab.txt, "
    "or a Hub name such as openai-community/gpt2."
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_BESIDE = ("special_tokens_map.json", "tokenizer_config.json", "config.json")
_NAMES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")
"""A file of such a name is called after its folder."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    name: str
    json: str
    """The text of its tokenizer.json."""
    named: dict[str, Any]
    """What the files beside it say: names of `bos`, `eos`, `cls` and `pad`, `bos_id` and `eos_id`, `padding_side`."""
    origin: str = ""
    """Where it comes from, for messages."""
    huggingface: Any = None
    """As HF tokenizers loads it; None: nobody has loaded it yet."""

    def load(self) -> Tokenizer:
        """The same, loaded, without truncation, padding and dropout. Raises InputError when it is no tokenizer."""
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_str(self.json)
        except Exception as error:
            reason = str(error).splitlines()[0][:200]
            raise InputError(f"{self.origin}: not a usable tokenizer ({reason}).\n{_ACCEPTED}") from None
        dropout = getattr(tokenizer.model, "dropout", None)
        if tokenizer.truncation is None and tokenizer.padding is None and dropout is None:
            return replace(self, huggingface=tokenizer)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if dropout is not None:
            tokenizer.model.dropout = None
        return replace(self, json=str(tokenizer.to_str()), huggingface=tokenizer)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: a vocabulary may have gaps."""
        return 1 + max(self.huggingface.get_vocab(with_added_tokens=True).values(), default=0)


def load_tokenizer(spec: str) -> Tokenizer:
    """Find, convert and load."""
    return read_tokenizer(spec).load()


def read_tokenizer(spec: str) -> Tokenizer:
    """Find and convert."""
    path = Path(spec).expanduser()
    if path.is_dir():
        files = [path / name for name in _NAMES[:3] if (path / name).is_file()]
        if not files:
            found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise InputError(f"{path}: no tokenizer in this folder (found {found}).\n{_ACCEPTED}")
        name, path = path.name, files[0]
    elif path.is_file():
        name = path.resolve().parent.name if path.name in _NAMES else path.name
    elif path.suffix in (".json", ".txt", ".model", ".tiktoken") or not _HUB_NAME.fullmatch(spec):
        raise InputError(f"{spec}: no such tokenizer file or folder.{nearby(spec)}\n{_ACCEPTED}")
    else:
        name, path = spec, _from_hub(spec)
    if path.suffix in (".model", ".tiktoken"):
        convert = "transformers makes one of it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER)."
        raise InputError(f"{path}: needs a tokenizer.json. {convert}")
    try:
        if path.name in ("vocab.json", "merges.txt"):
            text = _from_vocab_and_merges(path)
        else:
            text = _from_wordpiece(path) if path.suffix == ".txt" else path.read_text(encoding="utf-8")
    except InputError:
        raise
    except Exception as error:  # of whatever a file may hold, and of HF tokenizers, which has no type of its own
        raise InputError(f"{path}: can't be read as a tokenizer ({error}).\n{_ACCEPTED}") from None
    return Tokenizer(name, text, read_named_tokens(path.parent), spec)


def _from_vocab_and_merges(path: Path) -> str:
    """GPT-2's pair of files: byte-level BPE with GPT-2's split rule."""
    from tokenizers import ByteLevelBPETokenizer

    vocab_path, merges_path = path.with_name("vocab.json"), path.with_name("merges.txt")
    for needed in (vocab_path, merges_path):
        if not needed.is_file():
            raise InputError(f"{path}: {needed.name} is missing beside it; both are needed.")
    tokenizer = ByteLevelBPETokenizer(str(vocab_path), str(merges_path))
    specials = ("<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>")
    tokenizer.add_special_tokens([token for token in specials if tokenizer.token_to_id(token) is not None])
    return str(tokenizer.to_str())


def _from_wordpiece(path: Path) -> str:
    """A BERT vocab.txt. Lower case when tokenizer_config.json beside it says so, else when no entry has a capital."""
    from tokenizers import BertWordPieceTokenizer

    tokens = path.read_bytes().decode("utf-8").split("\n")
    if "[UNK]" not in (token.removesuffix("\r") for token in tokens):
        raise InputError(f"{path}: no [UNK] entry, so this is not a BERT vocabulary.")
    config = path.with_name("tokenizer_config.json")
    lowercase = json.loads(config.read_bytes()).get("do_lower_case") if config.is_file() else None
    if not isinstance(lowercase, bool):
        lowercase = not any(token != token.lower() for token in tokens if not token.startswith("["))
    return str(BertWordPieceTokenizer(str(path), lowercase=lowercase).to_str())


def _from_hub(name: str) -> Path:
    """The tokenizer.json, with what the Hub has beside it."""
    try:
        found = hub_file(name, "tokenizer.json")
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
    return found


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


def read_named_tokens(folder: Path) -> dict[str, Any]:
    """Names from tokenizer_config.json and special_tokens_map.json, ids from config.json."""
    named: dict[str, Any] = {}
    for file in _BESIDE:
        try:
            content = json.loads((folder / file).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("padding_side") in ("left", "right"):
            named["padding_side"] = content["padding_side"]
        for role in ("bos", "eos", "cls", "pad") if isinstance(content, dict) else ():
            token, number = content.get(f"{role}_token"), content.get(f"{role}_token_id")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and file != "config.json":
                named[role] = token
            # Some configs say -1, or a list of several.
            if type(number) is int and 0 <= number < 1 << 32 and file == "config.json":
                named[f"{role}_id"] = number
    return named


def choose_special_tokens(tokenizer: Any, named: dict[str, Any], *, bos: str, eos: str) -> SpecialTokens:
    """Apply the policy: "auto" (what the tokenizer has; BOS only on request), "none", or a token by name."""
    chosen: dict[str, str | None] = {}
    for role, wanted, usual in (("bos", bos, _USUAL_BOS), ("eos", eos, _USUAL_EOS)):
        number = named.get(f"{role}_id")
        by_number = tokenizer.id_to_token(number) if number is not None else None
        candidates = {"none": (), "auto": (named.get(role), by_number, *usual)}.get(wanted, (wanted,))
        existing = (token for token in candidates if token is not None and tokenizer.token_to_id(token) is not None)
        chosen[role] = next(existing, None)
        if chosen[role] is None and wanted not in ("auto", "none"):
            hint = did_you_mean(wanted, [added.content for added in tokenizer.get_added_tokens_decoder().values()])
            problem = f' "{wanted}": the tokenizer has no such token.{hint} Use "auto", "none" or one it has.'
            raise ConfigError(Setting(f"tokenizer.{role}"), problem)
    ids = [None if token is None else tokenizer.token_to_id(token) for token in chosen.values()]
    return SpecialTokens(*ids, *chosen.values())
