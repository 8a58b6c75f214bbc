"""A loop that changes on its way: found, said, and nothing of the record is lost. Honest loops are left alone."""

import pytest
import torch
from tiny_problems import classification, tiny_data
from torch import nn
from torch.nn import functional as F

from poprisk import Window
from poprisk.errors import RunError, UnexplainedGradientWarning
from poprisk.runs import Problem, Recorder, Run, train
from poprisk.runs._first_steps import check_first_steps
from poprisk.runs._gradient_check import GradientCheck


def loss_of(model, x, y, k):
    return F.cross_entropy(model(x), y)


def penalty(model, x, y, k):
    squares = sum(p.square().sum() for p in model.parameters())
    return loss_of(model, x, y, k) + (0.01 * squares if k >= 5 else 0.0)


def smoothing(model, x, y, k):
    return F.cross_entropy(model(x), y, label_smoothing=0.1 if k >= 50 else 0.0)


def scale(model, x, y, k):
    return loss_of(model, x, y, k) * (2.0 if k >= 20 else 1.0)


def noisy_inputs(model, x, y, k):
    return loss_of(model, x + 0.1 * torch.randn_like(x) if k >= 20 else x, y, k)


def dropout(model, x, y, k):
    hidden = model[1](model[0](x))
    return F.cross_entropy(model[2](F.dropout(hidden, 0.2, k >= 20)), y)


def loop(compute, steps=80, path=None, prepare=None, dtype=torch.float64, **options):
    problem = options.pop("problem", None) or classification()
    model = problem.module(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    torch.manual_seed(0)
    options["steps"] = options.pop("planned", None)
    with Recorder(path, model, optimizer, problem=problem, **options) as recorder:
        for k in range(steps):
            if prepare is not None:
                prepare(model, optimizer, k)
            index = torch.arange(12).roll(k)[:6]
            with recorder.step(index) as step:
                optimizer.zero_grad()
                step.loss = compute(model, problem.inputs[index].to(dtype), problem.targets[index], k)
                step.loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
    return recorder.run


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(
    ("compute", "agrees", "seen", "cause"),
    [
        (penalty, 2, 8, "an L2 penalty whose gradient is 0.02 times the weights"),
        (smoothing, 33, 64, "label smoothing of 0.1"),
        (scale, 17, 32, r"the scale of the loss changed by 2"),
        (noisy_inputs, 17, 32, "another loss or a penalty, or inputs or gradients changed"),
        (dropout, 17, 32, "another loss or a penalty, or inputs or gradients changed"),
    ],
)
def test_a_loop_that_changes_is_found(compute, agrees, seen, cause, every):
    with pytest.warns(UnexplainedGradientWarning, match=f"steps 0 … {agrees - 1} only; at step {seen} .*{cause}"):
        run = loop(compute, every=every)
    assert run.num_steps == 80
    assert run.unexplained.step == agrees
    assert run.obstacles == (run.unexplained.reason,)
    with pytest.raises(RunError, match=rf"no exact analysis .*at step {seen} .*possible up to stop={agrees}"):
        Window.of_run(run)


def test_the_steps_before_can_be_analyzed_and_nothing_is_lost(tmp_path):
    with pytest.warns(UnexplainedGradientWarning):
        loop(penalty, path=tmp_path / "run")
    run = Run.load(tmp_path / "run", problem=classification())
    assert run.manifest["closed"]
    assert bool(run.losses.isfinite().all())
    assert run.weights(80).shape == run.weights(0).shape
    ops = Window.of_run(run, stop=2).dense_operators()
    torch.testing.assert_close(ops.predicted_train, ops.train_displacement, rtol=1e-10, atol=1e-12)
    with pytest.raises(RunError, match="L2 penalty"):
        Window.of_run(run, stop=3)


def test_the_last_step_is_checked_when_the_recorder_closes():
    with pytest.warns(UnexplainedGradientWarning, match="at step 7 .*L2 penalty"):
        assert loop(penalty, steps=8).unexplained.step == 2
    with pytest.warns(UnexplainedGradientWarning, match="at step 7 .*L2 penalty"):
        loop(penalty, steps=8, every=4, planned=8)


def test_a_hook_on_a_parameter_is_part_of_the_loop():
    def clamp(model, optimizer, k):
        if k == 20:
            for p in model.parameters():
                p.register_hook(lambda g: g.clamp(-0.01, 0.01))

    with pytest.warns(UnexplainedGradientWarning, match="noise, clipping"):
        assert loop(loss_of, prepare=clamp).unexplained.step == 17


def make_quiet():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def test_a_model_switched_to_training_mode_is_found():
    problem = Problem(make_quiet, "cross_entropy", *tiny_data())

    def switch(model, optimizer, k):
        model.train(k >= 20)

    with pytest.warns(UnexplainedGradientWarning, match=r"at step 32 the model was switched .*draws at random"):
        run = loop(loss_of, problem=problem, prepare=switch)
    assert run.unexplained.step == 17


def schedule(model, optimizer, k):
    optimizer.param_groups[0]["lr"] = 0.1 * 0.99**k


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_honest_loop_is_left_alone(dtype, every):
    run = loop(loss_of, 150, dtype=dtype, every=every, prepare=schedule)
    assert run.unexplained is None
    assert not run.obstacles
    if every == 1:
        check_first_steps(run, run.model(torch.float64))


def test_a_converged_run_in_single_precision_is_left_alone():
    """Near its minimum the gradient of the full batch is a sum that cancels: what is left of it is rounding."""
    inputs = torch.linalg.qr(tiny_data(dtype=torch.float32)[0])[0] * 12**0.5
    arguments = {"in_features": 4, "out_features": 3, "bias": False}
    problem = Problem(nn.Linear, "squared", inputs, 100 * torch.eye(3).repeat(4, 1), arguments=arguments)
    model = problem.module(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Recorder(None, model, optimizer, problem=problem) as recorder:
        for _ in range(65):
            with recorder.step(range(12)):
                optimizer.zero_grad()
                x, y = problem.inputs.flip(0), problem.targets.flip(0)  # the same sum in another order
                (0.5 * (model(x) - y).square().sum() / 12).backward()
                optimizer.step()
    run = recorder.run
    assert run.unexplained is None
    check_first_steps(run, run.model(torch.float64))


def test_micro_batches_are_left_alone():
    run = train(classification(), torch.optim.Adam, 140, batch_size=6, accumulate=3, clip_norm=0.1, progress=False)
    assert run.unexplained is None


def test_a_resumed_run_stays_marked_and_a_change_at_the_break_is_found(tmp_path):
    with pytest.warns(UnexplainedGradientWarning, match="at step 8"):
        loop(penalty, steps=10, path=tmp_path / "first")
    assert loop(penalty, steps=5, path=tmp_path / "first", resume=True).unexplained.step == 2  # and no second warning
    loop(loss_of, steps=10, path=tmp_path / "second")
    with pytest.warns(UnexplainedGradientWarning, match="at step 10 .*scale of the loss"):
        loop(lambda *args: 3 * loss_of(*args), steps=5, path=tmp_path / "second", resume=True)


def test_few_steps_are_checked():
    check = GradientCheck(None, nn.Linear(1, 1), None, [], first=2, seed=1, steps=None)
    due = [k for k in range(6400) if check.is_due(k)]
    assert due[:5] == [0, 1, 8, 16, 32]
    assert len({k // 64 for k in due}) == 100  # one in each 64
    for steps in (500, 2000, 6400):
        assert sum(k < steps for k in due) + 1 <= 0.03 * steps
    again = GradientCheck(None, nn.Linear(1, 1), None, [], first=2, seed=1, steps=None)
    assert [k for k in range(6400) if again.is_due(k)] == due


def test_a_run_recorded_without_checks_is_checked_when_it_is_analyzed():
    run = loop(smoothing, verify_steps=0)
    assert run.unexplained is None
    with pytest.raises(RunError, match="does not have the gradient of step 64"):
        check_first_steps(run, run.model())
    check_first_steps(run, run.model(), stop=50)
    with pytest.raises(RunError, match="does not have the gradient of step 59"):
        check_first_steps(run, run.model(), stop=60)
