r"""Channels and coupling on the leading eigenvectors of W, for windows too large for dense operators.

With the r leading eigenvectors V of W, one forward sweep of V gives D V, G V and the stacked
:math:`\tilde M_j^{1/2} F_j V`, hence everything on the signal channel above a stated ε:

.. math:: C_S V, \quad C_Q V, \quad A_\circ = C_Q V (C_S V)^\dagger, \quad R_\perp V

What is left out is bounded: for h orthogonal to V, :math:`h^\top W h \le \varepsilon \|h\|^2`, and with the limits
:math:`\mu` of :mod:`poprisk.operators._visibility`

.. math:: \|G h\| \le \sqrt{\mu_Q\, \varepsilon}\, \|h\|, \qquad \|D h\| \le \sqrt{\mu_S\, \varepsilon}\, \|h\|
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import (
    Eigenpairs,
    LinearOperator,
    Progress,
    Spectrum,
    from_functions,
    top_eigenpairs,
    tsqr_append,
)
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._channels import DissipationChannels, dissipation_channels, operator_norm, require_length
from poprisk.operators._coupling import Coupling
from poprisk.operators._step_maps import Block
from poprisk.operators._sweeps import forward_sweep
from poprisk.operators._visibility import visibility_limit
from poprisk.operators._window import Window


@dataclass(frozen=True, eq=False)
class TopChannels:
    r"""Channels and coupling on the eigenvectors of W above ε, and bounds on what that leaves out.

    Made by ``top_channels``. ``channels`` holds C_S V, C_Q V, their singular values and the projectors; its
    ``visibility_norm`` is the norm of :math:`\Gamma_Q` on the leading space, a lower bound of the full one.
    """

    channels: DissipationChannels
    """C_S, C_Q and the projectors, on the leading space."""
    pairs: Eigenpairs
    """The eigenpairs of W, with their residuals; the last is the first one left out, where there is one."""
    epsilon: float
    r"""ε: :math:`h^\top W h \le \varepsilon \|h\|^2` for every h orthogonal to the leading space, in the units of W.

    The first value left out plus twice the joint bound of the residuals (once for the values, once for the vectors, by
    Weyl's inequality); the space is cut where the gap is wider than that. As with any iterative spectrum, that no
    larger eigenvalue was missed rests on the random start.
    """
    test_limit: float
    r""":math:`\mu_Q \ge \|\Gamma_Q\|`."""
    train_limit: float
    r""":math:`\mu_S \ge \|C_S\|^2`."""

    @cached_property
    def coupling(self) -> Coupling:
        r""":math:`A_\circ` and :math:`R_\perp` on the leading space."""
        return Coupling(self.channels)

    @property
    def rank(self) -> int:
        """Dimension of the leading space: of the r asked for, those down to the last gap that the residuals tell."""
        return self.channels.rank

    @property
    def test_left_out(self) -> float:
        r""":math:`\sqrt{\mu_Q \varepsilon}`, a bound on the norm of G outside the leading space."""
        return (self.test_limit * self.epsilon) ** 0.5

    @property
    def train_left_out(self) -> float:
        r""":math:`\sqrt{\mu_S \varepsilon}`, a bound on the norm of D outside the leading space."""
        return (self.train_limit * self.epsilon) ** 0.5

    @cached_property
    def coupling_norm(self) -> float:
        r""":math:`\|A_\circ\|` of the leading space."""
        return operator_norm(self.coupling._weights)

    def prediction_bound(self, h: Float[Tensor, "N"]) -> float:
        r"""A bound on :math:`\|G h - A_\circ D h\|` for any h, inside the leading space or not.

        .. math:: \|R_\perp\| \sqrt{h_V^\top W h_V} +
           \bigl(\sqrt{\mu_Q} + \|A_\circ\| \sqrt{\mu_S}\bigr) \sqrt\varepsilon\, \|h - h_V\|, \qquad h_V = V V^\top h

        With h = -g(s) it bounds the error of the predicted test displacement.

        Raises:
            DataError: h of another length.
        """
        c = self.channels
        require_length(h, c.vectors.shape[0], "h")
        inside = c.vectors.T @ h
        outside = (h - c.vectors @ inside).norm().item()
        dissipated = (c.roots * inside).norm().item()
        missed = self.test_left_out + self.coupling_norm * self.train_left_out
        return self.coupling.remainder_norm * dissipated + missed * outside


def top_channels(
    window: Window,
    r: int,
    *,
    pairs: Eigenpairs | None = None,
    surrogate: Window | None = None,
    tolerance: float | None = None,
    max_products: int | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> TopChannels:
    r"""Signal channel, C_S, C_Q, A_o and R_perp of a window on the r leading eigenvectors of W, by products alone.

    Costs r + 1 eigenpairs of W, one forward sweep of r columns and a few columns through the test and the training
    Jacobians of every step for the two limits.

    Args:
        window: The window, matrix-free or dense, with a test set.
        r: Eigenvectors wanted; fewer are taken where W is spent, or where the r-th and the next are too close to tell
            apart by their residuals.
        pairs: Leading eigenpairs of its W if they are known, at least r + 1 of them (or all); else they are computed.
        surrogate: A cheaper stand-in, such as ``window.with_nodes(1)``, whose W is searched in place of the window's:
            see :func:`poprisk._core.linalg.top_eigenpairs`.
        tolerance: Largest residual of an eigenpair, relative to the largest eigenvalue.
        max_products: Most products with W.
        generator: Source of the random start.
        progress: Called with the products made and the pairs converged.

    Raises:
        DataError: no test set, no gap among the eigenvalues, or pairs that are too few or of another size.
        HyperparameterError: r below 1.

    >>> from poprisk._core.autodiff import FlatModel
    >>> from poprisk.operators._gradient_descent import gradient_descent
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False).double(), "squared")
    >>> x, y = torch.diag(torch.tensor([2.0, 1.0]).double()), torch.ones(2, 1, dtype=torch.float64)
    >>> q = torch.tensor([[6.0, 1.0]], dtype=torch.float64)
    >>> window = Window(gradient_descent(model, x, y, lr=0.1, steps=3), model, x, y, test_inputs=q)
    >>> top = top_channels(window, 1)  # along the first example, which the test point sees three times
    >>> top.rank, top.coupling.matrix.round(decimals=6).abs()
    (1, tensor([[3., 0.]], dtype=torch.float64))
    """
    if r < 1:
        raise HyperparameterError(f"r must be a positive whole number of eigenvectors, got {r}")
    if window.test_inputs is None:
        raise DataError("C_Q and A_o need a test set: pass test_inputs=… to the window")
    if pairs is None:
        pairs = top_eigenpairs(
            window.dissipation_gramian,
            min(r + 1, window.num_outputs),
            surrogate=None if surrogate is None else surrogate.dissipation_gramian,
            tolerance=tolerance,
            max_products=max_products,
            generator=generator,
            progress=progress,
        )
    pairs = _leading(pairs, r, window.num_outputs)
    rank, epsilon = _cut(pairs, r)
    return TopChannels(
        channels=_swept_channels(window, pairs.vectors[:, :rank], epsilon),
        pairs=pairs,
        epsilon=epsilon,
        test_limit=visibility_limit(window),
        train_limit=visibility_limit(window, test=False),
    )


def _leading(pairs: Eigenpairs, r: int, N: int) -> Eigenpairs:
    found = pairs.vectors.shape[1]
    if pairs.vectors.shape[0] != N or found < min(r + 1, N):
        raise DataError(
            f"r = {r} needs {min(r + 1, N)} eigenpairs of length {N}, got {found} of length {pairs.vectors.shape[0]}: "
            "one more than r says how large the first one left out is"
        )
    k = min(r + 1, N)
    return replace(pairs, values=pairs.values[:k], vectors=pairs.vectors[:, :k], residuals=pairs.residuals[:k])


def _cut(pairs: Eigenpairs, r: int) -> tuple[int, float]:
    """Where to cut, at most at r, and ε.

    The blocks diag(Θ, W') of W in and beside the space differ from W by the residuals, so their eigenvalues do by no
    more than the joint bound, and those of W from the values by no more than that again. With a gap above the sum of
    both, the largest one of W' is counted among those left out.
    """
    values = torch.cat([pairs.values.clamp(min=0), pairs.values.new_zeros(1)])  # beyond all N there is nothing
    ceilings = values[1:] + 2 * pairs.joint_bound
    tells = (values[:-1] > ceilings)[:r].nonzero()
    if not len(tells):
        raise DataError(
            f"no gap among the {r} leading eigenvalues of W is wider than twice the joint bound of their residuals, "
            f"{pairs.joint_bound:.2g}, largest {values[0]:.2g}: ask for a smaller tolerance or more eigenvectors"
        )
    rank = int(tells[-1]) + 1
    return rank, ceilings[rank - 1].item()


def _swept_channels(window: Window, V: Float[Tensor, "N r"], epsilon: float) -> DissipationChannels:
    """The channels on the span of V, from one forward sweep.

    W restricted to that span is kept as a factor, so that its roots are known to rounding whatever the eigenvectors.
    """
    factor: Tensor | None = None

    def append(j: int, F: Block) -> None:
        nonlocal factor
        factor = tsqr_append(factor, window.effective_preconditioners[j].sqrt()[:, None] * F)

    swept = forward_sweep(window.steps, V, watch=append)
    assert factor is not None, "a window has at least one step"
    _, roots, Zt = torch.linalg.svd(factor)
    spectrum = Spectrum(roots, V @ Zt.T, resolution=0.0, rest=epsilon)
    channels = dissipation_channels(spectrum, _on_span(swept.train, V), _on_span(swept.test, V))
    return replace(channels, train_transfer=window.train_transfer, test_transfer=window.test_transfer)


def _on_span(XV: Float[Tensor, "rows r"], V: Float[Tensor, "N r"]) -> LinearOperator:
    """X on the span of V, 0 elsewhere, from X V."""
    shape = (XV.shape[0], V.shape[0])
    return from_functions(lambda Y: XV @ (V.T @ Y), lambda Y: V @ (XV.T @ Y), shape, XV.dtype, XV.device)
