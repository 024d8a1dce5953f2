"""Training straight from text: units of a store are made in the background, in the order in which loaders need them.

job          the maker: the job of `milldam tokenize` in a process beside training, its units in the order of demand
making       the maker as loaders see it: started, watched, replaced when it dies
demand       which units loaders wait for, and what the maker writes about its run, as files of the run folder
growing      the parts of a store that is being made, as `loader.unit_order` wants them

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
