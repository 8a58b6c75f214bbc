r"""What the test outputs can see of a gradient, bounded by what it dissipated: the order of G and W, as both sides.

The bounds speak of all directions, so :math:`\|\Gamma_Q\|` is taken over all directions of W above rounding
error, including those that a cutoff leaves to the reservoir (``DissipationChannels.complete``).
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError
from poprisk.operators import (
    MARGIN,
    Bound,
    DissipationChannels,
    eps_of,
    operator_norm,
    require_length,
    rounding_of_test_transfer,
)


def hard_reservoir_bound(channels: DissipationChannels) -> Bound:
    r"""The reservoir moves no test output: :math:`G P_{\{0\}} = 0`, Eq. ``pathwise_hard_reservoir``.

    The left side is :math:`\|G P_{res}\|`. What was taken as 0 in W lets through at most the root of the cut-off
    times the root of the visibility; that is part of the rounding allowed.

    Raises:
        DataError: G is no matrix, or W is known in part only.

    >>> from poprisk.operators import dissipation_channels
    >>> R = torch.diag(torch.tensor([1.0, 0.0]))
    >>> hard_reservoir_bound(dissipation_channels(R, R, torch.eye(2))).holds  # no run has such a G
    False
    """
    allowed = rounding_of_test_transfer(channels) + (channels.complete.visibility_norm * channels.cutoff) ** 0.5
    G_res = _restricted_test_transfer(channels, channels.rank)
    return Bound("hard reservoir", "eq:pathwise_hard_reservoir", "algebra", G_res, 0.0, allowed)


def soft_reservoir_bound(channels: DissipationChannels, epsilon: float, h: Float[Tensor, "N"] | None = None) -> Bound:
    r"""Directions that dissipated little are seen little, Eq. ``pathwise_soft_reservoir``.

    .. math:: \|G P_{[0,\varepsilon]} h\| \le \|\Gamma_Q\|^{1/2} \sqrt\varepsilon\, \|P_{[0,\varepsilon]} h\|

    Args:
        channels: The window.
        epsilon: Threshold in the units of W, not below rounding error.
        h: A direction; None takes the worst one, as a bound on operator norms.

    Raises:
        DataError: ε below the cut-off, where the visibility is not known, h of another length, or W known in part only.
    """
    channels = channels.complete
    if epsilon < channels.cutoff:
        raise DataError(
            f"epsilon must be at least the cut-off of the channels, {channels.cutoff:.3g}, got {epsilon:.3g}: take "
            "hard_reservoir_bound"
        )
    budget = (channels.visibility_norm * epsilon) ** 0.5
    if h is None:
        left, size = _restricted_test_transfer(channels, channels.spectrum.count_above(epsilon)), 1.0
    else:
        require_length(h, channels.vectors.shape[0], "h")
        low = channels.split_at(epsilon).reservoir @ h
        left, size = (channels.test_transfer @ low).norm().item(), low.norm().item()
    rounding = rounding_of_test_transfer(channels) * (1.0 if h is None else h.norm().item())
    return Bound("soft reservoir", "eq:pathwise_soft_reservoir", "algebra", left, budget * size, rounding)


def mobility_bound(channels: DissipationChannels, h: Float[Tensor, "N"]) -> Bound:
    r"""A direction that moves test outputs must have dissipated, Eq. ``pathwise_mobility_lower_bound``.

    .. math:: \|G h\|^2 / \|\Gamma_Q\| \le h^\top W h

    Raises:
        DataError: h of another length, or W known in part only.
    """
    channels = channels.complete
    dissipated = channels.dissipation(h)
    moved = (channels.test_transfer @ h).norm().item()
    noise = _reservoir_noise(channels, h)
    visibility = channels.visibility_norm
    left = moved**2 / visibility if visibility else 0.0
    rounding = (2 * moved * noise + noise**2) / visibility if visibility else 0.0
    return Bound("mobility", "eq:pathwise_mobility_lower_bound", "algebra", left, dissipated, rounding)


def filtered_bound(
    channels: DissipationChannels, phi: Callable[[Float[Tensor, "r"]], Float[Tensor, "r"]], h: Float[Tensor, "N"]
) -> Bound:
    r"""The bound for any bounded function of the gramian, Eq. ``pathwise_filtered_bound``.

    .. math:: \|G \varphi(W) h\|^2 \le \|\Gamma_Q\|\, \|W^{1/2} \varphi(W) h\|^2

    Args:
        channels: The window.
        phi: Maps eigenvalues to finite numbers, entry by entry; also called at 0, for the null space.
        h: A direction.

    Raises:
        DataError: h of another length, or a φ that is not finite or changes the shape; W known in part only.
    """
    channels = channels.complete
    spectrum = channels.spectrum
    require_length(h, spectrum.vectors.shape[0], "h")
    values, at_zero = phi(spectrum.values), phi(spectrum.values.new_zeros(1))
    if values.shape != spectrum.roots.shape or not (torch.isfinite(values).all() and torch.isfinite(at_zero).all()):
        raise DataError(
            "phi must map the eigenvalues, and 0, to as many finite numbers: it must be bounded on [0, ‖W‖]"
        )
    in_basis = spectrum.vectors.T @ h
    filtered = at_zero * h + spectrum.vectors @ ((values - at_zero) * in_basis)
    moved = (channels.test_transfer @ filtered).norm().item()
    noise = _reservoir_noise(channels, filtered)
    right = channels.visibility_norm * (spectrum.roots * values * in_basis).square().sum().item()
    rounding = 2 * moved * noise + noise**2
    return Bound("filtered", "eq:pathwise_filtered_bound", "algebra", moved**2, right, rounding)


def visibility_order_bound(channels: DissipationChannels) -> Bound:
    r"""The order :math:`G^\top G \preceq \|\Gamma_Q\| W` of ``thm:reservoir_invisibility``.

    The left side is the largest eigenvalue of the difference, relative to :math:`\|\Gamma_Q\| \|W\|`; the right one 0.

    Raises:
        DataError: G is no matrix, or W is known in part only.
    """
    channels = channels.complete
    G, spectrum = _dense_test_transfer(channels), channels.spectrum
    scale = channels.visibility_norm * spectrum.largest
    W = (spectrum.vectors * spectrum.values) @ spectrum.vectors.T
    difference = G.T @ G - channels.visibility_norm * W
    largest = torch.linalg.eigvalsh(difference)[-1].item()
    rounding = MARGIN * eps_of(channels) * len(spectrum.vectors) ** 0.5
    return Bound(
        "visibility order", "thm:reservoir_invisibility", "algebra", largest / scale if scale else 0.0, 0.0, rounding
    )


def visibility_spectra(channels: DissipationChannels) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    r"""The spectra :math:`\lambda_j(G^\top G)` and :math:`\|\Gamma_Q\| \lambda_j(W)`: the first is below the second.

    Differs from the paper, whose figure compares :math:`\lambda_j(\Gamma_Q)` with :math:`\lambda_j(W)`; those are in
    different units and not ordered.

    Raises:
        DataError: G is no matrix, or W is known in part only.
    """
    channels = channels.complete
    G = _dense_test_transfer(channels)
    N = G.shape[1]
    visible, budget = G.new_zeros(N), G.new_zeros(N)
    seen = torch.linalg.svdvals(G).square()
    visible[: len(seen)] = seen
    budget[: len(channels.spectrum.roots)] = channels.visibility_norm * channels.spectrum.values
    return visible, budget


def visibility_spectrum_bound(channels: DissipationChannels) -> Bound:
    r"""Index by index :math:`\lambda_j(G^\top G) \le \|\Gamma_Q\| \lambda_j(W)`, at the worst index."""
    visible, budget = visibility_spectra(channels)
    worst = int((visible - budget).argmax())
    rounding = MARGIN * eps_of(channels) * len(visible) ** 0.5 * max(visible[0].item(), budget[0].item())
    return Bound(
        "visibility spectrum",
        "thm:reservoir_invisibility",
        "algebra",
        visible[worst].item(),
        budget[worst].item(),
        rounding,
    )


def _restricted_test_transfer(channels: DissipationChannels, above: int) -> float:
    """‖G (I - V Vᵀ)‖ for the leading eigenvectors V of W."""
    V = channels.spectrum.vectors[:, :above]
    G = _dense_test_transfer(channels)
    return operator_norm(G - (G @ V) @ V.T)


def _reservoir_noise(channels: DissipationChannels, h: Tensor) -> float:
    """Rounding in ‖G h‖, and what directions below the cut-off may add."""
    low = (channels.reservoir @ h).norm().item()
    return (
        rounding_of_test_transfer(channels) * h.norm().item()
        + (channels.visibility_norm * channels.cutoff) ** 0.5 * low
    )


def _dense_test_transfer(channels: DissipationChannels) -> Tensor:
    G = channels.test_transfer
    if not isinstance(G, Tensor):
        raise DataError("this bound needs G as a matrix, got an operator: call to_dense() on it")
    return G
