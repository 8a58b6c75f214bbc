r"""Every bound of the theory on one window, as a function that returns both of its sides.

A bound on what really happened comes in two forms. In gradient flow the budget on the right is the root of the loss
drop :math:`\Phi_S(u(s)) - \Phi_S(u(T))`. In discrete time it is :math:`\sqrt{g^\top W g}`, which is the loss drop only
for full batches and small steps, and the displacement on the left is taken without the source (decay, a buffer
carried in).

Exact zeros are rounding in floating point: each bound states the ``rounding`` it allows for. The operators of a flow
are known up to the intervals that time is cut into; what that makes of a bound is its ``discretization``.

A cut-off decides what is signal channel and which predictor is the best, not which directions the run took: bounds on
the run hold with the norms over all directions of W above rounding error (``DissipationChannels.complete``).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError
from poprisk.operators import (
    MARGIN,
    Bound,
    Coupling,
    CumulativeError,
    DissipationChannels,
    Form,
    RealizedWindow,
    eps_of,
    operator_norm,
    path_error,
    require_length,
    whitened_error,
)
from poprisk.theory.visibility_bounds import (
    filtered_bound,
    hard_reservoir_bound,
    mobility_bound,
    soft_reservoir_bound,
    visibility_order_bound,
    visibility_spectrum_bound,
)


def visibility_bound(channels: DissipationChannels, window: RealizedWindow, form: Form = "discrete") -> Bound:
    r"""The test displacement is bounded by visibility and dissipation, Eq. ``effective_purif_bound``.

    .. math:: \|\Delta u_Q - source_Q\| \le \|\Gamma_Q\|^{1/2} \sqrt{g^\top W g}

    In gradient flow without the source, and with the loss drop under the root.

    Raises:
        DataError: lengths do not fit, W known in part only, or no loss drop in the form of gradient flow.
    """
    size = channels.complete.visibility_norm**0.5
    return _on_the_run("visibility", "eq:effective_purif_bound", channels, None, size, window, form)


def remainder_bound(coupling: Coupling, window: RealizedWindow, form: Form = "discrete") -> Bound:
    r"""The best predictor misses no more than the remainder, Eqs. ``effective_screen_bound``, ``latent_screen_bound``.

    .. math:: \|\Delta u_Q - source_Q - A_\circ (\Delta u_S - source_S)\| \le \|R_\perp\| \sqrt{g^\top W g}

    Where a cut-off leaves directions of W out of the signal channel, :math:`A_\circ` is the best one above it, and
    :math:`\|C_Q - A_\circ C_S\|` over all directions stands for :math:`\|R_\perp\|`.

    Raises:
        DataError: as of ``visibility_bound``; on the leading part of W take ``TopChannels.prediction_bound``.
    """
    A, channels = coupling.matrix, coupling.channels
    whole = channels.complete is channels
    size = coupling.remainder_norm if whole else operator_norm(whitened_error(channels.complete, A))
    return _on_the_run("remainder", "eq:effective_screen_bound", channels, A, size, window, form)


def predictor_bound(
    channels: DissipationChannels, A: Float[Tensor, "M N"], window: RealizedWindow, form: Form = "discrete"
) -> Bound:
    r"""What any linear predictor misses, Eq. ``general_screen_bound``.

    .. math:: \|\Delta u_Q - source_Q - A (\Delta u_S - source_S)\| \le \|C_Q - A C_S\| \sqrt{g^\top W g}
    """
    size = operator_norm(whitened_error(channels.complete, A))
    return _on_the_run("predictor", "eq:general_screen_bound", channels, A, size, window, form)


def trajectory_bound(
    channels: DissipationChannels, A: Float[Tensor, "M N"], window: RealizedWindow, form: Form = "discrete"
) -> Bound:
    r"""The same squared, through the path error, Eq. ``visible_trajectory_bound``.

    .. math:: \|\Delta u_Q - source_Q - A (\Delta u_S - source_S)\|^2 \le \|\mathcal D_A^{vis}\|\; g^\top W g
    """
    size = operator_norm(path_error(channels.complete, A)) ** 0.5
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
    rounding = MARGIN * eps_of(coupling.channels) * len(E) ** 0.5 + _unresolved_share(coupling, A, scale)
    return Bound(
        "path error order", "eq:path_error_loewner", "algebra", largest / scale if scale else 0.0, 0.0, rounding
    )


def sharp_bound(coupling: Coupling, A: Float[Tensor, "M N"]) -> Bound:
    r"""The visible infimum is sharp: :math:`\|R_\perp\|^2 \le \|\mathcal D_A^{vis}\|`."""
    right = operator_norm(path_error(coupling.channels, A))
    scale = max(right, operator_norm(coupling.channels.reduced_test) ** 2)
    rounding = scale * (MARGIN * eps_of(coupling.channels) + _unresolved_share(coupling, A, scale))
    return Bound("sharp", "eq:path_error_min", "algebra", coupling.remainder_norm**2, right, rounding)


def coarse_bound(error: CumulativeError) -> Bound:
    r"""The lifted error is coarser: :math:`\|\mathcal D_A^{vis}\| \le \|\mathcal D_A\|`."""
    left, right = operator_norm(error.visible), operator_norm(error.total)
    eps = torch.finfo(error.total.dtype).eps
    return Bound("coarse", "eq:lifted_error_split", "algebra", left, right, MARGIN * eps * right)


def anchored_bound(coupling: Coupling, anchored_error: CumulativeError) -> Bound:
    r"""The computable coarse bound of the anchor: :math:`\|R_\perp\|^2 \le \|\mathcal D_{A_s}\|`.

    Args:
        coupling: The window.
        anchored_error: The cumulative error of :math:`A_s = K_{QS}(s) K_{SS}(s)^\dagger`.
    """
    right = operator_norm(anchored_error.total)
    rounding = MARGIN * eps_of(coupling.channels) * max(right, coupling.channels.visibility_norm)
    return Bound("anchored", "thm:cumulative_error_split", "algebra", coupling.remainder_norm**2, right, rounding)


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
        window: What happened, ``ops.realized``.
        predictors: Linear predictors to bound beside :math:`A_\circ`, for instance the anchored one.
        epsilons: Thresholds for the soft reservoir; by default the eigenvalues of W at the quarters of its spectrum.
        form: "discrete", or "flow" for a run in gradient-flow mode.

    Raises:
        DataError: what the single bounds raise, for instance where W is known in part only.

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
    channels = channels.complete
    N, M = channels.vectors.shape[0], channels.test_transfer.shape[0]
    for what, x, length in (
        ("gradient", window.gradient, N),
        ("train_displacement", window.train_displacement, N),
        ("test_displacement", window.test_displacement, M),
    ):
        require_length(x, length, what)
    missed, x, slope = window.test_displacement, window.train_displacement, 0.0
    if form == "discrete":
        missed = missed if window.test_source is None else missed - window.test_source
        x = x if window.train_source is None else x - window.train_source
    if A is not None:
        missed, slope = missed - A @ x, operator_norm(A)
    budget = _budget(channels, window, form)
    scale = window.test_displacement.norm().item() + slope * window.train_displacement.norm().item()
    below_cutoff = size * channels.cutoff**0.5 * (channels.reservoir @ window.gradient).norm().item()
    rounding = MARGIN * eps_of(channels) * N**0.5 * scale + below_cutoff
    off = window.discretization
    discretization = off.test + slope * off.train + (size * off.root_dissipation if form == "flow" else 0.0)
    return Bound(name, label, form, missed.norm().item(), size * budget, rounding, discretization)


def _budget(channels: DissipationChannels, window: RealizedWindow, form: Form) -> float:
    if form == "discrete":
        return channels.dissipation(window.gradient) ** 0.5
    if form != "flow":
        raise HyperparameterError(f'form must be "discrete" or "flow", got {form!r}')
    for source in (window.train_source, window.test_source):
        if source is not None and source.any():
            raise DataError("the form of gradient flow knows no source, got one that is not 0: take form='discrete'")
    if window.loss_drop is None or window.loss_drop < 0:
        raise DataError(
            f"the form of gradient flow needs the loss drop, which is not negative, got {window.loss_drop}: take "
            "form='discrete' for runs that take steps"
        )
    return window.loss_drop**0.5


def _squared(bound: Bound) -> Bound:
    # (right + r)² - right²: what an allowance r of the plain bound becomes, rounding first.
    rounding = (2 * bound.right + bound.rounding) * bound.rounding
    discretization = (2 * (bound.right + bound.rounding) + bound.discretization) * bound.discretization
    return Bound(bound.name, bound.label, bound.form, bound.left**2, bound.right**2, rounding, discretization)


def _unresolved_share(coupling: Coupling, A: Tensor, scale: float) -> float:
    """What A makes of train displacements that count as 0, relative to the scale of a path error."""
    c = coupling.channels
    lost = c.train_roots[c.train_rank :]
    if not len(lost) or not scale:
        return 0.0
    return 2 * operator_norm(A) * lost[0].item() / scale**0.5
