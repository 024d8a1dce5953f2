"""pyarrow does without pandas until somebody wants it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pandas")

LEAN = "import sys, pyarrow as pa; from milldam.memory import keep_arrow_lean; keep_arrow_lean();"


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", LEAN + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_arrays_of_python_values_load_no_pandas() -> None:
    """Neither the first nor those that follow."""
    run("pa.array(['a']); pa.table({'a': [1]}).to_pylist(); assert 'pandas' not in sys.modules")


@pytest.mark.parametrize("how", ["import pandas as pd", "import pandas.api.types; import pandas as pd"])
def test_who_imports_pandas_gets_arrow_as_ever(how: str) -> None:
    """A missing value in a series is null, and a table becomes a frame."""
    run(
        f"pa.array(['a']); {how};"
        "assert pa.array(pd.Series([1.0, float('nan')])).null_count == 1;"
        "assert pa.Table.from_pandas(pd.DataFrame({'a': [1]})).num_rows == 1"
    )


def test_a_table_becomes_a_frame_though_nobody_imported_pandas() -> None:
    """What needs pandas finds it."""
    run("assert pa.table({'a': [1]}).to_pandas().shape == (1, 1)")
