"""From a function to everything of the user's that it can reach: each function, class and value a part with a hash.

A function refers to others by the names of their parts, so that functions which call each other are no cycle, and a
change shows in the part where it was made and in no other. Parts are met breadth first, names in order: the same
walk in every process. Costs the size of what is reachable, once.

Code counts by what it does, without where it stands: its instructions with their operands written out, without file,
line numbers, comments and docstrings; and by what it reaches for: global names and captured variables with the
attributes asked of them (`mylib.text.clean`), and what it imports while it runs. Of names that are made up at run time
(`eval`, `import_module`) it can only be told that there are some.
"""

from __future__ import annotations

import dis
import enum
import functools
import importlib
import importlib.util
import inspect
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from milldam.mapping.identity.libraries import (
    compiled_from,
    is_library,
    is_library_file,
    is_standard,
    library_name,
    library_version,
    module_file,
)
from milldam.mapping.identity.values import NAMED, Digest, Values, digest_of, text_digest, type_name

Chain = tuple[str, ...]
_KINDS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
    | inspect.CO_ITERABLE_COROUTINE
)
_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_VARIABLE = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_LOCAL = {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}
_BY_NAME = {"eval", "exec", "__import__", "globals", "import_module"}
_BY_ATTRIBUTE = {"import_module", "__subclasses__"}
_NAMED = {*dis.hasname, *dis.haslocal, *dis.hasfree, *dis.hasjrel, *dis.hasjabs}


@dataclass(frozen=True, slots=True)
class Import:
    """`from ..package import member as variable`, inside a function."""

    module: str
    level: int
    member: str | None
    variable: str
    is_top: bool
    """`import a.b` binds a, `import a.b as m` binds b."""


@dataclass(slots=True)
class Uses:
    """Names, each with the chains of attributes that follow it; () where the object itself is handed on."""

    globals: dict[str, set[Chain]] = field(default_factory=lambda: defaultdict(set))
    variables: dict[str, set[Chain]] = field(default_factory=lambda: defaultdict(set))
    imports: set[Import] = field(default_factory=set)
    unseen: set[str] = field(default_factory=set)
    """What leads to things that no name in the code tells."""


def content(code: CodeType) -> tuple[Any, ...]:
    """All of a code object that its results can depend on, as plain values."""
    instructions = tuple((one.opname, _operand(one)) for one in dis.get_instructions(code))
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _KINDS)
    names = (code.co_varnames, code.co_freevars, code.co_cellvars)
    return (counts, names, instructions, code.co_exceptiontable)


def _operand(instruction: dis.Instruction) -> Any:
    if instruction.opcode in dis.hasconst:
        value = instruction.argval
        return content(value) if isinstance(value, CodeType) else value
    return instruction.argval if instruction.opcode in _NAMED else instruction.arg


def uses(code: CodeType) -> Uses:
    """What the code and the functions and comprehensions inside it reach for."""
    found = Uses()
    for one in _with_nested(code):
        _add_uses(list(dis.get_instructions(one)), found)
    return found


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


def _add_uses(instructions: list[dis.Instruction], found: Uses) -> None:
    for at, one in enumerate(instructions):
        if one.opname in _ATTRIBUTE and one.argval in _BY_ATTRIBUTE:
            found.unseen.add(one.argval)
        if one.opname in _GLOBAL:
            found.globals[one.argval].add(_chain(instructions, at))
            if one.argval in _BY_NAME:
                found.unseen.add(one.argval)
        elif one.opname in _VARIABLE or one.opname in _LOCAL:
            found.variables[one.argval].add(_chain(instructions, at))
        elif one.opname.startswith(("LOAD_FAST_LOAD", "LOAD_FAST_BORROW_LOAD", "STORE_FAST_LOAD")):
            for name in one.argval:
                found.variables[name].add(())
        elif one.opname == "IMPORT_NAME":
            found.imports.update(_imports(instructions, at))


def _chain(instructions: list[dis.Instruction], at: int) -> Chain:
    names = []
    for one in instructions[at + 1 :]:
        if one.opname not in _ATTRIBUTE:
            break
        names.append(one.argval)
    return tuple(names)


def _imports(instructions: list[dis.Instruction], at: int) -> Iterator[Import]:
    """What one import statement binds: IMPORT_NAME, then a STORE, or an IMPORT_FROM and a STORE for each member."""
    module, level, members = instructions[at].argval, instructions[at - 2].argval, instructions[at - 1].argval
    member: str | None = None
    is_top = members is None
    for one in instructions[at + 1 :]:
        if one.opname == "IMPORT_FROM":
            member, is_top = (one.argval if members is not None else None), False
        elif one.opname.startswith("STORE_") and isinstance(one.argval, str):
            yield Import(module, level, member, one.argval, is_top)
            if members is None or member == members[-1]:
                return
        elif one.opname == "IMPORT_NAME":
            return


CODE = "code"
# A function of functools.singledispatch: what it captures is a cache; its registry says what it does.
_DISPATCH = functools.singledispatch(lambda value: value).__code__  # type: ignore[attr-defined]
_HEAP_TYPE = 1 << 9
"""Flag of the classes made by a class statement; the others are Python's own or compiled."""
# Of a class: where it stands, what Python adds to each (some of it later), what is said in other words elsewhere.
_UNTOLD = {
    "__abstractmethods__",
    "__annotate_func__",
    "__annotations__",
    "__annotations_cache__",
    "__dataclass_params__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__orig_bases__",
    "__parameters__",
    "__qualname__",
    "__slotnames__",  # set by the first pickling of an instance
    "__static_attributes__",
    "__weakref__",
    "_abc_impl",
}


class Parts:
    """What a walk collects: hashes by label, each label once, and what has no hash."""

    def __init__(self) -> None:
        self.hashes: dict[str, str] = {}
        self.unhashable: list[str] = []
        self._labels: dict[Any, str] = {}
        self._taken: set[str] = set()

    def label(self, key: Any, wanted: str) -> str:
        """The name of a part, numbered where another has it."""
        if key not in self._labels:
            label, number = wanted, 1
            while label in self._taken:
                number += 1
                label = f"{wanted} ({number})"
            self._labels[key] = label
            self._taken.add(label)
        return self._labels[key]

    def has(self, key: Any) -> bool:
        return key in self._labels

    def no_hash(self, line: str) -> None:
        if line not in self.unhashable:
            self.unhashable.append(line)

    def library(self, name: str) -> Digest:
        """A library is known by its version."""
        package = name.partition(".")[0]
        if not is_standard(package):
            self.hashes[f"module {package}"] = library_version(package)
        return package.encode()

    def file(self, module: str) -> Digest:
        """A user's compiled module is known by its file."""
        file = module_file(module)
        if file is None or not Path(file).is_file():
            self.no_hash(f"compiled module {module}: no file")
            return module.encode()
        label = self.label(("file", module), f"compiled module {module}")
        if label not in self.hashes:
            self.hashes[label] = digest_of("file", Path(file).read_bytes()).hex()
        return label.encode()


class Walk:
    """Collects the parts. `begin` with the function, add its arguments by `root`, then `finish`."""

    def __init__(self, within: frozenset[int] = frozenset()) -> None:
        self._within = within  # members of sets, around this walk: one that contains its own set is met again
        self.parts = Parts()
        self._values = Values(self)
        self._waiting: deque[Callable[[], None]] = deque()
        self._alive: list[Any] = []

    def begin(self, function: Any, label: str = "object") -> None:
        """The function itself, whatever kind of callable it is: its code is the part "code"."""
        if isinstance(function, functools.partial):
            for n, value in enumerate(function.args):
                self.root(f"argument {n}", value)
            for name, value in sorted(function.keywords.items()):
                self.root(f"argument {name}", value)
            self.begin(function.func, label)
        elif isinstance(function, types.MethodType):
            self.root(label, function.__self__)
            self.begin(function.__func__, f"method of {label}")
        elif isinstance(function, types.FunctionType) and library_name(function) is None:
            self._node(function, CODE, lambda label: self._function(function, label))
        else:
            self.root(label, function)

    def finish(self) -> None:
        """Walk until nothing new is found."""
        while self._waiting:
            self._waiting.popleft()()

    def root(self, label: str, value: Any) -> None:
        """A value that nothing else refers to: a part under its own label also when it is a function or a class."""
        link = self.value(label, value)
        if self.has_name(value):
            self.parts.hashes[label] = link.hex()

    def value(self, label: str, value: Any) -> Digest:
        """A named value: a part of its own, unless it is a function, class or module, which have theirs."""
        if self.has_name(value):
            return self.named(value, label)
        try:
            self.parts.hashes[label] = self._values.digest(value, label).hex()
        except RecursionError:
            self.unhashable(f"{label}, which is nested too deep", type(value))
            self.parts.hashes[label] = digest_of("too deep").hex()
        return text_digest("part", label)

    # ---- what values.py asks for ----

    def has_name(self, value: Any) -> bool:
        """Functions, classes, modules, and what a library has under a name of its own (a ufunc)."""
        if isinstance(value, NAMED):
            # A built-in function is bound to its module; one that is bound to a value is a method of that.
            owner = value.__self__ if isinstance(value, types.BuiltinMethodType) else None
            return owner is None or isinstance(owner, types.ModuleType)
        return callable(value) and hasattr(value, "__qualname__") and library_name(value) is not None

    def named(self, value: Any, where: str) -> Digest:
        """A reference to it; what it is comes later, as a part."""
        if isinstance(value, types.ModuleType):
            return self._module(value, {()})
        name = library_name(value)
        if name is not None:
            return digest_of("named", name.encode(), self.parts.library(name))
        if isinstance(value, types.FunctionType):
            short = value.__qualname__.rpartition("<locals>.")[2]
            return self._node(value, f"function {short}", lambda label: self._function(value, label))
        if isinstance(value, type) and not value.__flags__ & _HEAP_TYPE:
            return text_digest("built-in type", type_name(value))
        if isinstance(value, type):
            short = value.__qualname__.rpartition("<locals>.")[2]
            return self._node(value, f"class {short}", lambda label: self._class(value, label))
        return digest_of("compiled", value.__name__.encode(), self.parts.file(str(value.__module__)))

    def unhashable(self, where: str, kind: type) -> None:
        self.parts.no_hash(f"{where}: {type_name(kind)}")

    def alone(self, value: Any) -> Digest:
        if id(value) in self._within:
            return digest_of("again")
        walk = Walk(self._within | {id(value)})
        walk.root("value", value)
        walk.finish()
        return text_digest("alone", *(f"{name} {part}" for name, part in sorted(walk.parts.hashes.items())))

    def _node(self, value: Any, wanted: str, walk: Callable[[str], None]) -> Digest:
        """A reference to something with a part of its own, which is walked once, later."""
        known, label = self.parts.has(id(value)), self.parts.label(id(value), wanted)
        if not known:
            self._alive.append(value)
            self._waiting.append(lambda: walk(label))
        return text_digest("part", label)

    # ---- functions ----

    def _function(self, function: types.FunctionType, label: str) -> None:
        code, owner = function.__code__, "" if label == CODE else f" of {label.removeprefix('function ')}"
        if code is _DISPATCH:
            self.parts.hashes[label] = self._values.pairs("dispatch", function.registry.items(), label).hex()  # type: ignore[attr-defined]
            return
        compiled = compiled_from(function)
        if compiled is not None:
            self.parts.hashes[label] = digest_of("compiled", self._values.digest(compiled, label)).hex()
            return
        found = uses(code)
        links = [self._captured(function, found, owner), self._defaults(function, owner)]
        own = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
        links.append(self._values.attributes("attributes", own, f"attribute{owner}"))
        if hasattr(function, "__wrapped__"):
            links.append(self.value(f"wrapped function{owner}", function.__wrapped__))
        if is_library_file(code.co_filename):  # made by a library, e.g. a decorator's wrapper
            body = digest_of(code.co_qualname, self.parts.library(str(function.__globals__.get("__name__"))))
        else:
            body = self._values.digest(content(code), label)
            links += self._reached(function, found)
            # Not where it is a name of the user's own.
            known = (None, importlib.import_module)
            unseen = (name for name in sorted(found.unseen) if function.__globals__.get(name) in known)
            for name in unseen:
                self.parts.no_hash(f"{label}: what {name} leads to")
        self.parts.hashes[label] = digest_of("function", body, *links).hex()

    def _captured(self, function: types.FunctionType, found: Uses, owner: str) -> Digest:
        links = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                links.append(digest_of("empty"))
                continue
            links.append(self._reach(value, found.variables.get(name, {()}), f"captured value {name}{owner}"))
        return digest_of("captured", *links)

    def _defaults(self, function: types.FunctionType, owner: str) -> Digest:
        code, given = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
        both = [*zip(names, given, strict=True), *sorted((function.__kwdefaults__ or {}).items())]
        return digest_of("defaults", *(self.value(f"default argument {name}{owner}", value) for name, value in both))

    def _reached(self, function: types.FunctionType, found: Uses) -> Iterable[Digest]:
        """Links to the globals that a function uses and to what it imports while it runs."""
        scope = function.__globals__
        for name, chains in sorted(found.globals.items()):
            if name in scope:
                label = self.parts.label((id(scope), name), f"global {name}")
                yield digest_of(name, self._reach(scope[name], chains, label))
        for one in sorted(found.imports, key=repr):
            chains = found.variables.get(one.variable, set()) | found.globals.get(one.variable, set())
            yield digest_of(repr(one), self._imported(one, chains, str(scope.get("__package__") or "")))

    def _reach(self, value: Any, chains: Iterable[Chain], label: str) -> Digest:
        return self._module(value, chains) if isinstance(value, types.ModuleType) else self.value(label, value)

    def _imported(self, one: Import, chains: set[Chain], package: str) -> Digest:
        try:
            name = importlib.util.resolve_name("." * one.level + one.module, package or None)
            if is_library(name):
                return self.parts.library(name)
            value: Any = importlib.import_module(name)
            if one.is_top:
                value = sys.modules[name.partition(".")[0]]
            elif one.member is not None:
                value = _member(value, one.member)
        except (ImportError, AttributeError):
            return digest_of("not there")
        return self._reach(value, chains, self.parts.label((name, one.member), f"global {one.member}"))

    # ---- modules ----

    def _module(self, module: types.ModuleType, chains: Iterable[Chain]) -> Digest:
        """A library by its version; of a user's module what is used of it, or all where it is handed on as it is."""
        if is_library(module.__name__):
            return digest_of("module", self.parts.library(module.__name__))
        links = []
        for chain in sorted(chains):
            if not chain:
                label = f"own module {module.__name__}"
                links.append(self._node(module, label, lambda label: self._all_of(module, label)))
            elif hasattr(module, chain[0]):
                label = self.parts.label((id(vars(module)), chain[0]), f"global {chain[0]}")
                links.append(digest_of(chain[0], self._reach(getattr(module, chain[0]), [chain[1:]], label)))
            else:
                links.append(text_digest("not there", chain[0]))
        return digest_of("own module", *links)

    def _all_of(self, module: types.ModuleType, label: str) -> None:
        links = []
        for name, value in sorted(vars(module).items()):
            if not name.startswith("__"):
                part = self.parts.label((id(vars(module)), name), f"global {name}")
                links.append(digest_of(name, self._reach(value, [()], part)))
        self.parts.hashes[label] = digest_of("own module", *links).hex()

    # ---- classes ----

    def _class(self, kind: type, label: str) -> None:
        """Methods are parts of their own; attributes belong to the class."""
        where = label
        bases = digest_of("bases", *(self._values.digest(base, where) for base in kind.__bases__))
        told = _members_of_enum(kind) if issubclass(kind, enum.Enum) else dict(vars(kind))
        # The places of slots are told by `__slots__`; a class that cloudpickle has carried has none.
        told = {
            name: value
            for name, value in told.items()
            if name not in _UNTOLD and not isinstance(value, types.MemberDescriptorType)
        }
        annotated = list(vars(kind).get("__annotations__", ()))
        self.parts.hashes[label] = digest_of(
            "class",
            self._values.digest(type(kind), where),
            bases,
            self._values.digest(annotated, where),
            self._values.attributes("attributes", told, where),
        ).hex()


def _member(module: Any, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:  # a module of the package that nothing has imported yet
        return importlib.import_module(f"{module.__name__}.{name}")


def _members_of_enum(kind: type[enum.Enum]) -> dict[str, Any]:
    """Names with values, and the methods; not what the enum module made of them."""
    own = {
        name: value
        for name, value in vars(kind).items()
        if isinstance(value, types.FunctionType | property | classmethod | staticmethod)
    }
    return own | {f"member {name}": member.value for name, member in kind.__members__.items()}
