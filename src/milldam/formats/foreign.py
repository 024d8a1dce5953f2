"""A file of another tool, as training sees it where it lies: numpy, nanoGPT, llm.c, Megatron-LM.

Opening reads a header and compares sizes; tokens are mapped when they are first asked for. Nothing is unpickled: of an
.npy file the header alone is parsed, and a meta.pkl is never opened. Needs numpy alone.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, InputError, Setting
from milldam.files import hash_bytes
from milldam.loader.reading import Reader, open_reader
from milldam.loader.stream import TokenFile, TokenStream
from milldam.loader.views import Trainable
from milldam.stores.tokens.reader import in_blocks
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    from milldam.formats.finding import ReadRules, SourceFile

OPENERS = {".npy": "npy", ".bin": "nanogpt", ".idx": "megatron"}
"""How the name of a file ends -> the module here that opens it. A .bin with an .idx beside it is Megatron's."""
_BLOCKS, _BLOCK_BYTES = 64, 4096


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
        file = self._file
        known = f"{self.dtype.str} {self.tokens} ".encode() + _sample(file.path, file.first_byte)
        return hash_bytes(known if file.index is None else known + _sample(file.index, 0))

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
        beside = self.path.with_name(f"{name}{self.path.suffix}")
        other = f": open {beside}" if beside.exists() else ", such as train.bin and val.bin"
        raise ConfigError(
            f'{self.path}: has no split "{name}". Here each split is a file of its own{other}.\n'
            "Or cut this one by tokens: .split(train=0.9, val=...)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return open_foreign, (self.path, self._wanted)

    def _facts(self) -> str:
        return f"{self.tokens:,} tokens, {self.dtype}, {self.kind}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}: {self._facts()})"


def foreign_path(given: Path) -> Path | None:
    """The file that a path means, when it means one of these: itself, or PREFIX.bin for the prefix of a pair."""
    if given.suffix in OPENERS and given.is_file():
        return given
    pair = [given.with_name(given.name + ending) for ending in (".bin", ".idx")] if given.name else []
    return pair[0] if pair and not given.exists() and all(path.is_file() for path in pair) else None


def opener_of(path: Path) -> str:
    """The module here that opens a file of one of these endings."""
    is_pair = path.suffix == ".bin" and path.with_suffix(".idx").is_file()
    return "megatron" if is_pair else OPENERS[path.suffix]


def open_foreign(path: Path, dtype: npt.DTypeLike | None = None) -> ForeignFile:
    """Open a file that ends in .npy, .bin or .idx. `dtype`: for .bin files, which may not say it themselves."""
    wanted = None if dtype is None else token_dtype_of(dtype)
    module: Any = importlib.import_module(f"milldam.formats.{opener_of(path)}")
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path}: empty. There is nothing to train on.")
        opened: ForeignFile = module.open_file(path, wanted)
        return opened
    except OSError as error:
        raise InputError(f"{path}: can't be read ({error.strerror}).") from None


def read_flat(source: SourceFile, rules: ReadRules) -> Iterator[Tokens]:
    """All of a file as one document, in blocks: `read` of a format."""
    file = open_foreign(source.path, rules.dtype)
    yield from stretch(open_reader(file.stream(), "pread"), 0, file.tokens)


def stretch(reader: Reader, start: int, count: int) -> Iterator[Tokens]:
    """One document in blocks, open until its last."""
    for begin, end in in_blocks(start, count):
        length = np.array([end - begin])
        yield Tokens(reader.runs(np.array([begin]), length), length, open=end < start + count)


def token_dtype_of(given: npt.DTypeLike) -> np.dtype[Any]:
    """A dtype that the user names, which must be one of integers."""
    try:
        dtype = np.dtype(given)
    except TypeError:
        what = f': "{given}" is no dtype of numpy. Use one such as uint16 or int32.'
        raise ConfigError(Setting("dtype"), what) from None
    if dtype.kind not in "iu":
        raise ConfigError(Setting("dtype", str(given)), ": tokens are integers, such as uint16 or int32.")
    return dtype


def _sample(path: Path, first: int) -> bytes:
    """Blocks of a file spread evenly from a byte to the end, both ends included; all of it when it is small."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size - first
        if size <= _BLOCKS * _BLOCK_BYTES:
            file.seek(first)
            return file.read()
        places = (first + k * (size - _BLOCK_BYTES) // (_BLOCKS - 1) for k in range(_BLOCKS))
        return b"".join(file.read(_BLOCK_BYTES) for place in places if file.seek(place) == place)
