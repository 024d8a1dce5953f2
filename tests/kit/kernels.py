"""The kernels in C taken away, so that their twins in numpy do the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from milldam import native


@contextmanager
def without_kernels() -> Iterator[None]:
    """Within it, this process does everything in numpy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        yield
