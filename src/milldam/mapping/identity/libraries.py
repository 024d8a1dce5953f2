"""What is known of libraries: their values in plain terms, and whether code is theirs or the user's own.

Values of well known libraries, where plain pickling would tell too much (a tokenizer's caches, what its last call set),
too little, or nothing at all. Imports none of the libraries: who has such a value has the library.

The standard library, what lies in site-packages, and milldam itself count as libraries: they are known by name and
version. Everything else is the user's and is looked into. Reads the metadata of installed packages, imports nothing.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

Described = tuple[Any, ...]
# What calls change or what only says where a tokenizer came from.
_PASSING = {
    "_in_target_context_manager",
    "_tokenizer",
    "cache",
    "deprecation_warnings",
    "files_loaded",
    "init_inputs",
    "init_kwargs",
    "name_or_path",
    "sp_model",
    "tokens_trie",
    "verbose",
    "vocab_file",
}
_BLOCK = 1 << 16
_ARROW = ("DataType", "Field", "Schema", "Scalar", "Array", "ChunkedArray", "RecordBatch", "Table")


class NoContentError(Exception):
    """A value of a kind this room knows, but which has nothing to go by."""


def describe(value: Any) -> Described | None:
    """The value in plain terms; None for what this room does not know."""
    for base in type(value).__mro__:
        top, name = base.__module__.partition(".")[0], base.__name__
        known = _KNOWN.get((top, name))
        if known is not None:
            return (f"{top}.{name}", known(value))
    return None


def _array(value: Any) -> Described:
    """Content; of a class made from arrays also the class, and the attributes of its instances."""
    import numpy as np

    content = _array_content(np.asarray(value))
    if type(value) is np.ndarray or isinstance(value, np.memmap):
        return content
    return (*content, type(value), _own(value))


def _masked_array(value: Any) -> Described:
    import numpy as np

    mask, kind = _array_content(np.ma.getmaskarray(value)), type(value)
    facts = (value.fill_value, bool(value.hardmask), sorted(getattr(value, "_optinfo", {}).items()))
    return (*_array_content(np.asarray(value.data)), mask, kind, facts)


def _own(value: Any) -> Described:
    """The attributes that an instance was given, by name."""
    return tuple(sorted(getattr(value, "__dict__", {}).items()))


def _array_content(value: Any) -> Described:
    import numpy as np

    kind = str(value.dtype.descr) if value.dtype.names else value.dtype.str
    if value.dtype.hasobject:
        return (kind, value.shape, value.tolist())
    digest = hashlib.blake2b(digest_size=16)
    flags = ["external_loop", "buffered", "zerosize_ok"]
    for block in np.nditer(value, flags=flags, order="C", buffersize=_BLOCK):  # type: ignore[call-overload]
        digest.update(block.tobytes())
    return (kind, value.shape, digest.digest())


def _tensor(value: Any) -> Described:
    import torch

    if value.is_sparse or value.is_quantized or value.is_meta:
        raise NoContentError
    plain = value.detach().as_subclass(torch.Tensor)
    flat = plain.cpu().contiguous().reshape(-1).view(torch.uint8)
    content = hashlib.blake2b(memoryview(flat.numpy()), digest_size=16).digest()
    kind = None if type(value) is torch.Tensor else type(value)
    # Not the marks of what was compiled with it.
    own = tuple(pair for pair in _own(value) if not pair[0].startswith("_dynamo_"))
    return (str(value.dtype), tuple(value.shape), content, kind, own)


def compiled_from(value: Any) -> Described | None:
    """What `torch.compile` was given, and its compiler with the options; None: the value is nothing that it made.

    Its own wrapper holds addresses, and what it has compiled so far: neither says what it computes.
    """
    original = vars(value).get("_torchdynamo_orig_callable")
    if original is None:
        return None
    context = vars(value).get("dynamo_ctx")  # of a module; of a function its wrapper's variables say it
    code = getattr(value, "__code__", None)
    cells = dict(zip(code.co_freevars, value.__closure__ or (), strict=True)) if code is not None else {}
    compiler = cells["callback"].cell_contents if "callback" in cells else getattr(context, "callback", None)
    while (inner := getattr(compiler, "_torchdynamo_orig_backend", None)) is not None:
        compiler = inner
    return (original, compiler)


def _arrow(value: Any) -> Described:
    """Types as Arrow writes their schema; values as Arrow writes them to a stream, whatever their chunks."""
    import pyarrow as pa

    if isinstance(value, pa.Scalar):
        return (value.type, value.as_py())
    if isinstance(value, pa.DataType):
        value = pa.field("", value)
    if isinstance(value, pa.Field):
        value = pa.schema([value])
    if isinstance(value, pa.Schema):
        return (value.serialize().to_pybytes(),)
    if isinstance(value, pa.Array | pa.ChunkedArray):
        value = pa.table({"": value})
    rows = value.combine_chunks() if isinstance(value, pa.Table) else value
    sink = _Sink()
    with pa.PythonFile(sink, "w") as file, pa.ipc.new_stream(file, rows.schema) as stream:
        stream.write(rows)
    return (sink.digest.digest(),)


class _Sink:
    """A file that keeps only the hash of what is written."""

    closed = False

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _huggingface_tokenizer(value: Any) -> Described:
    """Class and settings; of the backend all but padding and truncation, which every call sets anew."""
    settings = {name: one for name, one in vars(value).items() if name not in _PASSING}
    backend = getattr(value, "_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        state = json.loads(backend.to_str())
        state["padding"] = state["truncation"] = None
        return (type(value), sorted(settings.items()), json.dumps(state, sort_keys=True))
    pieces: Any = getattr(value, "sp_model", None)
    model = pieces.serialized_model_proto() if hasattr(pieces, "serialized_model_proto") else None
    return (type(value), sorted(settings.items()), sorted(value.get_vocab().items()), model)


def _sentence_pieces(value: Any) -> Described:
    """The model, and the options that `encode` and `decode` take when a call names none."""
    plain = (str, bool, int, float, type, type(None))
    options = [(name, one) for name, one in _own(value) if isinstance(one, plain)]
    return (value.serialized_model_proto(), options)


def _unknown(value: Any) -> Described:
    raise NoContentError


def _fingerprinted(value: Any) -> Described:
    return (type(value).__qualname__, value.fingerprint, getattr(value, "split", None))


_KNOWN: dict[tuple[str, str], Callable[[Any], Described]] = {
    ("numpy", "MaskedArray"): _masked_array,
    ("numpy", "ndarray"): _array,
    ("numpy", "generic"): lambda value: (value.dtype, value.item() if value.dtype.hasobject else value.tobytes()),
    ("numpy", "dtype"): lambda value: (str(value.descr) if value.names else value.str,),
    ("torch", "Tensor"): _tensor,
    ("torch", "OptimizedModule"): lambda value: compiled_from(value) or (),
    ("torch", "ScriptModule"): _unknown,  # the many compiled parts that it consists of have no content to go by
    ("torch", "dtype"): lambda value: (str(value),),
    ("torch", "device"): lambda value: (str(value),),
    **{("pyarrow", name): _arrow for name in _ARROW},
    ("tokenizers", "Tokenizer"): lambda value: (value.to_str(), getattr(value, "encode_special_tokens", False)),
    ("transformers", "PreTrainedTokenizerBase"): _huggingface_tokenizer,
    ("sentencepiece", "SentencePieceProcessor"): _sentence_pieces,
    ("datasets", "Dataset"): lambda value: (value._fingerprint, str(value.split)),
    ("milldam", "TextEncoder"): lambda value: value.identity,
    ("milldam", "Store"): _fingerprinted,
    ("milldam", "FeatureStore"): _fingerprinted,
    ("milldam", "Table"): _fingerprinted,
}
_PACKAGE = str(Path(__file__).resolve().parents[1])
_INSTALLED = ("site-packages", "dist-packages")


@functools.cache
def _folders() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(os.path.join(os.path.realpath(path), "") for path in (*paths, _PACKAGE))


@functools.cache
def is_library_file(path: str) -> bool:
    """Whether code of this file is known by name and version; `<stdin>` and the like are the user's."""
    if path.startswith("<"):
        return path.startswith("<frozen ")
    real = os.path.realpath(path)
    return real.startswith(_folders()) or any(part in _INSTALLED for part in Path(real).parts)


def module_file(name: str) -> str | None:
    """Where a module's code lies, imported or not; None: built in, made up, or not there."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
        return file if isinstance(file, str) else None
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return spec.origin if spec.has_location else next(iter(spec.submodule_search_locations or []), None)


def is_library(name: str) -> bool:
    """Whether a module belongs to the standard library or an installed package."""
    if name == "__main__":
        return False
    file = module_file(name)
    if file is None:
        return name.partition(".")[0] in sys.stdlib_module_names
    return is_library_file(file)


def is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


@functools.cache
def library_version(package: str) -> str:
    """The version of what an importable package was installed from."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        installed = sorted(set(metadata.packages_distributions().get(package, [])))
        found = [f"{one} {metadata.version(one)}" for one in installed]
        return ", ".join(found) or str(getattr(sys.modules.get(package), "__version__", "of unknown version"))


def library_name(value: Any) -> str | None:
    """`module.name`, where a function, class or other named object is found under its name in a library."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if module is None and isinstance(getattr(value, "__self__", None), type(sys)):
        module = value.__self__.__name__
    if not isinstance(module, str) or not isinstance(name, str) or not is_library(module):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}.{name}" if found is value else None
