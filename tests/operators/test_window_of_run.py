"""A window from a run alone: what it takes from the problem, what it refuses, when it is dense."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalIterable=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

from functools import partial

import pytest
import torch
from networks import draw
from recorded_runs import operators_of, problem_of, relative, trained, window_of
from torch import nn
from torch.testing import assert_close

from poprisk.errors import DataError, RunError
from poprisk.operators._gradient_descent import RecordedSteps, gradient_descent
from poprisk.operators._step_maps import DenseStep, MatrixFreeStep
from poprisk.operators._window import Window
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._run import Run
from poprisk.runs._training import train

ADAM = partial(torch.optim.Adam, lr=0.05)


def test_the_problem_says_the_rest():
    run = trained("mlp", "adam", "cross_entropy")
    problem = run.problem
    by_hand = Window(
        run,
        problem.model(torch.float64),
        problem.inputs,
        problem.targets,
        test_inputs=problem.test[0],
        start=4,
        dense=True,
    )
    assert_close(
        by_hand.dense_operators().test_transfer, operators_of("mlp", "adam", "cross_entropy", start=4).test_transfer
    )


def test_another_test_set_or_none():
    run = trained("mlp", "adam", "cross_entropy", steps=3)
    elsewhere = draw("mlp", 14)[12:].float()  # cast to the window's dtype
    assert Window.of_run(run, test_inputs=elsewhere).test_transfer.shape == (6, 24)
    untested = Problem(
        nn.Linear, "squared", torch.eye(2), torch.ones(2, 1), arguments={"in_features": 2, "out_features": 1}
    )
    window = Window.of_run(train(untested, ADAM, 2, progress=False))
    assert window.test_transfer.shape == (0, 2)
    with pytest.raises(DataError, match="pass test_inputs"):
        window.anchored_coupling()


def test_a_run_recorded_in_single_precision():
    """Its own steps were rounded; what the rounding did is left out, so the prediction is exact to single precision."""
    double = problem_of("mlp", "squared", *draw("mlp", 12).split([8, 4]))
    run = train(double, ADAM, 6, batch_size=3, dtype=torch.float64, progress=False)
    inputs, targets = double.batch(dtype=torch.float32)
    single = Problem(make_single, "squared", inputs, targets, test=(double.test[0].float(), double.test[1].float()))
    rounded = train(single, ADAM, 6, batch_size=3, progress=False)
    assert rounded.weights(0).dtype == torch.float32
    ops, exact = (Window.of_run(r, dense=True).dense_operators() for r in (rounded, run))
    assert ops.test_transfer.dtype == torch.float64
    assert relative(ops.predicted_test, ops.test_displacement) < 1e-6
    assert relative(ops.test_transfer, exact.test_transfer) < 1e-4
    narrow = Window.of_run(rounded, dtype=torch.float32, dense=True).dense_operators()
    assert narrow.test_transfer.dtype == torch.float32
    assert relative(narrow.test_transfer.double(), ops.test_transfer) < 1e-4


def make_single():
    from networks import build

    return build("mlp").float()


def test_integer_inputs_stay_integers():
    window = window_of("transformer", "momentum", "cross_entropy", steps=2, dense=None)
    assert window.inputs.dtype == torch.int64
    assert window.test_inputs.dtype == torch.int64


def test_dense_where_the_jacobians_fit():
    run = trained("mlp", "adam", "squared", steps=3)
    d, rows = run.num_weights, 3 * (8 + 4 + 3) * 3  # three steps; train, test and batch; three outputs
    fits = Window.of_run(run, memory=rows * d * 8)
    assert all(isinstance(maps, DenseStep) for maps in fits.steps)
    tight = Window.of_run(run, memory=rows * d * 8 - 1)
    assert all(isinstance(maps, MatrixFreeStep) for maps in tight.steps)
    with pytest.raises(DataError, match="dense=True"):
        tight.lifted_steps()


def jitter(inputs, generator):
    return inputs + 0.1 * torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)


def test_a_model_that_the_steps_did_not_see_is_refused():
    inputs, targets = draw("mlp", 6), torch.ones(6, 1, dtype=torch.float64)
    options = {"arguments": {"in_features": 4, "out_features": 1, "dtype": torch.float64}}
    augmented = train(
        Problem(nn.Linear, "squared", inputs, targets, augment=jitter, **options), ADAM, 2, progress=False
    )
    with pytest.raises(RunError, match=r"inputs were augmented.*Window.of_run analyzes its evaluation form"):
        Window(augmented, augmented.problem.model(), inputs, targets)
    random = train(Problem(make_dropout, "squared", inputs, targets), ADAM, 2, progress=False)
    assert random.obstacles
    with pytest.raises(RunError, match="no exact analysis of this run is possible"):
        Window(random, random.problem.model(), inputs, targets)


def make_dropout():
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double()


def test_a_trajectory_of_ones_own_may_say_what_it_knows():
    model = trained("mlp", "adam", "squared").problem.model(torch.float64)
    x, y = draw("mlp", 5), torch.zeros(5, 3, dtype=torch.float64)
    plain = gradient_descent(model, x, y, lr=0.1, steps=2)

    class Doubtful(RecordedSteps):
        obstacles = ("the clock was wrong",)

    assert Window(plain, model, x, y).num_examples == 5
    with pytest.raises(RunError, match="the clock was wrong"):
        Window(Doubtful(plain.all_weights, plain.all_steps, plain.buffers), model, x, y)


def test_a_run_that_does_not_know_its_problem(tmp_path):
    problem = problem_of("mlp", "squared", *draw("mlp", 12).split([8, 4]))
    train(problem, ADAM, 2, path=tmp_path / "run", progress=False)
    with pytest.raises(RunError, match=r"Run.load\(path, problem=…\)"):
        Window.of_run(Run.load(tmp_path / "run"))
    assert Window.of_run(Run.load(tmp_path / "run", problem=problem)).num_examples == 8


def small_network(activation="Tanh"):
    return nn.Sequential(nn.Linear(4, 6), getattr(nn, activation)(), nn.Linear(6, 2))


def small_problem(make_model=small_network, **options):
    inputs = draw("mlp", 9)
    return Problem(make_model, "squared", inputs[:6], inputs[:6, :2] ** 2, test=(inputs[6:], inputs[6:, :2]), **options)


def small_run(**options):
    return train(small_problem(), ADAM, 3, batch_size=2, dtype=torch.float64, progress=False, **options)


def test_another_model_on_the_same_examples_is_refused(tmp_path):
    """By its path where it has one, else by the gradients of the first steps."""
    small_run(path=tmp_path / "run")
    with pytest.raises(DataError, match=r"small_network\(\), .*small_network\(activation='ReLU'\)"):
        Run.load(tmp_path / "run", problem=small_problem(arguments={"activation": "ReLU"}))
    unnamed = Run.load(tmp_path / "run", problem=small_problem(lambda: small_network("ReLU")))
    with pytest.raises(RunError, match="does not have the gradient of step 0 of the run"):
        Window.of_run(unnamed)
    same = Run.load(tmp_path / "run", problem=small_problem(lambda: small_network("Tanh")))
    assert Window.of_run(same).num_examples == 6


def test_frozen_weights_must_be_the_recorded_ones():
    def frozen(scale):
        module = small_network()
        with torch.no_grad():
            module[0].weight.fill_(scale)
        module[0].requires_grad_(False)
        return module

    run = train(small_problem(lambda: frozen(0.2)), ADAM, 2, dtype=torch.float64, progress=False)
    assert Window.of_run(run).num_examples == 6
    with pytest.raises(RunError, match="frozen parameters or buffers differ from the recorded"):
        Window.of_run(Run(run._storage, problem=small_problem(lambda: frozen(0.3))))


def test_a_run_in_evaluation_mode():
    """Batch statistics that are not those of the batch, no dropout: each example has outputs of its own."""

    def normalized():
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 2)).double()

    problem = small_problem(normalized)
    module = problem.module().eval()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    recorder = Recorder(None, module, optimizer, problem=problem)
    for _ in range(3):
        with recorder.step(torch.arange(6)):
            optimizer.zero_grad()
            problem.batch_loss(module(problem.inputs), problem.targets).backward()
            optimizer.step()
    ops = Window.of_run(recorder.close()).dense_operators()
    assert relative(ops.predicted_test, ops.test_displacement) < 1e-12


def test_what_does_not_fit_in_memory_is_refused():
    window = Window.of_run(small_run(), dense=True, memory=2**20)
    ops = window.dense_operators()
    assert ops.propagator.shape == (12, 12)
    tight = Window.of_run(small_run(), dense=True, memory=2000)
    for refused in (tight.dense_operators, tight.anchored_coupling, tight.lifted_steps):
        with pytest.raises(DataError, match=r"need about .* MiB .*memory=2000 .*raise memory=….*top_channels"):
            refused()
    H = torch.eye(12, dtype=torch.float64)
    assert_close(tight.test_transfer @ H, ops.test_transfer)


def test_inputs_that_the_model_cannot_take():
    run = small_run()
    model, (x, y) = run.model(), run.problem.batch()
    with pytest.raises(DataError, match=r"weights of torch.float64 .* training inputs torch.float32 \[6, 4\]"):
        Window(run, model, x.float(), y)
    with pytest.raises(DataError, match=r"does not accept the test inputs torch.float64 \[3, 5\]"):
        Window.of_run(run, test_inputs=torch.zeros(3, 5))


def test_a_sparse_run_is_asked_for_its_steps_once(monkeypatch):
    run = small_run(every=2)
    replays = []
    replayed = Run._replay
    monkeypatch.setattr(Run, "_replay", lambda self, a, b: replays.append((a, b)) or replayed(self, a, b))
    run = Run(run._storage, problem=run.problem)
    run._replayed = run._replay  # no memory of stretches
    window = Window.of_run(run, start=1)
    made = len(replays)
    assert made > 0
    ops = window.dense_operators()
    assert len(replays) == made
    assert relative(ops.predicted_test, ops.test_displacement) < 1e-12
