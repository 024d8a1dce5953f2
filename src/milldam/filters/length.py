"""Too short and too long, in characters and in tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from milldam.filters.layout import Mask
from milldam.filters.rules import FilterRules

Int64s = npt.NDArray[np.int64]


def character_faults(characters: Int64s, rules: FilterRules) -> Iterator[tuple[Mask, str]]:
    """Which documents have too few or too many characters."""
    if rules.min_characters is not None:
        yield characters < rules.min_characters, "too_few_characters"
    if rules.max_characters is not None:
        yield characters > rules.max_characters, "too_many_characters"


def token_faults(tokens: Int64s, rules: FilterRules) -> Iterator[tuple[Mask, str]]:
    """Which documents have too few or too many tokens."""
    if rules.min_tokens is not None:
        yield tokens < rules.min_tokens, "too_few_tokens"
    if rules.max_tokens is not None:
        yield tokens > rules.max_tokens, "too_many_tokens"
