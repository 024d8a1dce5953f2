"""What a function's result depends on -> a hash, the same in every process and on every day.

Its code, each value that it captures, names or has as a default, and each argument is a part with a hash of its own, so
that a change can be named. Functions and classes of the user's count wherever they are reached, by all that they reach
in turn. Code counts by its instructions, without file, lines and comments; values by what cloudpickle would write of
them, sets in order. Of the user's own modules counts what the code names in them; of installed packages the version.
When in doubt the function is another one.

Said to have no hash: what can't be pickled, and what `eval`, `import_module` and their like lead to. Not seen: files
that the function reads, the state of libraries (a seed, an attribute that somebody set), the environment.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import cloudpickle
import xxhash

from milldam.errors import ConfigError

_PYTHON = "Python"
_BY_ATTRIBUTE = {"import_module", "__subclasses__"}
_UNFORESEEABLE = {"eval", "exec", "__import__", "globals", *_BY_ATTRIBUTE}
_HEAP_TYPE = 1 << 9
_PLAIN = (bool, int, float, complex, type(None), list, tuple, dict, bytearray)
_METHODS = (types.FunctionType, property, classmethod, staticmethod)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


@dataclass(frozen=True, slots=True)
class FunctionIdentity:
    """What a function is, for a cache."""

    name: str
    hash: str
    parts: dict[str, str]
    """`code`, `captured value limit`, `global LIMIT`, `function clean`, `module numpy`, ... with the hash of each."""
    unhashable: tuple[str, ...] = ()
    """What has no hash, and why. When there is any, equal hashes prove nothing."""

    def differences(self, newer: FunctionIdentity) -> list[str]:
        """What is different now, part by part; empty when the hashes are equal.

        >>> old = FunctionIdentity("cut", "a", {"captured value limit": "1", "function clean": "2"})
        >>> old.differences(FunctionIdentity("cut", "b", {"captured value limit": "3", "function clean": "2"}))
        ['captured value limit']
        """
        if self.hash == newer.hash:
            return []
        differing = [one for one in {**self.parts, **newer.parts} if self.parts.get(one) != newer.parts.get(one)]
        lines = []
        for part in [_PYTHON] if _PYTHON in differing else differing:  # another Python compiles everything anew
            before, after = self.parts.get(part), newer.parts.get(part)
            if before is None or after is None:
                lines.append(f"{part} ({'new' if before is None else 'no longer used'})")
            else:
                is_version = part == _PYTHON or part.startswith("module ")
                lines.append(f"{part} ({before}, now {after})" if is_version else part)
        return lines or ["function"]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"unhashable": list(self.unhashable)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FunctionIdentity:
        return cls(data["name"], data["hash"], dict(data["parts"]), tuple(data["unhashable"]))


def identify(
    function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None, *, key: str | None = None
) -> FunctionIdentity:
    """The identity of a function with the keyword arguments it will be called with.

    `key` stands for everything that can't be hashed: with it nothing is unhashable, and another key is another
    identity.

    >>> limit = 10
    >>> identify(lambda text: text[:limit]).parts.keys()
    dict_keys(['code', 'global limit', 'Python'])
    """
    if not callable(function):
        what = "Give a function, a method or a callable object."
        raise ConfigError(f"A value of type {type(function).__name__} can't be called. {what}")
    versions: dict[str, str] = {}
    parts: dict[str, str] = {}
    unhashable: list[str] = []
    arguments = [(f"argument {name}", value) for name, value in sorted((kwargs or {}).items())]
    for label, value in [*_parts_of(function), *arguments]:
        try:
            parts[label] = f"{_Hasher(versions).of(value):032x}"
        except Exception as error:  # whatever a foreign __reduce__ raises: it can't be pickled
            reason = f"{type(value).__qualname__} is nested too deep" if isinstance(error, RecursionError) else error
            parts[label] = "unhashable"
            unhashable.append(f"{label}: {reason}")
    parts |= versions | {_PYTHON: f"{sys.version_info.major}.{sys.version_info.minor}"}
    if key is not None:
        parts["key"] = xxhash.xxh3_128_hexdigest(key.encode())
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    whole = xxhash.xxh3_128_hexdigest(json.dumps(sorted(parts.items())).encode())
    return FunctionIdentity(str(name), whole, parts, () if key is not None else tuple(unhashable))


# ---- functions ----


def _parts_of(function: Any) -> Iterator[tuple[str, Any]]:
    """What the function is made of, whatever kind of callable it is."""
    if isinstance(function, functools.partial):
        yield from ((f"argument {name}", value) for name, value in enumerate(function.args))
        yield from ((f"argument {name}", value) for name, value in sorted(function.keywords.items()))
        yield from _parts_of(function.func)
    elif isinstance(function, types.MethodType):
        yield "object", function.__self__
        yield from _parts_of(function.__func__)
    elif isinstance(function, types.FunctionType) and _library_name(function) is None:
        body, values = _anatomy(function)
        yield "code", body
        yield from values.items()
    else:
        yield "object", function


def _anatomy(function: types.FunctionType) -> tuple[Any, dict[str, Any]]:
    """Its code, as plain values; and all that it holds and names: label -> value."""
    code, scope = function.__code__, function.__globals__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    values = {f"captured value {name}": cell.cell_contents for name, cell in cells if cell != types.CellType()}
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    given = dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
    values |= {f"default argument {name}": value for name, value in given.items()}
    values |= {f"attribute {name}": value for name, value in sorted(vars(function).items())}
    if _is_library_file(code.co_filename):  # made by a library, as a decorator's wrapper is
        return (sys.modules.get(str(scope.get("__name__"))), code.co_qualname), values
    used, reached, imports = _uses(code)
    for name in sorted(used & scope.keys()):
        kinds = {types.FunctionType: "function", type: "class"}
        values[f"{kinds.get(type(scope[name]), 'global')} {name}"] = scope[name]
    for module, level in sorted(imports):
        try:
            full = importlib.util.resolve_name("." * level + module, str(scope.get("__package__") or "") or None)
            values[f"import {full}"] = importlib.import_module(full)
        except ImportError:
            values[f"import {module}"] = "not there"
    for name in sorted((used | (reached & _BY_ATTRIBUTE)) & _UNFORESEEABLE):
        if scope.get(name) in (None, importlib.import_module):  # no name of the user's own
            values[f"what {name} leads to"] = _Unforeseeable(name)
    return _content(code), {label: _named_in(value, reached) for label, value in values.items()}


class _Unforeseeable:
    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> Any:
        raise TypeError(f"nobody can tell what {self._name} leads to")


def _uses(code: types.CodeType) -> tuple[set[str], set[str], set[tuple[str, int]]]:
    """What code and the functions inside it reach for: globals; these, attributes and what is imported; the modules
    that it imports while it runs, with their level."""
    instructions = list(dis.get_instructions(code))
    used = {one.argval for one in instructions if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    imports = {
        (one.argval, instructions[at - 2].argval) for at, one in enumerate(instructions) if one.opname == "IMPORT_NAME"
    }
    reached = {*code.co_names, *(part for module, _ in imports for part in module.split("."))}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            used_inside, reached_inside, imported_inside = _uses(constant)
            used, reached, imports = used | used_inside, reached | reached_inside, imports | imported_inside
    return used, reached, imports


def _content(code: types.CodeType) -> tuple[Any, ...]:
    """All of a code object that its results can depend on, as plain values."""
    instructions = [
        (one.opname, _content(one.argval) if isinstance(one.argval, types.CodeType) else one.argval)
        for one in dis.get_instructions(code)
    ]
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0x3AC)
    return (counts, code.co_varnames, code.co_freevars, code.co_cellvars, instructions, code.co_exceptiontable)


def _named_in(value: Any, names: set[str], above: tuple[Any, ...] = ()) -> Any:
    """Of a module of the user's what the code may use of it, the module where no name tells; any other value itself."""
    if not isinstance(value, types.ModuleType) or is_library(value.__name__):
        return value
    for name in sorted(names - vars(value).keys()):  # a module of the package that nothing has imported yet
        if hasattr(value, "__path__") and importlib.util.find_spec(f"{value.__name__}.{name}") is not None:
            importlib.import_module(f"{value.__name__}.{name}")
    used = [name for name in sorted(names & vars(value).keys()) if not name.startswith("__")]
    inner = {name: vars(value)[name] for name in used if vars(value)[name] not in above}
    return {name: _named_in(one, names, (*above, value)) for name, one in inner.items()} or value


# ---- values ----


class _Hasher(cloudpickle.Pickler):  # type: ignore[misc]
    """What cloudpickle would write of a value, hashed; but of the user's functions and classes what they are made of,
    and what pickles differently from one process or day to the next by what it means."""

    def __init__(self, versions: dict[str, str]) -> None:
        self._versions, self._digest = versions, xxhash.xxh3_128()
        super().__init__(self, protocol=5, buffer_callback=lambda buffer: self._digest.update(buffer.raw()))

    def write(self, data: Any) -> None:
        self._digest.update(data)

    def of(self, value: Any) -> int:
        self.dump(value)
        return self._digest.intdigest()

    def persistent_id(self, value: Any) -> int | None:
        kind = type(value)
        if kind is str:  # one that is there twice may be one object, or two
            return xxhash.xxh3_128_intdigest(value.encode("utf-8", "surrogatepass"))
        if kind is bytes:
            return xxhash.xxh3_128_intdigest(value, seed=1)
        if kind is set or kind is frozenset:
            return self._inner((kind.__name__, sorted(map(self._inner, value))))
        name = None if kind in _PLAIN else _library_name(value)
        if name is None:
            return None
        package = name.partition(".")[0]
        if package not in sys.stdlib_module_names:
            self._versions[f"module {package}"] = _version(package)
        return self._inner(f"named {name}")

    def _inner(self, value: Any) -> int:
        return _Hasher(self._versions).of(value)

    def reducer_override(self, value: Any) -> Any:
        """(anything, what tells it apart, what it holds): what is held may lead back to the value."""
        if isinstance(value, types.ModuleType):
            return str, (_file_hash(value.__name__),)
        if isinstance(value, types.FunctionType):
            body, values = _anatomy(value)
            return tuple, (body,), values
        if isinstance(value, functools._lru_cache_wrapper):
            return str, ("cached",), {"of": value.__wrapped__}
        if isinstance(value, type) and value.__flags__ & _HEAP_TYPE:
            return type, (type(value), value.__bases__), _members(value)
        is_compiled = isinstance(getattr(value, "__self__", None), types.ModuleType)
        if is_compiled or type(value).__name__ == "cython_function_or_method":
            return str, (value.__qualname__, _file_hash(value.__module__))
        for base in type(value).__mro__:
            known = _KNOWN.get((base.__module__.partition(".")[0], base.__name__))
            if known is not None:
                return type(value), (known(value),)
        return super().reducer_override(value)


def _members(kind: type) -> dict[str, Any]:
    """Of a class: methods and attributes; of an enum its values, not what the enum module made of them."""
    members = {name: value for name, value in vars(kind).items() if isinstance(value, _METHODS)}
    if issubclass(kind, enum.Enum):
        members |= {f"member {name}": member.value for name, member in kind.__members__.items()}
    else:
        own = {name: one for name, one in vars(kind).items() if not name.startswith("__") and name != "_abc_impl"}
        members |= {name: one for name, one in own.items() if not isinstance(one, _SLOTS)}
    return {"annotated": list(vars(kind).get("__annotations__", ()))} | dict(sorted(members.items()))


def _file_hash(module: str) -> str:
    """A module of the user's as a whole, or one that is compiled."""
    file = _module_file(module)
    if file is None or not Path(file).is_file():
        raise TypeError(f"there is no file of module {module}")
    return xxhash.xxh3_128_hexdigest(Path(file).read_bytes())


def _tokenizer(value: Any) -> Any:
    """Settings and backend of a tokenizer of transformers, without what calls change, and where it came from."""
    settings = sorted((name, one) for name, one in vars(value).items() if name not in _PASSING)
    backend, pieces = getattr(value, "_tokenizer", None), getattr(value, "sp_model", None)
    if backend is not None and hasattr(backend, "to_str"):
        return (settings, json.dumps(json.loads(backend.to_str()) | {"padding": None, "truncation": None}))
    return (settings, sorted(value.get_vocab().items()), pieces and pieces.serialized_model_proto())


_PASSING = {
    *("_in_target_context_manager", "_tokenizer", "cache", "deprecation_warnings", "files_loaded", "init_inputs"),
    *("init_kwargs", "name_or_path", "sp_model", "tokens_trie", "verbose", "vocab_file"),
}


def _sentence_pieces(value: Any) -> Any:
    """The model, and the options that a call which names none takes."""
    plain = (str, bool, int, float, type, type(None))
    return (value.serialized_model_proto(), sorted(one for one in vars(value).items() if isinstance(one[1], plain)))


def _tensor(value: Any) -> Any:
    plain = value.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
    return (str(value.dtype), tuple(value.shape), plain.numpy())


_KNOWN: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("torch", "Tensor"): _tensor,
    ("tokenizers", "Tokenizer"): lambda value: (value.to_str(), getattr(value, "encode_special_tokens", False)),
    ("transformers", "PreTrainedTokenizerBase"): _tokenizer,
    ("sentencepiece", "SentencePieceProcessor"): _sentence_pieces,
    ("milldam", "TextEncoder"): lambda value: value.identity,
    ("datasets", "Dataset"): lambda value: (value._fingerprint, str(value.split)),
}
"""Values of libraries that say more, or less, of themselves when they are pickled than what they do."""


# ---- whose code is it, the user's or a library's? ----


@functools.cache
def _is_library_file(path: str) -> bool:
    """Whether code of this file is known by name and version; `<stdin>` and the like are the user's."""
    if path.startswith("<"):
        return path.startswith("<frozen ")
    folders = [*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parents[1])]
    real = Path(os.path.realpath(path))
    in_packages = {"site-packages", "dist-packages"} & set(real.parts)
    return bool(in_packages) or any(real.is_relative_to(os.path.realpath(folder)) for folder in folders)


def _module_file(name: str) -> str | None:
    """Where a module's code lies; None: built in, made up, or not there."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), None)
    return file if isinstance(file, str) else None


def is_library(name: str) -> bool:
    """Whether a module belongs to the standard library or an installed package."""
    file = _module_file(name)
    if name == "__main__" or file is not None:
        return name != "__main__" and _is_library_file(str(file))
    return name.partition(".")[0] in sys.stdlib_module_names


@functools.cache
def _version(package: str) -> str:
    """The version of what an importable package was installed from."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        installed = sorted(set(metadata.packages_distributions().get(package, [])))
        found = [f"{one} {metadata.version(one)}" for one in installed]
        return ", ".join(found) or str(getattr(sys.modules.get(package), "__version__", "of unknown version"))


def _library_name(value: Any) -> str | None:
    """`module.name`, where a function, class or other named object is found under its name in a library."""
    if isinstance(value, types.ModuleType):
        return value.__name__ if is_library(value.__name__) else None
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if module is None and isinstance(getattr(value, "__self__", None), types.ModuleType):
        module = value.__self__.__name__
    if not isinstance(module, str) or not isinstance(name, str) or not is_library(module):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}.{name}" if found is value else None
