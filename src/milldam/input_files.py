"""Which files are input, and what names their state: for who reads them, and for who asks whether what was made of them
is fresh. Of names that are not here: what is like them, and whether the Hub can be asked.

No file is opened but the manifest of a table: a `stat` for each, and the names of one folder at a time are all that is
held.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from milldam.errors import InputError, MilldamError, nearest
from milldam.files import hash_bytes
from milldam.stores.kinds import KINDS, TABLE
from milldam.stores.place import Folder

FORMATS = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_BOOKKEEPING = {
    *(kind.manifest for kind in KINDS),
    "config.json",
    "dataset_dict.json",
    "dataset_info.json",
    "dataset_infos.json",
    "generation_config.json",
    "special_tokens_map.json",
    "state.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
}
"""What lies beside the data in our folders, and in those of HF datasets and models: no input, unless it is named."""
_OUR_RECORDS = ".npy.json"
"""How the names of our files end that tell what an .npy file was made from."""
RUN_FOLDER = "run"
_ENDINGS_SHOWN = 5
_NAMES_COMPARED, _FILES_COMPARED = 10_000, 200_000
_HUB_SECONDS = 5.0
COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}


def is_address(given: str | Path) -> bool:
    """Whether fsspec should open it: s3://, gs://, hf://, memory://, ..."""
    return "://" in str(given)


def missing_package(address: str, error: ImportError) -> str:
    """What to install to read an address of this kind."""
    scheme = address.partition("://")[0].rpartition("::")[2]
    how = f'pip install "milldam[{_EXTRAS[scheme]}]"' if scheme in _EXTRAS else str(error)
    return f"{without_secrets(address)}: a package for {scheme}:// is missing: {how}"


_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hf"}
_NO_CREDENTIALS = (
    *("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "LocalTokenNotFoundError"),
    *("DefaultCredentialsError", "RefreshError", "ProfileNotFound"),
)
_WITH_BUCKETS = ("s3", "s3a", "gs", "gcs")


@contextlib.contextmanager
def explain_address_errors(address: str) -> Iterator[None]:
    """Turn what a service, its client or the network raises into an error that says what to do.

    A file that is not there stays a FileNotFoundError.
    """
    try:
        yield
    except (MilldamError, FileNotFoundError):
        raise
    except Exception as error:  # each client has error types of its own
        raise address_error(address, error) from error


def address_error(address: str, error: Exception, tried: str = "") -> InputError:
    """What to say of an address that can't be read; never the options, which may hold secrets."""
    told, name = first_line(error), without_secrets(address)
    if is_refusal(error):
        return InputError(
            f"{name}: no permission: {told}.\nCredentials come from where the service's own tools have them "
            "(environment, configuration files), or from storage_options; see docs/remote.md."
        )
    return InputError(
        f"{name}: can't be read: {told}{tried}.\nCheck the network and the endpoint (AWS_ENDPOINT_URL, "
        "storage_options; see docs/remote.md), then run it again: what is here already stays."
    )


def is_refusal(error: Exception) -> bool:
    """Whether somebody without permission, or without credentials, is sent away: to ask again is of no use."""
    return isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS


def first_line(error: Exception) -> str:
    """The first line of an error, not too long, and with no secret of an address in it."""
    text = str(error).strip() or type(error).__name__
    return without_secrets(text.splitlines()[0][:300]).rstrip(".")


def missing_bucket(filesystem: Any, address: str, path: str) -> str:
    """That the bucket of an address is not there, for a message; empty when it is, or when nobody can tell."""
    bucket = path.partition("/")[0]
    if address.partition("://")[0] in _WITH_BUCKETS:
        with contextlib.suppress(Exception):
            return "" if filesystem.exists(bucket) else f'there is no bucket "{bucket}"'
    return ""


def without_secrets(text: str) -> str:
    """An address without its user, password and query; what is no address stays as it is.

    >>> without_secrets("https://me:secret@host/data?token=abc")
    'https://host/data'
    """
    return re.sub(r"(\w://[^\s?]*)\?\S*", r"\1", re.sub(r"://[^/\s@]*@", "://", text))


def kind_of(name: str, input_format: str | None = None) -> tuple[str, str | None] | None:
    """(format, compression) as a file's name says them; None when it says no known format. `input_format`: what the
    user says that it is.

    >>> kind_of("corpus.jsonl.zst"), kind_of("corpus.pdf")
    (('jsonl', 'zst'), None)
    """
    # By plain strings: pathlib takes five times as long, and there may be ten million files.
    stem, ending = os.path.splitext(name.lower())  # noqa: PTH122
    compression = COMPRESSIONS.get(ending)
    if compression is not None:
        ending = os.path.splitext(stem)[1]  # noqa: PTH122
    format = input_format or FORMATS.get(ending)
    return (format, compression) if format is not None else None


def bare_name(name: str) -> str:
    """A file's name without the endings that say its format and compression.

    >>> bare_name("corpus.v2.jsonl.zst")
    'corpus.v2'
    """
    for endings in (COMPRESSIONS, FORMATS):
        stem, ending = os.path.splitext(name)  # noqa: PTH122 - a name, not a path
        if ending.lower() in endings:
            name = stem
    return name


def count_left_out(left_out: Counter[str], path: str) -> None:
    """Note a file of a folder that is not read, since its name says no known format, by its ending."""
    if not _is_bookkeeping(path):
        left_out[PurePosixPath(path).suffix.lower() or "no ending"] += 1


def describe_left_out(left_out: Counter[str]) -> str:
    """
    >>> describe_left_out(Counter({".pdf": 2, ".md": 1}))
    '3 files of no known format (.pdf 2, .md 1)'
    """
    endings = [f"{ending} {number:,}" for ending, number in left_out.most_common(_ENDINGS_SHOWN)]
    listed = ", ".join([*endings, "..."] if len(left_out) > _ENDINGS_SHOWN else endings)
    files = "1 file" if left_out.total() == 1 else f"{left_out.total():,} files"
    return f"{files} of no known format ({listed})" if left_out else ""


def files_below(folder: Path, *, any_format: bool = False, left_out: Counter[str] | None = None) -> Iterator[str]:
    """The input files of a folder to the bottom, sorted by name level by level: the order depends on the names alone.

    Hidden ones are left out, as is what milldam made; and what is of no known format, unless `any_format`: `left_out`
    is told. Where the folder itself is a table of ours, its files come in the order of its rows.
    """
    for path in _shards(folder) if is_table(folder) else _below(folder, ()):
        if any_format or is_input(path):
            yield path
        elif left_out is not None:
            count_left_out(left_out, path)


def is_input(path: str) -> bool:
    """Whether a file that lies in a folder is read without being named: by its name."""
    return kind_of(path) is not None and not _is_bookkeeping(path)


def _is_bookkeeping(path: str) -> bool:
    name = os.path.basename(path)  # noqa: PTH119
    return name in _BOOKKEEPING or name.endswith(_OUR_RECORDS)


def is_table(folder: Path) -> bool:
    """Whether a folder is a table of ours. Raises InputError for one that is not finished."""
    if (folder / TABLE.manifest).is_file():
        return True
    if (folder / RUN_FOLDER / "lock").exists() and next(folder.glob("rows-*.arrow"), None) is not None:
        raise InputError(f"{folder}: an unfinished table. Run the milldam.map that makes it again, to its end.")
    return False


def _shards(table: Path) -> Iterator[str]:
    for name, _ in TABLE.read(Folder(table)).files():
        if not (table / name).is_file():
            raise InputError(f"{table / name}: this shard of the table is missing. Make the table again.")
        yield str(table / name)


def _below(folder: Path, above: tuple[str, ...]) -> Iterator[str]:
    real = os.path.realpath(folder)
    if real in above:
        return  # a link that leads back up
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        # What a run wrote of itself is no input, also where a store or a table is named as input.
        of_run = entry.name == RUN_FOLDER and is_ours(os.fspath(folder))
        if entry.name.startswith(".") or (entry.is_dir() and (of_run or is_ours(entry.path))):
            continue
        if entry.is_dir():
            yield from _below(Path(entry.path), (*above, real))
        elif entry.is_file():
            yield entry.path


def is_ours(folder: str) -> bool:
    """A store, a table or a run, finished or not: what we made is no input, wherever it lies."""
    return any((Path(folder) / name).exists() for name in (*(kind.manifest for kind in KINDS), "run/lock"))


def version_of(status: os.stat_result) -> str:
    """Changes when a local file changes."""
    return str(status.st_mtime_ns)


NO_INPUT: dict[str, Any] = {"files": 0, "bytes": 0, "fingerprint": hash_bytes(b"")}


def add_input(state: dict[str, Any], path: str, size: int, version: str, dataset: int = 0) -> dict[str, Any]:
    """Number, size and fingerprint of input files, with one more.

    The fingerprint is made of name, size and version of each, in order. Of the name, not the path: data that moves to
    another folder is still the same data.
    """
    # Not by pathlib, which takes three times as long: there may be ten million of them.
    known = f"{state['fingerprint']} {dataset} {os.path.basename(path)} {size} {version}"  # noqa: PTH119
    fingerprint = hash_bytes(known.encode("utf-8", "surrogateescape"))
    return {"files": state["files"] + 1, "bytes": state["bytes"] + size, "fingerprint": fingerprint}


def changed_files(before: Path, now: Path) -> list[str]:
    """What differs between two lists of a run's input, in words, for a message alone: what is damaged in a list, or not
    there, is left out. By name, since input may have moved as a whole; of very many files, the first."""

    def files(listing: Path) -> Iterator[tuple[str, tuple[int, str]]]:
        with contextlib.suppress(OSError), listing.open("rb") as lines:
            for line in itertools.islice(lines, _FILES_COMPARED):
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    file = json.loads(line)
                    yield os.path.basename(file["path"]), (int(file["size"]), str(file["version"]))  # noqa: PTH119

    was, there = dict(files(before)), dict(files(now))
    found = [f"{'changed' if name in was else 'new'}: {name}" for name in there if was.get(name) != there[name]]
    return found + [f"gone: {name}" for name in was if name not in there]


def nearby(given: str) -> str:
    """A hint at a file or folder of about this name, to append to a message; empty when there is none."""
    path = Path(os.path.expanduser(given))
    there = next((folder for folder in path.parents if folder.is_dir()), None)
    if there is None or not os.access(there, os.R_OK):
        return ""
    missing, *below = path.relative_to(there).parts
    near = nearest(missing, (entry.name for entry in itertools.islice(os.scandir(there), _NAMES_COMPARED)))
    if near is None:
        return ""
    found = there / near
    whole = found.joinpath(*below)
    return f' Did you mean "{whole if whole.exists() else found}"?'


def why_no_hub(name: str, file: str, *, repo_type: str = "model") -> str | None:
    """Why nobody answers when asked for a file of this repository; None: there is an answer, whatever it is.

    One short try, before huggingface_hub and datasets make six in half a minute and tell of each.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=repo_type), timeout=_HUB_SECONDS)
    except (errors.HfHubHTTPError, ValueError):
        return None
    except Exception as error:  # the network has error types of its own, which change with huggingface_hub
        return f"the Hub does not answer ({' '.join(str(error).split()) or type(error).__name__})"
    return None
