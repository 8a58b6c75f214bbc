"""The demo's pairing, its summary, and its small print."""

import inspect
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch.optim import AdamW

from poprisk._core.seeds import stream
from poprisk._core.statistics import mean_over_seeds, paired_difference
from poprisk.cli._demonstration.networks import MLPShape, plain_network
from poprisk.cli._demonstration.recorded import record_demo
from poprisk.cli._demonstration.study import ADAMW, KEPT, USUAL_LR, DemoConfig, demo_data, run_demo
from poprisk.cli._demonstration.summary import format_lr, summarize
from poprisk.cli._demonstration.training import evaluation_steps
from poprisk.errors import DataError, HyperparameterError, PopRiskError, RunError
from poprisk.runs._run import Run

TINY = DemoConfig(
    seeds=2, train_size=120, steps=6, width=8, depth=1, evaluations=3, adamw_lrs=(1e-4, 3e-3), kept_lrs=(3e-3,)
)


@pytest.fixture(scope="module")
def tiny_result():
    told = []
    return run_demo(TINY, lambda *a: told.append(a)), told


def test_result_has_a_curve_for_every_member(tiny_result):
    result, _ = tiny_result
    assert result.evaluation_steps == [2, 4, 6]
    assert result.wrong_share == pytest.approx(0.4)
    assert result.test_size == 1797 - 120
    for name, count in ((ADAMW, 3), (KEPT, 2)):  # the default joins each grid
        sweep = result.sweeps[name]
        assert len(sweep.learning_rates) == count
        for curves in (sweep.test_accuracy, sweep.train_accuracy, sweep.memorized):
            assert torch.tensor(curves).shape == (count, 2, 3)


def test_progress_alternates_between_the_optimizers(tiny_result):
    _, told = tiny_result
    assert [(name, step) for name, step, _ in told[:4]] == [
        (ADAMW, 2),
        (KEPT, 2),
        (ADAMW, 4),
        (KEPT, 4),
    ]


def test_rerun_gives_the_same_numbers(tiny_result):
    again = run_demo(TINY)
    for name, sweep in tiny_result[0].sweeps.items():
        assert again.sweeps[name].test_accuracy == sweep.test_accuracy


def test_members_do_not_depend_on_how_many_seeds_run():
    few, many = demo_data(TINY), demo_data(replace(TINY, seeds=3))
    torch.testing.assert_close(few.labels, many.labels[:2])
    torch.testing.assert_close(few.inputs, many.inputs[:2])
    assert not torch.equal(few.labels[0], few.labels[1])


def test_the_recorded_run_is_of_the_first_seed_s_problem(tmp_path):
    record_demo(TINY, tmp_path / "run")
    run, data = Run.load(tmp_path / "run"), demo_data(TINY)
    assert torch.equal(run.problem.targets, data.labels[0])
    start = plain_network(MLPShape(64, TINY.width, TINY.depth, 10), stream(0, "weights"))
    assert torch.equal(run.weights(0), torch.cat([p.detach().flatten() for p in start.parameters()]))
    assert run.num_steps == TINY.steps
    assert run.kept is not None
    assert len(run.kept.held) == 6  # 5% of 120
    record_demo(TINY, tmp_path / "run")  # writes over its own
    (tmp_path / "other").mkdir()
    with pytest.raises(RunError, match="does not contain a run of the demo"):
        record_demo(TINY, tmp_path / "other")


def test_clean_labels_have_nothing_to_memorize():
    result = run_demo(replace(TINY, noise=0.0, seeds=1))
    assert result.sweeps[ADAMW].memorized is None
    assert all(row.memorized is None for row in result.summary.rows)
    assert "one seed, so no interval" in result.summary.headline


def test_defaults_come_from_the_classes():
    assert inspect.signature(AdamW).parameters["lr"].default == USUAL_LR
    assert USUAL_LR in DemoConfig().learning_rates(KEPT)
    assert len({stream(s, p) for s in range(3) for p in ("split", "labels", "weights", "batches")}) == 12


def test_evaluations_end_at_the_last_step():
    steps = evaluation_steps(1003, 40)
    assert len(steps) == 40
    assert steps[-1] == 1003
    assert evaluation_steps(3, DemoConfig().evaluations) == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"seeds": 0}, HyperparameterError),
        ({"noise": 0.95}, HyperparameterError),
        ({"noise": math.nan}, HyperparameterError),
        ({"train_size": 1797}, DataError),
        ({"steps": 0}, HyperparameterError),
        ({"adamw_lrs": (0.0,)}, HyperparameterError),
    ],
)
def test_wrong_configs_are_refused(change, kind):
    with pytest.raises(kind, match="got") as caught:
        replace(DemoConfig(), **change)
    assert isinstance(caught.value, PopRiskError)


def make_sweep(finals, rates, default):
    """A sweep whose two seeds end at ``final ± 0.01`` after a best step 0.02 higher."""
    curves = [[[f + 0.02 + d, f + d] for d in (-0.01, 0.01)] for f in finals]
    return {"learning_rates": rates, "default_lr": default, "test_accuracy": curves, "memorized": None}


def test_summary_of_known_numbers():
    adamw = make_sweep([0.5, 0.9, 0.8, 0.6], [1e-4, 3e-4, 1e-3, 3e-3], 1e-3)
    ours = make_sweep([0.88, 0.93, 0.95, 0.94], [1e-3, 3e-3, 1e-2, 3e-2], 1e-2)
    summary = summarize({ADAMW: adamw, KEPT: ours})
    usual, tuned, default = summary.rows
    assert (usual.lr, tuned.lr, default.lr) == (1e-3, 3e-4, 1e-2)
    assert tuned.best.value == pytest.approx(0.92)
    assert summary.difference.value == pytest.approx(0.05)
    assert summary.difference.verdict == "above"
    assert "training ends at 95.0% instead of 80.0%. It ends above the tuned AdamW (90.0%)" in summary.headline
    assert [s.variation for s in summary.sensitivity] == pytest.approx([0.4, 0.07])
    assert default.curve.low == pytest.approx([0.96, 0.94])


@pytest.mark.parametrize(
    ("final", "verdict"), [([0.85, 0.89], "ends below"), ([0.80, 0.99], "shows no clear difference from")]
)
def test_headline_says_what_was_found(final, verdict):
    adamw = make_sweep([0.9], [1e-3], 1e-3)
    ours = make_sweep([0.9], [1e-2], 1e-2)
    ours["test_accuracy"] = [[[0.5, value] for value in final]]
    adamw["test_accuracy"] = [[[0.5, 0.9], [0.5, 0.94]]]
    summary = summarize({ADAMW: adamw, KEPT: ours})
    assert verdict in summary.headline
    assert summary.sensitivity == []  # a grid of one learning rate spans no range
    assert summary.sensitivity_line == ""


def test_interval_is_students():
    difference = paired_difference([1.0, 2.0, 3.0, 4.0, 5.0], [0.0] * 5)
    # t(0.975, 4) = 2.776445, standard error √(2.5/5)
    assert difference.high == pytest.approx(3 + 2.776445 * math.sqrt(0.5), rel=1e-6)
    assert asdict(mean_over_seeds([2.0])) == {"value": 2.0, "standard_error": None, "count": 1}
    with pytest.raises(DataError, match="got 1 and 2 values"):
        paired_difference([1.0], [1.0, 2.0])
    with pytest.raises(DataError, match="got none"):
        mean_over_seeds([])


@pytest.mark.parametrize(
    ("lr", "words"), [(1e-3, "1e-3"), (3e-5, "3e-5"), (0.1, "1e-1"), (1.0, "1e0"), (0.025, "2.5e-2")]
)
def test_learning_rates_in_words(lr, words):
    assert format_lr(lr) == words
