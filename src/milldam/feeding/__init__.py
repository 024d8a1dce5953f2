"""Training straight from text: units of a store are made in the background, in the order in which loaders need them.

opening      `milldam.open(INPUTS, tokenizer=..., store=...)`: what is asked for, and what can't be
maker        a process that does the job of `milldam tokenize`, unit by unit as they are wanted; it has the run's lock
making       the maker as loaders see it: started, watched, replaced when it dies
demand       which units loaders wait for, as files of the run folder
made         the run's records, read while they are written
growing      the parts of a store that is being made, as `loader.parts` wants them

Ranks share a run folder and nothing else: whoever gets the lock has the maker, the others read what it makes. No rank
waits for another one, only for units.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_CONFIG_ENDINGS = (".yaml", ".yml")


def is_raw(inputs: object, options: Mapping[str, object]) -> bool:
    """Whether text is to be fed: a tokenizer or the place of a store is named, or the input is a configuration."""
    return not options.keys().isdisjoint(("tokenizer", "store")) or is_config(inputs)


def is_config(inputs: object) -> bool:
    return isinstance(inputs, Mapping) or (
        isinstance(inputs, str | Path) and str(inputs).lower().endswith(_CONFIG_ENDINGS)
    )
