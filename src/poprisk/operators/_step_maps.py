r"""One recorded step as linear maps between output space and weight space, dense or known by their products.

.. math:: F = J_S(w_k)^\top S_k, \qquad \bar J_S, \bar J_Q \text{ averaged over the step}, \qquad \bar B_k

Both faces have the same methods and, to rounding, the same results; every map has its adjoint beside it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, SegmentCurvature, SegmentJacobian
from poprisk.runs import AffineStep, PerWeight

Block = Float[Tensor, "_ k"]


@dataclass(frozen=True, eq=False, kw_only=True)
class StepMaps(ABC):
    """What the sweeps over a window need to know of one step."""

    step: AffineStep
    train_jacobian: SegmentJacobian | Float[Tensor, "N d"]
    test_jacobian: SegmentJacobian | Float[Tensor, "M d"] | None
    curvature: SegmentCurvature
    train_correction: float
    """Size of the secant correction of the training Jacobian, relative to the displacement."""
    test_correction: float
    """The same for the test Jacobian; 0 without a test set."""
    nodes: int
    """Quadrature nodes of the training Jacobian."""

    @property
    def curvature_correction(self) -> float:
        """The same for the loss curvature."""
        return self.curvature.correction

    @abstractmethod
    def gather(self, Z: Block) -> Block:
        """The rows of Z that the step's batch sees: with them alone ``pull_gathered`` makes what ``pull`` does."""

    @abstractmethod
    def pull_gathered(self, rows: Block) -> Block:
        """``pull``, from gathered rows."""

    @abstractmethod
    def pull_adjoint(self, Y: Block) -> Block:
        r""":math:`S_k J_k Y`."""

    def pull(self, Z: Block) -> Block:
        r""":math:`J_k^\top S_k Z`: what a change of the output gradient does to the batch gradient."""
        return self.pull_gathered(self.gather(Z))

    def push(self, X: Block) -> Block:
        r""":math:`\bar J_S X`: what a change of the step does to the training outputs."""
        return self.train_jacobian @ X

    def push_adjoint(self, C: Block) -> Block:
        r""":math:`\bar J_S^\top C`."""
        return self.train_jacobian.T @ C

    def push_test(self, X: Block) -> Block:
        r""":math:`\bar J_Q X`."""
        return X.new_zeros(0, X.shape[1]) if self.test_jacobian is None else self.test_jacobian @ X

    def push_test_adjoint(self, C: Block) -> Block:
        r""":math:`\bar J_Q^\top C`."""
        size = self.train_jacobian.shape[1]
        return C.new_zeros(size, C.shape[1]) if self.test_jacobian is None else self.test_jacobian.T @ C

    def bend(self, Y: Block) -> Block:
        r""":math:`\bar B Y`, symmetric: what a change of the outputs does to their gradient."""
        return self.curvature @ Y


@dataclass(frozen=True, eq=False, kw_only=True)
class MatrixFreeStep(StepMaps):
    """The maps of a step by automatic differentiation: nothing larger than a block of vectors is kept."""

    train_jacobian: SegmentJacobian
    test_jacobian: SegmentJacobian | None
    model: FlatModel
    weights: Float[Tensor, "d"]
    batch_inputs: Inputs
    num_examples: int

    def gather(self, Z: Block) -> Block:
        return Z.reshape(self.num_examples, -1, Z.shape[1])[self.step.batch].reshape(-1, Z.shape[1])

    def pull_gathered(self, rows: Block) -> Block:
        selection = self.step.selection.to(rows.dtype)
        shares = selection.repeat_interleave(rows.shape[0] // max(1, len(selection)))
        return self.model.vjp(self.weights, self.batch_inputs, shares[:, None] * rows)

    def pull_adjoint(self, Y: Block) -> Block:
        J_Y = self.model.jvp(self.weights, self.batch_inputs, Y).reshape(len(self.step.batch), -1, Y.shape[1])
        scattered = Y.new_zeros(self.num_examples, *J_Y.shape[1:])
        scattered.index_add_(0, self.step.batch, J_Y * self.step.selection.to(Y.dtype)[:, None, None])
        return scattered.reshape(-1, Y.shape[1])

    def to_dense(self) -> "DenseStep":
        """The same step with its Jacobians formed."""
        J = self.model.output_jacobian(self.weights, self.batch_inputs).flatten(0, 1)
        p = J.shape[0] // max(1, len(self.step.batch))
        return DenseStep(
            step=self.step,
            batch_jacobian=J * self.step.selection.to(J.dtype).repeat_interleave(p)[:, None],
            batch_rows=(self.step.batch[:, None] * p + torch.arange(p, device=J.device)).reshape(-1),
            train_jacobian=self.train_jacobian.to_dense(),
            test_jacobian=J.new_zeros(0, J.shape[1]) if self.test_jacobian is None else self.test_jacobian.to_dense(),
            curvature=self.curvature,
            train_correction=self.train_correction,
            test_correction=self.test_correction,
            nodes=self.nodes,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class DenseStep(StepMaps):
    """The maps of a step as matrices, for windows small enough to hold them."""

    train_jacobian: Float[Tensor, "N d"]
    test_jacobian: Float[Tensor, "M d"]
    batch_jacobian: Float[Tensor, "bp d"]
    r"""Rows of :math:`S_k J_k` that belong to the batch."""
    batch_rows: Tensor

    def gather(self, Z: Block) -> Block:
        return Z[self.batch_rows]

    def pull_gathered(self, rows: Block) -> Block:
        return self.batch_jacobian.T @ rows

    def pull_adjoint(self, Y: Block) -> Block:
        out = Y.new_zeros(len(self.train_jacobian), Y.shape[1])
        return out.index_add_(0, self.batch_rows, self.batch_jacobian @ Y)


def scale_rows(diagonal: PerWeight, X: Block) -> Block:
    """Diag(diagonal) X, where the diagonal may be one number for all weights.

    >>> scale_rows(torch.tensor([1.0, 2.0]), torch.ones(2, 1)).flatten()
    tensor([1., 2.])
    """
    return diagonal[:, None] * X if isinstance(diagonal, Tensor) else diagonal * X
