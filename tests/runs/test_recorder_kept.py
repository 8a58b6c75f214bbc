"""A loop of one's own with a Recorder and a KeepBest: the run has the kept weights and their risk beside its record."""

import pytest
import torch
from tiny_problems import make_mlp, tiny_data
from torch import nn
from torch.testing import assert_close

from poprisk import KeepBest, Problem, Recorder, Run, hold_back, population_risk
from poprisk.report import analyze


def whole():
    inputs, labels = tiny_data(80, dtype=torch.float32)
    return Problem(make_mlp, "cross_entropy", inputs, labels)


def looped(path, every=1, order="finish first", late=0):
    """The run, the keeper's estimate, and the model's weights before it finished."""
    problem, held = hold_back(whole(), 0.2)
    model = problem.module()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorder = Recorder(path, model, optimizer, problem=problem, every=every)
    keeper = None if late else KeepBest(model, optimizer, held, every=3)
    for k in range(20):
        rows = torch.arange(k % 8, 64, 8)
        with recorder.step(rows) as step:
            optimizer.zero_grad()
            inputs, targets = problem.batch(rows)
            step.loss = nn.functional.cross_entropy(model(inputs), targets)
            step.loss.backward()
            optimizer.step()
        if k + 1 == late:
            keeper = KeepBest(model, optimizer, held, every=3)
    last = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    if order == "finish first":
        risk = keeper.finish()
        return recorder.close(), risk, last, model
    recorder.close()
    risk = keeper.finish()
    return recorder.run, risk, last, model


@pytest.mark.parametrize("order", ["finish first", "close first"])
@pytest.mark.parametrize("every", [1, 6])
@pytest.mark.parametrize("stored", [True, False])
def test_the_run_has_what_was_kept_and_the_record_is_not_touched(stored, every, order, tmp_path):
    run, risk, last, model = looped(tmp_path / "run" if stored else None, every, order)
    run = Run.load(tmp_path / "run", problem=run.problem) if stored else run
    assert risk.step < 20 or risk.tail is not None
    assert torch.equal(run.weights(20), last)
    kept = run.kept
    assert_close(kept.weights, model.state_dict(), rtol=0, atol=0)
    assert (kept.risk.value, kept.risk.step, kept.count, len(kept.held)) == (risk.value, risk.step, 16, 0)
    assert run.manifest["closed"]
    found = population_risk(run)
    assert (found.method, found.value, found.standard_error) == ("held_back", risk.value, risk.standard_error)
    assert found.target.startswith(f"the kept weights, step {risk.step} of 20")
    assert population_risk(run, weights="last").method == "exclusion"  # the held-back examples are not in the run


def test_the_report_shows_it():
    run, risk, *_ = looped(None)
    found = analyze(run, budget=0.01, progress=False)
    assert (found.risk.method, found.risk.value, found.held_back.examples) == ("held_back", risk.value, 16)


def test_a_keeper_of_only_some_of_the_steps_is_not_stored():
    run, risk, last, _ = looped(None, late=5)
    assert risk.measured
    assert run.kept is None
    assert torch.equal(run.weights(20), last)
