r"""Bounds from the smoothness of the network on a circle or torus of inputs.

The constant of the Sobolev sampling inequality is not known: bounds that need it are returned without it, together with
the constant that they would take.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.estimate import Estimate
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators import Bound, Coupling, Form, RealizedWindow
from poprisk.theory.path_bounds import remainder_bound
from poprisk_lab.theory.torus import Torus, jacobian_sobolev_norm, require_on_grid, sobolev_norm


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
        masses: Masses of the samples' Voronoi cells.
        fill: h_S.
        order: m, above half the dimension.
        path_norm: :math:`\Lambda_m(s, T)`.
        root_dissipation: Root of the loss drop in gradient flow, of :math:`g^\top W g` in discrete time (where a source
            would have to be added to the displacement).
        density: Density of the population ρ on the grid, in any unit; None is uniform.

    Raises:
        DataError: shapes do not fit.
        HyperparameterError: an order of at most half the dimension.
    """
    _exponent(torus, order)
    n = len(train_residual)
    if tuple(masses.shape) != (n,):
        raise DataError(f"masses must be as many as there are samples, {n}, got shape {list(masses.shape)}")
    require_on_grid(torus, residual)
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
