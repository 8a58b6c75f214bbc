"""The table of layers is true: every row is made again by a run of a tiny model."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("layer_table", ROOT / "docs/_ext/layer_table.py")
assert spec is not None
assert spec.loader is not None
layer_table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layer_table)
LINES = layer_table.PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", layer_table.LAYERS)
def test_row(name):
    assert layer_table.row(name) in LINES


def test_there_are_no_other_rows():
    assert len([line for line in LINES if line.startswith("| `")]) == len(layer_table.LAYERS)
    page = layer_table.PAGE.read_text(encoding="utf-8")
    assert page.startswith(layer_table.HEAD)
    assert page.endswith(layer_table.FOOT)
