"""`milldam.open(INPUTS, tokenizer=..., store=...)`: batches from text at once, while the store makes itself.

Imports little: a training process needs none of what makes stores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.errors import ConfigError, Setting
from milldam.feeding import is_config
from milldam.feeding.growing import GrowingParts
from milldam.feeding.making import Making, Order
from milldam.files import hash_bytes
from milldam.loader.parts import FinishedParts, Parts
from milldam.loader.stores import Store

if TYPE_CHECKING:
    from milldam.config.settings import Config

_HOW = ("out", "memory", "workers", "overwrite", "executor", "address")
"""Settings that do not change what is made."""


def parts_of(inputs: Any, options: Mapping[str, Any]) -> Parts:
    """The parts of a store that is made from text: where it is finished, those that are there."""
    order = _order_config(inputs, options) if is_config(inputs) else _order_tokenize(inputs, options)
    making = Making(order)
    planned = None if order.asked.is_answered() else making.await_planned()
    if planned is None:
        return FinishedParts(Store(order.out))
    return GrowingParts(order, planned, making)


def _order_tokenize(inputs: Any, options: Mapping[str, Any]) -> Order:
    from milldam.config.tokenize_options import tokenize_config, tokenize_settings

    chosen = dict(options)
    tokenizer, store = chosen.pop("tokenizer", None), chosen.pop("store", None)
    for name, value in (("tokenizer", tokenizer), ("store", store)):
        if value is None:
            said = "what turns the text into tokens" if name == "tokenizer" else "a folder for what is made"
            raise ConfigError(Setting(name), f": {said} is not said. Text is fed with tokenizer=... and store=...")
    given = (inputs, Path(store), tokenizer, chosen)
    return _order(Path(store), partial(tokenize_config, *given), tokenize_settings(*given), None, report=False)


def _order_config(config: Any, options: Mapping[str, Any]) -> Order:
    from milldam.config.loading import read_config

    chosen = {name: value for name, value in options.items() if value is not None}
    if "store" in chosen:
        chosen["out"] = str(chosen.pop("store"))
    read = read_config(config, (), chosen)
    out = read.given.data.get("out")
    if not isinstance(out, str):
        raise ConfigError(Setting("store"), ": where the store goes is not said. Use store=..., or out: in the file.")
    return _order(Path(out), partial(_checked, config, chosen), read.given.data, read.said[0], report=True)


def _checked(config: Any, options: Mapping[str, Any]) -> Config:
    from milldam.config.loading import read_config

    return read_config(config, (), options).checked().config


def _order(out: Path, check: Callable[[], Config], settings: Mapping[str, Any], said: Any, *, report: bool) -> Order:
    from milldam.pipeline.receipt import Asked

    of_result = {name: value for name, value in settings.items() if name not in _HOW}
    name = hash_bytes(repr((of_result, said)).encode("utf-8", "backslashreplace"))
    return Order(out, check, Asked.of(settings, said, report=report), name)
