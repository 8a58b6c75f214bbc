"""Windows of real runs: displacements to rounding, two faces of each operator, the oracle, and the theorems."""

import numpy as np
import pytest
import torch
from networks import build, draw
from recorded_runs import LOSSES, NETWORKS, RULES, STEPS, operators_of, oracle_steps, relative, trained, window_of
from torch import nn
from torch.testing import assert_close

import oracles.run_operators as oracle
from oracles.linear_model import linear_operators
from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.linalg.adjoint import adjoint_mismatch
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import Coupling
from poprisk.operators._gradient_descent import gradient_descent
from poprisk.operators._gradient_flow import gradient_flow_operators
from poprisk.operators._kernels.drift import kernel_drift
from poprisk.operators._window import Window
from poprisk.theory.path_bounds import window_bounds

EVERY_RUN = [(kind, rule, loss) for kind in NETWORKS for rule in ("momentum", "adam", "poprisk") for loss in LOSSES]
ALL_RUNS = [*EVERY_RUN, *(("mlp", rule, loss) for rule in ("nesterov", "adamw") for loss in LOSSES)]


@pytest.mark.parametrize(("kind", "rule", "loss"), ALL_RUNS)
def test_the_kernel_moves_by_more_than_its_size(kind, rule, loss):
    """What is shown below is shown under feature learning."""
    run = trained(kind, rule, loss)
    model = run.problem.model(torch.float64)
    moved = kernel_drift(model, [run.weights(0), run.weights(STEPS)], run.problem.inputs)
    assert moved.drift[-1] >= 1
    first, last = (model.output_jacobian(run.weights(k), run.problem.inputs).flatten(0, 1) for k in (0, STEPS))
    change = torch.linalg.matrix_norm(last @ last.T - first @ first.T, 2)
    assert_close(moved.drift[-1], change / torch.linalg.matrix_norm(first @ first.T, 2), rtol=1e-6, atol=0.0)
    data = run.problem.inputs, run.problem.targets
    before, after = (model.per_example_losses(run.weights(k), *data).mean() for k in (0, STEPS))
    assert after < before


@pytest.mark.parametrize(("kind", "rule", "loss"), EVERY_RUN)
def test_displacements_are_reproduced_to_rounding(kind, rule, loss):
    """Minibatches, momentum, decay, Adam, the gate; from the beginning and from the middle of a run."""
    run = trained(kind, rule, loss)
    problem, model = run.problem, run.problem.model(torch.float64)
    for start in (0, 4):
        ops = operators_of(kind, rule, loss, start=start)
        assert relative(ops.predicted_train, ops.train_displacement) < 1e-12
        assert relative(ops.predicted_test, ops.test_displacement) < 1e-12
        assert ops.train_displacement.norm() > 1e-2
        later = model.output_gradient(run.weights(STEPS), problem.inputs, problem.targets).reshape(-1) / len(problem)
        assert_close(ops.propagator @ ops.output_gradient + ops.sources.gradient, later, rtol=1e-10, atol=1e-13)
        if loss == "squared":
            assert relative(len(problem) * ops.train_completion, ops.train_transfer) < 1e-12
        assert ops.first_order_dissipation > 0
    window = window_of(kind, rule, loss, start=start)  # and as products
    products = window.train_transfer, window.test_transfer, window.propagator
    train, test, gradient = (each @ ops.output_gradient for each in products)
    assert relative(ops.sources.train - train, ops.train_displacement) < 1e-12
    assert relative(ops.sources.test - test, ops.test_displacement) < 1e-12
    assert_close(gradient + ops.sources.gradient, later, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "rule", "loss"),
    [run if run[1] == "adam" else pytest.param(*run, marks=pytest.mark.slow) for run in EVERY_RUN],
)
def test_the_secant_is_not_what_makes_it_fit(kind, rule, loss):
    """With the closure off, and with twice the nodes: any matrix would pass with the closure alone."""
    plain = window_of(kind, rule, loss, secant=False)
    ops = plain.dense_operators()
    assert relative(ops.predicted_train, ops.train_displacement) < 1e-8
    assert relative(ops.predicted_test, ops.test_displacement) < 1e-8
    nodes = max(maps.nodes for maps in plain.steps)
    finer = operators_of(kind, rule, loss, nodes=2 * nodes)
    for name in ("propagator", "dissipation_gramian", "train_transfer", "test_transfer"):
        assert relative(getattr(ops, name), getattr(finer, name)) < 1e-8, name
    assert plain.corrections().shape == (STEPS, 3)
    assert plain.corrections().max() < 1e-10


@pytest.mark.parametrize("rule", RULES)
def test_dense_and_matrix_free_are_one_operator(rule):
    dense = window_of("mlp", rule, "cross_entropy", start=4)
    free = window_of("mlp", rule, "cross_entropy", start=4, dense=False, memory=2**14)
    ops = dense.dense_operators()
    generator = torch.Generator().manual_seed(0)
    for name in ("propagator", "train_completion", "train_transfer", "test_transfer", "dissipation_gramian"):
        operator, matrix = getattr(free, name), getattr(ops, name)
        H = torch.randn(matrix.shape[1], 3, generator=generator, dtype=torch.float64)
        Y = torch.randn(matrix.shape[0], 3, generator=generator, dtype=torch.float64)
        assert relative(operator @ H, matrix @ H) < 1e-11, name
        assert relative(operator.T @ Y, matrix.T @ Y) < 1e-11, name
        assert adjoint_mismatch(operator, generator=generator) < 1e-11, name
    assert_close(free.sources().test, ops.sources.test, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("rule", RULES)
def test_the_oracle_agrees(rule):
    """Naive numpy, straight from the recursion, given the same dense Jacobians."""
    window = window_of("mlp", rule, "squared", start=4)
    carried = trained("mlp", rule, "squared").buffer(4).numpy()
    expected, ops = oracle.operators_of(oracle_steps(window), carried), window.dense_operators()
    pairs = {
        "P": ops.propagator,
        "W": ops.dissipation_gramian,
        "D": ops.train_transfer,
        "G": ops.test_transfer,
        "source_S": ops.sources.train,
        "source_Q": ops.sources.test,
        "source_g": ops.sources.gradient,
    }
    for name, found in pairs.items():
        np.testing.assert_allclose(found.numpy(), getattr(expected, name), rtol=1e-9, atol=1e-12, err_msg=name)
    products = {"P": window.propagator, "W": window.dissipation_gramian}
    products |= {"D": window.train_transfer, "G": window.test_transfer}
    for name, product in products.items():
        found = product.to_dense().numpy()
        np.testing.assert_allclose(found, getattr(expected, name), rtol=1e-9, atol=1e-11, err_msg=f"{name} by products")


@pytest.mark.parametrize(("kind", "rule", "loss"), ALL_RUNS)
def test_every_bound_holds(kind, rule, loss):
    for start in (0, 4):
        ops = operators_of(kind, rule, loss, start=start)
        coupling = Coupling(dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer))
        predictors = [torch.zeros_like(ops.test_transfer), window_of(kind, rule, loss, start=start).anchored_coupling()]
        bounds = window_bounds(coupling, ops.realized, predictors=predictors)
        assert [str(bound) for bound in bounds if not bound.holds] == []
        for epsilon in coupling.channels.roots[[0, 2, 8, 20]].square().tolist():
            quiet = coupling.channels.split_at(epsilon).reservoir.to_dense()
            seen = torch.linalg.matrix_norm(ops.test_transfer @ quiet, 2).item()
            assert 0 < seen <= (coupling.channels.visibility_norm * epsilon) ** 0.5


@pytest.mark.parametrize(("kind", "rule", "loss"), [run for run in ALL_RUNS if run[2] == "squared"])
def test_training_motion_tells_test_motion_under_squared_loss(kind, rule, loss):
    """A_o (Δu_S - source_S) = Δu_Q - source_Q, from both starts; -s shows how well posed that is."""
    for start in (0, 4):
        ops = operators_of(kind, rule, loss, start=start)
        coupling = Coupling(dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer))
        predicted = coupling.predict(ops.train_displacement, ops.sources.train)
        error = relative(predicted, ops.test_displacement - ops.sources.test)
        print(
            f"{kind}, {rule}, start {start}: error {error:.0e}, |R_perp|/|C_Q| {coupling.relative_remainder:.0e}, "
            f"sigma_min(C_S) {coupling.channels.smallest_train_root:.0e} of {coupling.channels.train_roots[0]:.0e}"
        )
        assert error < 1e-8
        assert coupling.relative_remainder < 1e-8
        assert coupling.channels.smallest_train_root > 1e-9
        roots = torch.linalg.svdvals(coupling.channels.train_channel)
        least = roots[coupling.channels.rank - 1].item()
        assert coupling.channels.smallest_train_root == pytest.approx(least, rel=1e-3, abs=1e-13 * roots[0].item())
        assert coupling.channels.unresolved == 0


def test_gradient_flow_converges_to_the_linear_model_s_closed_forms():
    """Second order in the interval, for W, D and G; P is exact."""
    torch.manual_seed(0)
    x, x_test = torch.randn(6, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    model = FlatModel(torch.nn.Linear(4, 1, bias=False).double(), "squared")
    exact = linear_operators(x.numpy(), x_test.numpy(), T=3.0)
    errors = []
    for intervals in (8, 16, 32):
        ops = gradient_flow_operators(
            model, x, torch.randn(6, 1, dtype=torch.float64), time=3.0, intervals=intervals, test_inputs=x_test
        )
        np.testing.assert_allclose(ops.propagator.numpy(), exact.P, rtol=1e-10, atol=1e-12)
        pairs = ((ops.dissipation_gramian, exact.W), (ops.train_transfer, exact.D), (ops.test_transfer, exact.G))
        errors.append([np.linalg.norm(a.numpy() - b) / np.linalg.norm(b) for a, b in pairs])
    order = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert (np.abs(order - 2) < 0.15).all(), order
    coupling = Coupling(dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer))
    np.testing.assert_allclose(coupling.matrix.numpy(), exact.A, rtol=1e-8, atol=1e-9)
    assert coupling.relative_remainder < 1e-8


def test_small_full_batch_steps_approach_the_flow():
    """First order in the learning rate, on a network whose kernel moves."""
    x, y, q = draw("mlp", 5), torch.randn(5, 3, dtype=torch.float64), draw("mlp", 8)[5:]
    model = FlatModel(build("mlp"), "squared")
    flow = gradient_flow_operators(model, x, y, time=2.0, intervals=40, test_inputs=q)
    errors = []
    for steps in (10, 20, 40):
        run = gradient_descent(model, x, y, lr=2.0 / steps, steps=steps)
        ops = Window(run, model, x, y, test_inputs=q, dense=True).dense_operators()
        errors.append([relative(getattr(ops, k), getattr(flow, k)) for k in ("propagator", "test_transfer")])
    order = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert (np.abs(order - 1) < 0.2).all(), order
    assert abs(flow.first_order_dissipation / flow.loss_drop - 1) < 1e-3, "in the flow the form is the loss drop"


def test_bad_windows_are_refused():
    run = trained("mlp", "adam", "squared", steps=3)
    problem, model = run.problem, run.problem.model(torch.float64)
    with pytest.raises(DataError, match="0 ≤ start < stop ≤ 3"):
        Window(run, model, problem.inputs, problem.targets, start=3)
    with pytest.raises(DataError, match="pass all training inputs"):
        Window(run, model, problem.inputs[:3], problem.targets[:3])
    untold = gradient_descent(model, problem.inputs, problem.targets, lr=0.1, steps=2)  # says nothing about itself
    with pytest.raises(DataError, match="pass all training inputs"):
        Window(untold, model, problem.inputs[:3], problem.targets[:3])


def test_corrections_are_what_the_quadrature_misses():
    """A step across kinks, by its weights and outputs alone: training outputs, test outputs."""
    torch.manual_seed(0)
    model = FlatModel(nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 2)).double(), "cross_entropy")
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.arange(6) % 2
    path = gradient_descent(model, x[:6], y, lr=3.0, steps=3)
    plain = Window(path, model, x[:6], y, test_inputs=x[6:], dense=True, secant=False)
    found = plain.corrections()
    assert found[:, :2].max() > 1e-4
    for k, maps in enumerate(plain.steps):
        before, after = path.weights(k), path.weights(k + 1)
        for column, (J, z) in enumerate(((maps.train_jacobian, x[:6]), (maps.test_jacobian, x[6:]))):
            moved = (model.outputs(after, z) - model.outputs(before, z)).reshape(-1)
            missed = (J @ (after - before) - moved).norm() / moved.norm()
            assert_close(found[k, column], missed, rtol=1e-6, atol=1e-13)


def test_operators_of_a_relu_network_are_exact_when_steps_are_split_at_kinks():
    torch.manual_seed(0)
    layers = nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)
    model = FlatModel(nn.Sequential(*layers).double(), "cross_entropy")
    x = torch.randn(9, 3, dtype=torch.float64)
    y = torch.arange(6) % 2
    path = gradient_descent(model, x[:6], y, lr=3.0, steps=3)

    def operators(**options):
        ops = Window(path, model, x[:6], y, test_inputs=x[6:], dense=True, **options).dense_operators()
        return ops.propagator, ops.train_transfer, ops.test_transfer, ops.dissipation_gramian

    def errors(others):
        return [float((a - b).norm() / b.norm()) for a, b in zip(others, exact, strict=True)]

    exact = operators(quadrature="kinks")
    bare = operators(quadrature="kinks", secant=False)
    assert max(errors(bare)) <= 1e-10  # nothing is left for the secant to close
    usual, coarse, fine = (errors(operators(nodes=nodes)) for nodes in (None, 4, 64))
    assert 1e-4 < max(usual) < 1e-1  # at the cap of nodes
    assert all(f < c / 4 for f, c in zip(fine, coarse, strict=True))  # more nodes lead there
    with pytest.raises(HyperparameterError, match="quadrature must be"):
        operators(quadrature="relu")
