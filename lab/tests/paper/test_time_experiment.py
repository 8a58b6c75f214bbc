"""The time axis at its smoke size: filters against real descent, the command, its figure and its page."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from poprisk._core.store.envelope import load_result
from poprisk.errors import HyperparameterError
from poprisk_lab.pages.registry import chosen_pages
from poprisk_lab.paper.time_axis import study as experiment
from poprisk_lab.paper.time_axis.study import SMOKE, TimeConfig, descend, memorizing_task, summarize

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(smoke_result):
    return smoke_result("time")


@pytest.fixture(scope="module")
def task():
    return memorizing_task(SMOKE, 0)


def test_command_writes_result_and_figure_and_says_where(smoke_of, saved):
    made = smoke_of("time")
    directory, out, err = made.directory, made.out, made.err
    assert sorted(p.name for p in directory.iterdir()) == ["time.json", "time.pdf", "time.png"]
    assert f"Wrote {directory}" in out
    assert err.splitlines()[0] == "time: 0 of 1 runs; next: seed 0"
    assert saved["config"] == json.loads(json.dumps(asdict(SMOKE)))


def test_descent_is_the_power_of_a_matrix(task):
    X, y = task.features, task.targets
    lr, steps = 3.0, 7
    decay = torch.linalg.matrix_power(torch.eye(len(y), dtype=torch.float64) - lr / len(y) * X @ X.T, steps)
    train_outputs, test_outputs = descend(task, lr, [2, steps])
    torch.testing.assert_close(train_outputs[1], y - decay @ y, rtol=1e-10, atol=1e-10)
    K, K_QS = X @ X.T, task.test_features @ X.T
    torch.testing.assert_close(test_outputs[1], K_QS @ torch.linalg.pinv(K, rcond=1e-13) @ (y - decay @ y), rtol=1e-5,
                               atol=1e-5)  # fmt: skip


def test_modes_and_masses_are_those_of_the_kernel(saved, task):
    run, n = saved["result"]["runs"][0], SMOKE.examples
    _, s, Vt = torch.linalg.svd(task.features, full_matrices=False)
    C = task.test_features @ Vt.T / s
    np.testing.assert_allclose(run["mobility"], s.square(), rtol=1e-5)
    fast = torch.arange(len(s)) < SMOKE.memorizing
    assert run["rank"] == SMOKE.memorizing + SMOKE.dimension
    for k, t in enumerate(run["times"]):
        M = 1 - torch.exp(-t * s.square() / n)
        mass = n**2 * (C * M).square().sum(0)
        assert run["fast_mass"][k] == pytest.approx(mass[fast].sum().item(), rel=1e-4)
        assert run["slow_mass"][k] == pytest.approx(mass[~fast].sum().item(), rel=1e-4)
        for mode in run["modes"]:
            assert mode["flow"][k] == pytest.approx(M[mode["index"]].item(), rel=1e-4, abs=1e-9)
            steps = round(t / SMOKE.lr)
            discrete = 1 - (1 - SMOKE.lr * mode["mobility"] / n) ** steps
            assert mode["measured"][k] == pytest.approx(discrete, rel=1e-3, abs=1e-6)
            total = mode["mobility"] + n * SMOKE.decay
            decayed = mode["mobility"] / total * (1 - np.exp(-total * t / n))
            assert mode["decayed"][k] == pytest.approx(decayed, rel=1e-3, abs=1e-9)


def test_labels_are_carried_by_the_signal_and_not_by_the_marks(task):
    signal = task.test_features[:, SMOKE.memorizing] / SMOKE.weakness**0.5
    assert (signal.sign() == task.test_targets).all()
    assert task.features.shape == (SMOKE.examples, SMOKE.memorizing + SMOKE.dimension)


def test_events_are_those_that_last(saved):
    run = saved["result"]["runs"][0]
    first = run["interpolated_at"]
    right = [t for t, accuracy in zip(run["times"], run["train_accuracy"], strict=True) if accuracy < 1]
    assert first is None or max(right, default=0) < first
    assert experiment._stays([1.0, 2.0, 3.0, 4.0], [True, False, True, True]) == 3.0
    assert experiment._stays([1.0, 2.0], [True, False]) is None
    assert experiment._stays([1.0, 2.0], [True, True]) == 1.0
    revived = experiment.TimeRun(**{**run, "modes": [experiment.FittedMode(**mode) for mode in run["modes"]]})
    assert json.loads(json.dumps(asdict(summarize([revived])))) == saved["result"]["summary"]


def test_figure_shows_the_stored_numbers(saved):
    from poprisk_lab.paper.time_axis.figure import draw

    run = saved["result"]["runs"][0]
    filters, accuracy, mass = draw(saved).axes
    for k, mode in enumerate(run["modes"]):
        np.testing.assert_array_equal(filters.lines[3 * k].get_ydata(), mode["flow"])
        np.testing.assert_array_equal(filters.lines[3 * k + 1].get_ydata(), mode["decayed"])
    np.testing.assert_array_equal(accuracy.lines[0].get_ydata(), run["train_accuracy"])
    np.testing.assert_array_equal(mass.lines[1].get_ydata(), run["slow_mass"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"memorizing": 299}, "leave the signal something"),
        ({"lr": 100.0}, "must be below 100"),
        ({"shown": (283,)}, "shown must name directions"),
    ],
)
def test_wrong_configurations_are_refused(wrong, message):
    with pytest.raises(HyperparameterError, match=message):
        TimeConfig(**wrong)


@pytest.fixture(scope="module")
def stored():
    return load_result(ROOT / "results/time.json", experiment.KIND)


def test_page_comes_from_the_stored_result(stored):
    [page] = chosen_pages(["docs/time.md"])
    assert not page.is_stale(ROOT / "results")
    assert stored["config"] == json.loads(json.dumps(asdict(TimeConfig())))
    assert (ROOT / "docs/time.png").is_file()


def test_stored_result_says_what_is_claimed(stored):
    found = stored["result"]["summary"]
    assert found["reached"] == stored["config"]["seeds"]
    assert 100 * found["interpolated_at"] < found["generalized_at"] < found["overtaken_at"]
    assert found["accuracy_when_interpolated"]["value"] < 0.6
    assert found["final_accuracy"]["value"] > 0.85
    assert found["worst_output_error"] < 0.05
