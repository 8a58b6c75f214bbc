"""The benchmark of the operators at scale, at its smallest size: that it runs, and that what it reports is so."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from poprisk.operators._window import Window

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "operators.py"


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("operators_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "operators_benchmark", module)  # where problems find the network's factory
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_the_smoke_size_reports_every_figure(benchmark, monkeypatch, capsys, tmp_path):
    stored = tmp_path / "operators.json"
    monkeypatch.setattr(sys, "argv", ["operators.py", "--smoke", "--threads", "1", "--output", str(stored)])
    benchmark.main()
    printed, progress = capsys.readouterr()
    result = json.loads(printed)
    assert json.loads(stored.read_text()) == result
    assert "products" in progress
    assert result["smoke"]
    assert (result["outputs"], result["weights"]) == (200, 502)
    assert set(result["stages"]) == {"window", "eigenpairs", "test transfer", "channels"}
    assert result["seconds"] == pytest.approx(sum(row["seconds"] for row in result["stages"].values()), abs=0.02)
    assert 2**20 < result["peak_resident_bytes"] < result["limits"]["bytes"]
    assert result["losses"][1] < result["losses"][0]
    assert max(result["largest_corrections"]) < 1e-3
    assert result["converged"]
    assert result["largest_residual"] <= result["tolerance"] == 1e-3
    assert result["products"] + result["surrogate_products"] >= len(result["values"]) == 4
    assert result["test_displacement_error"] < 1e-4, "G carries the run's own gradient to what happened at test"
    assert result["accuracy"]["float32"] < 1e-4
    channels = result["channels"]
    assert 1 <= channels["rank"] <= 3
    assert 0 < channels["epsilon"] < 1
    assert channels["visibility"] <= channels["visibility_limit"]
    assert channels["prediction_error"] <= channels["prediction_bound"]
    assert list(result["seconds_by_steps"]) == ["2", "4", "8"]
    assert list(result["seconds_by_examples"]) == ["10", "20", "40"]
    assert list(result["seconds_by_weights"]) == ["247", "502", "1066"]
    assert all(math.isfinite(x) for x in result["exponents"].values())  # at this size a clock measures overhead
    assert result["exponents"]["columns"] < 1.5, "at this size a product is all overhead"


def test_the_full_size_is_the_one_asked_for(benchmark):
    size = benchmark.Size()
    assert size.examples * 10 >= 10_000
    assert sum(p.numel() for p in benchmark.network(size.width).parameters()) >= 100_000
    assert size.steps >= 200
    assert size.pairs >= 20


def test_the_exponent_of_a_power_law_is_its_power(benchmark):
    assert benchmark.exponent({2: 8.0, 4: 64.0, 8: 512.0}) == pytest.approx(3.0)


def test_exponents_are_slopes_of_the_cost(benchmark):
    assert benchmark.exponent({50: 1.0, 100: 2.0, 200: 4.0}) == pytest.approx(1.0)
    assert benchmark.exponent({5: 1.0, 10: 4.0, 20: 16.0}) == pytest.approx(2.0)


def test_arithmetic_of_a_product_is_linear_in_steps_and_columns(benchmark):
    """Counted, not timed: what the exponents of the full size are to show."""
    run = benchmark.recorded(benchmark.SMOKE)

    def flops(stop: int, columns: int) -> int:
        window = Window.of_run(run, dtype=torch.float32, stop=stop, dense=False, nodes=1)
        H = torch.randn(window.num_outputs, columns, generator=torch.Generator().manual_seed(0))
        with FlopCounterMode(display=False) as counter:
            window.dissipation_gramian.matmat(H)
        return counter.get_total_flops()

    assert 0.9 < benchmark.exponent({k: flops(k, 2) for k in (2, 4, 8)}) < 1.1
    one, two, four = (flops(4, k) for k in (1, 2, 4))
    assert four - two == 2 * (two - one), "every column costs the same, beside one evaluation of the network"
