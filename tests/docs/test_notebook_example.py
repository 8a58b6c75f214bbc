"""The notebook runs from top to bottom, and the outputs it carries are of the cells that it has."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/notebook/noisy_labels.ipynb"


def code_cells():
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_every_cell_was_run_in_order():
    assert [cell["execution_count"] for cell in code_cells()] == list(range(1, len(code_cells()) + 1))
    assert not [output for cell in code_cells() for output in cell["outputs"] if output["output_type"] == "error"]


@pytest.mark.timeout(900)
def test_it_runs_from_top_to_bottom(monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {}
    for cell in code_cells():
        exec("".join(cell["source"]), names)
    shown = capsys.readouterr().out
    assert names["risk"].valid
    assert names["test_accuracy"](names["again"]) > names["test_accuracy"](names["run"])  # corrected labels are better
    assert "158 of 800 labels are wrong" in shown
    assert "report.html" in shown
