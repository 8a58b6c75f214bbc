"""The benchmark of one GPU at its smallest size on the CPU: that each part runs, and says how far it came."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("scale_gpu")


@pytest.fixture
def recorder(benchmark, tmp_path, monkeypatch):
    made = benchmark.Recorder(tmp_path / "part.json", 25.0, smoke=True)
    monkeypatch.setattr(made, "left", lambda: 25.0)  # on a busy machine as on an idle one
    return made


def test_the_adjoint_leaves_its_main_figure_before_the_others(benchmark, recorder):
    benchmark.adjoint(recorder)
    stored = json.loads(recorder.path.read_text())
    assert not [key for key in stored if key.endswith(("_error", "_left_out"))]
    for name in benchmark.OPTIMIZERS:
        figures = stored[name]
        assert figures["seconds"] == min(figures["all_seconds"])
        assert figures["difference_of_graphs"] <= 1e-5
    seconds, stages = zip(*stored["progress"], strict=True)
    assert list(seconds) == sorted(seconds)
    last_solve = max(i for i, stage in enumerate(stages) if "all queries in" in stage)
    assert last_solve < min(i for i, stage in enumerate(stages) if "without graphs" in stage)
    cpu = {name: {"seconds": 30 * stored[name]["seconds"]} for name in benchmark.OPTIMIZERS}
    ratios = benchmark.speedups({"adjoint": stored, "adjoint_cpu": cpu})
    assert all(row["speedup"] == pytest.approx(30) and row["reached"] for row in ratios.values())


def test_ten_folds_over_one(benchmark, recorder):
    benchmark.ten_folds(recorder)
    (figures,) = [value for key, value in recorder.figures.items() if key.endswith("batch 32")]
    assert figures["ratio_to_one"] == pytest.approx(figures["ten_seconds"] / figures["one_seconds"])
    assert figures["k_fold_seconds"] > 0


def test_two_optimizers_race_before_the_third_is_there(benchmark, recorder):
    """With too little time to compile, which takes longest, the rest goes on without."""
    benchmark.training_step(recorder)
    two, three = recorder.figures["race"], recorder.figures["race_of_three"]
    assert "compile_left_out" in recorder.figures
    assert two["rounds"] == 15
    assert two["PopRiskAdamW"]["throughput_ratio"] > 0
    assert set(three) - set(two) == {"PopRiskAdamW, v and s bf16"}


def test_a_part_that_fails_is_written_down_and_the_next_goes_on(benchmark, recorder):
    def fail() -> None:
        raise RuntimeError("out of luck")

    scale_recorder = importlib.import_module("scale_recorder")
    scale_recorder.parts(recorder, [("first", 1, fail), ("second", 1, lambda: None), ("third", 1e6, fail)])
    stored = json.loads(recorder.path.read_text())
    assert "out of luck" in stored["first_error"]
    assert stored["second_wall_seconds"] >= 0
    assert "third_left_out" in stored
