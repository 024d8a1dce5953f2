"""A system without what only Linux has, for every process of a job: put this folder on PYTHONPATH.

There is no /proc but for psutil, which stands for the one of macOS here; no libc.so.6 (so no sync_file_range, prctl,
malloc_trim); no posix_fadvise and posix_fallocate; and workers are programs of their own, as sys.platform is darwin.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import Any

import psutil  # noqa: F401  it has to be that of the real system

for name in ("posix_fadvise", "posix_fallocate", "sched_getaffinity", "copy_file_range"):
    if hasattr(os, name):
        delattr(os, name)
sysconfig.get_config_vars()  # these, too
sys.platform = "darwin"


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "ctypes.dlopen" and arguments[0] == "libc.so.6":
        raise OSError("libc.so.6: no such library here")
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc") and not _for_psutil():
        raise FileNotFoundError(2, "no such file here", str(arguments[0]))


def _for_psutil() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("psutil"):
            return True
        frame = frame.f_back
    return False


_stat = os.stat


def _stat_elsewhere(path: Any, *rest: Any, **options: Any) -> os.stat_result:
    if str(path).startswith("/proc") and not _for_psutil():
        raise FileNotFoundError(2, "no such file here", str(path))
    return _stat(path, *rest, **options)


os.stat = _stat_elsewhere
sys.addaudithook(_refuse)
