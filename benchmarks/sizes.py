"""Sizes as people write them, to bytes and back.

Kept apart from milldam's own, so that these scripts run under any Python, milldam installed or not.
"""

from __future__ import annotations

import argparse
import re

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS = _DECIMAL | _BINARY


def parse_size(text: str) -> int:
    """Bytes from a size; made for `argparse`'s `type=`.

    >>> parse_size("600MB"), parse_size("1.5GiB"), parse_size("200")
    (600000000, 1610612736, 200)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f'"{text}" is not a size; write 600MB, 1GB or 1.5GiB')
    return int(float(match[1]) * _UNITS[match[2].upper()])


def megabytes(size: float) -> str:
    """A size in MB, for tables.

    >>> megabytes(1_234_567)
    '1.2 MB'
    """
    return f"{size / 1e6:.1f} MB"
