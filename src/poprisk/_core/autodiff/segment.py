r"""The Jacobian averaged over one step of the weights, closed so that it maps the step to the outputs' change."""

from copy import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.autodiff.blocks import plan_blocks, slices
from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.autodiff.kinks import average_between, find_kinks
from poprisk._core.autodiff.loss_derivatives import flatten_outputs
from poprisk._core.autodiff.products import Inputs, count_examples, take_examples
from poprisk._core.autodiff.quadrature import DEFAULT_TOLERANCE, NODE_CAP, check_nodes, choose_nodes, gauss_legendre
from poprisk._core.linalg import LinearOperator
from poprisk.errors import DataError

_CELLS, _MOST_CELLS = 4, 64
"""Parts of a step in which kinks are looked for, at first and where some were missed."""
_PIECE_NODES = 8


class SegmentJacobian(LinearOperator):
    r"""The mean Jacobian :math:`\bar J` of the outputs between two weight vectors, an [N, d] operator by its products.

    .. math::
       \tilde J = \sum_i \omega_i\, J(w + \theta_i \Delta w) \approx \int_0^1 J(w + \theta \Delta w)\, d\theta, \qquad
       \bar J = \tilde J + \frac{(\Delta u - \tilde J \Delta w)\, \Delta w^\top}{\|\Delta w\|^2}, \qquad
       \bar J \Delta w = \Delta u

    The Gauss–Legendre sum is the quantity; the rank-one secant closes what rounding and a capped number of nodes leave.
    ``correction`` says how much that was: with a large one *any* matrix would pass the last equation. The outputs'
    change is known to rounding only; where that noise is above √eps of the change itself (a run at rest), closing would
    write noise into the Jacobian and is left out (``closed``). At Δw = 0 the operator is J(start).

    Args:
        model: The model; weights of low precision are refused.
        start: w, before the step.
        end: w + Δw, after it.
        inputs: n examples.
        nodes: How many Gauss–Legendre nodes; None increases them until ``correction`` is at most ``tolerance`` (or at
            the level of rounding), or to ``max_nodes``. Smooth networks need 2 to 8; kinks (ReLU) end at the cap.
        tolerance: Default: 1e-12 in float64, 1e-5 in float32.
        max_nodes: Default: 32 in float64, 8 in float32.
        kinks: Whether to look for the kinks of piecewise linear activations (ReLU, max-pooling, …) on the step of each
            example, and to average between them: exact to rounding where "cap" is 1e-3. The rows of the examples that
            cross a kink are kept, [p, d] each. A network without kinks is averaged as before.
        secant: Whether to close; without, the product with Δw is the outputs' change up to the quadrature's error.

    Raises:
        DataError: weights of low precision, shapes or dtypes that do not fit, a module that mixes its examples.
        HyperparameterError: no positive number of nodes or tolerance.

    >>> model = FlatModel.from_function(lambda w, x: (x * w) ** 2, torch.zeros(1), "squared")
    >>> J = SegmentJacobian(model, torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([[1.0], [2.0]]))
    >>> J.displacement.tolist(), J.nodes  # F = x² w², J = 2 x² w is linear in w: one node, at the middle
    ([3.0, 12.0], 1)
    >>> (J @ torch.tensor([10.0])).tolist()
    [30.0, 120.0]
    """

    def __init__(
        self,
        model: FlatModel,
        start: Float[Tensor, "d"],
        end: Float[Tensor, "d"],
        inputs: Inputs,
        *,
        nodes: int | None = None,
        tolerance: float | None = None,
        max_nodes: int | None = None,
        kinks: bool = False,
        secant: bool = True,
    ) -> None:
        check_nodes(nodes, tolerance, max_nodes)
        if start.shape != end.shape or start.dtype != end.dtype:
            raise DataError(
                f"start and end must be weight vectors of one shape and dtype, got {list(start.shape)} of "
                f"{start.dtype} and {list(end.shape)} of {end.dtype}"
            )
        self.model, self.inputs = model, inputs
        self.start, self._end = start.detach(), end.detach()
        before, after = (flatten_outputs(model.batch_outputs(w, inputs)).reshape(-1) for w in (start, end))
        self.displacement: Float[Tensor, "N"] = after - before
        """Δu = F(end) - F(start)."""
        eps, moved = torch.finfo(start.dtype).eps, float(self.displacement.norm())
        self.noise: float = eps * float(before.norm() + after.norm()) / moved if moved else float("inf")
        """Rounding of the outputs against ‖Δu‖: below it ``correction`` tells nothing."""
        left: dict[int, Tensor] = {}

        def error(count: int) -> float:
            left[count] = self._left_over(count)
            return float(left[count].norm()) / (moved or 1.0)

        # Twice the rounding of the outputs: the products round as well.
        target = max(tolerance or DEFAULT_TOLERANCE[start.dtype], 2 * self.noise)
        self.crossing: Int[Tensor, "m"] = torch.zeros(0, dtype=torch.long, device=start.device)
        """The examples that cross a kink, if these were looked for."""
        self._rows = start.new_zeros(0)
        if kinks and moved:
            self._split(target * moved)
        self.nodes: int = nodes or choose_nodes(error, target, max_nodes or NODE_CAP[start.dtype])
        """Gauss–Legendre nodes used."""
        self._residual = left[self.nodes] if self.nodes in left else self._left_over(self.nodes)
        self.correction: float = float(self._residual.norm()) / moved if moved else 0.0
        """‖Δu - J̃ Δw‖ / ‖Δu‖, the share of the change that the secant supplies; 0 where nothing changed."""
        self.closed: bool = secant and self.noise <= eps**0.5
        """Whether the secant is in: asked for, and the change of the outputs stands out of rounding."""

    def _split(self, target: float) -> None:
        """Find the examples that cross kinks, more closely where some are missed, and average their rows."""
        n, found, cells = count_examples(self.inputs), {}, _CELLS
        left = torch.arange(n, device=self.device)
        while len(left) and cells <= _MOST_CELLS:
            found |= find_kinks(self.model, self.start, self.step, self.inputs, left, cells)
            if not found:
                return
            self.crossing = torch.tensor(sorted(found), device=self.device)
            ordered, nodes = {i: found[i] for i in self.crossing.tolist()}, 1
            while True:
                self._rows = average_between(self.model, self.start, self.step, self.inputs, ordered, nodes)
                open_ = self._left_over(nodes).view(n, -1).norm(dim=1)
                if nodes >= _PIECE_NODES or bool(open_.norm() <= target):
                    break
                nodes *= 2
            left, cells = (open_ > target / n**0.5).nonzero()[:, 0], 4 * cells

    def with_nodes(self, nodes: int) -> "SegmentJacobian":
        """The same average with another number of nodes, closed anew; a product costs in proportion to them.

        Raises:
            HyperparameterError: no positive number of nodes.

        >>> model = FlatModel.from_function(lambda w, x: (x * w) ** 4, torch.zeros(1), "squared")
        >>> J = SegmentJacobian(model, torch.tensor([1.0]), torch.tensor([2.0]), torch.ones(1, 1))
        >>> J.nodes, J.with_nodes(1).nodes, round(J.with_nodes(1).correction, 3)  # 4 w³ at the middle: 13.5 of 15
        (2, 1, 0.1)
        """
        check_nodes(nodes, None, None)
        other = copy(self)
        other.nodes, other._residual = nodes, self._left_over(nodes)
        moved = float(self.displacement.norm())
        other.correction = float(other._residual.norm()) / moved if moved else 0.0
        return other

    @property
    def step(self) -> Float[Tensor, "d"]:
        """Δw; not kept, as the weights of many steps are."""
        return self._end - self.start

    @property
    def shape(self) -> tuple[int, int]:
        """N and d."""
        return self.displacement.shape[0], self.start.shape[0]

    @property
    def _like(self) -> Tensor:
        return self.start

    def to_dense(self, block_size: int | None = None) -> Float[Tensor, "N d"]:
        """The matrix itself, from each example's own p rows."""
        N, d = self.shape
        n = count_examples(self.inputs)
        dense = self.start.new_zeros(n, N // n, d)
        few, _ = plan_blocks(n, 1, 2 * N // n * d, 0, self.start.element_size(), block_size or self.model.chunk_size)
        for w, weight in self._nodes(self.nodes):
            for rows in slices(n, few):
                dense[rows].add_(self.model.output_jacobian(w, take_examples(self.inputs, rows)), alpha=weight)
        if len(self.crossing):
            dense[self.crossing] = self._rows
        dense = dense.view(N, d)
        return dense.addr_(self._residual, self._dual_step()) if self.closed else dense

    def _matmat(self, X: Tensor) -> Tensor:
        total = torch.zeros(self.shape[0], X.shape[1], dtype=self.dtype, device=self.device)
        for w, weight in self._nodes(self.nodes):
            total.add_(self.model.jvp(w, self.inputs, X), alpha=weight)
        if len(self.crossing):
            total.view(count_examples(self.inputs), -1, X.shape[1])[self.crossing] = self._rows @ X
        return total.addr_(self._residual, self._dual_step() @ X) if self.closed else total

    def _rmatmat(self, Y: Tensor) -> Tensor:
        total = torch.zeros(self.shape[1], Y.shape[1], dtype=self.dtype, device=self.device)
        smooth = Y
        if len(self.crossing):
            of_example = Y.reshape(count_examples(self.inputs), -1, Y.shape[1])
            total += torch.einsum("mpd,mpk->dk", self._rows, of_example[self.crossing])
            smooth = of_example.index_fill(0, self.crossing, 0.0).reshape(Y.shape)
        for w, weight in self._nodes(self.nodes):
            total.add_(self.model.vjp(w, self.inputs, smooth), alpha=weight)
        return total.addr_(self._dual_step(), self._residual @ Y) if self.closed else total

    def _nodes(self, count: int) -> list[tuple[Tensor, float]]:
        """Weight vectors on the segment and their shares."""
        step = self.step
        if not step.any():
            return [(self.start, 1.0)]
        return [(self.start + theta * step, weight) for theta, weight in gauss_legendre(count)]

    def _left_over(self, count: int) -> Tensor:
        r""":math:`\Delta u - \tilde J \Delta w` with this many nodes."""
        step = self.step
        if not step.any():
            return torch.zeros_like(self.displacement)
        left = self.displacement.clone()
        for w, weight in self._nodes(count):
            left.sub_(self.model.jvp(w, self.inputs, step), alpha=weight)
        if len(self.crossing):
            n = count_examples(self.inputs)
            between = self.displacement.view(n, -1)[self.crossing] - self._rows @ step
            left.view(n, -1)[self.crossing] = between
        return left

    def _dual_step(self) -> Tensor:
        r""":math:`\Delta w / \|\Delta w\|^2`, by way of the unit vector: the square of a tiny step would underflow."""
        step = self.step
        length = step.norm()
        return (step / length) / length
