"""The notebook: its cells run in order and show what is saved in it, which is what the site's page shows.

What it shows is saved anew by MILLDAM_WRITE_GOLDEN=1 pytest -m slow tests/guards/test_notebook.py
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def run_notebook(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell, as a notebook has them."""
    session: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [_run_cell("".join(cell["source"]), session, number) for number, cell in enumerate(cells, 1)]


def _run_cell(source: str, session: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), session)
        shown = None
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), session)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    if shown is not None:
        data = {"text/plain": repr(shown)}
        if hasattr(shown, "_repr_html_"):
            data["text/html"] = shown._repr_html_()
        outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    return outputs


@pytest.mark.slow
def test_the_notebook_shows_what_is_saved_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of the same kind of output; the same output, but where the machine has a say."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    shown = run_notebook(notebook)
    if os.environ.get("MILLDAM_WRITE_GOLDEN"):
        for number, (cell, outputs) in enumerate(zip(cells, shown, strict=True), 1):
            cell["outputs"], cell["execution_count"] = outputs, number
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for cell, outputs in zip(cells, shown, strict=True):
        kinds = [sorted(output.get("data", [output["output_type"]])) for output in outputs]
        assert kinds == [sorted(output.get("data", [output["output_type"]])) for output in cell["outputs"]]
        if "varies" not in cell["metadata"].get("tags", ()):
            assert outputs == cell["outputs"]
