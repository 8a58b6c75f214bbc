r"""The loss's Hessian averaged over a segment of outputs, closed so that it maps their change to the gradient's."""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff.loss_derivatives import (
    flatten_outputs,
    loss_gradients,
    loss_hessian_products,
    loss_hessians,
)
from poprisk._core.autodiff.losses import ExampleLoss, resolve_loss, squared_loss
from poprisk._core.autodiff.precision import check_outputs_precision
from poprisk._core.autodiff.quadrature import DEFAULT_TOLERANCE, NODE_CAP, check_nodes, choose_nodes, gauss_legendre
from poprisk._core.linalg import LinearOperator
from poprisk.errors import DataError


class SegmentCurvature(LinearOperator):
    r"""The mean Hessian :math:`\bar B` of :math:`\Phi = \frac1n \sum_i \ell_i` between two output vectors.

    Block diagonal, one symmetric [p, p] block per example with the 1/n inside. With s = Δu_i, B̃ the Gauss–Legendre
    average over the straight segment and r = Δg_i - B̃ s, each block is closed by the symmetric (Powell–Broyden) secant

    .. math:: \bar B = \tilde B + \frac{r s^\top + s r^\top}{s^\top s} - \frac{(r^\top s)\, s s^\top}{(s^\top s)^2},
       \qquad \bar B\, \Delta u = \Delta g

    Squared loss gives I/n, to the bit. Blocks whose Δg_i does not stand out of rounding (below √eps of the gradient)
    are left as averaged: closing them would write noise into the curvature. Positive semi-definiteness is reported by
    ``smallest_eigenvalue`` and not enforced: the secant may cost it.

    Args:
        loss: Name or function of one example, as in ``FlatModel``.
        start_outputs: Outputs before, in the shape that the loss takes.
        end_outputs: Outputs after.
        targets: One for each example.
        nodes: How many Gauss–Legendre nodes; None increases them until ``correction`` is at most ``tolerance`` (or at
            the level of rounding), or to ``max_nodes``.
        tolerance: Default: 1e-12 in float64, 1e-5 in float32.
        max_nodes: Default: 32 in float64, 8 in float32.
        secant: Whether to close.

    Raises:
        DataError: outputs of low precision or of different shapes, or another number of targets.
        HyperparameterError: no positive number of nodes or tolerance.

    >>> u, v, y = torch.zeros(2, 1), torch.ones(2, 1), torch.zeros(2, 1)
    >>> SegmentCurvature("squared", u, v, y).to_dense()  # I/n
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """

    SELF_ADJOINT = True

    def __init__(
        self,
        loss: str | ExampleLoss,
        start_outputs: Float[Tensor, "n *out"],
        end_outputs: Float[Tensor, "n *out"],
        targets: Tensor,
        *,
        nodes: int | None = None,
        tolerance: float | None = None,
        max_nodes: int | None = None,
        secant: bool = True,
    ) -> None:
        check_nodes(nodes, tolerance, max_nodes)
        _check_outputs(start_outputs, end_outputs, targets)
        self.loss, self.targets = resolve_loss(loss), targets
        self._start, self._move = start_outputs.detach(), (end_outputs - start_outputs).detach()
        n, dtype = start_outputs.shape[0], start_outputs.dtype
        before, after = (loss_gradients(self.loss, u.detach(), targets) / n for u in (start_outputs, end_outputs))
        self.gradient_change: Float[Tensor, "n p"] = after - before
        """Δg, one row per example, the 1/n inside."""
        eps, moved = torch.finfo(dtype).eps, float(self.gradient_change.norm())
        noise = eps * (before.norm(dim=1) + after.norm(dim=1))
        target = max(tolerance or DEFAULT_TOLERANCE[dtype], 2 * float(noise.norm()) / moved if moved else 1.0)
        self.nodes: int = nodes or choose_nodes(
            lambda count: float(self._left_over(count).norm()) / (moved or 1.0), target, max_nodes or NODE_CAP[dtype]
        )
        """Gauss–Legendre nodes used."""
        self.blocks: Float[Tensor, "n p p"] = self._average(self.nodes)
        """The blocks of B̄."""
        s = flatten_outputs(self._move)
        residual = self.gradient_change - (self.blocks @ s.unsqueeze(2)).squeeze(2)
        self.correction: float = float(residual.norm()) / moved if moved else 0.0
        """‖Δg - B̃ Δu‖ / ‖Δg‖, the share that the secant supplies; 0 where nothing changed."""
        # The average of a constant Hessian is exact: what is left is the rounding of Δg.
        if secant and self.loss is not squared_loss:
            clear = noise <= eps**0.5 * self.gradient_change.norm(dim=1)
            self.blocks = self.blocks + _symmetric_secant(residual * clear.unsqueeze(1), s)

    @property
    def shape(self) -> tuple[int, int]:
        """N and N."""
        n, p, _ = self.blocks.shape
        return n * p, n * p

    @property
    def _like(self) -> Tensor:
        return self.blocks

    @property
    def smallest_eigenvalue(self) -> float:
        """Over all blocks; below zero the loss is not convex on the segment, or the secant took it there."""
        return float(torch.linalg.eigvalsh(self.blocks).min())

    def to_dense(self, block_size: int | None = None) -> Float[Tensor, "N N"]:
        """The matrix itself; ``block_size`` has no use here."""
        return torch.block_diag(*self.blocks)

    def _matmat(self, X: Tensor) -> Tensor:
        n, p, _ = self.blocks.shape
        return (self.blocks @ X.reshape(n, p, -1)).reshape(n * p, -1)

    def _average(self, count: int) -> Tensor:
        n = self._start.shape[0]
        total = 0.0
        for theta, weight in gauss_legendre(1 if self.loss is squared_loss else count):
            total = total + (weight / n) * loss_hessians(self.loss, self._start + theta * self._move, self.targets)
        assert isinstance(total, Tensor)
        return total

    def _left_over(self, count: int) -> Tensor:
        n, s = self._start.shape[0], flatten_outputs(self._move)
        left = self.gradient_change.clone()
        for theta, weight in gauss_legendre(count):
            left -= (weight / n) * loss_hessian_products(self.loss, self._start + theta * self._move, self.targets, s)
        return left


def _symmetric_secant(r: Float[Tensor, "n p"], s: Float[Tensor, "n p"]) -> Float[Tensor, "n p p"]:
    """The update of each block; 0 where s is."""
    length = s.norm(dim=1, keepdim=True)
    unit = torch.where(length > 0, s / length, 0.0)
    share = torch.where(length > 0, r / length, 0.0)
    outer = share.unsqueeze(2) * unit.unsqueeze(1)
    along = (share * unit).sum(dim=1)[:, None, None]
    return (outer + outer.mT) - along * (unit.unsqueeze(2) * unit.unsqueeze(1))


def _check_outputs(start: Tensor, end: Tensor, targets: Tensor) -> None:
    check_outputs_precision(start)
    if start.dim() == 0 or start.shape != end.shape or start.dtype != end.dtype:
        raise DataError(
            f"outputs before and after must have one shape [n, ...] and dtype, got {list(start.shape)} of "
            f"{start.dtype} and {list(end.shape)} of {end.dtype}"
        )
    if targets.dim() == 0 or targets.shape[0] != start.shape[0]:
        raise DataError(
            f"there must be one target for each of the {start.shape[0]} examples, got shape {list(targets.shape)}"
        )
