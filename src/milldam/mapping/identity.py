"""What a function's result depends on -> a hash, the same in every process and on every day.

The function, each function and class of the user's that it reaches, and each value that it captures or reads from a
global is a part with a hash of its own, so that a change can be named. Code counts by its instructions, without file,
lines, comments and docstrings; values by what cloudpickle would write for them, with sets in order. In the user's own
modules, only what the code names counts; for installed packages, the version. When in doubt the function is another.

What can't be pickled has no hash, nor does what `eval`, `import_module` and the like lead to. Not seen: files that the
function reads, the state of libraries (a seed, an attribute that somebody set), the environment.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import importlib
import importlib.util
import json
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import cloudpickle
import xxhash

from milldam.errors import ConfigError

_PYTHON, _CODE = "Python", "code"
_BY_NAME = {"eval", "exec", "__import__", "globals", "import_module"}
_BY_ATTRIBUTE = {"import_module", "__subclasses__"}
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
        differing = [one for one in {**self.parts, **newer.parts} if self.parts.get(one) != newer.parts.get(one)]
        if _PYTHON in differing:  # it compiles everything differently
            differing = [_PYTHON]
        lines = []
        for part in differing:
            before, after = self.parts.get(part), newer.parts.get(part)
            if before is None or after is None:
                lines.append(f"{part} ({'new' if before is None else 'no longer used'})")
            else:
                is_version = part == _PYTHON or part.startswith("module ")
                lines.append(f"{part} ({before}, now {after})" if is_version else part)
        return lines or ["function"]


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
    if isinstance(function, types.FunctionType) and library_name(function) is None:
        walk.refer(function, _CODE, walk.function)
    else:
        walk.add("object", function)
    for name, value in sorted((kwargs or {}).items()):
        walk.add(f"argument {name}", value)
    while walk.waiting:
        walk.waiting.popleft()()
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
        self.waiting: deque[Callable[[], None]] = deque()
        self._labels: dict[Any, str] = {}
        self._alive: list[Any] = []

    def add(self, label: str, value: Any) -> None:
        """A value, as a part of its own."""
        self.parts[label] = self._hash(label, value)

    def _hash(self, label: str, value: Any) -> str:
        try:
            return f"{_Hasher(self).of(value):032x}"
        except Exception as error:  # whatever a foreign __reduce__ raises: it can't be pickled
            reason = f"{type(value).__qualname__} is nested too deep" if isinstance(error, RecursionError) else error
            self.unhashable[f"{label}: {reason}"] = None
            return "unhashable"

    def _label(self, key: Any, wanted: str) -> str:
        """The name of a part, numbered where another has it."""
        if key not in self._labels:
            taken, name, number = set(self._labels.values()), wanted, 1
            while name in taken:
                number += 1
                name = f"{wanted} ({number})"
            self._labels[key] = name
        return self._labels[key]

    def refer(self, value: Any, wanted: str, walk: Callable[[Any, str], None]) -> str:
        """The label of something with a part of its own, which is walked once, later."""
        known, label = id(value) in self._labels, self._label(id(value), wanted)
        if not known:
            self._alive.append(value)  # an id may not be given to another value
            self.waiting.append(lambda: walk(value, label))
        return label

    def reference(self, value: Any) -> str | None:
        """What stands for a function, class or module; None for any other value."""
        if isinstance(value, types.ModuleType):
            return self._library(value.__name__) if is_library(value.__name__) else self._file(value.__name__)
        if isinstance(value, _CACHED):
            return f"cached {self.reference(value.__wrapped__)}"
        is_bound = isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType)
        if is_bound or not (isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__"))):
            return None
        name = library_name(value)
        if name is not None:
            self._library(name)
            return f"named {name}"
        short = value.__qualname__.rpartition("<locals>.")[2]
        if isinstance(value, types.FunctionType):
            return self.refer(value, f"function {short}", self.function)
        if isinstance(value, type):
            return self.refer(value, f"class {short}", self._class)
        if isinstance(value, types.BuiltinFunctionType) or type(value).__name__ == "cython_function_or_method":
            return f"{short} of {self._file(str(value.__module__))}"
        return None

    def _library(self, name: str) -> str:
        """A library is known by its version."""
        package = name.partition(".")[0]
        if package not in sys.stdlib_module_names:
            self.parts[f"module {package}"] = library_version(package)
        return f"module {name}"

    def _file(self, module: str) -> str:
        """A module of the user's as a whole, or one that is compiled."""
        file, label = _module_file(module), f"file of module {module}"
        if file is None or not Path(file).is_file():
            self.unhashable[f"{label}: there is none"] = None
        elif label not in self.parts:
            self.parts[label] = xxhash.xxh3_128_hexdigest(Path(file).read_bytes())
        return label

    # ---- functions and classes ----

    def function(self, function: types.FunctionType, label: str) -> None:
        """By its code, what it captured, its defaults and attributes, and the globals that it uses."""
        code, of = function.__code__, "" if label == _CODE else f" of {label.removeprefix('function ')}"
        values: list[tuple[str, Any]] = []
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not set yet
                values.append((f"captured value {name}{of}", cell.cell_contents))
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        all_defaults = [*zip(names, defaults, strict=True), *sorted((function.__kwdefaults__ or {}).items())]
        values += [(f"default argument {name}{of}", value) for name, value in all_defaults]
        values += [(f"attributes{of}", vars(function))] if vars(function) else []
        uses = _Uses(code)
        if is_library_file(code.co_filename):  # made by a library, as a decorator's wrapper is
            body: Any = (code.co_qualname, self._library(str(function.__globals__.get("__name__"))))
        else:
            body, scope = _content(code), function.__globals__
            values += self._globals(scope, uses)
            for name in sorted((uses.globals & _BY_NAME) | (uses.names & _BY_ATTRIBUTE)):
                if scope.get(name) in (None, importlib.import_module):  # no name of the user's own
                    self.unhashable[f"{label}: what {name} leads to"] = None
        links = [self._link(name, value, uses.names) for name, value in values]
        self.parts[label] = self._hash(label, (body, links))

    def _globals(self, scope: dict[str, Any], uses: _Uses) -> Iterator[tuple[str, Any]]:
        """The globals that code uses, and what it imports while it runs."""
        for name in sorted(uses.globals & scope.keys()):
            yield self._label((id(scope), name), f"global {name}"), scope[name]
        for module, level in sorted(uses.imports):
            try:
                name = importlib.util.resolve_name("." * level + module, str(scope.get("__package__") or "") or None)
                yield f"import {name}", importlib.import_module(name)
            except ImportError:
                yield f"import {module}", "not there"

    def _link(self, label: str, value: Any, names: set[str]) -> Any:
        """What is named in code, for its hash: a reference, or a part of its own. Of a module of the user's what the
        code may use of it; all where no name tells."""
        if isinstance(value, types.ModuleType) and not is_library(value.__name__):
            there = vars(value)
            used = [name for name in sorted(names) if name in there and not name.startswith("__")]
            for name in names - set(used):  # a module of the package that nothing has imported yet
                if hasattr(value, "__path__") and importlib.util.find_spec(f"{value.__name__}.{name}") is not None:
                    self._link(name, importlib.import_module(f"{value.__name__}.{name}"), names)
            links = [self._link(self._label((id(there), name), f"global {name}"), there[name], names) for name in used]
            return ("own module", links or self._file(value.__name__))
        reference = self.reference(value)
        if reference is None and label not in self.parts:
            self.add(label, value)
        return (label.partition(" (")[0], reference or label)

    def _class(self, kind: type, label: str) -> None:
        """Methods are parts of their own; attributes belong to the class."""
        methods: tuple[type, ...] = (types.FunctionType, property, classmethod, staticmethod)
        members = {name: value for name, value in vars(kind).items() if isinstance(value, methods)}
        if issubclass(kind, enum.Enum):  # not what the enum module made of them
            members |= {f"member {name}": member.value for name, member in kind.__members__.items()}
        else:
            descriptors = types.MemberDescriptorType | types.GetSetDescriptorType
            own = {name: one for name, one in vars(kind).items() if not name.startswith("__") and name != "_abc_impl"}
            members |= {name: one for name, one in own.items() if not isinstance(one, descriptors)}
        annotated = list(vars(kind).get("__annotations__", ()))
        self.parts[label] = self._hash(label, (type(kind), kind.__bases__, annotated, sorted(members.items())))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


class _Uses:
    """The names that code and the functions inside it reach for."""

    def __init__(self, code: types.CodeType) -> None:
        instructions = [one for inner in _codes(code) for one in dis.get_instructions(inner)]
        loads = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
        self.globals = {one.argval for one in instructions if one.opname in loads}
        self.imports = {
            (one.argval, level.argval)
            for level, one in zip(instructions, instructions[2:], strict=False)
            if one.opname == "IMPORT_NAME"
        }
        imported = {name for module, _ in self.imports for name in module.split(".")}
        self.names = {name for inner in _codes(code) for name in inner.co_names} | imported
        """Globals, attributes and what is imported."""


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
        if kind is str:  # one that is there twice may be one object, or two
            return xxhash.xxh3_128_intdigest(value.encode("utf-8", "surrogatepass"))
        if kind is bytes:
            return xxhash.xxh3_128_intdigest(value, seed=1)
        if kind in _PLAIN:
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


_PLAIN = (bool, int, float, complex, type(None), list, tuple, dict, bytearray)


def _tensor(value: Any) -> Any:
    raw = value.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
    return (str(value.dtype), value.shape, raw.numpy())


def _huggingface_tokenizer(value: Any) -> Any:
    """Class, settings and backend, without what calls change, or what only says where the tokenizer came from."""
    settings = sorted((name, one) for name, one in vars(value).items() if name not in _PASSING.split())
    backend, pieces = getattr(value, "_tokenizer", None), getattr(value, "sp_model", None)
    if backend is not None and hasattr(backend, "to_str"):
        state = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
        return (settings, json.dumps(state, sort_keys=True))
    return (settings, sorted(value.get_vocab().items()), pieces and pieces.serialized_model_proto())


_PASSING = (
    "_in_target_context_manager _tokenizer cache deprecation_warnings files_loaded init_inputs init_kwargs "
    "name_or_path sp_model tokens_trie verbose vocab_file"
)


def _sentence_pieces(value: Any) -> Any:
    """The model, and the options that a call which names none takes."""
    plain = (str, bool, int, float, type, type(None))
    options = sorted((name, one) for name, one in vars(value).items() if isinstance(one, plain))
    return (value.serialized_model_proto(), options)


_CONTENTS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("torch", "Tensor"): _tensor,
    ("transformers", "PreTrainedTokenizerBase"): _huggingface_tokenizer,
    ("sentencepiece", "SentencePieceProcessor"): _sentence_pieces,
    ("datasets", "Dataset"): lambda value: (value._fingerprint, str(value.split)),
    **{
        ("milldam", name): lambda value: value.fingerprint for name in ("TextEncoder", "Store", "FeatureStore", "Table")
    },
}
"""Values of libraries that say more, or less, of themselves when they are pickled than what they do."""


# ---- whose code is it, the user's or a library's? ----


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Of the standard library, installed packages, and milldam itself."""
    paths: Iterable[str] = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return tuple(os.path.join(os.path.realpath(path), "") for path in (*paths, str(Path(__file__).parents[1])))


@functools.cache
def is_library_file(path: str) -> bool:
    """Whether code of this file is known by name and version; `<stdin>` and the like are the user's."""
    if path.startswith("<"):
        return path.startswith("<frozen ")
    real = os.path.realpath(path)
    return real.startswith(_library_folders()) or not {"site-packages", "dist-packages"}.isdisjoint(Path(real).parts)


def _module_file(name: str) -> str | None:
    """Where a module's code lies; None: built in, made up, or not there."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
    return file if isinstance(file, str) else None


def is_library(name: str) -> bool:
    """Whether a module belongs to the standard library or an installed package."""
    if name == "__main__":
        return False
    file = _module_file(name)
    return name.partition(".")[0] in sys.stdlib_module_names if file is None else is_library_file(file)


@functools.cache
def library_version(package: str) -> str:
    """The version of what an importable package was installed from."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        installed = sorted(set(metadata.packages_distributions().get(package, [])))
        versions = [f"{one} {metadata.version(one)}" for one in installed]
        return ", ".join(versions) or str(getattr(sys.modules.get(package), "__version__", "of unknown version"))


def library_name(value: Any) -> str | None:
    """`module.name`, where a function, class or other named object is found under its name in a library."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if module is None and isinstance(getattr(value, "__self__", None), types.ModuleType):
        module = value.__self__.__name__
    if not isinstance(module, str) or not isinstance(name, str) or not is_library(module):
        return None
    value_there: Any = sys.modules.get(module)
    for part in name.split("."):
        value_there = getattr(value_there, part, None)
    return f"{module}.{name}" if value_there is value else None
