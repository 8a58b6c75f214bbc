r"""Functions on a circle or torus of inputs: fill distance, Voronoi cells and Sobolev norms.

Functions are sampled on a regular grid, derivatives are taken by FFT, and the Sobolev norm is

.. math:: \|f\|_{H^m}^2 = |\mathcal M| \sum_k (1 + |\xi_k|^2)^m |\hat f_k|^2, \qquad \xi_k = 2\pi k / period

for any real order m, exact for functions that the grid resolves.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError
from poprisk.operators import operator_norm

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
        density: Nonnegative population density on the grid, in any unit; None is uniform (exact on the circle).

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
        weights: Weights of the quadrature; None for steps.

    >>> pathwise_sobolev_norm(torch.tensor([3.0, 4.0]))
    5.0
    """
    if weights is None:
        return norms.norm().item()
    if weights.shape != norms.shape or not (weights >= 0).all():
        raise DataError(f"weights must be {list(norms.shape)} numbers that are not negative, got {list(weights.shape)}")
    return (weights * norms.square()).sum().sqrt().item()


def _weighted(torus: Torus, values: Tensor, order: float) -> Tensor:
    """The function whose root of summed squares is the norm: (1 - Δ)^{m/2} f, with the cell's volume inside."""
    require_on_grid(torus, values)
    axes = tuple(range(torus.dimension))
    frequency = 2 * math.pi * torch.fft.fftfreq(torus.size, torus.period / torus.size, dtype=torch.float64)
    squares = sum(frequency.square().reshape([-1 if axis == here else 1 for here in axes]) for axis in axes)
    weight = (1 + torch.as_tensor(squares)).pow(order / 2).to(values.device, values.dtype)
    weight = weight.reshape(*torus.shape, *[1] * (values.dim() - torus.dimension))
    smoothed = torch.fft.ifftn(weight * torch.fft.fftn(values, dim=axes), dim=axes).real
    return smoothed * (torus.volume / torus.size**torus.dimension) ** 0.5


def require_on_grid(torus: Torus, values: Tensor) -> None:
    """Refuses values that are not on the grid."""
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
