"""The one check of settings: plain values and where they stand -> an instance of a dataclass, or errors that say where.

Values come from YAML files, options or keyword arguments. pydantic checks them against the types of the fields, ranges
included (`Annotated[int, Ge(1)]`); a dataclass finds its contradictions in `__post_init__` and raises a ConfigError
that begins with the `Setting`. All problems are reported at once, each with its file, line and key, or with the option
or argument, and with the nearest right word.

Before that, each value is read as its key means it: `off` is a word where a word is wanted and false elsewhere, `1e6`
is a whole number, one item is a list of one, a path is text.
"""

from __future__ import annotations

import ast
import itertools
import math
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from milldam.errors import ConfigError, Setting, did_you_mean, nearest

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")
KeyPath = tuple[str | int, ...]
Message = tuple[str | Setting, ...]
OVERRIDES = "overrides"
"""The place of `--set` on the command line, and of `overrides=` in Python."""
MOST_PROBLEMS = 10
_OTHER_WORDS = {
    "overwrite": "force overwrite_output_dir overwrite_cache clobber",
    "out": "output output_dir output_path output_prefix out_dir save_path dataset_dir",
    "executor": "engine runner",
    "workers": "num_workers num_proc nproc n_jobs num_jobs jobs threads num_threads cpus",
    "memory": "max_memory memory_limit mem ram",
    "limit": "max_samples max_docs max_documents num_samples num_documents samples",
    "datasets.0.path": "data data_path data_files data_dir input inputs train_file dataset",
    "datasets.0.subset": "config_name dataset_config dataset_config_name",
    "datasets.0.text_column": "column field key json_key json_keys jsonl_key text_key text_field content_field "
    "text_column_name dataset_text_field",
    "tokenizer": "model model_name model_path pretrained tokenizer_name tokenizer_path tokenizer_model tokenizer_type "
    "tokenizer_name_or_path vocab_file encoding",
    "tokenizer.bos": "bos_token add_bos add_bos_token prepend_bos",
    "tokenizer.eos": "eos_token eos_text add_eos add_eos_token append_eos append_eod eod",
    "seq_len": "max_length max_len max_seq_len max_seq_length sequence_len seq_length sequence_length block_size "
    "context_length context_size chunk_size",
    "splits.val": "val_split validation_split val_ratio val_size valid_split test_size test_split split_ratio "
    "train_split",
    "dedup": "deduplicate dedupe deduplication minhash",
    "filters.language": "lang languages",
    "filters.min_characters": "min_length min_len min_chars",
}
"""Settings by their place in a configuration, and their names in other tools."""
_MEANT = {word: place for place, words in _OTHER_WORDS.items() for word in words.split()}


def meant_setting(word: str) -> str | None:
    """The place of the setting that other tools call so.

    >>> meant_setting("--num-proc"), meant_setting("bos_token"), meant_setting("workers")
    ('workers', 'tokenizer.bos', None)
    """
    return _MEANT.get(word.lstrip("-").replace("-", "_").lower())


def dotted(path: KeyPath) -> str:
    """A path as people write it: datasets.0.path"""
    return ".".join(map(str, path))


class Plain(str):
    """A scalar without quotes in a YAML file: its key decides what it means."""


@dataclass(slots=True)
class Values:
    """Plain values, and where they stand. A value without a place is an option or argument."""

    data: Any = field(default_factory=dict)
    source: str = ""
    """The file; empty for options and arguments."""
    places: dict[KeyPath, tuple[str, int | None]] = field(default_factory=dict)
    """(file, line) of each key; the file is `OVERRIDES` or "" for what was put over it."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user on how a file was read."""
    if_missing: str = ""
    """Advice for when a required key is missing."""

    def put(self, name: str, value: Any) -> None:
        """Put an option over the value of the file."""
        self.forget_places((name,))
        self.data[name] = value
        self.places[name,] = ("", None)

    def forget_places(self, path: KeyPath) -> None:
        for old in [old for old in self.places if old[: len(path)] == path]:
            del self.places[old]

    def place(self, path: KeyPath) -> tuple[str, int | None]:
        """The place of a key, or else of the block that it is in."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, (self.source, None))

    def message(self, path: KeyPath, *text: str | Setting) -> Message:
        """A message with place and key in front: `config.yaml:12: dedup.treshold: no such key.`"""
        (source, line), name = self.place(path), dotted(path)
        if source == OVERRIDES:
            return (Setting(OVERRIDES), f" {name}: ", *text)
        if not source:
            return (Setting(name), ": ", *text) if name else text
        return (f"{source}:{line}: " if line else f"{source}: ", f"{name}: " if name else "", *text)


# ---- the check ----


def checked_settings(kind: type[T], given: Mapping[str, Any] | Values, *, if_missing: str = "") -> T:
    """The settings of a job from options or arguments by name, where None means the default, or from a file.

    >>> from milldam.rules import CleanRules
    >>> checked_settings(CleanRules, {"strip": True, "unicode": "NFD"})
    Traceback (most recent call last):
    milldam.errors.ConfigError: unicode: must be NFC or NFKC, not "NFD". Did you mean "NFC"?
    """
    from pydantic import TypeAdapter, ValidationError

    values = given if isinstance(given, Values) else Values(dict(given), if_missing=if_missing)
    meant = _as_meant(Kinds(block=kind), values.data)
    try:
        return cast("T", _adapter(TypeAdapter, cast("Any", kind)).validate_python(meant))
    except ConfigError as error:
        setting, *text = error.args
        if not values.source or not isinstance(setting, Setting):
            raise
        path = tuple(int(part) if part.isdecimal() else part for part in setting.path.split("."))
        text[0] = text[0].removeprefix(":").lstrip()
        raise ConfigError(*values.message(path, *text)) from None
    except ValidationError as error:
        problems = sorted(_problems(kind, values, meant, error), key=lambda problem: problem[0])
        messages = [message for _, message in problems[:MOST_PROBLEMS]]
        if len(problems) > MOST_PROBLEMS:
            messages.append((f"... and {len(problems) - MOST_PROBLEMS} more.",))
        raise ConfigError(*messages[0], *(part for one in messages[1:] for part in ("\n", *one))) from None


@cache
def _adapter(adapter: Any, kind: Any) -> Any:
    return adapter(kind)


# ---- the types of keys ----

_OFF = ("off", "none")
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True, slots=True)
class Kinds:
    """The parts of a key's type; no parts mean that any value is taken as it is."""

    choices: tuple[str, ...] = ()
    scalars: frozenset[type] = frozenset()
    item: Any = None
    """Type of a list's items."""
    entry: Any = None
    """Type of the values of a block whose keys the user names."""
    block: type | None = None
    optional: bool = False

    @property
    def off(self) -> str | None:
        """The choice that means off."""
        return next((word for word in _OFF if word in self.choices), None)

    @property
    def inner(self) -> type | None:
        """The block that it holds, or that a list of it holds."""
        return self.block or (kinds_of(self.item).block if self.item else None)

    def __str__(self) -> str:
        """For a message: off, exact or a block of keys."""
        parts = [*self.choices, *(name for kind, name in _NAMES.items() if kind in self.scalars)]
        parts += ["a list"] if self.item else []
        parts += ["a block of keys"] if self.block or self.entry else []
        return f"{', '.join(parts[:-1])} or {parts[-1]}" if parts[1:] else "".join(parts) or "something else"


@cache
def kinds_of(annotation: Any) -> Kinds:
    """The parts of a type: `Literal["off"] | DedupRules | None` has choices and a block and is optional."""
    union = get_origin(annotation) in (Union, types.UnionType)
    members = get_args(annotation) if union else (annotation,)
    choices: tuple[str, ...] = ()
    item: Any = None
    entry: Any = None
    block: Any = None
    for member in members:
        origin, inner = get_origin(member), get_args(member)
        if origin is Literal:
            choices += inner
        elif origin in (tuple, list):
            item = inner[0]
        elif inner and isinstance(origin, type) and issubclass(origin, Mapping):
            entry = inner[1]
        elif is_dataclass(member):
            block = member
    scalars = frozenset(member for member in members if member in _NAMES)
    return Kinds(choices, scalars, item, entry, block, optional=type(None) in members)


@cache
def keys_of(block: type) -> dict[str, Kinds]:
    """The keys of a block, its own before inherited ones, and what they may hold."""
    hints, own = get_type_hints(block), block.__annotations__
    return {one.name: kinds_of(hints[one.name]) for one in sorted(fields(block), key=lambda one: one.name not in own)}


@cache
def defaults_of(block: type) -> dict[str, Any]:
    """Defaults by key; required keys are not in it."""
    made = {one.name: one.default_factory() for one in fields(block) if one.default_factory is not MISSING}
    return made | {one.name: one.default for one in fields(block) if one.default is not MISSING}


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    path = str(sys.modules[module].__file__)
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def descriptions_of(block: type) -> dict[str, str]:
    """The docstrings of the fields, each in one line."""
    return {
        key.target.id: " ".join(text.value.value.split())
        for one in reversed(block.__mro__)
        if is_dataclass(one)
        for key, text in itertools.pairwise(_classes_of(one.__module__)[one.__name__].body)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def blocks_of(block: type, under: str = "") -> Iterator[tuple[str, type]]:
    """(dotted name, dataclass) of a block and all blocks below it."""
    yield under, block
    for key, kinds in keys_of(block).items():
        if kinds.inner:
            yield from blocks_of(kinds.inner, f"{under}.{key}".removeprefix("."))


# ---- values as their keys mean them ----

_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?")
_WORDS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_WORDS |= dict.fromkeys(("null", "~", ""))  # type: ignore[arg-type]
_DEFAULT: Any = object()


def is_null(value: Any) -> bool:
    """Whether a value is null, or a key has none."""
    return value is None or (isinstance(value, Plain) and value.lower() in ("", "~", "null"))


def _typed(value: Any) -> Any:
    """A value without a type to go by, as YAML has it: words for booleans and null, numbers of all spellings."""
    if isinstance(value, dict):
        return {key: _typed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_typed(one) for one in value]
    if not isinstance(value, Plain):
        return value
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if _NUMBER.fullmatch(value) is None or len(value) > 40:
        return str(value)
    digits = value.replace("_", "")
    number = int(digits) if re.fullmatch(r"[-+]?\d+", digits) else float(digits)
    return number if math.isfinite(number) else str(value)


def _as_meant(kinds: Kinds, value: Any, default: Any = MISSING) -> Any:
    """A value as its key means it; one that does not fit stays as it is, for pydantic to refuse."""
    if kinds == Kinds():
        return _typed(value)
    if isinstance(value, Mapping) and kinds.inner:
        keys, defaults = keys_of(kinds.inner), defaults_of(kinds.inner)
        meant = {key: _as_meant(keys.get(key, Kinds()), one, defaults.get(key, MISSING)) for key, one in value.items()}
        return {key: one for key, one in meant.items() if one is not _DEFAULT}
    if isinstance(value, Mapping):
        return {key: _as_meant(kinds_of(kinds.entry), one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_meant(kinds_of(kinds.item), one) for one in value]
    typed, text = _typed(value), str(value)
    if typed is None:
        # `dedup: null` is off; `dedup:` with nothing after it, as when all below is a comment, is the default.
        off = value != "" and (kinds.off is not None or kinds.optional)
        return None if default is MISSING else kinds.off if off else _DEFAULT
    choice = {one.lower(): one for one in kinds.choices}.get(text.lower())
    if choice is not None:
        return choice
    if isinstance(typed, bool) and bool in kinds.scalars:
        return typed
    if isinstance(typed, int | float) and not isinstance(typed, bool):
        if int in kinds.scalars and float(typed).is_integer():
            return int(typed)
        if float in kinds.scalars:
            return typed
    if str in kinds.scalars and (isinstance(value, str | PurePath) or type(value) in (int, float)):
        return os.path.expanduser(text) if text.startswith("~/") else text
    if (typed is False or text.lower() in _OFF) and (kinds.off or kinds.optional):
        return kinds.off
    if typed is True and isinstance(default, str) and default not in _OFF:
        return default  # `on` is the default; where that is off, the block with its defaults
    if typed is True and kinds.block and len(defaults_of(kinds.block)) == len(keys_of(kinds.block)):
        return {}
    if kinds.item and not kinds.scalars:
        return [_as_meant(kinds_of(kinds.item), value)]
    return text if isinstance(typed, bool) else typed


# ---- pydantic's errors in our words ----

_RANGES = {
    "greater_than_equal": "must be at least {ge:g}.",
    "greater_than": "must be more than {gt:g}.",
    "less_than_equal": "must be at most {le:g}.",
    "less_than": "must be less than {lt:g}.",
    "string_too_short": "is empty.",
    "too_short": "is empty.",
    "value_error": "{error}",
}
_SHAPES: dict[type, str] = {dict: "a block of keys", list: "a list", tuple: "a list", type(None): "empty"}


def _problems(root: type, values: Values, meant: Any, error: ValidationError) -> Iterator[tuple[int, Message]]:
    """Each problem with its line. Of the branches of a union, the error that lies deepest says what is wrong."""
    found: dict[KeyPath, Any] = {}
    for one in error.errors(include_url=False):
        path: KeyPath = ()
        here = meant
        for part in one["loc"]:  # without pydantic's names for the branches of unions
            if part in here if isinstance(here, dict) else isinstance(here, list) and isinstance(part, int):
                path, here = (*path, part), here[part]
        path = (*path, one["loc"][-1]) if one["type"] == "missing" else path
        if path not in found or one["type"] in _RANGES:
            found[path] = one
    outer = {path[:length] for path in found for length in range(1, len(path))}
    missing = [path[0] for path, one in found.items() if one["type"] == "missing" and not path[1:]]
    for path, one in sorted(found.items(), key=lambda pair: pair[1]["type"] == "missing"):
        if path in outer or path[0] in missing:
            continue
        block, kinds = root, Kinds(block=root)
        for part in path:
            if isinstance(part, int):
                kinds = kinds_of(kinds.item)
            elif kinds.inner:
                block, kinds = kinds.inner, keys_of(kinds.inner).get(part, Kinds())
            else:
                kinds = kinds_of(kinds.entry)
        if one["type"] == "missing":
            path, text = path[:-1], f"the key {path[-1]} is missing."
        elif one["type"] == "unexpected_keyword_argument":
            text = f"no such key.{_hint(str(path[-1]), block, root)}"
        elif one["type"] in _RANGES:
            text = _RANGES[one["type"]].format(**one.get("ctx", {}))
        else:
            value = values.data
            for part in path:
                value = value[part] if isinstance(value, dict | list | tuple) else value  # type: ignore[index]
            typed = _typed(value) if isinstance(value, Plain) else value
            shown = f"{value}" if isinstance(typed, bool | int | float) else f'"{value}"'
            text = f"must be {kinds}, not {_SHAPES.get(type(typed), shown)}.{did_you_mean(str(value), kinds.choices)}"
        yield values.place(path)[1] or 0, values.message(path, text)
    if missing:
        source = values.source
        names: list[Any] = [str(name) if source else Setting(str(name)) for name in missing]
        listed = [part for name in names[:-1] for part in (", ", name)][1:]
        listed += [" and ", names[-1]] if listed else names
        text = f" {'are' if missing[1:] else 'is'} missing. {values.if_missing}".rstrip()
        yield sys.maxsize, (f"{source}: " if source else "", *listed, text)


def _hint(key: str, block: type, root: type) -> str:
    """A key of another block, the name of what other tools call so, or the nearest key, here or else in any block."""
    blocks = {one: under for under, inner in reversed(list(blocks_of(root))) for one in keys_of(inner)}
    here, place = nearest(key, keys_of(block)), meant_setting(key)
    name, under = key, blocks.get(key)
    if under is None and place is not None and place.split(".")[0] in blocks:
        *above, name = (part for part in place.split(".") if not part.isdecimal())
        under, here = ".".join(above), None
    elif under is None:
        name = here or nearest(key, blocks) or ""
        under = blocks.get(name, "")
    if not name:
        return ""
    where = "" if name in keys_of(block) else f" under {under}" if under else " at the top level"
    return f' Did you mean {f""""{here}", or """ if here not in (None, name) else ""}"{name}"{where}?'
