"""Files that other tools made, as training sees them: nanoGPT, llm.c, Megatron-LM, numpy.

Opening reads a header and compares sizes; tokens are mapped when they are first asked for. Nothing is unpickled: of an
.npy file the header alone is parsed, and a meta.pkl is never opened. Integers, little-endian; an .npy file says its
byte order itself.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

from milldam.checked import checked, read_json
from milldam.errors import ConfigError, InputError, StoreError
from milldam.files import hash_bytes
from milldam.loader.reading import TokenArray
from milldam.loader.stream import TokenFile, TokenStream
from milldam.loader.views import Trainable
from milldam.stores.kinds import FileRecord, InputFacts, TokenizerFacts
from milldam.stores.tokens.format import Index

ENDINGS = (".npy", ".bin", ".idx")
_NPY_HEADERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
_LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""Files of llm.c and modded-nanogpt: first number of the header -> version, dtype."""
_LLM_C_HEADER = 1024
_BLOCKS, _BLOCK_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a file says of itself, or what was said of it."""

    kind: str
    file: TokenFile
    dtype: np.dtype[Any]
    vocab_size: int | None = None
    tokenizer_name: str | None = None
    tokenizer_hash: str | None = None
    eos: int | None = None


class ForeignFile(Trainable):
    """Tokens end to end in one file, and what training needs of them.

    file.windows(seq_len), .streams(batch_size, seq_len), .split(train=0.9, val=...)
    """

    found_for: Path | None = None
    """The input it was found for, when it was opened by the input's name."""

    def __init__(self, contents: _Contents, asked: np.dtype[Any] | None) -> None:
        self._contents, self._asked = contents, asked

    @property
    def path(self) -> Path:
        return self._contents.file.path

    @property
    def kind(self) -> str:
        """Whose file it is: nanoGPT, llm.c, Megatron, numpy."""
        return self._contents.kind

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return self._contents.file.tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._contents.dtype

    @property
    def vocab_size(self) -> int | None:
        """None: the file does not say."""
        return self._contents.vocab_size

    @property
    def tokenizer_name(self) -> str | None:
        """None: the file does not say."""
        return self._contents.tokenizer_name

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the content: size, dtype, and 64 blocks of 4 KB from end to end. A copy has the same.

        Two files that differ between the blocks alone are not told apart: all of a file is too much to read.
        """
        file = self._contents.file
        known = f"{self.dtype.str} {self.tokens} ".encode() + _sample(file.path, file.first_byte)
        return hash_bytes(known if file.index is None else known + _sample(file.index, 0))

    def stream(self) -> TokenStream:
        return TokenStream(
            name=str(self.path),
            files=(self._contents.file,),
            dtype=self.dtype,
            first=0,
            stop=self.tokens,
            fingerprint=self.fingerprint,
            pad_id=self._contents.eos or 0,
            tokenizer=self._contents.tokenizer_hash,
        )

    def named_part(self, name: str) -> Trainable:
        beside = self.path.with_name(f"{name}{self.path.suffix}")
        other = f": open {beside}" if beside.exists() else ", such as train.bin and val.bin"
        raise ConfigError(
            f'{self.path}: has no splits, and "{name}" is asked for. Here each split is a file of its own{other}.\n'
            "Or cut this one by tokens: .split(train=0.9, val=...)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return open_foreign, (self.path, self._asked)

    def _facts(self) -> str:
        return f"{self.tokens:,} tokens, {self.dtype}, {self.kind}"

    def __repr__(self) -> str:
        origin = "" if self.found_for is None else f", made from {self.found_for}"
        return f"{type(self).__name__}({str(self.path)!r}: {self._facts()}{origin})"


class MegatronFile(ForeignFile):
    """A pair of Megatron-LM, whose documents are known: `file[i]`, `len(file)`, `for document in file`."""

    def __init__(self, contents: _Contents, asked: np.dtype[Any] | None, index: Index) -> None:
        super().__init__(contents, asked)
        self.index = index

    @functools.cached_property
    def _mapped(self) -> TokenArray:
        # A plain array over the mapping: np.memmap's slicing costs several times as much.
        return np.asarray(np.memmap(self.path, self.dtype, mode="r"))

    def __len__(self) -> int:
        return len(self.index.documents) - 1

    def __getitem__(self, number: int) -> TokenArray:
        """A document, as a view into the mapped file."""
        wanted = number + len(self) if number < 0 else number
        if not 0 <= wanted < len(self):
            raise IndexError(f"document {number} of {len(self):,} documents")
        begin, end = self.index.extent(wanted)
        return self._mapped[begin:end]

    def __iter__(self) -> Iterator[TokenArray]:
        return (self[number] for number in range(len(self)))

    def _facts(self) -> str:
        return f"{len(self):,} documents, {super()._facts()}"


# ---- opening ----


def foreign_path(given: Path) -> Path | None:
    """The file that a path means, when it means one of these: itself, or PREFIX.bin for the prefix of a pair."""
    if given.suffix in ENDINGS and given.is_file():
        return given
    pair = [given.with_name(given.name + ending) for ending in (".bin", ".idx")] if given.name else []
    return pair[0] if pair and not given.exists() and all(path.is_file() for path in pair) else None


def open_foreign(path: Path, dtype: npt.DTypeLike | None = None) -> ForeignFile:
    """Open a file that ends in .npy, .bin or .idx. `dtype`: for .bin files, which may not say it themselves."""
    asked = _checked_dtype(dtype)
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path}: empty. There is nothing to train on.")
        if path.suffix == ".npy":
            return ForeignFile(_agreed(_read_npy(path), asked), asked)
        if path.suffix == ".idx" or path.with_suffix(".idx").is_file():
            return _open_pair(path, asked)
        return ForeignFile(_read_bin(path, asked), asked)
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}).") from None


def _checked_dtype(dtype: npt.DTypeLike | None) -> np.dtype[Any] | None:
    if dtype is None:
        return None
    try:
        asked = np.dtype(dtype)
    except TypeError:
        raise ConfigError(f'dtype: "{dtype}" is no dtype of numpy. Use one such as uint16 or int32.') from None
    if asked.kind not in "iu":
        raise ConfigError(f"dtype: {asked}; tokens are integers, such as uint16 or int32.")
    return asked


def _agreed(contents: _Contents, asked: np.dtype[Any] | None) -> _Contents:
    """What says its dtype itself must not be asked for as another one."""
    if asked is not None and asked != contents.dtype:
        raise ConfigError(
            f"{contents.file.path}: says itself that it holds {contents.dtype}, and dtype={asked} is asked for. "
            "Leave dtype out."
        )
    if contents.file.tokens == 0:
        raise InputError(f"{contents.file.path}: no tokens in it. There is nothing to train on.")
    return contents


# ---- numpy ----


def _read_npy(path: Path) -> _Contents:
    shape, dtype, first = _npy_header(path)
    if dtype.kind not in "iu":
        what = "Python objects, which are never loaded" if dtype.hasobject else str(dtype)
        raise InputError(f"{path}: holds {what}. Tokens are a 1-D array of integers.")
    if len(shape) != 1:
        raise InputError(
            f"{path}: a {len(shape)}-D array of shape {shape}. Tokens are a 1-D array: save array.reshape(-1)."
        )
    size, expected = path.stat().st_size, first + shape[0] * dtype.itemsize
    if size != expected:
        raise InputError(f"{path}: {size:,} bytes where its header says {expected:,}. Make it again.")
    if first % dtype.itemsize:
        raise InputError(f"{path}: its tokens begin at byte {first}, which is not aligned. Save it again with numpy.")
    contents = _Contents("numpy", TokenFile(path, shape[0], first), dtype)
    facts = read_sidecar(path)
    return contents if facts is None else _with_facts(contents, facts)


def _npy_header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """(shape, dtype, byte where the array begins); numpy reads the header as a literal, nothing in it is run."""
    with path.open("rb") as file:
        try:
            version = npy_format.read_magic(file)
            shape, _, dtype = _NPY_HEADERS[version](file)
        except KeyError:
            raise InputError(f"{path}: .npy version {version}, which plain integers do not need.") from None
        except Exception as error:  # a damaged header may fail anywhere in numpy's parsers
            raise InputError(f"{path}: not a .npy file ({error}).") from None
        return shape, dtype, file.tell()


def sidecar_path(npy: Path) -> Path:
    return npy.with_name(npy.name + ".json")


class _Part(TypedDict):
    bin: FileRecord


class Sidecar(TypedDict):
    """What milldam wrote down beside an .npy file: as the manifest of a store."""

    dtype: str
    tokens: int
    vocab_size: int
    tokenizer: TokenizerFacts
    settings: dict[str, Any]
    input: InputFacts
    shards: list[_Part]


def read_sidecar(npy: Path) -> Sidecar | None:
    """None when there is no such file, or it is not ours."""
    path = sidecar_path(npy)
    try:
        facts = read_json(path)
    except FileNotFoundError:
        return None
    if not isinstance(facts, dict) or facts.get("format") != "milldam npy":
        return None
    return checked(Sidecar, facts, path)


def _with_facts(contents: _Contents, facts: Sidecar) -> _Contents:
    there = f"{contents.file.tokens} tokens of {contents.dtype.name}"
    written = f"{facts['tokens']} tokens of {facts['dtype']}"
    path = contents.file.path
    if there != written:
        raise StoreError(
            f"{path}: {there}, and {sidecar_path(path).name} beside it says {written}: it belongs to another file. "
            "Make both again, or remove the .json."
        )
    tokenizer = facts["tokenizer"]
    return _Contents(
        *(contents.kind, contents.file, contents.dtype),
        vocab_size=facts["vocab_size"],
        tokenizer_name=tokenizer.get("name"),
        tokenizer_hash=tokenizer.get("xxh3"),
        eos=tokenizer.get("eos"),
    )


# ---- Megatron ----


def _open_pair(path: Path, asked: np.dtype[Any] | None) -> MegatronFile:
    tokens, index_path = path.with_suffix(".bin"), path.with_suffix(".idx")
    if not tokens.is_file():
        raise InputError(f"{index_path}: an index without its tokens: there is no {tokens.name} beside it.")
    index = Index.map(index_path)
    size = tokens.stat().st_size
    index.check_ends(size)
    file = TokenFile(tokens, size // index.dtype.itemsize, index=index_path, empty_documents=True)
    return MegatronFile(_agreed(_Contents("Megatron", file, index.dtype), asked), asked, index)


# ---- nanoGPT and llm.c ----


def _read_bin(path: Path, asked: np.dtype[Any] | None) -> _Contents:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(12)
    magic, version, count = struct.unpack("<3i", head.ljust(12, b"\0"))
    if magic in _LLM_C:
        return _agreed(_llm_c(path, magic, version, count), asked)
    dtype = np.dtype("uint16") if asked is None else asked
    if size % dtype.itemsize:
        raise InputError(
            f"{path}: {size:,} bytes are no whole number of tokens of {dtype}, {dtype.itemsize} bytes each. "
            'Is it cut short, or of another dtype? Say which, such as dtype="int32".'
        )
    return _Contents("nanoGPT", TokenFile(path, size // dtype.itemsize), dtype)


def _llm_c(path: Path, magic: int, version: int, count: int) -> _Contents:
    known, name = _LLM_C[magic]
    if version != known:
        raise InputError(f"{path}: a file of llm.c, version {version}; this milldam reads version {known}.")
    dtype = np.dtype(name)
    size, expected = path.stat().st_size, _LLM_C_HEADER + count * dtype.itemsize
    if size != expected:
        raise InputError(
            f"{path}: {size:,} bytes where {count:,} tokens of {name}, as its header says, take {expected:,} with it. "
            "Is it cut short? Make it again."
        )
    return _Contents("llm.c", TokenFile(path, count, _LLM_C_HEADER), dtype)


def _sample(path: Path, first: int) -> bytes:
    """Blocks of a file spread evenly from a byte to the end, both ends included; all of it when it is small."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size - first
        if size <= _BLOCKS * _BLOCK_BYTES:
            file.seek(first)
            return file.read()
        places = (first + k * (size - _BLOCK_BYTES) // (_BLOCKS - 1) for k in range(_BLOCKS))
        return b"".join(os.pread(file.fileno(), _BLOCK_BYTES, place) for place in places)
