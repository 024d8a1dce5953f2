"""What tests of configuration files share; each file has its own `load`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from milldam.config.loading import LoadedConfig
from milldam.errors import ConfigError

Load = Callable[..., LoadedConfig]
"""Loads a text as a file, with overrides."""


@pytest.fixture
def complaint(load: Load) -> Callable[..., str]:
    """What is said of a text that is wrong."""

    def complain(text: str, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        return str(caught.value)

    return complain
