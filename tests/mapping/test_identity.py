"""What a function's result depends on: every edit that matters changes the hash, no other does, in any process."""

from __future__ import annotations

import datetime
import enum
import functools
import math
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from milldam.mapping.identity import FunctionIdentity, identify

GPT2 = Path(__file__).parents[3] / "shared/data/tokenizers/gpt2/tokenizer.json"


def identity(source: str) -> FunctionIdentity:
    """Of the function f after running some source as a file of the user's."""
    scope: dict[str, Any] = {"__name__": "users_own"}
    exec(compile(textwrap.dedent(source), "user.py", "exec", dont_inherit=True), scope)
    return identify(scope["f"])


def holding(value: Any) -> FunctionIdentity:
    """The identity of a function that captured a value."""
    return identify(lambda: value)


def changed(before: str, after: str) -> list[str]:
    """What the edit from one source to another is said to change."""
    old, new = identity(before), identity(after)
    differences = old.differences(new)
    assert (old.hash == new.hash) == (not differences)
    return differences


SOURCE = """
    LIMIT = 10
    UNUSED = 1

    def inner(text):
        return text.strip("-")

    def helper(text):
        return [inner(one) for one in text.split()]

    def f(batch, *, width=3, **rest):
        def shorten(words):
            return {word[:LIMIT] for word in words}
        return [shorten(helper(text)) or width for text in batch]
"""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("or width", "and width", ["code"]),
        ("word[:LIMIT]", "word[1:LIMIT]", ["code"]),
        ("LIMIT = 10", "LIMIT = 11", ["global LIMIT"]),
        ("LIMIT = 10", "LIMIT = 10.0", ["global LIMIT"]),
        ("width=3", "width=4", ["code"]),
        ('"-"', '"+"', ["function inner"]),
        ("text.split()", "text.split(None)", ["function helper"]),
        ("inner(one) for", "one for", ["function helper", "function inner"]),
        ("UNUSED = 1", "UNUSED = 2", []),
        ("def inner(text):\n", 'def inner(text):\n        """Strips."""\n        # why\n\n', []),
        ("    LIMIT = 10\n", "\n\n\n    # more\n    LIMIT = 10\n", []),
        ("def inner(text):", "def inner(text: str) -> str:", []),
    ],
)
def test_an_edit_changes_its_part_and_no_other(before: str, after: str, said: list[str]) -> None:
    """Body, nested function, constant, default, and helpers two levels deep, each named; not comments, docstrings,
    annotations, lines, nor globals that are not used."""
    assert before in SOURCE and sorted(changed(SOURCE, SOURCE.replace(before, after))) == said


def test_captured_values_are_named() -> None:
    """A closure's value, its own and that of a function it calls."""
    source = """
        def make(limit):
            def clean(text): return text[:limit]
            def f(text): return clean(text) * 2
            return f
        f = make({})
    """
    assert changed(source.format(3), source.format(4)) == ["captured value limit of clean"]
    limit = 3
    assert identify(lambda text: text[:limit]).parts.keys() == {"captured value limit", "code", "Python"}


def test_a_method_of_a_class_that_is_used() -> None:
    """Methods, class attributes and base classes, found through the class."""
    source = """
        class Base:
            mark = "-"
            def strip(self, text): return text.strip(self.mark)
        class Cleaner(Base):
            def __init__(self, limit): self.limit = limit
            @property
            def half(self): return self.limit // 2
            @staticmethod
            def of(n): return Cleaner(n)
            def __call__(self, text): return self.strip(text)[: self.half]
        cleaner = Cleaner(10)
        def f(text): return cleaner(text)
    """
    assert changed(source, source.replace("text.strip", "text.lstrip")) == ["function Base.strip"]
    assert changed(source, source.replace('"-"', '"+"')) == ["class Base"]
    assert changed(source, source.replace("// 2", "// 3")) == ["function Cleaner.half"]
    assert changed(source, source.replace("Cleaner(n)", "Cleaner(n + 1)")) == ["function Cleaner.of"]
    assert changed(source, source.replace("Cleaner(10)", "Cleaner(11)")) == ["global cleaner"]


# ---- modules ----


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, with a package of the user's own."""
    (tmp_path / "mylib").mkdir()
    (tmp_path / "mylib/__init__.py").write_text("from . import text\n")
    (tmp_path / "mylib/text.py").write_text(
        "import mylib\nMARK = '-'\nlock = __import__('threading').Lock()\n"
        "def clean(x): return x.strip(MARK)\ndef other(x): return x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylib"]:
        del sys.modules[name]


USES = {
    "attribute": "import mylib\ndef f(x): return mylib.text.clean(x)",
    "member": "from mylib import text\ndef f(x): return [text.clean(y) for y in x]",
    "name": "from mylib.text import clean\ndef f(x): return clean(x)",
    "import inside": "def f(x):\n    import mylib.text\n    return mylib.text.clean(x)",
    "import inside as": "def f(x):\n    import mylib.text as t\n    return [t.clean(y) for y in x]",
    "member inside": "def f(x):\n    from mylib import text\n    return text.clean(x)",
    "name inside": "def f(x):\n    from mylib.text import other as o, clean as c\n    return c(x)",
}


@pytest.mark.parametrize("use", USES)
def test_a_module_of_ones_own_counts_by_what_is_used_of_it(project: Path, use: str) -> None:
    """The function called and what it uses in turn; the module's other content, locks too, does not matter."""
    file = project / "mylib/text.py"
    text = file.read_text()

    def after(before: str, then: str) -> FunctionIdentity:
        file.write_text(text.replace(before, then))
        forget()
        sys.dont_write_bytecode = True
        found = identity(USES[use])
        assert found.unhashable == []
        return found

    first = after("", "")
    if "other" not in USES[use]:
        assert after("return x\n", "return x * 2\n").hash == first.hash
    assert first.differences(after("x.strip", "x.lstrip")) == ["function clean"]
    assert first.differences(after("'-'", "'+'")) == ["global MARK"]


# ---- values ----


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


VALUES: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (lambda: 1, lambda: True),
    (lambda: 0.0, lambda: -0.0),
    (lambda: ["a", 1], lambda: (b"a", 1)),
    (lambda: {"x", "y", ("z", 1)}, lambda: {"x", "y", ("z", 2)}),
    (lambda: re.compile("a+", re.IGNORECASE), lambda: re.compile("a+")),
    (lambda: datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), lambda: datetime.datetime(2026, 1, 1)),
    (lambda: Colour.RED, lambda: Colour.BLUE),
    (lambda: "abc".upper, lambda: "abd".upper),
    (lambda: np.arange(6).reshape(2, 3), lambda: np.arange(6).reshape(3, 2)),
    (lambda: np.random.default_rng(0), lambda: np.random.default_rng(1)),
    (lambda: pa.table({"a": [1]}), lambda: pa.table({"a": [3]})),
    (lambda: torch.ones(2, dtype=torch.bfloat16), lambda: torch.zeros(2, dtype=torch.bfloat16)),
]


@pytest.mark.parametrize(("one", "other"), VALUES)
def test_values_count_by_content(one: Callable[[], Any], other: Callable[[], Any]) -> None:
    """Made anew they are the same, another value is another."""
    assert holding(one()) == holding(one())
    assert holding(one()).hash != holding(other()).hash
    assert holding(one()).unhashable == []


@pytest.mark.slow
@pytest.mark.skipif(not GPT2.exists(), reason="no shared data beside the project")
def test_a_tokenizer_that_was_used_is_the_same() -> None:
    """transformers sets padding and truncation of its backend on every call; a setting of the user's counts."""
    from transformers import PreTrainedTokenizerFast

    def load(**settings: Any) -> Any:
        return PreTrainedTokenizerFast(tokenizer_file=str(GPT2), pad_token="<|endoftext|>", **settings)

    tokenizer = load()
    before = holding(tokenizer)
    tokenizer(["a b", "c"], padding=True, truncation=True, max_length=1)
    tokenizer(["a b", "c"], padding="max_length", max_length=4)
    assert before == holding(tokenizer) == holding(load())
    assert before.unhashable == []
    tokenizer.padding_side = "left"
    assert before.differences(holding(tokenizer)) == ["captured value value"]
    tokenizer = load()
    tokenizer.add_tokens(["<new>"])
    assert before.hash != holding(tokenizer).hash


def test_what_can_not_be_hashed_is_named() -> None:
    """With the way to it; a key of the user's stands for it."""
    held, numbers = {"lock": threading.Lock(), "n": 1}, (n for n in range(3))

    def function(batch: Any) -> Any:
        return held, numbers

    found, named = identify(function), identify(function, key="v1")
    names = [line.partition(":")[0].removeprefix("captured value ") for line in found.unhashable]
    assert names == ["held", "numbers"] and "lock" in found.unhashable[0]
    assert named == identify(function, key="v1") and named.unhashable == []
    assert named.differences(identify(function, key="v2")) == ["key"]


SCRIPT = """
import collections, dataclasses, enum, functools, re, sys
import numpy as np
from milldam.mapping.identity import identify

class Kind(enum.Enum):
    A = "a"

@dataclasses.dataclass
class Rules:
    names: frozenset
    kind: Kind = Kind.A

class Cleaner:
    marks = {"a", "b", "c", "d"}
    def __init__(self): self.rules = Rules(frozenset("uvwxyz")); self.cache = {}
    def __call__(self, text): return text.strip("".join(self.marks))

cleaner, PATTERN, TABLE = Cleaner(), re.compile("a"), np.arange(5)

@functools.lru_cache
def helper(x): return x in {"one", "two", "three", 4, None} and PATTERN

def f(batch, default=object, steps={len, max, helper, cleaner.__call__}):
    return [cleaner(x) for x in batch if helper(x)], TABLE, lambda: cleaner

found = identify(f, {"k": {Kind.A, 3, "x", (1, 2)}})
assert not found.unhashable, found.unhashable
print(found.hash)
"""


def test_another_process_gives_the_same(tmp_path: Path) -> None:
    """Whatever its hash seed, its folder and the place of the file."""
    hashes = set()
    for seed in ("0", "1", "77"):
        script = tmp_path / seed / "script.py"
        script.parent.mkdir()
        script.write_text("\n" * int(seed) + SCRIPT)
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        hashes.add(ran.stdout)
    assert len(hashes) == 1


# ---- functions and classes as arguments ----


def up(value: int) -> int:
    return value + 1


def double(value: int) -> int:
    return value * 2


def applied(batch: Any, op: Any = None, other: Any = None) -> Any:
    return {"x": [op(value) for value in batch["x"]]}


PAIRS = [(math.floor, math.ceil), (int, float), (np.sort, np.cumsum), (torch.sin, torch.cos), (up, double)]


@pytest.mark.parametrize(("one", "another"), PAIRS)
def test_a_function_that_is_an_argument_counts(one: Any, another: Any) -> None:
    """As a keyword argument, in a partial, as the mapped function itself, in a set; the argument is named."""
    for made in (
        lambda op: identify(applied, {"op": op}),
        lambda op: identify(functools.partial(applied, op=op)),
        lambda op: identify(functools.partial(applied, None, op)),
        identify,
        lambda op: holding({op}),
    ):
        assert made(one).hash == made(one).hash != made(another).hash
    assert "argument op" in identify(applied, {"op": one}).differences(identify(applied, {"op": another}))
