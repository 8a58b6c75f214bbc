"""The cumulative error of predictors on recorded runs, and exact transfer where a predictor is preserved."""

import pytest
import torch
from networks import draw
from recorded_runs import optimizer, oracle_steps, relative, trained, window_of
from torch import nn
from torch.testing import assert_close

import oracles.run_operators as oracle
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import Coupling, path_error
from poprisk.operators._cumulative import lifted_maps
from poprisk.operators._window import Window
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

RULES = ("momentum", "adam", "poprisk")


def coupling_of(ops):
    return Coupling(dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer))


def predictors_of(window, coupling):
    """None at all, the kernel's at the start, the best one, and a wild one."""
    shape = (window.num_test_outputs, window.num_outputs)
    wild = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {
        "zero": torch.zeros(shape, dtype=torch.float64),
        "anchored": window.anchored_coupling(),
        "unpreconditioned": window.anchored_coupling(preconditioned=False),
        "optimal": coupling.matrix,
        "wild": wild,
    }


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("rule", RULES)
def test_the_error_is_what_the_path_shows_plus_a_slack(rule, loss):
    window = window_of("mlp", rule, loss, start=4)
    ops = window.dense_operators()
    coupling, steps = coupling_of(ops), window.lifted_steps()
    roots = [m.sqrt().unsqueeze(1) for m in window.effective_preconditioners]
    size = torch.trace(path_error(coupling.channels, torch.zeros_like(ops.test_transfer))).item()
    for name, A in predictors_of(window, coupling).items():
        lifted = sum(
            L @ (root * s.gradient_map) for L, root, s in zip(lifted_maps(steps, A), roots, steps, strict=True)
        )
        difference = ops.test_transfer - A @ ops.train_transfer
        assert_close(lifted, difference, rtol=1e-10, atol=1e-12 * ops.test_transfer.norm().item(), msg=name)
        error = window.cumulative_error(A)
        assert error.mismatch < 1e-12, name
        assert error.smallest_slack > -1e-12, name
        assert torch.linalg.eigvalsh(error.slack)[0] > -1e-12 * torch.trace(error.total), name
        assert_close(error.visible, path_error(coupling.channels, A), rtol=1e-6, atol=1e-8 * size, msg=name)
        assert torch.trace(error.slack) > 1e-3 * torch.trace(error.total), f"{name}: the split says nothing here"
        expected = torch.from_numpy(oracle.cumulative_error_of(oracle_steps(window), A.numpy()))
        assert relative(error.total, expected) < 1e-6, name


def test_the_anchored_predictor_is_kernel_regression():
    window = window_of("mlp", "adam", "squared", start=4)
    w = trained("mlp", "adam", "squared").weights(4)
    J_S, J_Q = (window.model.output_jacobian(w, x).flatten(0, 1) for x in (window.inputs, window.test_inputs))
    M = torch.diag(window.effective_preconditioners[0])
    for A, metric in (
        (window.anchored_coupling(), M),
        (window.anchored_coupling(preconditioned=False), torch.eye(len(M), dtype=M.dtype)),
    ):
        expected = J_Q @ metric @ J_S.T @ torch.linalg.inv(J_S @ metric @ J_S.T)
        assert relative(A, expected) < 1e-6
    assert relative(window.anchored_coupling(), window.anchored_coupling(preconditioned=False)) > 1e-3


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize(("kind", "rule"), [("mlp", "momentum"), ("mlp", "poprisk"), ("transformer", "adam")])
def test_transfer_is_exact_where_test_points_are_training_points(kind, rule, loss):
    """J_Q = A J_S at all weights, A a choice of rows: no error at all, though the kernel moves."""
    run = trained(kind, rule, loss, steps=4)
    chosen = torch.tensor([5, 0, 3])
    window = Window.of_run(run, test_inputs=run.problem.inputs[chosen], dense=True)
    A = torch.eye(window.num_outputs, dtype=torch.float64).reshape(window.num_examples, -1, window.num_outputs)
    assert_exact(window, A[chosen].flatten(0, 1))


@pytest.mark.parametrize("rule", RULES)
def test_transfer_is_exact_for_a_linear_model_in_the_span(rule):
    """Each test input is a combination of training inputs, and the model is linear: A holds the coefficients."""
    x = draw("mlp", 4)[:3]
    coefficients = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    problem = Problem(
        make_linear,
        "cross_entropy",
        x,
        torch.tensor([0, 1, 1]),
        test=(coefficients @ x, torch.zeros(5, dtype=torch.long)),
    )
    run = train(problem, optimizer(rule), 6, batch_size=2, progress=False)
    assert_exact(Window.of_run(run, dense=True), torch.kron(coefficients, torch.eye(2, dtype=torch.float64)))


def make_linear():
    return nn.Linear(4, 2, bias=False, dtype=torch.float64)


def assert_exact(window, A):
    ops = window.dense_operators()
    none = window.cumulative_error(torch.zeros_like(A))
    assert torch.trace(window.cumulative_error(A).total) < 1e-20 * torch.trace(none.total)
    naive = oracle.cumulative_error_of(oracle_steps(window), torch.zeros_like(A).numpy())
    assert relative(none.total, torch.from_numpy(naive)) < 1e-6
    assert relative(A @ ops.train_transfer, ops.test_transfer) < 1e-11
    assert coupling_of(ops).relative_remainder < 1e-8
    moved = A @ (ops.train_displacement - ops.sources.train)
    assert relative(moved, ops.test_displacement - ops.sources.test) < 1e-11
    J_S = window.model.output_jacobian(window._trajectory.weights(0), window.inputs).flatten(0, 1)
    if torch.linalg.matrix_rank(J_S) == len(A.T):  # else the kernel at the start does not determine A
        assert relative(window.anchored_coupling() @ ops.train_transfer, ops.test_transfer) < 1e-8
