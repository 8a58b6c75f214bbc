"""Fill distances, Sobolev norms, and the bounds built on them."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from oracles.run_operators import DenseStep, operators_of, random_steps
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import Coupling
from poprisk.operators._cumulative import LiftedStep, lifted_maps
from poprisk.operators._dense import RealizedWindow
from poprisk.runs._step import AffineStep
from poprisk_lab.theory.sobolev import (
    SobolevBound,
    fill_distance_slope,
    sobolev_generalization_bound,
    sobolev_operator_bound,
    sobolev_trajectory_bound,
    sobolev_transfer_bound,
)
from poprisk_lab.theory.torus import (
    Torus,
    fill_distance,
    jacobian_sobolev_norm,
    pathwise_sobolev_norm,
    sobolev_norm,
    voronoi_masses,
)

CIRCLE = Torus(dimension=1, size=32)


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def uniform(seed: int, *shape: int) -> torch.Tensor:
    return 2 * math.pi * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_distance(points: torch.Tensor, samples: torch.Tensor, period: float) -> torch.Tensor:
    apart = (points[:, None] - samples[None]).abs() % period
    return torch.minimum(apart, period - apart).square().sum(-1).sqrt()


def test_fill_distance_on_the_circle_is_exact():
    samples = uniform(0, 9, 1)
    fine = torch.linspace(0, 2 * math.pi, 200_001, dtype=torch.float64)[:, None]
    expected = naive_distance(fine, samples, 2 * math.pi).min(1).values.max().item()
    assert fill_distance(CIRCLE, samples) == pytest.approx(expected, abs=4e-5)
    assert fill_distance(CIRCLE, samples + 5) == pytest.approx(fill_distance(CIRCLE, samples))
    even = torch.arange(8).double()[:, None] * math.pi / 4
    assert fill_distance(CIRCLE, even) == pytest.approx(math.pi / 8)
    assert fill_distance(CIRCLE, torch.zeros(1, 1).double()) == pytest.approx(math.pi)


def test_fill_distance_on_the_torus_is_within_half_a_cell():
    torus, samples = Torus(dimension=2, size=40), uniform(1, 12, 2)
    ours = fill_distance(torus, samples)
    assert ours == pytest.approx(naive_distance(torus.grid.reshape(-1, 2), samples, 2 * math.pi).min(1).values.max())
    finer = fill_distance(Torus(dimension=2, size=200), samples)
    assert ours - 1e-12 <= finer <= ours + torus.half_diagonal
    lattice = torch.cartesian_prod(*[torch.arange(4).double() * math.pi / 2] * 2)
    assert fill_distance(torus, lattice) == pytest.approx(math.pi / 4 * 2**0.5)


def test_voronoi_masses():
    samples = uniform(2, 7, 1)
    exact = voronoi_masses(CIRCLE, samples)
    fine = Torus(dimension=1, size=100_000)
    on_grid = voronoi_masses(fine, samples, torch.ones(100_000).double())
    assert exact.sum().item() == pytest.approx(1)
    assert_close(exact, on_grid, rtol=0, atol=3e-5)
    half = (fine.grid[:, 0] < math.pi).double()  # a population on half of the circle
    one = torch.tensor([[0.25], [0.75], [1.5]]).double() * math.pi
    assert_close(voronoi_masses(fine, one, half), torch.tensor([0.5, 0.5, 0.0]).double(), rtol=0, atol=3e-5)
    torus = Torus(dimension=2, size=64)
    lattice = torch.cartesian_prod(*[(torch.arange(2) + 0.5).double() * math.pi] * 2) + 1e-6
    assert_close(voronoi_masses(torus, lattice), torch.full((4,), 0.25).double(), rtol=0, atol=0.04)


@pytest.mark.parametrize("order", [0.0, 1.0, 1.5, 3.0])
def test_norms_of_waves(order):
    z = CIRCLE.grid[:, 0]
    wave = 2 * torch.cos(3 * z) + torch.sin(5 * z)
    squared = math.pi * (4 * 10**order + 26**order)
    assert sobolev_norm(CIRCLE, wave, order) ** 2 == pytest.approx(squared)
    assert sobolev_norm(CIRCLE, torch.stack([wave, wave], dim=-1), order) ** 2 == pytest.approx(2 * squared)
    torus = Torus(dimension=2, size=16)
    x, y = torus.grid.unbind(-1)
    assert sobolev_norm(torus, torch.cos(2 * x + 3 * y), order) ** 2 == pytest.approx(2 * math.pi**2 * 14**order)
    stretched = Torus(dimension=1, size=32, period=1.0)  # frequencies are 2πk/period
    wave = torch.cos(2 * math.pi * stretched.grid[:, 0])
    assert sobolev_norm(stretched, wave, order) ** 2 == pytest.approx(0.5 * (1 + 4 * math.pi**2) ** order)


def test_order_one_is_the_norm_with_its_derivative():
    z = torch.arange(4096).double() * 2 * math.pi / 4096
    f = torch.exp(torch.sin(z))
    derivative = torch.cos(z) * f
    expected = ((f.square() + derivative.square()).mean() * 2 * math.pi).sqrt().item()
    assert sobolev_norm(CIRCLE, torch.exp(torch.sin(CIRCLE.grid[:, 0])), 1.0) == pytest.approx(expected, rel=1e-12)


def test_the_norm_of_a_jacobian_is_a_supremum():
    waves = torch.stack([torch.sin((k + 1) * CIRCLE.grid[:, 0] + k) for k in range(6)], dim=-1)
    J = torch.einsum("zk,kpd->zpd", waves, normal(0, 6, 2, 5))
    norm = jacobian_sobolev_norm(CIRCLE, J, order=1.5)
    tried = [sobolev_norm(CIRCLE, J @ (v / v.norm()), 1.5) for v in normal(1, 2000, 5)]
    assert 0.9 * norm < max(tried) <= norm * (1 + 1e-12)
    M = normal(2, 5).abs()
    assert_close(
        jacobian_sobolev_norm(CIRCLE, J, 1.5, preconditioner=M), jacobian_sobolev_norm(CIRCLE, J * M.sqrt(), 1.5)
    )
    weights = torch.tensor([0.5, 2.0]).double()
    assert pathwise_sobolev_norm(torch.tensor([2.0, 3.0]).double(), weights) == pytest.approx(20**0.5)


def smooth_run(seed: int, *, momentum: bool, size: int = 32):
    """Random steps whose test set is the grid of a circle, with Jacobians that are smooth functions of the input."""
    rng = np.random.default_rng(seed)
    steps = random_steps(seed, momentum=momentum, count=4)
    z = 2 * np.pi * np.arange(size) / size
    waves = np.stack([np.cos(k * z) for k in range(5)] + [np.sin(k * z) for k in range(1, 5)], axis=1)
    for step in steps:
        step.Jbar_Q = waves @ rng.normal(size=(9, 9))
    return steps, operators_of(steps)


def lifted(steps: list[DenseStep], F: list[np.ndarray]) -> list[LiftedStep]:
    def share(x):
        return tensor(x) if isinstance(x, np.ndarray) else x

    return [
        LiftedStep(
            AffineStep(
                batch=torch.arange(len(step.S)),
                selection=tensor(step.S),
                preconditioner=tensor(step.M),
                momentum=share(step.beta),
                new_gradient=share(step.kappa),
                buffer_share=share(step.a),
                direct_share=share(step.b),
            ),
            tensor(map_),
            tensor(step.J_S.T * step.S),
            tensor(step.Jbar_S),
            tensor(step.Jbar_Q),
        )
        for step, map_ in zip(steps, F, strict=True)
    ]


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("order", [1.0, 2.0])
def test_the_operator_lemma_in_discrete_time(momentum, order):
    for seed in range(5):
        steps, ops = smooth_run(seed, momentum=momentum)
        channels = dissipation_channels(tensor(ops.W_factor), tensor(ops.D), tensor(ops.G))
        maps = lifted_maps(lifted(steps, ops.F))
        norms = [jacobian_sobolev_norm(CIRCLE, L.unsqueeze(1), order) for L in maps]
        path_norm = pathwise_sobolev_norm(torch.tensor(norms, dtype=torch.float64))
        bound = sobolev_operator_bound(CIRCLE, channels.reduced_test.unsqueeze(1), order, path_norm)
        assert bound.holds
        assert bound.tightness > 0.2
        waves = np.fft.fft(channels.reduced_test.numpy(), axis=0) / 32
        weighed = (1 + np.fft.fftfreq(32, 1 / 32)[:, None] ** 2) ** (order / 2) * waves
        assert bound.left == pytest.approx(math.sqrt(2 * math.pi) * np.linalg.norm(weighed, 2))
        assert bound.right == pytest.approx(math.sqrt(sum(norm**2 for norm in norms)))
        if not momentum:  # then the lifted map of a step is its Jacobian with the root of the preconditioner
            plain = [
                jacobian_sobolev_norm(CIRCLE, tensor(step.Jbar_Q).unsqueeze(1), order, preconditioner=tensor(step.M))
                for step in steps
            ]
            assert_close(torch.tensor(norms), torch.tensor(plain))


def test_right_sides_of_the_transfer_and_trajectory_bounds():
    _, ops = smooth_run(0, momentum=True)
    R, D, G = tensor(ops.W_factor), tensor(ops.D), tensor(ops.G)
    coupling = Coupling(dissipation_channels(R, D, G, rank_cutoff=0.3))
    channels = coupling.channels
    assert channels.unresolved > 0
    tau = channels.train_roots[channels.train_rank].item()
    sizes = {"num_test": 32, "fill": 0.5, "order": 2.0, "path_norm": 3.0}
    bound = sobolev_transfer_bound(coupling, CIRCLE, **sizes)
    assert bound.smooth == pytest.approx(32**0.5 * (0.5**1.5 * 3.0 + tau))
    assert bound.left == coupling.remainder_norm > 0
    assert bound.needed_constant == pytest.approx(bound.left / bound.smooth)
    whole = Coupling(dissipation_channels(R, D, G))
    assert sobolev_transfer_bound(whole, CIRCLE, **sizes).smooth == pytest.approx(32**0.5 * 0.5**1.5 * 3.0)
    g = normal(0, 6)
    window = RealizedWindow(g, -D @ g, -G @ g, loss_drop=4.0)
    flow = sobolev_trajectory_bound(coupling, window, CIRCLE, **sizes, form="flow")
    discrete = sobolev_trajectory_bound(coupling, window, CIRCLE, **sizes)
    assert flow.smooth == pytest.approx(2 * bound.smooth)
    assert discrete.smooth == pytest.approx(bound.smooth * (R @ g).norm().item())
    assert discrete.left == pytest.approx((G @ g - coupling.matrix @ D @ g).norm().item())
    with pytest.raises(HyperparameterError, match=r"above half the dimension, 0\.5, got 0\.5"):
        sobolev_transfer_bound(coupling, CIRCLE, num_test=32, fill=0.5, order=0.5, path_norm=1.0)


@pytest.mark.parametrize("order", [1, 2])
def test_fields_that_vanish_on_the_samples_shrink_with_the_fill_distance(order):
    """The sampling inequality behind the theorem, with as many field directions as there are waves: slope m - 1/2."""
    z = np.linspace(0, 2 * np.pi, 257)[:-1] + 0.01
    k = np.arange(1, 600)
    weight = (1 + k**2) ** (-order / 2) / np.sqrt(np.pi)  # of unit norm in H^m

    def field(points):
        return np.concatenate(
            [
                np.full((len(points), 1), (2 * np.pi) ** -0.5),
                weight * np.cos(np.outer(points, k)),
                weight * np.sin(np.outer(points, k)),
            ],
            axis=1,
        )

    fills, remainders = [], []
    for n in (8, 12, 16, 24, 32):
        samples = 2 * np.pi * np.arange(n) / n
        C_S, C_Q = field(samples), field(z)
        R_perp = C_Q - C_Q @ np.linalg.pinv(C_S) @ C_S
        fills.append(fill_distance(CIRCLE, tensor(samples)[:, None]))
        remainders.append(np.linalg.norm(R_perp, axis=1).max())  # the most that any one point may be off
    slope = fill_distance_slope(fills, remainders)
    assert slope.valid
    assert slope.value == pytest.approx(order - 0.5, abs=0.1)


def test_slopes_say_when_they_are_none():
    assert fill_distance_slope([1.0, 0.5, 0.25, 0.125], [3.0, 1.5, 0.75, 0.375]).value == pytest.approx(1)
    noisy = fill_distance_slope([1.0, 0.5, 0.25], [1.0, 0.6, 0.2])
    assert noisy.valid
    assert noisy.standard_error > 0.05
    assert not fill_distance_slope([1.0, 0.5], [1.0, 0.5]).valid
    zero = fill_distance_slope([1.0, 0.5, 0.25], [1.0, 0.0, 0.1])
    assert not zero.valid
    assert "is 0" in zero.reason
    with pytest.raises(DataError, match="one remainder per positive fill distance"):
        fill_distance_slope([1.0, 0.5], [1.0])
    with pytest.raises(DataError, match="that differ"):
        fill_distance_slope([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])


def test_the_generalization_bound_needs_a_bounded_constant():
    """A smooth residual sampled ever denser: what the training error does not explain shrinks at least as h^m."""

    def residual(z):
        return torch.sin(2 * z) + 0.5 * torch.cos(5 * z)

    grid = Torus(dimension=1, size=256)
    needed = []
    for n in (6, 10, 16, 24, 40):
        samples = (torch.arange(n).double() + 0.3 * torch.sin(torch.arange(n).double())).mul(2 * math.pi / n)[:, None]
        masses, fill = voronoi_masses(grid, samples), fill_distance(grid, samples)
        bound = sobolev_generalization_bound(
            grid,
            residual=residual(grid.grid[:, 0]),
            train_residual=residual(samples),
            start_residual=residual(grid.grid[:, 0]),
            masses=masses,
            fill=fill,
            order=1.0,
            path_norm=2.0,
            root_dissipation=0.5,
        )
        assert bound.left == pytest.approx((0.5 * (1 + 0.25)) ** 0.5)
        mean_square = residual(samples).square().mean().item()  # erratum: the mean, not the sum
        assert bound.known == pytest.approx((n * masses.max().item() * mean_square) ** 0.5)
        assert bound.smooth == pytest.approx(fill * (sobolev_norm(grid, residual(grid.grid[:, 0]), 1.0) + 1.0))
        needed.append(bound.needed_constant)
    assert max(needed) < 1
    assert SobolevBound("any", "eq", left=1.0, known=0.0, smooth=0.0).needed_constant == math.inf


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match=r"samples must be \[n, 1\]"):
        fill_distance(CIRCLE, torch.zeros(3, 2).double())
    with pytest.raises(DataError, match="with n at least 1"):
        voronoi_masses(CIRCLE, torch.zeros(0, 1).double())
    with pytest.raises(DataError, match=r"on the grid \[32\]"):
        sobolev_norm(CIRCLE, torch.zeros(31).double(), 1.0)
    with pytest.raises(DataError, match="a Jacobian on the grid"):
        jacobian_sobolev_norm(CIRCLE, torch.zeros(32, 2).double(), 1.0)
    with pytest.raises(DataError, match=r"preconditioner must be a vector \[2\]"):
        jacobian_sobolev_norm(CIRCLE, torch.zeros(32, 1, 2).double(), 1.0, preconditioner=-torch.ones(2).double())
    with pytest.raises(DataError, match="density must be not negative"):
        voronoi_masses(CIRCLE, torch.zeros(1, 1).double(), torch.zeros(32).double())
    with pytest.raises(HyperparameterError, match="positive dimension, size and period"):
        Torus(dimension=0, size=4)
    with pytest.raises(DataError, match="weights must be"):
        pathwise_sobolev_norm(torch.ones(2), torch.ones(3))
