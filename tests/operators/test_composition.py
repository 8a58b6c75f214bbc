"""P(t, s) = P(t, r) P(r, s): for the gradient alone without momentum, for gradient and momentum together with it."""

from functools import partial

import pytest
import torch
from networks import draw
from recorded_runs import STEPS, problem_of, relative, trained, window_of
from torch.testing import assert_close

from poprisk._core.linalg.adjoint import adjoint_mismatch
from poprisk.operators._window import Window
from poprisk.runs._training import train


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_without_momentum_the_gradient_is_a_state(loss):
    problem = problem_of("mlp", loss, *draw("mlp", 12).split([8, 4]))
    run = train(problem, partial(torch.optim.SGD, lr=0.2), 5, batch_size=4, progress=False)
    windows = [Window.of_run(run, start=s, stop=t, dense=True) for s, t in ((0, 5), (0, 2), (2, 5))]
    augmented = [window.augmented_propagator.to_dense() for window in windows]
    whole, first, second = (window.propagator.to_dense() for window in windows)
    assert_close(second @ first, whole, rtol=1e-11, atol=1e-13)
    assert_close(augmented[0][: len(whole), : len(whole)], whole, rtol=1e-11, atol=1e-13)
    assert not augmented[0][: len(whole), len(whole) :].any(), "a buffer carried in has no influence"


@pytest.mark.parametrize(
    ("rule", "loss"),
    [("momentum", "cross_entropy"), ("nesterov", "squared"), ("adam", "cross_entropy"), ("poprisk", "squared")],
)
def test_with_momentum_gradient_and_momentum_are(rule, loss):
    first, second, whole = (window_of("mlp", rule, loss, start=s, stop=t) for s, t in ((1, 3), (3, 6), (1, 6)))
    a, b, c = (window.augmented_propagator.to_dense() for window in (first, second, whole))
    assert relative(b @ a, c) < 1e-10
    N = whole.num_outputs
    assert_close(c[:N, :N], whole.propagator.to_dense(), rtol=1e-12, atol=1e-14)
    apart = second.propagator.to_dense() @ first.propagator.to_dense()
    assert relative(apart, c[:N, :N]) > 1e-2, "alone, the gradient does not compose"


@pytest.mark.parametrize("dense", [True, False])
def test_the_adjoint_belongs_to_it(dense):
    window = window_of("mlp", "momentum", "cross_entropy", start=6, stop=9, dense=dense)
    operator = window.augmented_propagator
    assert operator.shape == (24 + window.model.size,) * 2
    assert adjoint_mismatch(operator, generator=torch.Generator().manual_seed(0)) < 1e-12
    X = torch.randn(operator.shape[1], 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix = window_of("mlp", "momentum", "cross_entropy", start=6, stop=9).augmented_propagator.to_dense()
    assert relative(operator @ X, matrix @ X) < 1e-11
    assert relative(operator.T @ X, matrix.T @ X) < 1e-11


@pytest.mark.parametrize("rule", ["nesterov", "adam"])
def test_it_carries_the_run_from_state_to_state(rule):
    """Without decay nothing else moves the weights: gradient and buffer at the end follow from those at the start."""
    run = trained("mlp", rule, "cross_entropy")
    problem, model = run.problem, run.problem.model(torch.float64)

    def state(k):
        g = model.output_gradient(run.weights(k), problem.inputs, problem.targets).reshape(-1) / len(problem)
        return torch.cat([g, run.buffer(k)])

    window = window_of("mlp", rule, "cross_entropy", start=4)
    assert relative(window.augmented_propagator @ state(4), state(STEPS)) < 1e-10
