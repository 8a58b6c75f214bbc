"""Windows of real runs: displacements to rounding, two faces of each operator, the oracle, and the theorems."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from networks import build, draw
from torch.testing import assert_close

from oracles.linear_model import linear_operators
from oracles.run_operators import DenseStep as OracleStep
from oracles.run_operators import operators_of
from poprisk.autodiff import FlatModel
from poprisk.errors import DataError
from poprisk.linalg import adjoint_mismatch
from poprisk.operators import Coupling, RealizedWindow, dissipation_channels, window_bounds
from poprisk.operators.gradient_descent import gradient_descent
from poprisk.operators.gradient_flow import gradient_flow_operators
from poprisk.operators.window import Window
from poprisk.optim import PopRiskAdamW
from poprisk.problems import Problem
from poprisk.runs import train

RULES = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.8, weight_decay=0.02),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.8, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.05),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "poprisk": partial(PopRiskAdamW, lr=0.2, alpha="calibrated", weight_decay=0.05),
}
NETWORKS = ("mlp", "smooth cnn", "transformer")
OUTPUTS = {"mlp": 3, "smooth cnn": 3, "transformer": 5}


@cache
def trained(kind, rule, loss, *, steps=6, n=8, batch=3):
    """A recorded run on random data, its model, and inputs to test on."""
    everything = draw(kind, n + 4)
    generator = torch.Generator().manual_seed(5)
    if loss == "squared":
        targets = torch.randn(n, OUTPUTS[kind], generator=generator, dtype=torch.float64)
    else:
        targets = torch.randint(OUTPUTS[kind], (n,), generator=generator)
    problem = Problem(build, loss, everything[:n], targets, arguments={"kind": kind})
    run = train(problem, RULES[rule], steps, batch_size=batch, progress=False)
    return run, problem, everything[n:]


@cache
def window_of(kind, rule, loss, *, start=0, stop=None, dense=True, steps=6, **options):
    run, problem, test_inputs = trained(kind, rule, loss, steps=steps)
    where = {"test_inputs": test_inputs, "start": start, "stop": stop, "dense": dense}
    return Window(run, problem.model(torch.float64), problem.inputs, problem.targets, **where, **options)


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("rule", ["momentum", "adam", "poprisk"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_displacements_are_reproduced_to_rounding(kind, rule, loss):
    """Minibatches, momentum, decay, Adam, the gate; from the beginning and from the middle of a run."""
    run, problem, _ = trained(kind, rule, loss)
    model = problem.model(torch.float64)
    for start, stop in ((0, None), (2, None)):
        window = window_of(kind, rule, loss, start=start, stop=stop)
        ops = window.dense_operators()
        assert relative(ops.predicted_train, ops.train_displacement) < 1e-11
        assert relative(ops.predicted_test, ops.test_displacement) < 1e-11
        assert ops.train_displacement.norm() > 1e-3
        w = run.weights(window.stop)
        later = model.output_gradient(w, problem.inputs, problem.targets).reshape(-1) / len(problem)
        assert_close(ops.propagator @ ops.output_gradient + ops.sources.gradient, later, rtol=1e-10, atol=1e-13)
        if loss == "squared":
            assert relative(len(problem) * ops.train_completion, ops.train_transfer) < 1e-12
        assert ops.first_order_dissipation > 0


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_the_secant_is_not_what_makes_it_fit(kind, loss):
    """With the closure off, and with twice the nodes: any matrix would pass with the closure alone."""
    plain = window_of(kind, "adam", loss, secant=False)
    ops = plain.dense_operators()
    assert relative(ops.predicted_train, ops.train_displacement) < 1e-8
    assert relative(ops.predicted_test, ops.test_displacement) < 1e-8
    nodes = max(maps.nodes for maps in plain.steps)
    finer = window_of(kind, "adam", loss, nodes=2 * nodes).dense_operators()
    for name in ("propagator", "dissipation_gramian", "train_transfer", "test_transfer"):
        assert relative(getattr(ops, name), getattr(finer, name)) < 1e-8, name
    assert plain.corrections().shape == (6, 3)
    assert plain.corrections().max() < 1e-10


@pytest.mark.parametrize("rule", RULES)
def test_dense_and_matrix_free_are_one_operator(rule):
    dense = window_of("mlp", rule, "cross_entropy", start=2)
    free = window_of("mlp", rule, "cross_entropy", start=2, dense=False, memory=2**14)
    ops = dense.dense_operators()
    generator = torch.Generator().manual_seed(0)
    for name in ("propagator", "train_transfer", "test_transfer", "dissipation_gramian"):
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
    window = window_of("mlp", rule, "squared", start=2)
    run = window._trajectory
    steps = []
    for k, maps in enumerate(window.steps, window.start):
        step, eye = maps.step, torch.eye(window.num_outputs, dtype=torch.float64)
        S = torch.zeros(window.num_examples, dtype=torch.float64).index_add_(0, step.batch, step.selection)
        numbers = {
            "beta": step.momentum,
            "kappa": step.new_gradient,
            "a": step.buffer_share,
            "b": step.direct_share,
            "decay": step.decay,
            "coupled_decay": step.coupled_decay,
            "extra": step.source,
        }
        steps.append(
            OracleStep(
                J_S=window.model.output_jacobian(run.weights(k), window.inputs).flatten(0, 1).numpy(),
                Jbar_S=maps.train_jacobian.numpy(),
                Jbar_Q=maps.test_jacobian.numpy(),
                Bbar=maps.bend(eye).numpy(),
                S=S.repeat_interleave(3).numpy(),
                M=step.preconditioner.numpy(),
                w=run.weights(k).numpy(),
                **{name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in numbers.items()},
            )
        )
    expected, ops = operators_of(steps, run.buffer(window.start).numpy()), window.dense_operators()
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


@pytest.mark.parametrize("rule", ["momentum", "adam", "poprisk"])
def test_what_was_never_drawn_moves_no_test_output(rule):
    """Three of eight examples are never drawn: they are reservoir, whatever their loss."""
    everything = draw("mlp", 12)
    targets = torch.randn(8, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    small = Problem(build, "squared", everything[:5], targets[:5], arguments={"kind": "mlp"})
    run = train(small, RULES[rule], 8, batch_size=2, progress=False)
    window = Window(run, small.model(torch.float64), everything[:8], targets, test_inputs=everything[8:], dense=True)
    # The selection says n/b of the five that took part; with eight in Φ the same gradient is 8/5 of it.
    ops = window.dense_operators()
    channels = dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer)
    assert channels.rank <= 15
    reservoir = channels.reservoir.to_dense()
    assert (ops.test_transfer @ reservoir).norm() / ops.test_transfer.norm() < 1e-10


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_every_bound_holds(rule, loss):
    ops = window_of("mlp", rule, loss, start=2).dense_operators()
    coupling = Coupling(dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer))
    realized = RealizedWindow(
        ops.output_gradient, ops.train_displacement, ops.test_displacement, ops.sources.train, ops.sources.test
    )
    bounds = window_bounds(coupling, realized, predictors=[torch.zeros_like(ops.test_transfer)])
    assert [str(bound) for bound in bounds if not bound.holds] == []


@pytest.mark.parametrize("rule", RULES)
def test_training_motion_tells_test_motion_under_squared_loss(rule):
    ops = window_of("mlp", rule, "squared", steps=6).dense_operators()
    coupling = Coupling(dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer))
    predicted = coupling.predict(ops.train_displacement, ops.sources.train, ops.sources.test)
    assert relative(predicted, ops.test_displacement) < 1e-8


def test_a_propagator_without_momentum_composes():
    problem = Problem(build, "cross_entropy", draw("mlp", 8), torch.arange(8) % 3, arguments={"kind": "mlp"})
    run = train(problem, partial(torch.optim.SGD, lr=0.3), 9, batch_size=4, progress=False)
    model = problem.model(torch.float64)

    def propagator(start, stop):
        window = Window(run, model, problem.inputs, problem.targets, start=start, stop=stop, dense=True)
        return window.dense_operators().propagator

    assert_close(propagator(4, 9) @ propagator(0, 4), propagator(0, 9), rtol=1e-11, atol=1e-13)


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
    flow = gradient_flow_operators(model, x, y, time=2.0, intervals=60, test_inputs=q)
    errors = []
    for steps in (20, 40, 80):
        run = gradient_descent(model, x, y, lr=2.0 / steps, steps=steps)
        ops = Window(run, model, x, y, test_inputs=q, dense=True).dense_operators()
        errors.append([relative(getattr(ops, k), getattr(flow, k)) for k in ("propagator", "test_transfer")])
    order = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    assert (np.abs(order - 1) < 0.2).all(), order
    assert abs(flow.first_order_dissipation / flow.loss_drop - 1) < 1e-3, "in the flow the form is the loss drop"


def test_bad_windows_are_refused():
    run, problem, _ = trained("mlp", "adam", "squared", steps=3)
    model = problem.model(torch.float64)
    with pytest.raises(DataError, match="0 ≤ start < stop ≤ 3"):
        Window(run, model, problem.inputs, problem.targets, start=3)
    with pytest.raises(DataError, match="pass all training inputs"):
        Window(run, model, problem.inputs[:3], problem.targets[:3])
