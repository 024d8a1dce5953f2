"""Values as text for people: escaped, so that nothing from the data is ever markup; numbers, times, places."""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

# Characters that can't be seen, or turn the text around them: controls, soft hyphen, direction marks and overrides,
# zero-width characters, line and paragraph separators, halves of surrogate pairs, tag characters. Joiners (U+200C,
# U+200D) stay: scripts and emoji need them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e0fff]"
)


def escape(text: object, unseen: str = '<span class="unseen">{}</span>') -> str:
    """Text for the body of the page.

    >>> escape("<b>\\u202e")
    '&lt;b&gt;<span class="unseen">U+202E</span>'
    """
    return _UNSEEN.sub(lambda found: unseen.format(f"U+{ord(found[0]):04X}"), html.escape(str(text)))


def escape_plain(text: object) -> str:
    """Text for an attribute or inside SVG, where there can be no markup.

    >>> escape_plain('"\\x00"')
    '&quot;⟨U+0000⟩&quot;'
    """
    return escape(text, "⟨{}⟩")


def shorten(text: object, characters: int = 60) -> str:
    """A name that may be of any length, cut.

    >>> shorten("a long name", 7)
    'a long…'
    """
    whole = str(text)
    return whole if len(whole) <= characters else whole[: characters - 1] + "…"


def short_count(number: float) -> str:
    """
    >>> short_count(1_234), short_count(15_293_621), short_count(2.5e12)
    ('1,234', '15.3 M', '2.5 T')
    """
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= max(scale, 10_000):
            return f"{number / scale:.3g} {unit}" if number < 999.5 * scale else f"{number / scale:,.0f} {unit}"
    return f"{int(number):,}"


def counted(count: int, noun: str, several: str | None = None) -> str:
    """
    >>> counted(1, "document"), counted(2_000, "document"), counted(2, "batch", "batches")
    ('1 document', '2,000 documents', '2 batches')
    """
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def preferred_line(prefer: Mapping[str, Any]) -> str:
    """Which of near-duplicates stays by a field, and how many documents have the field.

    >>> preferred_line({"stays": 'the highest number in "score"', "with": 1200, "without": 1})
    'the highest number in "score" stays; 1,200 of 1,201 documents have one'
    """
    documents = prefer["with"] + prefer["without"]
    return f"{prefer['stays']} stays; {prefer['with']:,} of {counted(documents, 'document')} have one"


def turns_by_role(counts: Mapping[str, Any]) -> str:
    """Turns of conversations, from `turns_ROLE`.

    >>> turns_by_role({"turns": 3, "turns_user": 2, "turns_assistant": 1})
    '1 assistant, 2 user'
    """
    return ", ".join(f"{counts[key]:,} {key[6:]}" for key in sorted(counts) if key.startswith("turns_"))


def share(part: float, whole: float) -> str:
    """
    >>> share(1, 3), share(1, 10**6), share(0, 5), share(9_999, 10_000), share(1, 0)
    ('33.3 %', '< 0.1 %', '0 %', '> 99.9 %', '')
    """
    if whole <= 0:
        return ""
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if 99.9 < percent < 100:
        return "> 99.9 %"
    return f"{percent:.1f}".removesuffix(".0") + " %"


def duration(seconds: float) -> str:
    """
    >>> duration(0.42), duration(75), duration(7_384), duration(200_000)
    ('0.4 s', '1 min 15 s', '2 h 3 min', '2 d 7 h')
    """
    if seconds < 59.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole, units = round(seconds), (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    (unit, size), (smaller, part) = next(both for both in itertools.pairwise(units) if whole >= both[0][1])
    rest = whole % size // part
    return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")


def moment(time: float) -> str:
    """A unix time, to the minute; empty when it is none.

    >>> moment(1_700_000_000)
    '2023-11-14 22:13 UTC'
    """
    try:
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return ""


def round_step(limit: float, parts: int) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides `limit` into at most about so many parts.

    >>> round_step(512, 4), round_step(7, 7)
    (200, 1)
    """
    rough = max(limit, 1e-9) / parts
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return int(step) if step >= 1 else step


def place_words(place: dict[str, Any]) -> str:
    """A place in a file.

    >>> place_words({"line": 1234, "from_byte": 64000000}), place_words({"document": 0})
    ('line 1,234 from byte 64,000,000 on', 'document 0')
    """
    name = next(name for name in ("line", "record", "document") if name in place)
    behind = f" from byte {place['from_byte']:,} on" if "from_byte" in place else ""
    return f"{name} {place[name]:,}{behind}"
