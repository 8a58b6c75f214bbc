"""Models and losses as people have them: dead units, in-place activations, sequences, losses without forward mode."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import grad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from poprisk import PopRiskAdamW
from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.autodiff.ways import JacobianWay
from poprisk.errors import BackendWarning, DataError
from poprisk.optim import Gate
from poprisk.risk._exclusion import exclusion
from poprisk.risk._influence.batch_derivatives import GeneralBatch
from poprisk.risk._influence.exclusion_sweep import ExclusionSweep
from poprisk.risk._influence.label_sensitivity import label_sensitivities
from poprisk.risk._influence.linear_stack import StackBatch
from poprisk.risk._influence.matrix import influence_matrix, influence_on, influence_operator
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import retrain
from poprisk.risk._risk import population_risk
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

N, CLASSES = 12, 3


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(n=N):
    return torch.arange(n) % CLASSES


def record(make, loss, x, y, optimizer=None, steps=6, dtype=torch.float64):
    rule = optimizer or partial(torch.optim.SGD, lr=0.1)
    return train(Problem(make, loss, x, y), rule, steps, batch_size=4, dtype=dtype, progress=False)


def mlp(dead=0, inplace=False):
    """Four live units, and some that no input of these tests can reach."""
    torch.manual_seed(1)
    live = nn.Linear(4, 4), nn.Linear(4, CLASSES)
    first, last = nn.Linear(4, 4 + dead), nn.Linear(4 + dead, CLASSES)
    with torch.no_grad():
        first.weight[:4], first.bias[:4], first.bias[4:] = live[0].weight, live[0].bias, -100.0
        last.weight[:, :4], last.bias[:] = live[1].weight, live[1].bias
    return nn.Sequential(first, nn.ReLU(inplace=inplace), last)


class Normed(nn.Module):
    """No stack of linear layers."""

    def __init__(self, outputs=1) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner, self.norm, self.outer = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, outputs)

    def forward(self, x):
        return self.outer(self.norm(self.inner(x)).tanh())


class Recurrent(nn.Module):
    def __init__(self, kind=nn.GRU) -> None:
        super().__init__()
        self.recurrent, self.head = kind(4, 3, batch_first=True), nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][:, -1])


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_a_dead_unit_changes_nothing_under_a_pooled_gate(granularity):
    """Its zeros add nothing to a row's signal or noise, whose ratio is the gate."""
    optimizer = partial(
        PopRiskAdamW,
        gate=Gate("snr", strength=1.0, granularity=granularity, normalize=False),
        weight_decay=0.01,
        lr=0.02,
    )
    runs = [record(partial(mlp, dead), "cross_entropy", numbers(N, 4), labels(), optimizer) for dead in (0, 2)]
    without, beside = (influence_matrix(run) for run in runs)
    torch.testing.assert_close(beside, without, rtol=1e-9, atol=1e-12)
    eye = torch.eye(N, dtype=torch.float64)
    torch.testing.assert_close(influence_operator(runs[1]).matmat(eye), without, rtol=1e-9, atol=1e-12)


def test_a_dead_unit_under_a_normalized_gate_agrees_with_trainings():
    optimizer = partial(
        PopRiskAdamW, gate=Gate("snr", strength=1.0, granularity="row", normalize=True), weight_decay=0.01, lr=0.02
    )
    unrolled = Unrolled(record(partial(mlp, 2), "cross_entropy", numbers(N, 4), labels(), optimizer))
    assert unrolled.spot_check(2).worst < 1e-5
    assert bool(influence_matrix(unrolled).isfinite().all())


def test_activations_in_place_are_those_that_are_not():
    runs = [record(partial(mlp, inplace=way), "cross_entropy", numbers(N, 4), labels()) for way in (False, True)]
    assert isinstance(Unrolled(runs[1]).batch(0), StackBatch)
    plain, in_place = (influence_matrix(run) for run in runs)
    torch.testing.assert_close(in_place, plain)
    assert population_risk(runs[1]).value == pytest.approx(population_risk(runs[0]).value, rel=1e-10)


class WrittenOut(Recurrent):
    """The same with the equations of a GRU."""

    def forward(self, x):
        layer, h = self.recurrent, x.new_zeros(len(x), 3)
        for k in range(x.shape[1]):
            given = (x[:, k] @ layer.weight_ih_l0.T + layer.bias_ih_l0).chunk(3, 1)
            kept = (h @ layer.weight_hh_l0.T + layer.bias_hh_l0).chunk(3, 1)
            r, z = (given[0] + kept[0]).sigmoid(), (given[1] + kept[1]).sigmoid()
            h = (1 - z) * (given[2] + r * kept[2]).tanh() + z * h
        return self.head(h)


def test_recurrent_layers_are_followed_like_their_equations():
    layer, equations = (record(make, "cross_entropy", numbers(N, 2, 4), labels()) for make in (Recurrent, WrittenOut))
    torch.testing.assert_close(layer.weights(layer.num_steps), equations.weights(layer.num_steps))
    torch.testing.assert_close(influence_matrix(layer), influence_matrix(equations), rtol=1e-6, atol=1e-9)
    again = retrain(layer, Members(torch.ones(2, N)))
    torch.testing.assert_close(again.weights, layer.weights(layer.num_steps).expand(2, -1))


def test_linear_layers_over_places_are_no_stack():
    make = lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))  # noqa: E731
    run = record(make, "squared", numbers(N, 5, 4), numbers(N, 5, 2, seed=1))
    unrolled = Unrolled(run)
    assert isinstance(unrolled.batch(0), GeneralBatch)
    assert unrolled.spot_check(2).worst < 1e-6
    assert population_risk(run).value > population_risk(run).training_loss
    flat = record(lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 2)), "squared", numbers(N, 5, 4), numbers(N, 2))
    assert isinstance(Unrolled(flat).batch(0), StackBatch)


def huber(u, y):
    far = (u - y).abs() > 1
    return torch.where(far, (u - y).abs() - 0.5, 0.5 * (u - y).square()).sum()


LOSSES = {
    "mse": (F.mse_loss, lambda u, y: (u - y).square().mean()),
    "huber": (lambda u, y: F.huber_loss(u, y, reduction="sum"), huber),
}


@pytest.mark.filterwarnings("ignore::poprisk.errors.BackendWarning")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_without_forward_mode_give_what_their_formulas_give(name):
    runs = [record(Normed, loss, numbers(N, 4), numbers(N, 1, seed=1)) for loss in LOSSES[name]]
    torch.testing.assert_close(*(exclusion(run).losses for run in runs))
    torch.testing.assert_close(*(influence_matrix(run) for run in runs))
    risks = [population_risk(run).value for run in runs]
    assert risks[0] == pytest.approx(risks[1], rel=1e-9)


def normal(u, y):
    """In float32 its forward mode meets tangents in float64."""
    return -torch.distributions.Normal(u[0], F.softplus(u[1]) + 1e-3, validate_args=False).log_prob(y[0])


@pytest.mark.filterwarnings("ignore::poprisk.errors.BackendWarning")
def test_a_likelihood_in_single_precision():
    runs = []
    for dtype in (torch.float32, torch.float64):
        x, y = numbers(N, 4).to(dtype), numbers(N, 1, seed=1).to(dtype)
        runs.append(record(partial(Normed, 2), normal, x, y, dtype=dtype))
    single, double = (exclusion(run).losses.double() for run in runs)
    torch.testing.assert_close(single, double, rtol=1e-4, atol=1e-4)
    assert population_risk(runs[0]).value == pytest.approx(population_risk(runs[1]).value, rel=1e-4)


def test_backward_ways_give_what_forward_mode_gives():
    model = FlatModel(Normed(2).double(), "squared")
    x, y, w = numbers(5, 4), numbers(5, 2, seed=1), model.weights
    batch = GeneralBatch(model, w, x, y, torch.full((5,), 0.2, dtype=torch.float64))
    V, dx, rows = numbers(3, len(w), seed=2), numbers(3, 5, 4, seed=3), torch.tensor([0, 4, 0])

    def all_ways():
        return [batch.push_alone(V, rows), batch.input_slopes(V), *batch.push_inputs(V, dx)]

    forward = all_ways()
    total, e = batch._total, 1e-6
    for v, found in zip(V, forward[1], strict=True):  # of a layer norm too
        ahead, behind = (grad(total, argnums=1)(w + sign * e * v, x) for sign in (1, -1))
        torch.testing.assert_close(found, (ahead - behind) / (2 * e), rtol=1e-6, atol=1e-8)
    assert model.own_hessian_way is model.input_way is JacobianWay.FORWARD
    model.own_hessian_way = model.input_way = JacobianWay.DOUBLE_BACKWARD
    for found, expected in zip(all_ways(), forward, strict=True):
        torch.testing.assert_close(found, expected)


def test_excluded_outputs_without_forward_mode():
    run = record(Normed, "squared", numbers(N, 4), numbers(N, 1, seed=1))
    unrolled = Unrolled(run)
    expected = ExclusionSweep(unrolled, torch.arange(N)).outputs_at(unrolled.stop)
    assert unrolled.model.jacobian_way is JacobianWay.FORWARD
    unrolled.model.jacobian_way = JacobianWay.DOUBLE_BACKWARD
    found = ExclusionSweep(unrolled, torch.arange(N)).outputs_at(unrolled.stop)
    torch.testing.assert_close(found.tangent, expected.tangent)
    torch.testing.assert_close(found.displaced, expected.displaced)


def test_a_way_that_is_given_up_is_named():
    model = FlatModel(Normed().double(), LOSSES["huber"][0])
    batch = GeneralBatch(model, model.weights, numbers(5, 4), numbers(5, 1), torch.ones(5, dtype=torch.float64))
    with pytest.warns(BackendWarning, match="double backward"):
        batch.push_alone(numbers(2, model.size), torch.tensor([0, 1]))


def test_queries_and_targets_of_different_number_are_refused():
    run = record(mlp, "cross_entropy", numbers(N, 4), labels())
    with pytest.raises(DataError, match="same number of queries"):
        influence_on(run, numbers(5, 4), labels(3))
    with pytest.raises(DataError, match="same number of queries"):
        influence_on(run, numbers(0, 4), labels(0))


class _Largest(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.numbers = max(self.numbers, found.numel())
        return found


def test_label_sensitivities_keep_only_each_examples_own():
    n = 40
    make = partial(nn.Linear, 4, CLASSES)
    run = record(make, "cross_entropy", numbers(n, 4), labels(n), steps=20)
    unrolled = Unrolled(run)
    whole = unrolled.adjoint(
        unrolled.model.output_jacobian(unrolled.last_weights, unrolled.inputs).flatten(0, 1).T, wrt=("labels",)
    ).labels
    assert whole is not None
    each = torch.arange(n)
    expected = whole.view(n, CLASSES, n, CLASSES)[each, :, each]
    with _Largest() as largest:
        found = label_sensitivities(unrolled)
    torch.testing.assert_close(found, expected)
    assert largest.numbers < whole.numel() / 2  # of a batch's outputs, not of all examples'
    some = torch.tensor([7, 3])
    torch.testing.assert_close(label_sensitivities(Unrolled(run, memory=1), some), expected[some])
