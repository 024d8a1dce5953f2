"""What a function's result depends on -> a hash, the same in every process and on every day.

The function, each function and class of the user's that it reaches, and each value that it captures or reads from a
global is a part with a hash of its own, so that a change can be named. Code counts by its instructions, without file,
lines, comments and docstrings; values by what cloudpickle would write for them, with sets in order. In the user's own
modules, only what the code names counts; for installed packages, the version. When in doubt the function is another.

What can't be pickled has no hash. Not seen: what `eval` and `import_module` lead to, files that the function reads, the
state of libraries (a seed, an attribute that somebody set), the environment.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import importlib.util
import json
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import cloudpickle
import xxhash

from milldam.errors import ConfigError

_PYTHON, _CODE = "Python", "code"
_CACHED = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True, slots=True)
class FunctionIdentity:
    """A function as a cache knows it; plain JSON by `asdict`."""

    name: str
    hash: str
    parts: dict[str, str]
    """`code`, `captured value limit`, `global LIMIT`, `function clean`, `module numpy`, ... with the hash of each."""
    unhashable: list[str] = field(default_factory=list)
    """What has no hash, and why. When there is any, equal hashes prove nothing."""

    def differences(self, newer: FunctionIdentity) -> list[str]:
        """What has changed, part by part; empty if the hashes are equal.

        >>> old = FunctionIdentity("cut", "a", {"captured value limit": "1", "function clean": "2"})
        >>> old.differences(FunctionIdentity("cut", "b", {"captured value limit": "3", "function clean": "2"}))
        ['captured value limit']
        """
        if self.hash == newer.hash:
            return []
        changed = [one for one in {**self.parts, **newer.parts} if self.parts.get(one) != newer.parts.get(one)]
        return [_PYTHON] if _PYTHON in changed else changed  # it compiles everything differently


def identify(
    function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None, *, key: str | None = None
) -> FunctionIdentity:
    """The identity of a function with the keyword arguments it will be called with.

    `key` stands for everything that can't be hashed: with it nothing is unhashable, and another key is another
    identity.

    >>> limit = 10
    >>> sorted(identify(lambda text: text[:limit]).parts)
    ['Python', 'code', 'global limit']
    """
    if not callable(function):
        what = "Give a function, a method or a callable object."
        raise ConfigError(f"A value of type {type(function).__name__} can't be called. {what}")
    walk = _Walk()
    if isinstance(function, types.FunctionType) and _library_name(function) is None:
        walk.refer(function, _CODE, walk.add_function)
    else:
        walk.add("object", function)
    for name, value in sorted((kwargs or {}).items()):
        walk.add(f"argument {name}", value)
    parts = walk.parts | {_PYTHON: f"{sys.version_info.major}.{sys.version_info.minor}"}
    if key is not None:
        parts["key"] = xxhash.xxh3_128_hexdigest(key.encode())
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    whole = xxhash.xxh3_128_hexdigest(json.dumps(sorted(parts.items())).encode())
    return FunctionIdentity(str(name), whole, parts, [] if key is not None else list(walk.unhashable))


# ---- from the function to all that it reaches ----


class _Walk:
    """Collects the parts. Functions and classes refer to others by the names of their parts: cycles are no matter."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self.unhashable: dict[str, None] = {}
        self._labels: dict[Any, str] = {}
        self._taken = Counter[str]()
        self._alive: list[Any] = []

    def add(self, label: str, value: Any) -> None:
        """A value, as a part of its own."""
        try:
            self.parts[label] = f"{_Hasher(self).of(value):032x}"
        except Exception as error:  # whatever a foreign __reduce__ raises: it can't be pickled
            self.unhashable[f"{label}: {error}"] = None
            self.parts[label] = "unhashable"

    def _label(self, key: Any, wanted: str) -> str:
        """The name of a part, numbered where others have it."""
        if key not in self._labels:
            number = self._taken[wanted] = self._taken[wanted] + 1
            self._labels[key] = wanted if number == 1 else f"{wanted} ({number})"
        return self._labels[key]

    def refer(self, value: Any, wanted: str, add: Callable[[Any, str], None]) -> str:
        """The label of a function or class, which becomes a part when it is first met."""
        is_known, label = id(value) in self._labels, self._label(id(value), wanted)
        if not is_known:
            self._alive.append(value)  # an id may not be given to another value
            add(value, label)
        return label

    def reference(self, value: Any) -> str | None:
        """What stands for a function, class or module; None for any other value."""
        if isinstance(value, types.ModuleType):
            return self._module(value.__name__)
        if isinstance(value, _CACHED):
            return f"cached {self.reference(value.__wrapped__)}"
        is_bound = isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType)
        if is_bound or not (isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__"))):
            return None
        name = _library_name(value)
        if name is not None:
            self._module(name.partition(".")[0])
            return f"named {name}"
        short = value.__qualname__.rpartition("<locals>.")[2]
        if isinstance(value, types.FunctionType):
            return self.refer(value, f"function {short}", self.add_function)
        if isinstance(value, type):
            return self.refer(value, f"class {short}", self._add_class)
        is_compiled = isinstance(value, types.BuiltinFunctionType) or "cython" in type(value).__name__
        return f"{short} of {self._module(str(value.__module__))}" if is_compiled else None

    def _module(self, name: str) -> str:
        """A library is known by its version; a module of the user's as a whole, or one that is compiled, by its
        file."""
        if _is_library(name):
            package = name.partition(".")[0]
            if package not in sys.stdlib_module_names:
                self.parts[f"module {package}"] = _library_version(package)
            return f"module {name}"
        file, label = _module_file(name), f"file of module {name}"
        if file is None or not Path(file).is_file():
            self.unhashable[f"{label}: there is none"] = None
        else:
            self.parts[label] = xxhash.xxh3_128_hexdigest(Path(file).read_bytes())
        return label

    def add_function(self, function: types.FunctionType, label: str) -> None:
        """By its code, defaults and attributes, what it captured, and the globals that it uses."""
        code, of = function.__code__, "" if label == _CODE else f" of {label.removeprefix('function ')}"
        scope, values = function.__globals__, list[tuple[str, Any]]()
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not set yet
                values.append((f"captured value {name}{of}", cell.cell_contents))
        own = (function.__defaults__, sorted((function.__kwdefaults__ or {}).items()), sorted(vars(function).items()))
        if _is_library_file(code.co_filename):  # made by a library, as a decorator's wrapper is
            body = (code.co_qualname, self._module(str(scope.get("__name__"))))
            self.add(label, (body, own, self._links(values, set())))
            return
        instructions = [one for inner in _codes(code) for one in dis.get_instructions(inner)]
        reached = {name for inner in _codes(code) for name in inner.co_names}
        loads = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
        for name in sorted({one.argval for one in instructions if one.opname in loads} & scope.keys()):
            values.append((self._label((id(scope), name), f"global {name}"), scope[name]))
        for level, _, one in zip(instructions, instructions[1:], instructions[2:], strict=False):
            if one.opname == "IMPORT_NAME":
                reached |= set(one.argval.split("."))
                try:
                    package = str(scope.get("__package__") or "") or None
                    name = importlib.util.resolve_name("." * level.argval + one.argval, package)
                    values.append((f"import {name}", importlib.import_module(name)))
                except ImportError:
                    values.append((f"import {one.argval}", "not there"))
        self.add(label, (_content(code), own, self._links(values, reached)))

    def _links(self, values: list[tuple[str, Any]], reached: set[str]) -> list[Any]:
        """What is named in code, for its hash: a reference, or the name of a part of its own. Of a module of the user's
        what the code may use of it, by the names that it reaches for; its whole file where no name tells."""
        links: list[Any] = []
        for label, value in values:
            if isinstance(value, types.ModuleType) and not _is_library(value.__name__):
                there = vars(value)
                names = [name for name in sorted(reached) if name in there and not name.startswith("__")]
                used = [(self._label((id(there), name), f"global {name}"), there[name]) for name in names]
                modules = {name for name in names if isinstance(there[name], types.ModuleType)}
                links.append(("own module", self._links(used, reached - modules) or self._module(value.__name__)))
                continue
            reference = self.reference(value)
            if reference is None and label not in self.parts:
                self.add(label, value)
            links.append((label.partition(" (")[0], reference or label))
        return links

    def _add_class(self, kind: type, label: str) -> None:
        """Methods are parts of their own; attributes belong to the class."""
        methods: tuple[type, ...] = (types.FunctionType, property, classmethod, staticmethod)
        slots = (types.MemberDescriptorType, types.GetSetDescriptorType)
        members = {
            name: one
            for name, one in vars(kind).items()
            if isinstance(one, methods) or not (name.startswith(("__", "_abc_")) or isinstance(one, slots))
        }
        annotated = list(vars(kind).get("__annotations__", ()))
        self.add(label, (type(kind), kind.__bases__, annotated, sorted(members.items())))


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """A code object and those of the functions inside it."""
    inside = [one for constant in code.co_consts if isinstance(constant, types.CodeType) for one in _codes(constant)]
    return [code, *inside]


def _content(code: types.CodeType) -> tuple[Any, ...]:
    """All of a code object that its results can depend on, as plain values."""
    instructions = [
        (one.opname, _content(one.argval) if isinstance(one.argval, types.CodeType) else one.argval)
        for one in dis.get_instructions(code)
    ]
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0x3AC)
    return (counts, code.co_varnames, code.co_freevars, code.co_cellvars, instructions, code.co_exceptiontable)


# ---- values ----


class _Hasher(cloudpickle.Pickler):  # type: ignore[misc]
    """What cloudpickle would write of a value, hashed."""

    def __init__(self, walk: _Walk) -> None:
        self._walk, self._digest = walk, xxhash.xxh3_128()
        super().__init__(self, protocol=5, buffer_callback=lambda buffer: self._digest.update(buffer.raw()))

    def write(self, data: Any) -> None:
        self._digest.update(data)

    def of(self, value: Any) -> int:
        self.dump(value)
        return self._digest.intdigest()

    def persistent_id(self, value: Any) -> int | None:
        """A number that stands for what pickles differently from one process or day to the next."""
        kind = type(value)
        if kind in (str, bytes):  # one that is there twice may be one object, or two
            content = value.encode("utf-8", "surrogatepass") if kind is str else value
            return xxhash.xxh3_128_intdigest(content, seed=kind is bytes)
        if kind in (bool, int, float, complex, type(None), list, tuple, dict, bytearray):
            return None
        if kind is set or kind is frozenset:
            return self._inner((kind.__name__, sorted(map(self._inner, value))))
        reference = self._walk.reference(value)
        if reference is not None:
            return self._inner(("reference", reference))
        for base in kind.__mro__:
            content = _CONTENTS.get((base.__module__.partition(".")[0], base.__name__))
            if content is not None:
                return self._inner((kind, content(value)))
        return None

    def _inner(self, value: Any) -> int:
        return _Hasher(self._walk).of(value)


def _tensor(value: Any) -> Any:
    raw = value.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
    return (str(value.dtype), value.shape, raw.numpy())


def _huggingface_tokenizer(value: Any) -> Any:
    """Settings and vocabulary, without what calls change, or what only says where the tokenizer came from."""
    settings = sorted((name, one) for name, one in vars(value).items() if name not in _PASSING.split())
    backend: Any = getattr(value, "_tokenizer", None)
    if not hasattr(backend, "to_str"):
        return (settings, sorted(value.get_vocab().items()))
    return (settings, json.dumps(json.loads(backend.to_str()) | {"padding": None, "truncation": None}, sort_keys=True))


_PASSING = (
    "_in_target_context_manager _tokenizer cache deprecation_warnings files_loaded init_inputs init_kwargs "
    "name_or_path sp_model tokens_trie verbose vocab_file"
)
_OURS = ("TextEncoder", "Store", "FeatureStore", "Table")
_CONTENTS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("torch", "Tensor"): _tensor,
    ("transformers", "PreTrainedTokenizerBase"): _huggingface_tokenizer,
    ("datasets", "Dataset"): lambda value: (value._fingerprint, str(value.split)),
    **{("milldam", name): lambda value: value.fingerprint for name in _OURS},
}
"""Values of libraries that say more, or less, of themselves when they are pickled than what they do."""


# ---- whose code is it, the user's or a library's? ----


@functools.cache
def _is_library_file(path: str) -> bool:
    """Whether code of this file is known by name and version; `<stdin>` and the like are the user's."""
    if path.startswith("<"):
        return path.startswith("<frozen ")
    real, libraries = Path(path).resolve(), (Path(os.__file__).resolve().parent, Path(__file__).resolve().parents[1])
    return any(map(real.is_relative_to, libraries)) or not {"site-packages", "dist-packages"}.isdisjoint(real.parts)


def _module_file(name: str) -> str | None:
    """Where a module's code lies; None: built in, made up, or not there."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
    return file if isinstance(file, str) else None


def _is_library(name: str) -> bool:
    """Whether a module belongs to the standard library or an installed package."""
    if name == "__main__":
        return False
    file = _module_file(name)
    return name.partition(".")[0] in sys.stdlib_module_names if file is None else _is_library_file(file)


@functools.cache
def _library_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # installed under another name
        return str(getattr(sys.modules.get(package), "__version__", "unknown"))


def _library_name(value: Any) -> str | None:
    """`module.name`, where a function, class or other named object is found under its name in a library."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if module is None and isinstance(getattr(value, "__self__", None), types.ModuleType):
        module = value.__self__.__name__
    if not isinstance(module, str) or not isinstance(name, str) or not _is_library(module):
        return None
    value_there: Any = sys.modules.get(module)
    for part in name.split("."):
        value_there = getattr(value_there, part, None)
    return f"{module}.{name}" if value_there is value else None
