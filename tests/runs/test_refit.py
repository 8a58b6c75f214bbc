# type: ignore
"""``refit``: the chosen number of passes on all examples, the same average, the first training's estimate."""

from functools import partial

import pytest
import torch
from tiny_problems import make_mlp, tiny_data
from torch.testing import assert_close

from poprisk import Problem, Run, TailAverage, population_risk, refit, train
from poprisk.errors import RunError
from poprisk.report import analyze
from poprisk.report._drawing.commands import training_call
from poprisk.report._drawing.page import report_page
from poprisk.runs._refit import refit_steps
from poprisk.runs._training import draw_batch

ADAM = partial(torch.optim.AdamW, lr=1e-2)


def problem():
    inputs, labels = tiny_data(60, dtype=torch.float32)
    return Problem(make_mlp, "cross_entropy", inputs, labels)


def first(tail=0.2, **options):
    return train(problem(), ADAM, 40, batch_size=8, hold_back=0.25, tail=tail, seed=3, progress=False, **options)


@pytest.fixture(scope="module")
def run():
    return first(clip_norm=0.5)


def test_it_is_the_training_on_all_examples_and_its_average(run):
    steps = round(run.kept.risk.step * 60 / 45)
    final = refit(run, ADAM, progress=False)
    assert final.num_steps == refit_steps(run) == steps
    assert len(torch.cat([final.batch(k) for k in range(7)]).unique()) == 56  # an epoch, the last 4 are dropped
    own = problem()
    model = own.module()
    optimizer = ADAM(model.parameters())
    average = TailAverage(model, optimizer, 0.2)
    for k in range(steps):
        rows = draw_batch(60, 8, 3, k)
        optimizer.zero_grad()
        inputs, targets = own.batch(rows)
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert_close(final.weights(steps), torch.cat([p.detach().flatten() for p in model.parameters()]), rtol=0, atol=0)
    average.copy_to_model()
    assert_close(final.kept.weights, dict(model.state_dict()), rtol=0, atol=0)


def test_the_estimate_is_that_of_the_first_training_and_says_so(run):
    final = refit(run, ADAM, progress=False)
    before, found = population_risk(run), population_risk(final)
    assert (found.value, found.standard_error, found.valid) == (before.value, before.standard_error, True)
    assert found.target == (
        f"the kept weights of the first training, on 45 of the 60 examples (step {run.kept.risk.step} of 40); the "
        "weights of this training, on all of them, are not measured"
    )
    analysis = analyze(final, budget=0.01, progress=False)
    assert analysis.held_back is None
    assert found.target in report_page(analysis)
    assert training_call(final) == ""


def test_without_an_average_it_ends_with_the_last_weights():
    run = first(tail=None)
    final = refit(run, ADAM, progress=False)
    weights = torch.cat([x.flatten() for x in final.kept.weights.values()])
    assert torch.equal(weights, final.weights(final.num_steps))


def test_the_schedule_is_stretched(run):
    seen = []
    refit(run, ADAM, schedule=lambda k: seen.append(k) or 1.0, progress=False)
    steps = refit_steps(run)
    assert (seen[0], seen[-1], len(seen)) == (0, int((steps - 1) * run.kept.risk.step / steps), steps)


def stop(last, k, loss):
    if k == last:
        raise KeyboardInterrupt


@pytest.mark.parametrize("every", [1, 7])
def test_interrupted_anywhere_it_ends_with_the_same_weights(every, tmp_path):
    run = first(path=tmp_path / "first", every=every)
    whole = refit(run, ADAM, path=tmp_path / "whole", progress=False)

    for last in (9, 22):
        with pytest.raises(KeyboardInterrupt):
            refit(run, ADAM, path=tmp_path / "parts", resume=True, progress=partial(stop, last))
        assert 0 < Run.load(tmp_path / "parts").num_steps <= last
    again = refit(run, ADAM, path=tmp_path / "parts", resume=True, progress=False)
    assert_close(again.kept.weights, whole.kept.weights, rtol=0, atol=0)
    assert torch.equal(again.weights(again.num_steps), whole.weights(whole.num_steps))


def test_what_cannot_be_trained_again_is_refused():
    plain = train(problem(), ADAM, 5, progress=False)
    with pytest.raises(RunError, match=r"refit needs a finished run of train\(…, hold_back=0.05\)"):
        refit(plain, ADAM)
