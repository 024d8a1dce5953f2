"""Which values of a parameter `make test` looks at; `make test-all` looks at all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_quick(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """The first of them quick, the others marked slow; a tuple is a value for each parameter."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=[pytest.mark.slow] * (place >= quick))
        for place, one in enumerate(values)
    ]
