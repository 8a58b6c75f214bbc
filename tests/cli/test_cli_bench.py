"""``poprisk bench``: ratios from interleaved rounds, in words and as JSON."""

import io
import json

import pytest
from cli_calls import call
from rich.console import Console

from poprisk.cli import _step_time as step_time
from poprisk.cli._bench import bench_lines
from poprisk.cli._step_time import interleaved
from poprisk.errors import HyperparameterError


def test_bench_gives_ratios_of_both_implementations(capsys, monkeypatch):
    monkeypatch.setattr(step_time, "CASES", {"2k, 2 tensors": [(1000,), (10, 100)]})
    code, out, err = call(capsys, "bench", "--device", "cpu", "--json")
    assert code == 0, err
    found = json.loads(out)
    case = found["steps"]["2k, 2 tensors"]
    for kind in ("foreach", "fused"):
        low, high = case["spread"][kind]
        assert 0 < low <= case["ratios"][kind] <= high
        assert case["milliseconds"][f"PopRiskAdamW, {kind}"] > 0
    assert found["kernel_tile"]["gradients"] > 0
    console = Console(width=120, record=True, file=io.StringIO())
    for line in bench_lines(found, 120):
        console.print(line)
    text = console.export_text()
    assert f"{case['ratios']['fused']:.2f} (" in text
    assert f"as long as {found['kernel_tile']['gradients']:.3g} gradients" in " ".join(text.split())


def test_rounds_take_turns_and_stop_in_time():
    called = []
    rows = interleaved({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, 9, 2, "cpu", seconds=0.0)
    assert called == list("aabb") * 3  # three rounds at least
    assert len(rows) == 3
    with pytest.raises(HyperparameterError, match="at least 1, got 0 and 1"):
        interleaved({}, 0, 1, "cpu")
