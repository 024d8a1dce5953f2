"""pyarrow without pandas, until somebody wants pandas.

For the first array of Python values, pyarrow loads pandas where it is installed: 40 MB in every process, for nothing.
`keep_arrow_lean` lets it find that there is none. When a program, or a user's function, imports pandas itself, pyarrow
is told at once, and treats pandas' types as ever.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class _Finder(importlib.abc.MetaPathFinder):
    """Stands before the finder of pandas."""

    def __init__(self) -> None:
        self.hidden = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "pandas":
            return None
        if self.hidden:
            raise ModuleNotFoundError("No module named 'pandas'", name=name)
        sys.meta_path.remove(self)
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is not None and found.loader is not None:
            found.loader = _Telling(found.loader)
        return found


class _Telling(importlib.abc.Loader):
    """Loads pandas, then lets pyarrow know."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import pyarrow

        # What needs pandas looks for it again.
        pyarrow.table({"a": [0]}).to_pandas()


def keep_arrow_lean() -> None:
    """Once is enough; where pandas or pyarrow's use of it is there already, it stays."""
    if "pandas" in sys.modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    import pyarrow

    finder = _Finder()
    sys.meta_path.insert(0, finder)
    finder.hidden = True
    try:
        pyarrow.array([0])
    finally:
        finder.hidden = False
