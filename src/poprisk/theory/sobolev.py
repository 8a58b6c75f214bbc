r"""Smoothness of the network on a circle or torus of inputs, and the bounds that follow from it.

Functions are sampled on a regular grid, derivatives are taken by FFT, and the Sobolev norm is

.. math:: \|f\|_{H^m}^2 = |\mathcal M| \sum_k (1 + |\xi_k|^2)^m |\hat f_k|^2, \qquad \xi_k = 2\pi k / period

for any real order m, exact for functions that the grid resolves. The constant of the Sobolev sampling inequality is not
known: bounds that need it are returned without it, beside the constant it would take.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.estimate import Estimate
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators import Bound, Coupling, Form, RealizedWindow, operator_norm
from poprisk.theory.path_bounds import remainder_bound

# Grid points times samples compared at once: 32 MiB of distances in float64.
_PAIRS_AT_A_TIME = 2**22


@dataclass(frozen=True)
class Torus:
    """A flat torus (a circle for dimension 1), sampled on a regular grid that is the same along each axis.

    >>> Torus(dimension=2, size=4, period=1.0).grid[1, 2]
    tensor([0.2500, 0.5000], dtype=torch.float64)
    """

    dimension: int
    size: int
    """Grid points along each axis."""
    period: float = 2 * math.pi
    """Length of each axis."""

    def __post_init__(self) -> None:
        if self.dimension < 1 or self.size < 1 or not self.period > 0:
            raise HyperparameterError(
                f"a torus needs a positive dimension, size and period, got {self.dimension}, {self.size}, {self.period}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the grid."""
        return (self.size,) * self.dimension

    @property
    def volume(self) -> float:
        """Measure of the torus."""
        return self.period**self.dimension

    @property
    def grid(self) -> Float[Tensor, "*grid k"]:
        """The grid points, float64."""
        axis = torch.arange(self.size, dtype=torch.float64) * (self.period / self.size)
        return torch.stack(torch.meshgrid(*[axis] * self.dimension, indexing="ij"), dim=-1)

    @property
    def half_diagonal(self) -> float:
        """Distance from a point to the nearest grid point, at most."""
        return 0.5 * self.period / self.size * self.dimension**0.5


def fill_distance(torus: Torus, samples: Float[Tensor, "n k"]) -> float:
    r"""The fill distance :math:`h_S = \sup_z \min_i d(z, z_i)` of ``thm:sobolev_remainder``.

    Exact on the circle. On a torus the supremum is taken over the grid, so the value is at most ``half_diagonal`` too
    small.

    Raises:
        DataError: no sample, or another dimension.

    >>> fill_distance(Torus(1, size=8, period=4.0), torch.tensor([[0.0], [1.0]]))  # the far side of the circle
    1.5
    """
    _check_samples(torus, samples)
    if torus.dimension == 1:
        return 0.5 * _circle_gaps(torus, samples)[0].max().item()
    return max(nearest.max().item() for nearest, _ in _nearest(torus, samples))


def voronoi_masses(
    torus: Torus, samples: Float[Tensor, "n k"], density: Float[Tensor, "*grid"] | None = None
) -> Float[Tensor, "n"]:
    r"""The masses :math:`\mu_i = \rho(V_i)` of the samples' Voronoi cells, which add up to 1.

    Args:
        torus: The inputs.
        samples: Training inputs; of equal ones the first has the cell, or, on the circle, they share it.
        density: Of the population on the grid, not negative, in any unit; None is uniform (exact on the circle).

    Raises:
        DataError: no sample, another dimension, or a density of another shape, negative or without mass.

    >>> voronoi_masses(Torus(1, size=8, period=4.0), torch.tensor([[0.0], [1.0]]))
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    _check_samples(torus, samples)
    n = len(samples)
    masses = torch.zeros(n, dtype=torch.float64, device=samples.device)
    if torus.dimension == 1 and density is None:
        gaps, order = _circle_gaps(torus, samples)
        masses[order] = 0.5 * (gaps + gaps.roll(1)) / torus.period
        return masses
    if density is None:
        density = torch.ones(torus.shape, dtype=torch.float64, device=samples.device)
    if tuple(density.shape) != torus.shape or not (density >= 0).all() or not density.sum() > 0:
        raise DataError(
            f"density must be not negative on the grid {list(torus.shape)} and have some mass, got shape "
            f"{list(density.shape)}"
        )
    owners = torch.cat([owner for _, owner in _nearest(torus, samples)])
    masses.index_add_(0, owners, density.reshape(-1).double())
    return masses / masses.sum()


def sobolev_norm(torus: Torus, values: Float[Tensor, "*values"], order: float) -> float:
    r"""The norm :math:`\|f\|_{H^m}` of a function on the grid, with values in R^p.

    Args:
        torus: The inputs.
        values: f, shape ``[*grid]`` or ``[*grid, p]``.
        order: m; 0 is the L² norm (not divided by the volume).

    Raises:
        DataError: values that are not on the grid.

    >>> circle = Torus(1, size=16)
    >>> z = circle.grid[..., 0]
    >>> round(sobolev_norm(circle, torch.sin(3 * z), order=1.0) ** 2 / math.pi, 6)  # (1 + 3²) π
    10.0
    """
    return _weighted(torus, values, order).norm().item()


def jacobian_sobolev_norm(
    torus: Torus,
    jacobian: Float[Tensor, "*jacobian"],
    order: float,
    *,
    preconditioner: Float[Tensor, "d"] | None = None,
) -> float:
    r"""The Jacobian–Sobolev norm :math:`\mathfrak a_m = \sup_{\|v\|=1} \|z \mapsto J_z v\|_{H^m}` at one time.

    Args:
        torus: The inputs.
        jacobian: J_z on the grid, shape ``[*grid, p, d]``; or any other family of functions, its index last.
        order: m.
        preconditioner: The diagonal M; then J M^{1/2} takes the place of J.

    Raises:
        DataError: a Jacobian that is not on the grid, or a preconditioner of another length or negative.

    >>> circle = Torus(1, size=16)
    >>> z = circle.grid
    >>> J = torch.stack([torch.sin(z), torch.cos(2 * z)], dim=-1)  # d = 2 weights, p = 1 output
    >>> round(jacobian_sobolev_norm(circle, J, order=1.0) ** 2 / math.pi, 6)  # the faster one: (1 + 2²) π
    5.0
    """
    if jacobian.dim() != torus.dimension + 2:
        raise DataError(
            f"a Jacobian on the grid must have shape {[*torus.shape, 'p', 'd']}, got {list(jacobian.shape)}"
        )
    if preconditioner is not None:
        if preconditioner.shape != jacobian.shape[-1:] or not (preconditioner >= 0).all():
            raise DataError(
                f"preconditioner must be a vector [{jacobian.shape[-1]}] that is not negative, got shape "
                f"{list(preconditioner.shape)}"
            )
        jacobian = jacobian * preconditioner.sqrt()
    return operator_norm(_weighted(torus, jacobian, order).reshape(-1, jacobian.shape[-1]))


def pathwise_sobolev_norm(norms: Float[Tensor, "m"], weights: Float[Tensor, "k"] | None = None) -> float:
    r"""The norm of a path, :math:`\Lambda_m(s, T) = (\int_s^T \mathfrak a_m(\tau)^2 d\tau)^{1/2}`.

    In discrete time the integral is a sum over steps without weights, and :math:`\mathfrak a_m` is the norm of the
    step's lifted map (``lifted_maps`` with the grid as test set), which has learning rate and momentum inside.

    Args:
        norms: :math:`\mathfrak a_m` at the nodes of a quadrature, or of each step.
        weights: Of the quadrature; None for steps.

    >>> pathwise_sobolev_norm(torch.tensor([3.0, 4.0]))
    5.0
    """
    if weights is None:
        return norms.norm().item()
    if weights.shape != norms.shape or not (weights >= 0).all():
        raise DataError(f"weights must be {list(norms.shape)} numbers that are not negative, got {list(weights.shape)}")
    return (weights * norms.square()).sum().sqrt().item()


def sobolev_operator_bound(torus: Torus, channel: Float[Tensor, "*channel"], order: float, path_norm: float) -> Bound:
    r"""The lemma on the dissipation-normalized field, ``lem:sobolev_C_bound``; no constant is involved.

    .. math:: \|\mathcal T_{s,T} W^{\dagger/2}\|_{\ell_2 \to H^m} \le \Lambda_m(s, T)

    Args:
        torus: The inputs.
        channel: :math:`C_Q V` with the grid as test set, ``reduced_test`` reshaped to ``[*grid, p, r]``.
        order: m.
        path_norm: :math:`\Lambda_m`.
    """
    left = jacobian_sobolev_norm(torus, channel, order)
    return Bound("sobolev operator", "lem:sobolev_C_bound", "algebra", left, path_norm, 1e-10 * path_norm)


@dataclass(frozen=True)
class SobolevBound:
    r"""An inequality :math:`left \le known + C \cdot smooth` whose constant C is not known.

    Over a sweep of training sets on one manifold the bound says that ``needed_constant`` stays bounded.

    >>> SobolevBound("transfer", "eq:sobolev_Rperp", left=3.0, known=1.0, smooth=4.0).needed_constant
    0.5
    """

    name: str
    label: str
    """Of the equation in the paper."""
    left: float
    known: float
    """What of the right side carries no unknown constant."""
    smooth: float
    """The factor of the unknown constant."""

    @property
    def needed_constant(self) -> float:
        """The smallest C with which the inequality holds."""
        excess = max(self.left - self.known, 0.0)
        if self.smooth == 0:
            return 0.0 if excess == 0 else math.inf
        return excess / self.smooth


def sobolev_transfer_bound(
    coupling: Coupling, torus: Torus, *, num_test: int, fill: float, order: float, path_norm: float
) -> SobolevBound:
    r"""The remainder shrinks with the fill distance, Eq. ``sobolev_Rperp``.

    .. math:: \|R_\perp\| \le C |Q|^{1/2} \bigl(h_S^{m - d/2} \Lambda_m + \tau\bigr)

    Differs from the paper by τ: where singular values of C_S are cut off, the field of a dropped direction does not
    vanish on the samples but is at most τ there, the largest one dropped. Without a cut-off τ is 0, but then, since W
    has no more directions than there are train outputs, :math:`R_\perp` itself is 0 whenever D is one-to-one on the
    signal channel; the dependence on the fill distance shows in the remainder with ``rank_cutoff`` set.

    Args:
        coupling: The window.
        torus: The inputs; its dimension is the d of the exponent.
        num_test: :math:`|Q|`, the number of test inputs (not outputs).
        fill: h_S.
        order: m, above half the dimension.
        path_norm: :math:`\Lambda_m(s, T)`.

    Raises:
        HyperparameterError: an order of at most half the dimension.
    """
    tau = coupling.channels.train_roots[coupling.channels.train_rank :]
    smooth = fill ** _exponent(torus, order) * path_norm + (tau[0].item() if len(tau) else 0.0)
    return SobolevBound("transfer", "eq:sobolev_Rperp", coupling.remainder_norm, 0.0, num_test**0.5 * smooth)


def sobolev_trajectory_bound(
    coupling: Coupling,
    window: RealizedWindow,
    torus: Torus,
    *,
    num_test: int,
    fill: float,
    order: float,
    path_norm: float,
    form: Form = "discrete",
) -> SobolevBound:
    r"""What the best predictor misses on the run, Eq. ``sobolev_trajectory``.

    .. math:: \|\Delta u_Q - A_\circ \Delta u_S\|
              \le C |Q|^{1/2} h_S^{m-d/2} \Lambda_m \sqrt{\Phi_S(u(s)) - \Phi_S(u(T))}

    In discrete time displacements without source, and :math:`g^\top W g` under the root; τ as in
    ``sobolev_transfer_bound``.
    """
    transfer = sobolev_transfer_bound(coupling, torus, num_test=num_test, fill=fill, order=order, path_norm=path_norm)
    plain = remainder_bound(coupling, window, form)
    return SobolevBound(
        "trajectory", "eq:sobolev_trajectory", plain.left, 0.0, transfer.smooth * _budget(coupling, window, form)
    )


def sobolev_generalization_bound(
    torus: Torus,
    *,
    residual: Float[Tensor, "*residual"],
    train_residual: Float[Tensor, "n p"],
    start_residual: Float[Tensor, "*start"],
    masses: Float[Tensor, "n"],
    fill: float,
    order: float,
    path_norm: float,
    root_dissipation: float,
    density: Float[Tensor, "*grid"] | None = None,
) -> SobolevBound:
    r"""Population error from training error and smoothness, Eq. ``sobolev_generalization``, for squared loss.

    .. math:: \|r_T\|_{L^2(\rho)} \le \sqrt{n \mu_{max}}\, \|r_T\|_S
              + C h_S^m \bigl(\|F(w(s), \cdot) - y\|_{H^m} + \Lambda_m \sqrt{\Phi_S(u(s)) - \Phi_S(u(T))}\bigr)

    Differs from the paper: :math:`\|r_T\|_S` is the root of the *mean* squared residual over the samples; with the sum
    the first term would not follow from the masses.

    Args:
        torus: The inputs.
        residual: r_T = F(w(T), ·) - y on the grid, ``[*grid]`` or ``[*grid, p]``.
        train_residual: The same at the samples.
        start_residual: F(w(s), ·) - y on the grid.
        masses: Of the samples' Voronoi cells.
        fill: h_S.
        order: m, above half the dimension.
        path_norm: :math:`\Lambda_m(s, T)`.
        root_dissipation: Root of the loss drop in gradient flow, of :math:`g^\top W g` in discrete time (where a source
            would have to be added to the displacement).
        density: Of the population ρ on the grid, in any unit; None is uniform.

    Raises:
        DataError: shapes that do not fit.
        HyperparameterError: an order of at most half the dimension.
    """
    _exponent(torus, order)
    n = len(train_residual)
    if tuple(masses.shape) != (n,):
        raise DataError(f"masses must be as many as there are samples, {n}, got shape {list(masses.shape)}")
    _on_grid(torus, residual)
    squares = residual.reshape(*torus.shape, -1).square().sum(dim=-1)
    weights = torch.ones_like(squares) if density is None else density
    population = ((weights * squares).sum() / weights.sum()).sqrt().item()
    root_mean_square = (train_residual.square().sum() / n).sqrt().item()
    smooth = fill**order * (sobolev_norm(torus, start_residual, order) + path_norm * root_dissipation)
    known = (n * masses.max().item()) ** 0.5 * root_mean_square
    return SobolevBound("generalization", "eq:sobolev_generalization", population, known, smooth)


def fill_distance_slope(fill_distances: Sequence[float], remainders: Sequence[float]) -> Estimate:
    r"""The slope of :math:`\log \|R_\perp\|` against :math:`\log h_S` over training sets of several densities.

    The transfer theorem bounds it from below by m - d/2 for every order m the network has, once :math:`\Lambda_m` stays
    bounded over the sweep. To be measured under a loss whose curvature changes: under squared loss the remainder is 0
    in gradient flow at every density.

    Args:
        fill_distances: h_S of each training set.
        remainders: :math:`\|R_\perp\|` (divided by :math:`\Lambda_m |Q|^{1/2}`, where those vary).

    Returns:
        The least-squares slope with the standard error of its residuals; not valid for fewer than three training sets
        or remainders that are 0.

    Raises:
        DataError: lists of different lengths, fill distances that are not positive or all the same.

    >>> round(fill_distance_slope([1.0, 0.5, 0.25], [8.0, 1.0, 0.125]).value, 6)
    3.0
    """
    if len(fill_distances) != len(remainders) or not all(h > 0 for h in fill_distances):
        raise DataError(
            f"a slope needs one remainder per positive fill distance, got {len(fill_distances)} and {len(remainders)}"
        )
    if len(set(fill_distances)) < 2:
        raise DataError(f"a slope needs fill distances that differ, got {list(fill_distances)}")
    if not all(r > 0 for r in remainders):
        reason = "a remainder is 0: there is nothing that shrinks"
        return Estimate(math.nan, math.nan, valid=False, reason=reason)
    x = torch.tensor([math.log(h) for h in fill_distances], dtype=torch.float64)
    y = torch.tensor([math.log(r) for r in remainders], dtype=torch.float64)
    x = x - x.mean()
    slope = (x @ y / (x @ x)).item()
    if len(x) < 3:
        return Estimate(slope, math.nan, valid=False, reason="two training sets leave no residual to judge a line by")
    residual = y - y.mean() - slope * x
    return Estimate(slope, (residual.square().sum() / (len(x) - 2) / (x @ x)).sqrt().item())


def _budget(coupling: Coupling, window: RealizedWindow, form: Form) -> float:
    if form == "flow":
        return (window.loss_drop or 0.0) ** 0.5  # `remainder_bound` has refused what is missing or negative
    return coupling.channels.dissipation(window.gradient) ** 0.5


def _exponent(torus: Torus, order: float) -> float:
    if not order > torus.dimension / 2:
        raise HyperparameterError(
            f"the order must be above half the dimension, {torus.dimension / 2}, got {order}: rougher functions have "
            "no values at points"
        )
    return order - torus.dimension / 2


def _weighted(torus: Torus, values: Tensor, order: float) -> Tensor:
    """The function whose root of summed squares is the norm: (1 - Δ)^{m/2} f, with the cell's volume inside."""
    _on_grid(torus, values)
    axes = tuple(range(torus.dimension))
    frequency = 2 * math.pi * torch.fft.fftfreq(torus.size, torus.period / torus.size, dtype=torch.float64)
    squares = sum(frequency.square().reshape([-1 if axis == here else 1 for here in axes]) for axis in axes)
    weight = (1 + torch.as_tensor(squares)).pow(order / 2).to(values.device, values.dtype)
    weight = weight.reshape(*torus.shape, *[1] * (values.dim() - torus.dimension))
    smoothed = torch.fft.ifftn(weight * torch.fft.fftn(values, dim=axes), dim=axes).real
    return smoothed * (torus.volume / torus.size**torus.dimension) ** 0.5


def _on_grid(torus: Torus, values: Tensor) -> None:
    if tuple(values.shape[: torus.dimension]) != torus.shape:
        raise DataError(
            f"values must lie on the grid {list(torus.shape)} along their first axes, got {list(values.shape)}"
        )


def _check_samples(torus: Torus, samples: Tensor) -> None:
    if samples.dim() != 2 or samples.shape[1] != torus.dimension or not len(samples):
        raise DataError(f"samples must be [n, {torus.dimension}] with n at least 1, got {list(samples.shape)}")


def _circle_gaps(torus: Torus, samples: Tensor) -> tuple[Tensor, Tensor]:
    """From each sample to the next one around the circle, in that order, and the order."""
    angles, order = samples[:, 0].double().remainder(torus.period).sort()
    return torch.cat([angles[1:], angles[:1] + torus.period]) - angles, order


def _nearest(torus: Torus, samples: Tensor):
    """For the grid points, some at a time: distance to the nearest sample, and which it is."""
    points = torus.grid.reshape(-1, torus.dimension).to(samples.device)
    for block in points.split(max(1, _PAIRS_AT_A_TIME // (len(samples) * torus.dimension))):
        apart = (block.unsqueeze(1) - samples.double()).remainder(torus.period)
        yield torch.minimum(apart, torus.period - apart).norm(dim=2).min(dim=1)
