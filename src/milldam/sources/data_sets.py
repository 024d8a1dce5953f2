"""What the user calls a dataset -> inputs to list, and which of its documents to take.

An ordinary path or address; one with a split, whose files are told by HF's conventions; a folder that HF `save_to_disk`
wrote, here or at an address; or a name on the Hub, whose files are read where they lie, never downloaded whole (this
alone needs the package `datasets`). Reads no data. A split is held as a list of paths: 17 MB for 100,000 files.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from milldam.errors import ConfigError, InputError, did_you_mean
from milldam.files import stays_in_folder
from milldam.input_files import FORMATS, is_address, kind_of, nearby, why_no_hub
from milldam.sources.compression import STDIN, open_bytes
from milldam.sources.units import list_inputs

TRAIN, ALL = "train", "all"
_KEYWORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_CANONICAL = {word: split for split, words in _KEYWORDS.items() for word in words}
# A word ends where HF has it end: at punctuation, a digit or the name's own end.
_WORD = re.compile(rf"(?<![^-._ 0-9])(?:{'|'.join(_CANONICAL)})(?![^-._ 0-9])")
_NUMBERED = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}.*")
_NO_SPLITS = ("chunk", "data", "file", "part", "shard")
_ASKED = re.compile(r"(?P<name>\w+(?:[.-]\w+)*)\s*(?:\[(?P<rows>.*)\])?")
_ROWS = re.compile(r"\s*(-?\d+(?:_\d+)*%?)?\s*:\s*(-?\d+(?:_\d+)*%?)?\s*")
_EXAMPLES = "Examples: train, train[:100_000], train[10%:20%], train[-5%:], train+test."
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_ENDING = re.compile(r"\.[A-Za-z]\w*\Z")


# ---- how a split is asked for ----


@dataclass(frozen=True, slots=True)
class RowSlice:
    """A slice of a dataset's documents, as Python slices a list; None: from its begin, to its end.

    >>> RowSlice(10, 20, percent=True).bounds(1000)
    (100, 200)
    """

    start: int | None = None
    stop: int | None = None
    percent: bool = False

    @property
    def needs_total(self) -> bool:
        """Whether the documents must be counted before it is known which ones are meant."""
        return self.percent or (self.start or 0) < 0 or (self.stop or 0) < 0

    def bounds(self, total: int) -> tuple[int, int]:
        """(first, behind the last) of `total` documents. Percents are rounded to the closest document, as in HF."""

        def place(edge: int) -> int:
            """Counted from the end when below zero, even where the percents of a few documents round to none."""
            count = round(edge * total / 100.0) if self.percent else edge
            return min(max(total + count if edge < 0 else count, 0), total)

        first = 0 if self.start is None else place(self.start)
        return first, max(first, total if self.stop is None else place(self.stop))


@dataclass(frozen=True, slots=True)
class Split:
    """What was asked for: splits one after the other, or a slice of one."""

    names: tuple[str, ...]
    rows: RowSlice | None = None


def parse_split(text: str) -> Split:
    """
    >>> parse_split("train[:100_000]")
    Split(names=('train',), rows=RowSlice(start=None, stop=100000, percent=False))
    """

    def refused(problem: str) -> ConfigError:
        return ConfigError(f'split "{text}": {problem}. {_EXAMPLES}')

    parts = [_ASKED.fullmatch(part.strip()) for part in text.split("+")]
    names = tuple(part["name"] for part in parts if part is not None)
    if len(names) < len(parts):
        raise refused("no name of a split with an optional slice")
    slices = [part["rows"] for part in parts if part is not None and part["rows"] is not None]
    if not slices:
        return Split(names)
    if len(names) > 1:
        raise refused("a sum of slices is not known: give each its own entry under datasets, with the same path")
    edges = _ROWS.fullmatch(slices[0])
    if edges is None:
        raise refused(f"[{slices[0]}] is not a slice of documents")
    percents = {edge.endswith("%") for edge in edges.groups() if edge is not None}
    if len(percents) == 2:
        raise refused("percents on one side only")
    start, stop = (None if edge is None else int(edge.rstrip("%")) for edge in edges.groups())
    if True in percents and any(abs(edge) > 100 for edge in (start or 0, stop or 0)):
        raise refused("more than 100 %")
    first = start or 0
    if stop is not None and first >= stop and (first < 0) == (stop < 0):
        raise refused("it ends where it begins, so that it has no documents")
    return Split(names, RowSlice(start, stop, True in percents))


def choose_splits(asked: Split | None, there: Mapping[str, Any], path: str) -> list[str]:
    """The names of the wanted splits, as they are called there: "val" and "dev" are "validation" too. None asked for:
    train, or the only one there is."""
    listed = ", ".join(f'"{name}"' for name in there) or "none"
    if asked is None:
        if TRAIN not in there and len(there) != 1:
            raise InputError(f"{path}: which split? There are {listed}. Set split.")
        return [TRAIN] if TRAIN in there else list(there)
    if asked.names == (ALL,) and ALL not in there:
        return list(there)
    by_meaning = {_CANONICAL.get(name, name): name for name in there}
    chosen = []
    for name in asked.names:
        found = name if name in there else by_meaning.get(_CANONICAL.get(name, name))
        if found is None:
            hint = did_you_mean(name, there)
            raise InputError(f'{path}: no split "{name}" in it; there are: {listed}.{hint} Set split.')
        chosen.append(found)
    return chosen


# ---- looking it up ----


@dataclass(frozen=True, slots=True)
class Resolved:
    inputs: tuple[str, ...]
    """For `list_inputs`, in order."""
    input_format: str | None = None
    """For `list_inputs`: what the files are, when their names do not say."""
    rows: RowSlice | None = None
    """Which documents of all the inputs together; None: all."""


def resolve_data_set(path: str, split: str | None, subset: str | None, *, input_format: str | None = None) -> Resolved:
    """Look up a dataset.

    Raises ConfigError for a split or subset that can't be meant, InputError for a dataset or split that is not there.
    """
    asked = None if split is None else parse_split(split)
    rows = None if asked is None else asked.rows
    if _may_be_on_hub(path):
        splits = _hub_splits(path, subset)
        files = tuple(file for name in choose_splits(asked, splits, path) for file in splits[name])
        unknown = [file for file in files if kind_of(file) is None]
        if unknown and input_format is None:
            raise InputError(f"{path}: it has files such as {unknown[0]}.\nKnown are {', '.join(FORMATS)}.")
        return Resolved(files, input_format, rows)
    if subset is not None:
        raise ConfigError(f"{path}: subset is for datasets on the Hub; this one is not there. Name its folder in path.")
    saved = _saved_splits(path)
    if saved is not None:
        chosen = choose_splits(asked, saved, path)
        return Resolved(tuple(file for name in chosen for file in _saved_files(saved[name])), "arrow", rows)
    if asked is None:
        return Resolved((path,), input_format)
    groups = _ordinary_splits(path, input_format)
    # A name may carry two splits: its file is taken once.
    wanted = dict.fromkeys(file for name in choose_splits(asked, groups, path) for file in groups[name])
    return Resolved(tuple(wanted), input_format, rows)


def split_names(path: str, subset: str | None) -> list[str]:
    """The splits of a folder that `save_to_disk` wrote, or of a dataset on the Hub; none of anything else."""
    if _may_be_on_hub(path):
        return list(_hub_splits(path, subset))
    return list(_saved_splits(path) or ())


def refuse_texts(paths: Sequence[str]) -> None:
    """Raises InputError where strings in a list are no paths: they may be meant as texts, and nobody guesses."""
    for path in paths:
        known = path == STDIN or is_address(path) or glob.has_magic(path) or os.path.lexists(os.path.expanduser(path))
        if not known and not ("/" in path and _may_be_on_hub(path)):
            shown = textwrap.shorten(path, 60, placeholder=" ...") or repr(path)
            raise InputError(
                f"{shown}: no such file or folder.{nearby(path) if len(path) < 256 else ''}\nStrings in a list are "
                'paths. To tokenize texts, give an iterator, iter(texts), or rows, [{"text": ...}, ...].'
            )


# ---- files, folders, globs and addresses ----


def splits_in(name: str) -> list[str]:
    """The splits that the name of a file or folder carries as words.

    >>> splits_in("wiki_dev-00001.jsonl")
    ['validation']
    """
    return list(dict.fromkeys(_CANONICAL[word] for word in _WORD.findall(name)))


def _ordinary_splits(path: str, input_format: str | None) -> dict[str, list[str]]:
    """Files by split, in their order: by the first of HF's conventions that any file follows.

    data/NAME-00000-of-00005 for any name; then a split's word in a folder's name; then one in the file's. Files that do
    not follow it belong to no split. When there are none of these, everything is "train".
    """
    base = _parts(path.rstrip("/"))
    if not os.path.lexists(path):
        base = tuple(itertools.takewhile(lambda part: not glob.has_magic(part), base))
    files = [file.path for file in list_inputs((path,), input_format)]
    groups: list[dict[str, list[str]]] = [{}, {}, {}, {TRAIN: files}]
    for file in files:
        parts = _parts(file)
        folders = parts[len(base) : -1] if parts[: len(base)] == base else ()
        in_data = folders == ("data",) or (not folders and parts[-2:-1] == ("data",))
        numbered = _NUMBERED.fullmatch(parts[-1]) if in_data else None
        by_number = [numbered[1]] if numbered is not None and numbered[1] not in _NO_SPLITS else []
        by_folder = dict.fromkeys(split for folder in folders for split in splits_in(folder))
        for group, splits in zip(groups, (by_number, by_folder, splits_in(parts[-1])), strict=False):
            for split in splits:
                group.setdefault(split, []).append(file)
    chosen = next(group for group in groups if group)
    if len(files) == 1 and _parts(files[0])[-1:] == base[-1:]:
        # A single file that is named is the user's word, as data_files is in HF: it is train whatever it is called.
        chosen.setdefault(TRAIN, files)
    return chosen


def _parts(path: str) -> tuple[str, ...]:
    """The names that a path or an address goes through."""
    inner = path.rpartition("://")[2].lstrip("/") if is_address(path) else os.path.expanduser(path)
    return PurePosixPath(inner).parts


# ---- what HF `save_to_disk` wrote ----


def _saved_splits(path: str) -> dict[str, str] | None:
    """The folder of each split; None when the path is no such folder."""
    splits = _read_json(path, "dataset_dict.json").get("splits")
    if isinstance(splits, list):
        return {str(name): _join(path, str(name)) for name in splits}
    state = _read_json(path, "state.json")
    if "_data_files" not in state:
        return None
    words = splits_in(_parts(path)[-1]) if _parts(path) else []
    return {state.get("_split") or (words or [TRAIN])[0]: path}


def _saved_files(folder: str) -> list[str]:
    """The Arrow files of a saved dataset, in its order."""
    state = _read_json(folder, "state.json")
    if any(state.get(key) for key in ("_indices_files", "_indices_data_files")):
        raise InputError(
            f"{folder}: its rows are chosen or shuffled by an index file, which milldam does not follow.\n"
            "Save it again with datasets: dataset.flatten_indices().save_to_disk(...)"
        )
    files = state.get("_data_files")
    if not isinstance(files, list) or not all(isinstance(file, dict) and "filename" in file for file in files):
        raise InputError(f"{folder}: no dataset in it: its state.json lists no files. Save it again.")
    return [_join(folder, str(file["filename"])) for file in files]


def _join(folder: str, name: str) -> str:
    if not stays_in_folder(name):
        raise InputError(f'{folder}: it lists "{name}", which is not a file in it. Save it again.')
    return f"{folder.rstrip('/')}/{name}"


def _read_json(folder: str, name: str) -> dict[str, Any]:
    """An object from a small file; empty when there is no such file."""
    remote = is_address(folder)
    if folder == STDIN or (remote and (glob.has_magic(folder) or kind_of(folder) is not None)):
        return {}
    try:
        with open_bytes(f"{folder.rstrip('/')}/{name}") as file:
            value = json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    except InputError as error:
        if isinstance(error.__cause__, PermissionError):
            return {}  # so do some stores call what does not exist
        raise
    except OSError as error:
        raise InputError(f"{folder}: can't be read ({error}). Try again, or check the address.") from None
    except ValueError as error:
        raise InputError(f"{folder}/{name}: not JSON ({error}). Save the dataset again.") from None
    return value if isinstance(value, dict) else {}


# ---- the Hub ----


def _may_be_on_hub(path: str) -> bool:
    """Whether a path that does not exist may be the name of a dataset: `name` or `user/name`, without an ending."""
    here = path == STDIN or is_address(path) or glob.has_magic(path) or os.path.lexists(path)
    return not here and _HUB_NAME.fullmatch(path) is not None and _ENDING.search(path) is None


def _hub_splits(path: str, subset: str | None) -> dict[str, list[str]]:
    missing = f"{path}: no such file or folder.{nearby(path)}"
    try:
        from datasets import load_dataset_builder
    except ImportError:
        raise InputError(f'{missing}\nTo read a dataset of that name from the Hub: pip install "milldam[hf]"') from None
    failed = f"{missing}\nNor can a dataset of that name be opened on the Hub: "
    silence = why_no_hub(path, "README.md", repo_type="dataset")
    if silence is not None:
        raise InputError(f"{failed}{silence}.")
    try:
        data_files = load_dataset_builder(path, name=subset).config.data_files
    except Exception as error:  # the network, the Hub and datasets have error types of their own
        raise InputError(
            failed, textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
        ) from None
    if not data_files:
        raise InputError(
            f"{path}: this dataset has no data files on the Hub.\nSave it with datasets: save_to_disk(...)"
        )
    return {str(split): [str(file) for file in files] for split, files in data_files.items()}
