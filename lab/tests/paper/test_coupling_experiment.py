# type: ignore  # the project checks the types of src and lab/src
"""Train-test coupling at its smoke size: what is stored is what happened, the command, its figure and its page."""

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.testing import assert_close

from poprisk import cli
from poprisk._core.progress import Progress
from poprisk._core.store.envelope import load_result
from poprisk._core.store.files import write_text
from poprisk.errors import DataError, HyperparameterError, MissingExtraError
from poprisk.operators._kernels.tangent import cross_kernel, train_kernel
from poprisk.runs._problem import Problem
from poprisk.runs._training import train
from poprisk_lab.pages.registry import chosen_pages
from poprisk_lab.paper.coupling import study as experiment
from poprisk_lab.paper.coupling.measures import measure_run
from poprisk_lab.paper.coupling.study import FULL_BATCH, MINIBATCH, REPEATED, SMOKE, Case, CouplingConfig
from poprisk_lab.reproductions import known

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
PAIRS = SMOKE.cases[1].repeated


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return caught.value.code, out, err


@pytest.fixture(scope="module")
def saved(smoke_result):
    return smoke_result("coupling")


@pytest.fixture(scope="module")
def runs(saved):
    return {run["case"]: run for run in saved["result"]["runs"]}


def test_command_writes_result_and_figure_and_says_where(smoke_of, saved):
    made = smoke_of("coupling")
    directory, out, err = made.directory, made.out, made.err
    assert sorted(p.name for p in directory.iterdir()) == ["coupling.json", "coupling.pdf", "coupling.png"]
    assert (directory / "coupling.png").read_bytes().startswith(b"\x89PNG")
    assert (directory / "coupling.pdf").read_bytes().startswith(b"%PDF")
    assert f"Wrote {directory}" in out
    lines = err.splitlines()
    assert lines[0] == "coupling: 0 of 3 runs; next: seed 0, minibatch"
    assert re.fullmatch(r"coupling: 2 of 3 runs, about \d+ (s|min) left; next: seed 0, repeated", lines[2])
    assert lines[3].startswith("coupling: 3 of 3 runs")
    assert saved["config"] == json.loads(json.dumps(asdict(SMOKE)))
    assert saved["environment"]["torch"] == torch.__version__


def test_predictions_are_exact_except_where_the_theorem_ends(runs):
    for case, run in runs.items():
        true = np.array(run["test_displacement"])
        for name in ("coupled", "transferred", "frozen"):
            values = np.array(run[name]["values"])
            error = np.linalg.norm(values - true) / np.linalg.norm(true)
            assert run[name]["relative_error"] == pytest.approx(error, abs=1e-15)
            assert run[name]["correlation"] == pytest.approx(np.corrcoef(values, true)[0, 1])
        assert run["transferred"]["relative_error"] < 1e-13
        assert (run["coupled"]["relative_error"] < 1e-11) == (case != REPEATED)
        assert run["frozen"]["relative_error"] > 1e-3
        assert run["sourceless_error"] > 1e-5  # weight decay is among the sources
        assert all(bound["holds"] for bound in run["bounds"])
        assert len(run["corrections"]) == SMOKE.steps
        assert max(run["corrections"]) < 1e-11
    repeated = runs[REPEATED]
    assert repeated["unresolved"] == PAIRS - never_apart(SMOKE.cases[2])  # dissipated, and moved no training output
    assert repeated["relative_remainder"] > 1e-4
    assert runs[MINIBATCH]["relative_remainder"] < 1e-11


def test_visibility_lies_under_dissipation_and_the_reservoir_is_the_repeated_pairs(runs):
    for run in runs.values():
        visible, allowed = np.array(run["visible"]), np.array(run["allowed"])
        assert (visible <= allowed * (1 + 1e-5) + 1e-12 * allowed[0]).all()
        assert visible[0] > 0.01 * allowed[0]
        assert run["reservoir_leak"] < 1e-12
        assert run["drift_steps"] == [0, 4, SMOKE.steps]
    dimensions = [runs[case]["reservoir_dimension"] for case in (MINIBATCH, FULL_BATCH, REPEATED)]
    assert dimensions == [0, PAIRS, never_apart(SMOKE.cases[2])]


def never_apart(case):
    """How many pairs of examples with one input were in every batch together or not at all."""
    run = experiment.record(SMOKE, case, seed=0)
    batches = [set(run.batch(k).tolist()) for k in range(run.num_steps)]
    first_again = SMOKE.examples - PAIRS
    together = [all((i in batch) == (first_again + i in batch) for batch in batches) for i in range(PAIRS)]
    return sum(together)


def test_residual_in_the_reservoir_is_what_the_pairs_disagree_on(runs):
    """Full batches cannot tell two labels of one input apart: the gradient's part between them never changes."""
    case = SMOKE.cases[1]
    run = experiment.record(SMOKE, case, seed=0)
    problem, model = run.problem, run.problem.model(torch.float64)
    kept = []
    for k in (0, run.num_steps):
        g = (model.outputs(run.weights(k), problem.inputs) - problem.targets).flatten() / len(problem)
        between = (g[:PAIRS] - g[-PAIRS:]) / 2**0.5
        kept.append(between)
        expected = (between.norm() / g.norm()).item()
        assert runs[FULL_BATCH]["residual_in_reservoir"][len(kept) - 1] == pytest.approx(expected, rel=1e-9)
    assert_close(kept[0], kept[1], rtol=1e-12, atol=1e-15)


def test_frozen_prediction_is_kernel_regression_with_the_first_kernel():
    """Without decay there are no sources, and the prediction is K_QS K_SS⁻¹ Δu_S."""
    run = experiment.record(replace(SMOKE, weight_decay=0.0), SMOKE.cases[0], seed=0)
    problem, model = run.problem, run.problem.model(torch.float64)
    measured = measure_run(run, "no decay", 0, SMOKE.drift_every)
    test_inputs, test_targets = problem.test
    K_SS = train_kernel(model, run.weights(0), problem.inputs)
    K_QS = cross_kernel(model, run.weights(0), test_inputs, problem.inputs)
    first, last = (model.outputs(run.weights(k), problem.inputs).flatten() for k in (0, run.num_steps))
    frozen = torch.tensor(measured.frozen.values, dtype=torch.float64)
    assert_close(frozen, K_QS @ torch.linalg.solve(K_SS, last - first), rtol=1e-7, atol=1e-9)
    assert measured.sourceless_error < 1e-11
    outputs = model.outputs(run.weights(run.num_steps), test_inputs)
    assert measured.test_errors[1] == pytest.approx((outputs - test_targets).square().mean().item())


def test_cases_share_data_and_weights():
    plain, twice = (experiment.record(SMOKE, case, seed=0) for case in (SMOKE.cases[0], SMOKE.cases[2]))
    assert torch.equal(plain.weights(0), twice.weights(0))
    n = SMOKE.examples - PAIRS
    assert torch.equal(plain.problem.inputs[:n], twice.problem.inputs[:n])
    assert torch.equal(plain.problem.targets[:n], twice.problem.targets[:n])
    assert torch.equal(twice.problem.inputs[n:], twice.problem.inputs[:PAIRS])
    assert not (twice.problem.targets[n:] == twice.problem.targets[:PAIRS]).any()
    assert torch.equal(plain.problem.test[0], twice.problem.test[0])


def test_summary_is_over_the_seeds_of_a_case(saved):
    runs = [experiment.CouplingRun(**_revived(run)) for run in saved["result"]["runs"][:1]]
    twin = experiment.CouplingRun(**{**vars(runs[0]), "drift": [2 * x for x in runs[0].drift]})
    both = experiment.summarize([runs[0], twin])
    assert both.drift_end.value == pytest.approx(1.5 * runs[0].drift[-1])
    assert both.drift_end.standard_error == pytest.approx(0.5 * runs[0].drift[-1])
    assert both.drift_curve.low == runs[0].drift
    assert both.drift_curve.high == twin.drift
    assert both.lowest_drift_peak == max(runs[0].drift)
    assert both.bounds_checked == 2 * len(runs[0].bounds) == both.bounds_held


def _revived(run):
    from poprisk_lab.paper.coupling.measures import CheckedBound, Prediction

    predictions = {name: Prediction(**run[name]) for name in ("coupled", "transferred", "frozen")}
    return {**run, **predictions, "bounds": [CheckedBound(**bound) for bound in run["bounds"]]}


def test_figure_shows_the_stored_numbers(saved, runs):
    from poprisk_lab.paper.coupling.figure import draw

    full, mini, predicted, drift = draw(saved).axes
    for panel, case in ((full, FULL_BATCH), (mini, MINIBATCH)):
        allowed, visible = panel.lines[:2]
        signal = len(runs[case]["allowed"]) - runs[case]["reservoir_dimension"]
        np.testing.assert_array_equal(allowed.get_ydata(), runs[case]["allowed"][:signal])
        np.testing.assert_array_equal(visible.get_ydata(), runs[case]["visible"][:signal])
    assert len(full.lines) == 3  # where the reservoir begins
    assert full.lines[2].get_xdata()[0] == SMOKE.examples - PAIRS + 0.5
    drawn = {line.get_label().split(":")[0]: line.get_ydata() for line in predicted.lines[1:]}
    for label, name in (("initial kernel", "frozen"), (r"$-G\,g(0) + s_Q$", "transferred")):
        np.testing.assert_array_equal(drawn[label], runs[MINIBATCH][name]["values"])
    for line, row in zip(drift.lines, saved["result"]["summary"], strict=True):
        np.testing.assert_array_equal(line.get_ydata(), row["drift_curve"]["mean"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs the NAME .* Known: coupling"),
        (["couplign"], "'couplign', did you mean 'coupling'. Known: coupling"),
        (["COUPLING"], "did you mean 'coupling'"),
        (["dance"], "no experiment is called 'dance'. Known: coupling"),
        (["coupling", "more"], "more"),
        (["coupling", "--speed"], "--speed"),
    ],
)
def test_wrong_names_are_one_line_and_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "reproduce", *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"poprisk: error: .*{message}.*\n", err)
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_experiment(capsys):
    code, out, _ = call(capsys, "reproduce", "--help")
    assert code == 0
    words = re.sub(r"[\s│]+", " ", out)
    for name, claim in known().items():
        assert f"{name}: {claim}" in words


def test_occupied_output_is_refused_before_anything_slow(capsys, tmp_path, monkeypatch):
    occupied = write_text(tmp_path / "taken", "x")
    monkeypatch.setattr(experiment, "run", None)
    code, out, err = call(capsys, "reproduce", "coupling", "--output", str(occupied))
    assert (code, out) == (2, "")
    assert re.fullmatch(r"poprisk: error: .*choose another.*\n", err)


def test_a_missing_package_leaves_no_directory_behind(capsys, tmp_path, monkeypatch):
    def missing(name):
        raise MissingExtraError("matplotlib", "report", "the coupling figure")

    monkeypatch.setattr("poprisk_lab.reproduce.reproduction", missing)
    code, out, err = call(capsys, "reproduce", "coupling", "--smoke", "--output", str(tmp_path / "new"))
    assert (code, out) == (2, "")
    assert "matplotlib" in err
    assert list(tmp_path.iterdir()) == []


def test_interrupt_writes_nothing(capsys, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "measure_run", interrupted)
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, "reproduce", "coupling", "--smoke")
    assert code == 130
    assert err.splitlines()[-1] == "poprisk: interrupted; nothing was written"
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_progress_on_a_terminal_is_a_bar(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(
        "poprisk._core.progress_faces._console",
        lambda: Console(file=screen, force_terminal=True, width=90, _environ={}),
    )
    with Progress("coupling") as progress:
        progress.update(0, total=3, doing="first")
        progress.update(2, total=3, doing="last")
    assert "coupling: last" in screen.getvalue()
    assert "2/3" in screen.getvalue()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"dimension": 1}, "dimension must be at least 2"),
        ({"lr": 0.0}, "lr > 0"),
        ({"cases": ()}, "different names"),
        ({"cases": (Case("a", 1, 0), Case("a", 2, 0))}, "different names"),
        ({"cases": (Case("a", 1, 49),)}, "at most half"),
        ({"cases": (Case("a", 97, 0),)}, "1 to 96"),
        ({"cases": (Case("a", 6, 0),)}, r"those that figure and page show, .*, got \['a'\]"),
    ],
)
def test_wrong_configurations_are_refused(wrong, message):
    with pytest.raises(HyperparameterError, match=message):
        CouplingConfig(**wrong)


def test_a_run_without_test_set_is_refused():
    problem = Problem(
        experiment.tanh_network, "squared", torch.ones(2, 2), torch.ones(2, 1), arguments={"inputs": 2, "width": 2}
    )
    run = train(problem, torch.optim.SGD, 1, progress=False)
    with pytest.raises(DataError, match="test="):
        measure_run(run, "plain", 0, 1)


@pytest.fixture(scope="module")
def stored():
    return load_result(ROOT / "results/coupling.json", experiment.KIND)


def test_page_comes_from_the_stored_result(stored):
    [page] = chosen_pages(["docs/coupling.md"])
    assert not page.is_stale(ROOT / "results")
    assert stored["config"] == json.loads(json.dumps(asdict(CouplingConfig())))
    assert (ROOT / "docs/coupling.png").is_file()


def test_stored_result_says_what_is_claimed(stored):
    rows = {row["case"]: row for row in stored["result"]["summary"]}
    for row in rows.values():
        assert row["lowest_drift_peak"] >= 2
        assert row["bounds_held"] == row["bounds_checked"] > 0
        assert row["worst_transferred_error"] < 1e-8
        assert row["worst_correction"] < 1e-8
    for case in (MINIBATCH, FULL_BATCH):
        assert rows[case]["worst_coupled_error"] < 1e-8
        assert rows[case]["frozen_error"]["value"] > 0.1
    assert set(rows[FULL_BATCH]["reservoir_dimensions"]) == {CouplingConfig().cases[1].repeated}
    assert rows[FULL_BATCH]["worst_reservoir_leak"] < 1e-8
    assert rows[REPEATED]["coupled_error"]["value"] > 1e-3  # where the theorem ends
