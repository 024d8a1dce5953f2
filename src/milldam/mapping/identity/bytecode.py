"""What a code object does, without where it stands: its instructions with their operands written out.

File, line numbers, comments and docstrings are not in it. Beside it, what the code reaches for: global names and
captured variables with the attributes asked of them (`mylib.text.clean`), and what it imports while it runs. Of names
that are made up at run time (`eval`, `import_module`) it can only be told that there are some.
"""

from __future__ import annotations

import dis
import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

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
