"""What all tests share: hypothesis without randomness or a database, and where the data lies."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

PROJECT = Path(__file__).parents[1]

settings.register_profile(
    "milldam",
    deadline=None,
    database=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("milldam")


@pytest.fixture(scope="session")
def demo_tokenizer() -> Path:
    """The tokenizer.json that comes with milldam."""
    return PROJECT / "src/milldam/demo_data/tokenizer.json"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data beside the project."""
    folder = PROJECT.parent / "shared/data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return folder
