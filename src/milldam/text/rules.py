"""How texts are cleaned: the settings of this room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanRules:
    """How to clean every text before anything else, in this order."""

    unicode: Literal["NFC", "NFKC"] | None = None
    """Unicode normalisation."""
    control_characters: bool = True
    """Remove control characters other than tab and line ends (C0, DEL, C1), and byte order marks (U+FEFF)."""
    whitespace: bool = False
    """Turn line ends into \\n and spaces of all kinds into one space; remove spaces at line ends; keep at most one
    blank line."""
    strip: bool = True
    """Remove white space at both ends."""
    function: str | None = None
    """Your own cleaning, `module:function`, last: takes the text and returns it, or None to drop it. Up to 16 MB."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
