r"""Every bound of the theory on one window, as a function that returns both of its sides.

A bound on what really happened comes in two forms. In gradient flow the budget on the right is the root of the loss
drop :math:`\Phi_S(u(s)) - \Phi_S(u(T))`. In discrete time it is :math:`\sqrt{g^\top W g}`, which is the loss drop only
for full batches and small steps, and the displacement on the left is taken without the source (decay, a buffer
carried in).

Exact zeros are rounding in floating point: each bound states the ``rounding`` it allows for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError
from poprisk.operators.channels import DissipationChannels, operator_norm, require_length
from poprisk.operators.coupling import Coupling, PredictorError, path_error, whitened_error
from poprisk.operators.cumulative import CumulativeError

Form = Literal["discrete", "flow"]

# Rounding errors of the sizes involved that a side may be off, per root of its dimension.
_MARGIN = 100.0


@dataclass(frozen=True)
class Bound:
    """An inequality ``left <= right`` with its two sides.

    >>> bound = Bound("remainder", "eq:effective_screen_bound", "discrete", left=1.0, right=4.0)
    >>> bound.holds, bound.tightness
    (True, 0.25)
    """

    name: str
    label: str
    """Of the equation in the paper."""
    form: Form | Literal["algebra"]
    """Whether the budget is first-order dissipation or loss drop; "algebra" where no displacement enters."""
    left: float
    right: float
    rounding: float = 0.0
    """What floating point may have added to the left side."""

    @property
    def holds(self) -> bool:
        """Whether left is at most right, up to rounding."""
        return self.left <= self.right + self.rounding

    @property
    def tightness(self) -> float:
        """Left over right: 1 where the bound is attained; 0 where both sides are 0."""
        if self.right == 0:
            return 0.0 if self.left <= self.rounding else float("inf")
        return self.left / self.right

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "FAILS"
        return f"{self.name} ({self.form}): {self.left:.3g} <= {self.right:.3g} {verdict}"


@dataclass(frozen=True, eq=False)
class RealizedWindow:
    r"""What really happened over a window.

    .. math:: \Delta u_S = -D g + source_S, \qquad \Delta u_Q = -G g + source_Q
    """

    gradient: Float[Tensor, "N"]
    """g, the output gradient at the start."""
    train_displacement: Float[Tensor, "N"]
    """Δu_S."""
    test_displacement: Float[Tensor, "M"]
    """Δu_Q."""
    train_source: Float[Tensor, "N"] | None = None
    """What of Δu_S is not linear in g; none if not given."""
    test_source: Float[Tensor, "M"] | None = None
    """What of Δu_Q is not linear in g."""
    loss_drop: float | None = None
    """Φ_S(u(s)) - Φ_S(u(T)); needed for bounds in the form of gradient flow."""


def hard_reservoir_bound(channels: DissipationChannels) -> Bound:
    r"""The reservoir moves no test output: :math:`G P_{\{0\}} = 0`, Eq. ``pathwise_hard_reservoir``.

    The left side is :math:`\|G P_{res}\|`. What was taken as 0 in W lets through at most the root of the cut-off
    times the root of the visibility; that is part of the rounding allowed.

    >>> from poprisk.operators import dissipation_channels
    >>> R = torch.diag(torch.tensor([1.0, 0.0]))
    >>> hard_reservoir_bound(dissipation_channels(R, R, torch.eye(2))).holds  # no run has such a G
    False
    """
    G_res = _restricted_test_transfer(channels, channels.rank)
    allowed = _rounding_of_G(channels) + (channels.visibility_norm * channels.cutoff) ** 0.5
    return Bound("hard reservoir", "eq:pathwise_hard_reservoir", "algebra", G_res, 0.0, allowed)


def soft_reservoir_bound(channels: DissipationChannels, epsilon: float, h: Float[Tensor, "N"] | None = None) -> Bound:
    r"""Directions that dissipated little are seen little, Eq. ``pathwise_soft_reservoir``.

    .. math:: \|G P_{[0,\varepsilon]} h\| \le \|\Gamma_Q\|^{1/2} \sqrt\varepsilon\, \|P_{[0,\varepsilon]} h\|

    Args:
        channels: The window.
        epsilon: Threshold in the units of W, at least the cut-off of the channels.
        h: A direction; None takes the worst one, as a bound on operator norms.

    Raises:
        DataError: ε below the cut-off, where the visibility is not known, or h of another length.
    """
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
    rounding = _rounding_of_G(channels) * (1.0 if h is None else h.norm().item())
    return Bound("soft reservoir", "eq:pathwise_soft_reservoir", "algebra", left, budget * size, rounding)


def mobility_bound(channels: DissipationChannels, h: Float[Tensor, "N"]) -> Bound:
    r"""A direction that moves test outputs must have dissipated, Eq. ``pathwise_mobility_lower_bound``.

    .. math:: \|G h\|^2 / \|\Gamma_Q\| \le h^\top W h

    Raises:
        DataError: h of another length.
    """
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
        DataError: h of another length, or a φ that is not finite or changes the shape.
    """
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
    """
    G, spectrum = _dense_test_transfer(channels), channels.spectrum
    scale = channels.visibility_norm * spectrum.largest
    W = (spectrum.vectors * spectrum.values) @ spectrum.vectors.T
    difference = G.T @ G - channels.visibility_norm * W
    largest = torch.linalg.eigvalsh(difference)[-1].item()
    rounding = _MARGIN * _eps(channels) * len(spectrum.vectors) ** 0.5
    return Bound(
        "visibility order", "thm:reservoir_invisibility", "algebra", largest / scale if scale else 0.0, 0.0, rounding
    )


def visibility_spectra(channels: DissipationChannels) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    r"""The spectra :math:`\lambda_j(G^\top G)` and :math:`\|\Gamma_Q\| \lambda_j(W)`: the first is below the second.

    Differs from the paper, whose figure compares :math:`\lambda_j(\Gamma_Q)` with :math:`\lambda_j(W)`; those are in
    different units and not ordered.
    """
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
    rounding = _MARGIN * _eps(channels) * len(visible) ** 0.5 * max(visible[0].item(), budget[0].item())
    return Bound(
        "visibility spectrum",
        "thm:reservoir_invisibility",
        "algebra",
        visible[worst].item(),
        budget[worst].item(),
        rounding,
    )


def visibility_bound(channels: DissipationChannels, window: RealizedWindow, form: Form = "discrete") -> Bound:
    r"""The test displacement is bounded by visibility and dissipation, Eq. ``effective_purif_bound``.

    .. math:: \|\Delta u_Q - source_Q\| \le \|\Gamma_Q\|^{1/2} \sqrt{g^\top W g}

    In gradient flow without the source, and with the loss drop under the root.
    """
    size = channels.visibility_norm**0.5
    return _on_the_run("visibility", "eq:effective_purif_bound", channels, None, size, window, form)


def remainder_bound(coupling: Coupling, window: RealizedWindow, form: Form = "discrete") -> Bound:
    r"""The best predictor misses no more than the remainder, Eqs. ``effective_screen_bound``, ``latent_screen_bound``.

    .. math:: \|\Delta u_Q - source_Q - A_\circ (\Delta u_S - source_S)\| \le \|R_\perp\| \sqrt{g^\top W g}
    """
    A, size = coupling.matrix, coupling.remainder_norm
    return _on_the_run("remainder", "eq:effective_screen_bound", coupling.channels, A, size, window, form)


def predictor_bound(
    channels: DissipationChannels, A: Float[Tensor, "M N"], window: RealizedWindow, form: Form = "discrete"
) -> Bound:
    r"""What any linear predictor misses, Eq. ``general_screen_bound``.

    .. math:: \|\Delta u_Q - source_Q - A (\Delta u_S - source_S)\| \le \|C_Q - A C_S\| \sqrt{g^\top W g}
    """
    size = operator_norm(whitened_error(channels, A))
    return _on_the_run("predictor", "eq:general_screen_bound", channels, A, size, window, form)


def trajectory_bound(
    channels: DissipationChannels, A: Float[Tensor, "M N"], window: RealizedWindow, form: Form = "discrete"
) -> Bound:
    r"""The same squared, through the path error, Eq. ``visible_trajectory_bound``.

    .. math:: \|\Delta u_Q - source_Q - A (\Delta u_S - source_S)\|^2 \le \|\mathcal D_A^{vis}\|\; g^\top W g
    """
    size = operator_norm(path_error(channels, A)) ** 0.5
    plain = _on_the_run("trajectory", "eq:visible_trajectory_bound", channels, A, size, window, form)
    return _squared(plain)


def cumulative_bound(
    channels: DissipationChannels,
    A: Float[Tensor, "M N"],
    error: CumulativeError,
    window: RealizedWindow,
    form: Form = "discrete",
) -> Bound:
    r"""The coarse version over all directions, with :math:`\|\mathcal D_A\|` for :math:`\|\mathcal D_A^{vis}\|`."""
    size = operator_norm(error.total) ** 0.5
    plain = _on_the_run("cumulative", "thm:cumulative_error_split", channels, A, size, window, form)
    return _squared(plain)


def path_error_order_bound(coupling: Coupling, A: Float[Tensor, "M N"]) -> Bound:
    r"""The remainder is below every path error, Eq. ``path_error_loewner``.

    .. math:: R_\perp R_\perp^\top \preceq \mathcal D_A^{vis}

    The left side is the largest eigenvalue of the difference, relative to the norm of the path error; the right one 0.
    """
    E = path_error(coupling.channels, A)
    R = coupling.reduced_remainder
    scale = max(operator_norm(E), operator_norm(coupling.channels.reduced_test) ** 2)
    largest = torch.linalg.eigvalsh(R @ R.T - E)[-1].item() if len(E) else 0.0
    # Unresolved directions are orthogonal to the remainder's complement up to their own small singular values.
    rounding = _MARGIN * _eps(coupling.channels) * len(E) ** 0.5 + _unresolved_share(coupling, A, scale)
    return Bound(
        "path error order", "eq:path_error_loewner", "algebra", largest / scale if scale else 0.0, 0.0, rounding
    )


def sharp_bound(coupling: Coupling, A: Float[Tensor, "M N"]) -> Bound:
    r"""The visible infimum is sharp: :math:`\|R_\perp\|^2 \le \|\mathcal D_A^{vis}\|`."""
    right = operator_norm(path_error(coupling.channels, A))
    scale = max(right, operator_norm(coupling.channels.reduced_test) ** 2)
    rounding = scale * (_MARGIN * _eps(coupling.channels) + _unresolved_share(coupling, A, scale))
    return Bound("sharp", "eq:path_error_min", "algebra", coupling.remainder_norm**2, right, rounding)


def coarse_bound(error: CumulativeError) -> Bound:
    r"""The lifted error is coarser: :math:`\|\mathcal D_A^{vis}\| \le \|\mathcal D_A\|`."""
    left, right = operator_norm(error.visible), operator_norm(error.total)
    eps = torch.finfo(error.total.dtype).eps
    return Bound("coarse", "eq:lifted_error_split", "algebra", left, right, _MARGIN * eps * right)


def anchored_bound(coupling: Coupling, anchored_error: CumulativeError) -> Bound:
    r"""The computable coarse bound of the anchor: :math:`\|R_\perp\|^2 \le \|\mathcal D_{A_s}\|`.

    Args:
        coupling: The window.
        anchored_error: The cumulative error of :math:`A_s = K_{QS}(s) K_{SS}(s)^\dagger`.
    """
    right = operator_norm(anchored_error.total)
    rounding = _MARGIN * _eps(coupling.channels) * max(right, coupling.channels.visibility_norm)
    return Bound("anchored", "thm:cumulative_error_split", "algebra", coupling.remainder_norm**2, right, rounding)


def nonlinear_bound(error: PredictorError) -> Bound:
    r"""No predictor, linear or not, beats the remainder: :math:`\|R_\perp\| \le \operatorname{Err}(\Psi)`.

    Eq. ``nonlinear_gap_identity``. The right side is itself a lower bound on Err, so the inequality is proved where it
    holds.
    """
    return Bound("nonlinear", "eq:nonlinear_gap_identity", "algebra", error.floor, error.at_least, 1e-9 * error.floor)


def window_bounds(
    coupling: Coupling,
    window: RealizedWindow,
    *,
    predictors: Sequence[Float[Tensor, "M N"]] = (),
    epsilons: Sequence[float] | None = None,
    form: Form = "discrete",
) -> list[Bound]:
    r"""All bounds that channels and a realized window give, in one list.

    Args:
        coupling: The window's operators, dense.
        window: What happened.
        predictors: Linear predictors to bound beside :math:`A_\circ`, for instance the anchored one.
        epsilons: Thresholds for the soft reservoir; by default the eigenvalues of W at the quarters of its spectrum.
        form: "discrete", or "flow" for a run in gradient-flow mode.

    >>> from poprisk.operators import Coupling, dissipation_channels
    >>> D, G, g = torch.eye(2), torch.tensor([[1.0, 2.0]]), torch.tensor([3.0, 1.0])
    >>> coupling = Coupling(dissipation_channels(torch.eye(2), D, G))
    >>> bounds = window_bounds(coupling, RealizedWindow(g, -D @ g, -G @ g))
    >>> all(bound.holds for bound in bounds)
    True
    """
    channels, g = coupling.channels, window.gradient
    if epsilons is None:
        values = channels.spectrum.values[: channels.rank]
        epsilons = sorted(
            {values[int(q * (channels.rank - 1))].item() for q in (0.25, 0.5, 0.75)} if channels.rank else ()
        )
    found = [
        hard_reservoir_bound(channels),
        *(soft_reservoir_bound(channels, epsilon) for epsilon in epsilons),
        *(soft_reservoir_bound(channels, epsilon, g) for epsilon in epsilons),
        mobility_bound(channels, g),
        filtered_bound(channels, lambda values: 1 / (1 + values), g),
        visibility_order_bound(channels),
        visibility_spectrum_bound(channels),
        visibility_bound(channels, window, form),
        remainder_bound(coupling, window, form),
    ]
    for A in predictors:
        found += [
            predictor_bound(channels, A, window, form),
            trajectory_bound(channels, A, window, form),
            path_error_order_bound(coupling, A),
            sharp_bound(coupling, A),
        ]
    return found


def _on_the_run(
    name: str,
    label: str,
    channels: DissipationChannels,
    A: Tensor | None,
    size: float,
    window: RealizedWindow,
    form: Form,
) -> Bound:
    """‖Δu_Q - A Δu_S‖ <= size · budget, both displacements without source in discrete time."""
    N, M = channels.vectors.shape[0], channels.test_transfer.shape[0]
    for what, x, length in (
        ("gradient", window.gradient, N),
        ("train_displacement", window.train_displacement, N),
        ("test_displacement", window.test_displacement, M),
    ):
        require_length(x, length, what)
    missed, scale = window.test_displacement, window.test_displacement.norm().item()
    x = window.train_displacement
    if form == "discrete":
        missed = missed if window.test_source is None else missed - window.test_source
        x = x if window.train_source is None else x - window.train_source
    if A is not None:
        missed = missed - A @ x
        scale += operator_norm(A) * window.train_displacement.norm().item()
    budget = _budget(channels, window, form)
    below_cutoff = size * channels.cutoff**0.5 * (channels.reservoir @ window.gradient).norm().item()
    rounding = _MARGIN * _eps(channels) * N**0.5 * scale + below_cutoff
    return Bound(name, label, form, missed.norm().item(), size * budget, rounding)


def _budget(channels: DissipationChannels, window: RealizedWindow, form: Form) -> float:
    if form == "discrete":
        return channels.dissipation(window.gradient) ** 0.5
    if form != "flow":
        raise HyperparameterError(f'form must be "discrete" or "flow", got {form!r}')
    for source in (window.train_source, window.test_source):
        if source is not None and source.abs().max() > 0:
            raise DataError("the form of gradient flow knows no source, got one that is not 0: take form='discrete'")
    if window.loss_drop is None or window.loss_drop < 0:
        raise DataError(
            f"the form of gradient flow needs the loss drop, which is not negative, got {window.loss_drop}: take "
            "form='discrete' for runs that take steps"
        )
    return window.loss_drop**0.5


def _squared(bound: Bound) -> Bound:
    # (left + r)² - left²: what the rounding of the plain bound becomes.
    rounding = (2 * bound.right + bound.rounding) * bound.rounding
    return Bound(bound.name, bound.label, bound.form, bound.left**2, bound.right**2, rounding)


def _restricted_test_transfer(channels: DissipationChannels, above: int) -> float:
    """‖G (I - V Vᵀ)‖ for the leading eigenvectors V of W."""
    V = channels.spectrum.vectors[:, :above]
    G = _dense_test_transfer(channels)
    return operator_norm(G - (G @ V) @ V.T)


def _reservoir_noise(channels: DissipationChannels, h: Tensor) -> float:
    """Rounding in ‖G h‖, and what directions below the cut-off may add."""
    low = (channels.reservoir @ h).norm().item()
    return _rounding_of_G(channels) * h.norm().item() + (channels.visibility_norm * channels.cutoff) ** 0.5 * low


def _rounding_of_G(channels: DissipationChannels) -> float:
    size = operator_norm(channels.reduced_test * channels.roots)
    return _MARGIN * _eps(channels) * channels.vectors.shape[0] ** 0.5 * size


def _unresolved_share(coupling: Coupling, A: Tensor, scale: float) -> float:
    """What A makes of train displacements that count as 0, relative to the scale of a path error."""
    c = coupling.channels
    lost = c.train_roots[c.train_rank :]
    if not len(lost) or not scale:
        return 0.0
    return 2 * operator_norm(A) * lost[0].item() / scale**0.5


def _dense_test_transfer(channels: DissipationChannels) -> Tensor:
    G = channels.test_transfer
    if not isinstance(G, Tensor):
        raise DataError("this bound needs G as a matrix, got an operator: call to_dense() on it")
    return G


def _eps(channels: DissipationChannels) -> float:
    return torch.finfo(channels.roots.dtype).eps
