"""What a build does beyond copying files: it compiles the kernels of `milldam.native`."""

from __future__ import annotations

import sys
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):
    """A wheel with the library is for one platform and any Python; without a compiler it is a wheel for all."""

    def dependencies(self) -> list[str]:
        return ["ziglang"] if self._wanted() and not _kernels(self.root).can_compile() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._wanted():
            return
        if problem := _kernels(self.root).build():
            said = "milldam's kernels were not compiled; it runs without them, more slowly."
            self.app.display_warning(f"{said}\n{problem}")
            return
        build_data["artifacts"].append("src/milldam/native/kernels.so")
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")

    def _wanted(self) -> bool:
        return self.target_name == "wheel" and not _kernels(self.root).unwanted()


def _kernels(root: str) -> ModuleType:
    spec = spec_from_file_location("milldam_native_build", Path(root, "src/milldam/native/build.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
