"""A file of another tool, as training sees it where it lies: numpy, nanoGPT, llm.c, Megatron-LM.

Opening reads a header and compares sizes; tokens are mapped when they are first asked for. Nothing is unpickled: of an
.npy file the header alone is parsed, and a meta.pkl is never opened. Needs numpy alone.
"""

from __future__ import annotations

import functools
import os
import struct
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from milldam.checked import checked, parse_json
from milldam.errors import ConfigError, InputError, Setting
from milldam.files import hash_bytes
from milldam.loader.reading import TokenArray
from milldam.loader.stream import TokenFile, TokenStream
from milldam.loader.views import Trainable
from milldam.stores.kinds import Facts
from milldam.stores.tokens.format import Index

OPENED = (".npy", ".bin", ".idx")
"""How the names of these files end. A .bin with an .idx beside it is Megatron's."""
_BLOCKS, _BLOCK_BYTES = 64, 4096
_LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""First number of the header -> version, dtype."""
_LLM_C_HEADER = 1024


class ForeignFile(Trainable):
    """A file of another tool with tokens end to end, which can be trained on.

    file.windows(seq_len), .streams(batch_size, seq_len), .split(train=0.9, val=...)

    >>> summary = milldam.export("corpus.milldam", "nanogpt", "train.bin")
    >>> milldam.open("train.bin")
    ForeignFile('train.bin': 23,862 tokens, uint16, nanoGPT)
    """

    def __init__(
        self,
        kind: str,
        file: TokenFile,
        dtype: np.dtype[Any],
        wanted: np.dtype[Any] | None,
        *,
        vocab_size: int | None = None,
        tokenizer: dict[str, Any] | None = None,
    ) -> None:
        """`wanted`: the dtype that the user says it has; `vocab_size`, `tokenizer`: where the file says them."""
        if wanted is not None and wanted != dtype:
            raise ConfigError(f"{file.path}: holds {dtype}, as its header says, not {wanted}. Leave dtype out.")
        if file.tokens == 0:
            raise InputError(f"{file.path}: no tokens in it. There is nothing to train on.")
        self.kind, self.dtype, self.vocab_size = kind, dtype, vocab_size
        self.path, self.tokens = file.path, file.tokens
        self.tokenizer_name: str | None = (tokenizer or {}).get("name")
        self._file, self._wanted, self._tokenizer = file, wanted, tokenizer or {}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Names the content: size, dtype, and 64 blocks of 4 KB from end to end. A copy has the same.

        Two files that differ between the blocks alone are not told apart: all of a file is too much to read.
        """
        file, sampled = self._file, f"{self.dtype.str} {self.tokens} ".encode()
        for path, first in ((file.path, file.first_byte), (file.index, 0)):
            if path is not None:
                with path.open("rb") as opened:
                    step = max(
                        _BLOCK_BYTES, (os.fstat(opened.fileno()).st_size - first - _BLOCK_BYTES) // (_BLOCKS - 1)
                    )
                    for number in range(_BLOCKS):
                        opened.seek(first + number * step)
                        sampled += opened.read(_BLOCK_BYTES)
        return hash_bytes(sampled)

    def stream(self) -> TokenStream:
        return TokenStream(
            name=str(self.path),
            files=(self._file,),
            dtype=self.dtype,
            first=0,
            stop=self.tokens,
            fingerprint=self.fingerprint,
            pad_id=self._tokenizer.get("eos") or 0,
            tokenizer=self._tokenizer.get("xxh3"),
        )

    def named_part(self, name: str) -> Trainable:
        other = "Here each split is a file of its own, such as train.bin and val.bin."
        cut = "Or cut this one by tokens: .split(train=0.9, val=...)"
        raise ConfigError(f'{self.path}: has no split "{name}". {other}\n{cut}')

    def __reduce__(self) -> tuple[Any, ...]:
        return open_foreign, (self.path, self._wanted)

    def _facts(self) -> str:
        return f"{self.tokens:,} tokens, {self.dtype}, {self.kind}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}: {self._facts()})"


class MegatronFile(ForeignFile):
    """A pair of Megatron-LM, whose documents are known: `file[i]`, `len(file)`, `for document in file`."""

    def __init__(self, file: TokenFile, wanted: np.dtype[Any] | None, index: Index) -> None:
        super().__init__("Megatron", file, index.dtype, wanted)
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

    def _facts(self) -> str:
        return f"{len(self):,} documents, {super()._facts()}"


# ---- opening ----


def foreign_path(given: Path) -> Path | None:
    """The file that a path means, when it means one of these: itself, or PREFIX.bin for the prefix of a pair."""
    if given.suffix in OPENED and given.is_file():
        return given
    pair = [given.with_name(given.name + ending) for ending in (".bin", ".idx")] if given.name else []
    return pair[0] if pair and not given.exists() and all(path.is_file() for path in pair) else None


def format_of(path: Path) -> str:
    """The format of a file of one of these endings."""
    if path.suffix == ".npy":
        return "npy"
    return "megatron" if path.suffix == ".idx" or path.with_suffix(".idx").is_file() else "nanogpt"


def open_foreign(path: Path, dtype: npt.DTypeLike | None = None) -> ForeignFile:
    """Open a file that ends in .npy, .bin or .idx. `dtype`: for .bin files, which may not say it themselves."""
    wanted = None if dtype is None else token_dtype_of(dtype)
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path}: empty. There is nothing to train on.")
        opener = {"npy": _open_npy, "nanogpt": _open_bin, "megatron": _open_pair}[format_of(path)]
        return opener(path, wanted)
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}).") from None


def token_dtype_of(given: npt.DTypeLike) -> np.dtype[Any]:
    """A dtype that the user names, which must be one of integers."""
    try:
        dtype = np.dtype(given)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "iu":
        raise ConfigError(Setting("dtype", str(given)), ": tokens are integers, such as uint16 or int32.")
    return dtype


def _open_npy(path: Path, wanted: np.dtype[Any] | None) -> ForeignFile:
    try:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a damaged header may fail anywhere in numpy's parsers
        raise InputError(f"{path}: not a .npy file of numbers, or cut short ({error}).") from None
    if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.kind not in "iu":
        what = f"{array.ndim}-D array of {array.dtype}" if isinstance(array, np.ndarray) else "archive"
        raise InputError(f"{path}: {what}. Tokens are a 1-D array of integers: save array.reshape(-1).")
    if array.offset % array.itemsize:
        raise InputError(f"{path}: its tokens are not aligned. Save it again with numpy.")
    file, facts = TokenFile(path, len(array), array.offset), read_sidecar(path)
    if facts is None:
        return ForeignFile("numpy", file, array.dtype, wanted)
    if (facts["tokens"], facts["dtype"]) != (len(array), array.dtype.name):
        there, written = f"{len(array)} tokens of {array.dtype.name}", f"{facts['tokens']} tokens of {facts['dtype']}"
        raise InputError(f"{path}: {there}, and the .json beside it is of {written}. Make both again, or remove it.")
    vocab_size, tokenizer = facts["vocab_size"], facts["tokenizer"]
    return ForeignFile("numpy", file, array.dtype, wanted, vocab_size=vocab_size, tokenizer=tokenizer)


class Sidecar(TypedDict):
    """The fields that are read of X.npy.json, which `tokenize --format npy` leaves; it has more, as a manifest."""

    dtype: str
    tokens: int
    fingerprint: str
    vocab_size: int
    tokenizer: Facts
    settings: dict[str, Any]
    input: Facts


def sidecar_path(npy: Path) -> Path:
    return npy.with_name(npy.name + ".json")


def read_sidecar(npy: Path) -> Sidecar | None:
    """None when there is no such file, or it is not ours."""
    path = sidecar_path(npy)
    try:
        facts = parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    is_ours = isinstance(facts, dict) and facts.get("format") == "milldam npy"
    return checked(Sidecar, facts, path) if is_ours else None


def _open_bin(path: Path, wanted: np.dtype[Any] | None) -> ForeignFile:
    """nanoGPT's file without a header, or one of llm.c and modded-nanogpt, whose header says dtype and count."""
    size = path.stat().st_size
    with path.open("rb") as file:
        magic, version, count = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    if magic not in _LLM_C:
        dtype = np.dtype("uint16") if wanted is None else wanted
        if size % dtype.itemsize:
            problem = f"{size:,} bytes are not a whole number of tokens of {dtype}. Is it cut short, or of another "
            raise InputError(f"{path}: {problem}dtype? Say which, such as ", Setting("dtype", "int32"), ".")
        return ForeignFile("nanoGPT", TokenFile(path, size // dtype.itemsize), dtype, wanted)
    known, name = _LLM_C[magic]
    expected = _LLM_C_HEADER + count * np.dtype(name).itemsize
    if version != known or size != expected:
        expectation = f"version {version}, {count:,} tokens of {name}; expected are version {known}, {expected:,} bytes"
        raise InputError(f"{path}: {size:,} bytes, by its header a file of llm.c, {expectation}. Make it again.")
    return ForeignFile("llm.c", TokenFile(path, count, _LLM_C_HEADER), np.dtype(name), wanted)


def _open_pair(path: Path, wanted: np.dtype[Any] | None) -> MegatronFile:
    tokens, index_path = path.with_suffix(".bin"), path.with_suffix(".idx")
    if not tokens.is_file():
        raise InputError(f"{index_path}: an index without its tokens: there is no {tokens.name} beside it.")
    index = Index.map(index_path)
    size = tokens.stat().st_size
    index.check_ends(size)
    file = TokenFile(tokens, size // index.dtype.itemsize, index=index_path, empty_documents=True)
    return MegatronFile(file, wanted, index)
