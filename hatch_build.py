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
    """A wheel has the library, for one platform and any Python."""

    def dependencies(self) -> list[str]:
        return ["ziglang"] if self.target_name == "wheel" and not _kernels(self.root).can_compile() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        kernels = _kernels(self.root)
        if problem := kernels.build():
            self.app.abort(f"milldam's loops in C can't be compiled. {kernels.ADVICE}\n{problem}")
        build_data["artifacts"].append(kernels.library().relative_to(self.root).as_posix())
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _kernels(root: str) -> ModuleType:
    spec = spec_from_file_location("milldam_native_build", Path(root, "src/milldam/native/build.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
