"""Text of unknown origin, made fit to be printed."""

from __future__ import annotations

_PICTURES = {code: 0x2400 + code for code in range(0x20) if code != 0x0A} | {0x7F: 0x2421}
_VISIBLE = _PICTURES | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """Control characters as pictures, line ends apart: what we print must not steer the terminal."""
    return text.translate(_VISIBLE)
