"""The notebook: its cells run in order and show what is saved in it, which is what the site's page shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.kit.notebooks import run_notebook

import milldam

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_shows_what_is_saved_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of the same kind of output; the same output, but where the machine has a say."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, outputs in zip(cells, run_notebook(notebook), strict=True):
        kinds = [sorted(output.get("data", [output["output_type"]])) for output in outputs]
        assert kinds == [sorted(output.get("data", [output["output_type"]])) for output in cell["outputs"]]
        if "varies" not in cell["metadata"].get("tags", ()):
            assert outputs == cell["outputs"], "python -m tests.kit.notebooks examples/quickstart.ipynb"


def test_what_a_notebook_shows_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names come from anywhere: none of them is markup, in a store or a table."""
    monkeypatch.chdir(tmp_path)
    rows = [{"<b>text": "a few words"}] * 8
    table = milldam.map(rows, lambda batch: batch, Path("<i>.table"))
    (tmp_path / "tokens.bin").write_bytes(bytes(2048))
    store = milldam.import_tokens("tokens.bin", "<i>.milldam")
    for shown in (store, table):
        html = shown._repr_html_()
        assert html.startswith("<table>") and "<i>" not in html and "<b>" not in html and "&lt;i&gt;" in html
