"""A headless Chromium, for pages that people look at."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest


def chromium(tmp_path: Path, page: Path, *options: str, query: str = "") -> str:
    """What headless Chromium prints of a page."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium here to look at the page with")
    quiet = ("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update")
    command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync", *quiet]
    command += [f"--user-data-dir={tmp_path / 'profile'}", *options, page.resolve().as_uri() + query]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pixel_rows(png: bytes) -> list[bytes]:
    """The rows of a picture as PNG stores them: of a blank one, next to none differ."""
    at, data = 8, b""
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += size + 12
    width, height = struct.unpack_from(">II", png, 16)
    raw = zlib.decompress(data)
    stride = len(raw) // height
    assert stride > width
    return [raw[row * stride : (row + 1) * stride] for row in range(height)]
