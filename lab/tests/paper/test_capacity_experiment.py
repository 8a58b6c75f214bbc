"""The capacity axis at its smoke size: exact risks against dense formulas, the command, its figure and its page."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from poprisk._core.seeds import stream
from poprisk._core.store.envelope import load_result
from poprisk.errors import HyperparameterError
from poprisk.theory.random_features import random_feature_task
from poprisk_lab.pages.registry import chosen_pages
from poprisk_lab.paper.capacity import study as experiment
from poprisk_lab.paper.capacity.study import SMOKE, CapacityConfig

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(smoke_result):
    return smoke_result("capacity")


@pytest.fixture(scope="module")
def task():
    """The task of the width sweep and of the noise."""
    return random_feature_task(
        stream(0, "capacity") % 2**31,
        examples=SMOKE.sweep_examples,
        tests=SMOKE.sweep_tests,
        dimension=SMOKE.dimension,
        widest=30,
    )


def fit_matrix(task, width):
    return task.features(task.test_inputs, width) @ torch.linalg.pinv(task.features(task.inputs, width))


def test_command_writes_result_and_figure_and_says_where(smoke_of, saved):
    made = smoke_of("capacity")
    directory, out, err = made.directory, made.out, made.err
    assert sorted(p.name for p in directory.iterdir()) == ["capacity.json", "capacity.pdf", "capacity.png"]
    assert f"Wrote {directory}" in out
    assert err.splitlines()[0] == "capacity: 0 of 3 runs; next: predictive ranks"
    assert saved["config"] == json.loads(json.dumps(asdict(SMOKE)))


def test_risk_along_the_width_is_that_of_least_norm_fits(saved, task):
    """In expectation over the noise, a fit T y has the error ‖T ȳ − f*‖² + σ²‖T‖²_F."""
    widths = saved["result"]["widths"]
    for k, width in enumerate(SMOKE.widths):
        T, m = fit_matrix(task, width), SMOKE.sweep_tests
        noise = SMOKE.sigma**2 * T.square().sum() / m
        misfit = (T @ task.signal - task.truth).square().sum() / m
        assert widths["compared"]["theory"][k] == pytest.approx((misfit + noise).item(), rel=1e-8)
        assert widths["without_misfit"][k] == pytest.approx(noise.item(), rel=1e-8)
    assert widths["compared"]["largest_deviation"] < 5
    fitted = [width >= SMOKE.sweep_examples for width in SMOKE.widths]
    assert [error < 1e-15 for error in widths["train_errors"]] == fitted


def test_interpolated_noise_costs_the_trace(saved, task):
    studies = saved["result"]["noise"]
    assert [study["width"] for study in studies] == [SMOKE.sweep_examples, *SMOKE.noise_widths]
    for study in studies:
        trace = fit_matrix(task, study["width"]).square().sum().item() / SMOKE.sweep_tests
        assert study["visibility"] == pytest.approx(trace, rel=1e-8)
        assert abs(study["slope"] - study["visibility"]) < 5 * study["slope_error"]
        ratios = np.array(study["simulated"]) / np.array(study["variances"])
        assert study["slope"] == pytest.approx(ratios.mean())
        assert study["train_error"] < 1e-15


def test_peak_is_where_the_increments_turn(saved):
    ranks = saved["result"]["ranks"]
    theory, increments, peak = np.array(ranks["shown"]["theory"]), ranks["increments"], ranks["shown"]["peak"]
    np.testing.assert_allclose(np.diff(theory), increments, rtol=1e-9, atol=1e-12)
    assert peak == theory.argmax()
    assert increments[peak - 1] > 0 > increments[peak]
    assert peak in ranks["sign_changes"]
    assert ranks["with_peak"] == len(ranks["prominences"]) == SMOKE.problems
    assert ranks["with_peak"] + ranks["only_local"] + ranks["without_peak"] == ranks["problems"]
    assert max(ranks["prominences"]) == pytest.approx(1 - max(theory[0], theory[-1]) / theory[peak])


def test_figure_shows_the_stored_numbers(saved):
    from poprisk_lab.paper.capacity.figure import draw

    ranks, widths, increments, noise = draw(saved).axes
    result = saved["result"]
    np.testing.assert_array_equal(ranks.lines[0].get_ydata(), result["ranks"]["shown"]["theory"])
    np.testing.assert_array_equal(widths.lines[0].get_ydata(), result["widths"]["compared"]["theory"])
    heights = [bar.get_height() for bar in increments.patches[: len(result["ranks"]["increments"])]]
    np.testing.assert_array_equal(heights, result["ranks"]["increments"])
    shown = result["noise"][1]  # the first is the peak, off the scale
    np.testing.assert_allclose(noise.lines[0].get_ydata()[1:], shown["visibility"] * np.array(shown["variances"]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"problems": 0}, "at least 1"),
        ({"widths": (4, 2, 8)}, "widths must ascend"),
        ({"noise_widths": (10,)}, "noise_widths must be at least 40"),
        ({"noise_levels": (1.0,)}, "two or more variances"),
    ],
)
def test_wrong_configurations_are_refused(wrong, message):
    with pytest.raises(HyperparameterError, match=message):
        CapacityConfig(**wrong)


@pytest.fixture(scope="module")
def stored():
    return load_result(ROOT / "results/capacity.json", experiment.KIND)


def test_page_comes_from_the_stored_result(stored):
    [page] = chosen_pages(["docs/capacity.md"])
    assert not page.is_stale(ROOT / "results")
    assert stored["config"] == json.loads(json.dumps(asdict(CapacityConfig())))
    assert (ROOT / "docs/capacity.png").is_file()


def test_stored_result_says_what_is_claimed(stored):
    ranks, widths = stored["result"]["ranks"], stored["result"]["widths"]
    assert ranks["with_peak"] == 20
    assert ranks["hits"] >= 19
    assert widths["compared"]["peak"] == stored["config"]["sweep_examples"]
    assert widths["compared"]["largest_deviation"] < 4
    for study in stored["result"]["noise"]:
        assert abs(study["slope"] - study["visibility"]) < 3 * study["slope_error"]
        assert study["rank"] == stored["config"]["sweep_examples"]  # no reservoir, as the page says
