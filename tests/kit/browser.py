"""A headless Chromium, for pages that people look at."""

from __future__ import annotations

import shutil
import subprocess
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
