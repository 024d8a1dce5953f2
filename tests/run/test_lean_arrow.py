"""pyarrow does without pandas until somebody wants it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pandas")

LEAN = "import sys, pyarrow as pa; from milldam.memory import keep_arrow_lean; keep_arrow_lean();"


@pytest.mark.parametrize(
    "code",
    [
        "pa.array(['a']); pa.table({'a': [1]}).to_pylist(); assert 'pandas' not in sys.modules",
        "pa.array(['a']); import pandas as pd; assert pa.array(pd.Series([1.0, float('nan')])).null_count == 1",
        "import pandas.api.types as t, pandas as pd; assert pa.Table.from_pandas(pd.DataFrame({'a': [1]})).num_rows",
        "assert pa.table({'a': [1]}).to_pandas().shape == (1, 1)",
    ],
)
def test_pandas_is_loaded_where_it_is_needed_and_works_as_ever(code: str) -> None:
    """Arrays of Python values load none; series and frames come and go as they do without us."""
    command = [sys.executable, "-c", LEAN + code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
