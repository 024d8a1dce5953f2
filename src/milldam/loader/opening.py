"""What a path is, and how it is opened: a store, a file of another tool, or an input with what was prepared from it.

Nothing is guessed in silence: of an input, what is used is logged; what is stale, or of which nobody can tell, is
refused. Nothing is tokenized here.

An input -> what was prepared from it and lies beside it, and whether it is fresh.

Fresh means made from this very input as it is now: the same files by name, size and time of modification, in the same
order, as written down when it was made. So input and result may move together to another folder (by `mv`, `cp -p`,
`rsync -a`: what keeps the time); a copy with a new time, or a new name, is refused, since nobody can tell without
reading it all. A look costs a `stat` a file of the input; no text is read.
"""

from __future__ import annotations

import glob
import logging
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypedDict

import numpy.typing as npt

from milldam.checked import checked
from milldam.errors import ConfigError, InputError, MismatchError, StoreError
from milldam.formats.foreign import ForeignFile, foreign_path, open_foreign
from milldam.formats.npy import read_sidecar, sidecar_path
from milldam.input_files import (
    Files,
    InputState,
    bare_name,
    by_name,
    changed_files,
    files_below,
    kind_of,
    listed_files,
    nearby,
    version_of,
)
from milldam.loader.stores import Store
from milldam.markup import counted
from milldam.stores.kinds import TOKENS, InputFacts, store_kind
from milldam.stores.tokens.manifest import NAME, Manifest

STORE_ENDING, NPY_ENDING = ".milldam", ".npy"
_CHANGES_SHOWN = 3
_STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class Prepared:
    """Something that lies where data prepared from an input would lie."""

    path: Path
    problem: str | None
    """Why it can't be used; None: it was made from the input as it is now."""
    command: str
    """Makes it again."""
    tokens: int = 0


class _Settings(TypedDict, total=False):
    """Those that are looked at; there are others."""

    datasets: list[dict[str, Any]]
    clean: Any
    dedup: Any


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a store or an .npy file says of how it was made."""

    input: InputFacts
    settings: _Settings
    tokens: int
    tokenizer: str
    files: Files = field(default_factory=dict)
    """The input files, when they are written down one by one."""

    @property
    def any_format(self) -> bool:
        """Files of any name were taken from a folder."""
        return any(one.get("input_format") for one in self.settings.get("datasets", ()))

    @property
    def preprocessed(self) -> bool:
        """By `milldam preprocess`: `milldam tokenize` neither cleans nor drops duplicates."""
        return any(self.settings.get(name) is not None for name in ("clean", "dedup"))


def places(given: Path) -> list[Path]:
    """Where data prepared from an input is looked for, stores first."""
    names = [given.name] if given.is_dir() else list(dict.fromkeys((bare_name(given.name), given.name)))
    return [given.with_name(name + ending) for ending in (STORE_ENDING, NPY_ENDING) for name in names]


def prepared_beside(given: Path) -> list[Prepared]:
    """What lies beside an input, stores first."""
    found = []
    for path in places(given):
        if path.suffix == STORE_ENDING and path.is_dir():
            found.append(_look_at(given, path, _store_origin))
        elif path.suffix == NPY_ENDING and path.is_file():
            found.append(_look_at(given, path, _npy_origin))
    return found


def command_for(given: Path, out: Path, *, overwrite: bool = False) -> str:
    """What makes data from an input."""
    form = " --format npy" if out.suffix == NPY_ENDING else ""
    again = " --overwrite" if overwrite else ""
    return f"milldam tokenize {shlex.quote(str(given))}{form} -o {shlex.quote(str(out))} --tokenizer ...{again}"


def _look_at(given: Path, path: Path, read_origin: Any) -> Prepared:
    try:
        origin: _Origin = read_origin(path)
    except StoreError as error:
        return Prepared(path, str(error).removeprefix(f"{path}: "), command_for(given, path))
    now = _now(given, origin)
    known = origin.input.get("fingerprint")
    if known is None:
        return Prepared(path, "it does not say what it was made from", command_for(given, path, overwrite=True))
    if known == now["fingerprint"]:
        return Prepared(path, None, "", origin.tokens)
    other = _made_from_other(given, origin)
    if other is not None:
        elsewhere = given.with_name(given.name + path.suffix)
        return Prepared(path, other, command_for(given, elsewhere, overwrite=elsewhere.exists()))
    return Prepared(path, _what_changed(given, origin, now), _again(given, path, origin))


def _again(given: Path, path: Path, origin: _Origin) -> str:
    if origin.preprocessed:
        return "milldam preprocess CONFIG.yaml --overwrite, with the configuration it was made with"
    return f"{command_for(given, path, overwrite=True)}\n  (it was made with the tokenizer {origin.tokenizer})"


# ---- what it was made from ----


def _store_origin(path: Path) -> _Origin:
    manifest = Manifest.read(path)
    listing, settings = listed_files(path / "run" / "inputs.jsonl"), checked(_Settings, manifest.settings, path / NAME)
    return _Origin(manifest.input, settings, manifest.tokens, str(manifest.tokenizer.get("name")), listing)


def _npy_origin(path: Path) -> _Origin:
    facts = read_sidecar(path)
    if facts is None:
        raise StoreError(f"{path}: no {sidecar_path(path).name} beside it says what it was made from")
    settings = checked(_Settings, facts["settings"], sidecar_path(path))
    return _Origin(facts["input"], settings, facts["tokens"], str(facts["tokenizer"].get("name")))


# ---- what there is now ----


def _input_files(given: Path, origin: _Origin) -> Iterator[tuple[str, int, str]]:
    """(path, size, version) of the input as it is now."""
    paths = files_below(given, any_format=origin.any_format) if given.is_dir() else [str(given)]
    for path in paths:
        status = os.stat(path)
        yield path, status.st_size, version_of(status)


def _now(given: Path, origin: _Origin) -> dict[str, Any]:
    state = InputState()
    for path, size, version in _input_files(given, origin):
        state.add(path, size, version)
    return state.as_json()


# ---- the difference, in words ----


def _made_from_other(given: Path, origin: _Origin) -> str | None:
    """What else it was made from; None when it was made from this input as it was once, as far as one can tell."""
    if given.is_file() and origin.input.get("files", 1) != 1:
        part = f", of which {given.name} is one" if given.name in origin.files else ""
        return f"it was made from {origin.input['files']:,} files{part}"
    if any(one.get("split") or one.get("subset") for one in origin.settings.get("datasets", ())) and given.is_dir():
        return "it was made from a split of it, so whether that has changed is not known"
    now = by_name(_input_files(given, origin))
    if not origin.files or origin.files.keys() & now.keys():
        return None
    first = next(iter(origin.files))
    if first == _STANDARD_INPUT:
        return "it was made from standard input, so whether that was this file is not known"
    renamed = sorted(origin.files.values()) == sorted(now.values())
    hint = ", a file of the same size and time; was it renamed?" if renamed else ""
    return f"it was made from other input: {first}{' and more' if len(origin.files) > 1 else ''}{hint}"


def _what_changed(given: Path, origin: _Origin, now: dict[str, Any]) -> str:
    changes = changed_files(origin.files, by_name(_input_files(given, origin))) if origin.files else []
    was: Any = {"files": 0, "bytes": 0, **origin.input}
    if changes:
        return "; ".join(changes[:_CHANGES_SHOWN])
    if (was["files"], was["bytes"]) == (now["files"], now["bytes"]):
        return f"{given.name} has the size it had, but another time of modification or another name"
    there, before = (f"{one['bytes']:,} bytes in {counted(one['files'], 'file')}" for one in (now, was))
    return f"{given.name} has {there}, and had {before}"


log = logging.getLogger("milldam")


def open_data(
    path: str | Path,
    *,
    split: str | None = None,
    dtype: npt.DTypeLike | None = None,
    cache: str | int | None = None,
    cache_dir: str | Path | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Store | ForeignFile:
    """Open what can be trained on, in milliseconds whatever its size.

    a folder with milldam.json      a store
    X.npy                           one 1-D array of integers
    X.bin and X.idx, or X           a file pair of Megatron-LM
    X.bin alone                     nanoGPT (uint16, or `dtype`); llm.c, known by its header
    corpus.txt, other input         what was prepared from it and lies beside it, when it is fresh
    s3://bucket/corpus.milldam      a store at an address; `cache`, `cache_dir`, `storage_options`: see `milldam.remote`
    """
    asked = {"cache": cache, "cache_dir": cache_dir, "storage_options": storage_options}
    if "://" in str(path) or any(value is not None for value in asked.values()):
        return _open_remote(path, split, dtype, asked)
    given = Path(path)
    kind = store_kind(given)
    if kind is TOKENS:
        return _open_one(given, split, dtype)
    if kind is not None:
        raise StoreError(TOKENS.missing_in(given))
    foreign = foreign_path(given)
    if foreign is not None:
        return _open_one(foreign, split, dtype)
    if not given.exists() and any(glob.iglob(str(given))):
        in_a_folder = len(given.parts) > 1 and not given.is_absolute()
        made = f"{Path(given.parts[0]).stem if in_a_folder else 'corpus'}{STORE_ENDING}"
        raise InputError(
            f"{given}: a pattern that several files have. What is opened is the store that was made of them.\n"
            f"Make it: {command_for(given, Path(made))}"
        )
    if not given.exists():
        raise StoreError(f"{given}: no such file or folder.{_hint(given)}")
    # "." and ".." are no names, and what lies beside a folder is found by its name.
    return _open_for(given if given.name not in ("", "..") else given.resolve(), split, dtype)


def _open_remote(path: str | Path, split: str | None, dtype: npt.DTypeLike | None, asked: dict[str, Any]) -> Store:
    """A store at an address: only those who have one pay for what reads it."""
    from milldam.remote import place_at

    place = place_at(path, **asked)
    if dtype is not None:
        raise ConfigError(f"{place.name}: a store knows its dtype; leave dtype out.")
    store = Store(place, split=split)
    if place.origin is not None:
        # Now, rather than at the first shard that has to be fetched.
        place.origin.require_room(max((shard.bin["bytes"] for shard in store.shards), default=0))
    return store


def _open_one(path: Path, split: str | None, dtype: npt.DTypeLike | None) -> Store | ForeignFile:
    """A store or a file of another tool, by its own name."""
    if not path.is_dir():
        file = open_foreign(path, dtype)
        if split is not None:
            file.named_part(split)
        return file
    if dtype is not None:
        raise ConfigError(f"{path}: a store knows its dtype; leave dtype out.")
    return Store(path, split=split)


def _hint(given: Path) -> str:
    there = [path for path in places(given) if path.exists()] if given.name else []
    return f' Did you mean "{there[0]}"?' if there else nearby(str(given))


# ---- what was prepared from an input ----


def _open_for(given: Path, split: str | None, dtype: npt.DTypeLike | None) -> Store | ForeignFile:
    if given.is_dir() and (given.suffix == STORE_ENDING or (given / "run" / "lock").exists()):
        Manifest.read(given)  # raises, and says what is wrong with it
    try:
        beside = prepared_beside(given)
    except OSError as error:
        raise InputError(f"{error.filename}: can't be read ({error.strerror}).") from None
    fresh = [one for one in beside if one.problem is None]
    if not fresh:
        _refuse(given, beside)
    chosen = fresh[0]
    passed_over = "".join(f"; {one.path.name} is not used: {one.problem}" for one in beside if one.problem)
    # Not the file that was asked for: to be seen also where nobody has set up logging.
    log.warning(f"{given}: using {chosen.path}, {chosen.tokens:,} tokens, made from it and up to date{passed_over}")
    data = _open_one(chosen.path, split, dtype)
    data.found_for = given
    return data


def _refuse(given: Path, beside: list[Prepared]) -> NoReturn:
    if not beside:
        _refuse_bare(given)
    listed = "\n".join(f"  {one.path}: {one.problem}" for one in beside)
    raise MismatchError(
        f"{given}: the data beside it can't be used for it:\n{listed}\n"
        f"Make it: {beside[0].command}\n"
        f'Or use it as it is, by its own name: milldam.open("{beside[0].path}")'
    )


def _refuse_bare(given: Path) -> NoReturn:
    """Nothing prepared lies beside it."""
    if given.is_dir() and next(files_below(given), None) is None:
        Manifest.read(given)  # raises: it is neither a store nor input
    looked = places(given)
    missing = (
        f"there is nothing beside it that was prepared from it (looked for {', '.join(path.name for path in looked)})."
    )
    if given.is_file() and kind_of(given.name) is None:
        raise InputError(f"{given}: neither a store nor .npy, .bin or .idx, and {missing}")
    raise InputError(f"{given}: {missing}\nMake it: {command_for(given, looked[0])}")
