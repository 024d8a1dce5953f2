"""Whose code is it: the user's own, or of an installed library?

The standard library, what lies in site-packages, and milldam itself count as libraries: they are known by name and
version. Everything else is the user's and is looked into. Reads the metadata of installed packages, imports nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

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
        found = [f"{one} {metadata.version(one)}" for one in sorted(set(_distributions().get(package, [])))]
        return ", ".join(found) or str(getattr(sys.modules.get(package), "__version__", "of unknown version"))


@functools.cache
def _distributions() -> Any:
    return metadata.packages_distributions()


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
