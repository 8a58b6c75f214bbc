r"""One recorded step as linear maps between output space and weight space, dense or known by their products.

.. math:: F = J_S(w_k)^\top S_k, \qquad \bar J_S, \bar J_Q \text{ averaged over the step}, \qquad \bar B_k

Both faces have the same methods and, to rounding, the same results; every map has its adjoint beside it.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, SegmentCurvature, SegmentJacobian
from poprisk.runs import AffineStep, PerWeight

Block = Float[Tensor, "_ k"]


@runtime_checkable
class StepMaps(Protocol):
    """What the sweeps over a window need to know of one step."""

    step: AffineStep

    @property
    def train_correction(self) -> float:
        """Size of the secant correction of the training Jacobian, relative to the displacement."""
        ...

    @property
    def test_correction(self) -> float:
        """The same for the test Jacobian."""
        ...

    @property
    def curvature_correction(self) -> float:
        """The same for the loss curvature."""
        ...

    @property
    def nodes(self) -> int:
        """Quadrature nodes of the training Jacobian."""
        ...

    def gather(self, Z: Block) -> Block:
        """The rows of Z that the step's batch sees: with them alone ``pull_gathered`` makes what ``pull`` does."""
        ...

    def pull_gathered(self, rows: Block) -> Block:
        """``pull``, from gathered rows."""
        ...

    def pull(self, Z: Block) -> Block:
        r""":math:`J_k^\top S_k Z`: what a change of the output gradient does to the batch gradient."""
        ...

    def pull_adjoint(self, Y: Block) -> Block:
        r""":math:`S_k J_k Y`."""
        ...

    def push(self, X: Block) -> Block:
        r""":math:`\bar J_S X`: what a change of the step does to the training outputs."""
        ...

    def push_adjoint(self, C: Block) -> Block:
        r""":math:`\bar J_S^\top C`."""
        ...

    def push_test(self, X: Block) -> Block:
        r""":math:`\bar J_Q X`."""
        ...

    def push_test_adjoint(self, C: Block) -> Block:
        r""":math:`\bar J_Q^\top C`."""
        ...

    def bend(self, Y: Block) -> Block:
        r""":math:`\bar B Y`, symmetric: what a change of the outputs does to their gradient."""
        ...


@dataclass
class MatrixFreeStep:
    """The maps of a step by automatic differentiation: nothing larger than a block of vectors is kept."""

    step: AffineStep
    model: FlatModel
    weights: Float[Tensor, "d"]
    batch_inputs: Inputs
    num_examples: int
    train: SegmentJacobian
    test: SegmentJacobian | None
    curvature: SegmentCurvature

    @property
    def train_correction(self) -> float:
        """Size of the secant correction of the training Jacobian, relative to the displacement."""
        return self.train.correction

    @property
    def test_correction(self) -> float:
        """The same for the test Jacobian; 0 without a test set."""
        return 0.0 if self.test is None else self.test.correction

    @property
    def curvature_correction(self) -> float:
        """The same for the loss curvature."""
        return self.curvature.correction

    @property
    def nodes(self) -> int:
        """Quadrature nodes of the training Jacobian."""
        return self.train.nodes

    def gather(self, Z: Block) -> Block:
        """The rows of Z that belong to the batch."""
        return Z.reshape(self.num_examples, -1, Z.shape[1])[self.step.batch].reshape(-1, Z.shape[1])

    def pull_gathered(self, rows: Block) -> Block:
        r""":math:`J_k^\top S_k Z` from the rows of Z that belong to the batch."""
        selection = self.step.selection.to(rows.dtype)
        shares = selection.repeat_interleave(rows.shape[0] // max(1, len(selection)))
        return self.model.vjp(self.weights, self.batch_inputs, shares[:, None] * rows)

    def pull(self, Z: Block) -> Block:
        r""":math:`J_k^\top S_k Z`."""
        return self.pull_gathered(self.gather(Z))

    def pull_adjoint(self, Y: Block) -> Block:
        r""":math:`S_k J_k Y`."""
        J_Y = self.model.jvp(self.weights, self.batch_inputs, Y).reshape(len(self.step.batch), -1, Y.shape[1])
        scattered = Y.new_zeros(self.num_examples, *J_Y.shape[1:])
        scattered.index_add_(0, self.step.batch, J_Y * self.step.selection.to(Y.dtype)[:, None, None])
        return scattered.reshape(-1, Y.shape[1])

    def push(self, X: Block) -> Block:
        r""":math:`\bar J_S X`."""
        return self.train.push(X)

    def push_adjoint(self, C: Block) -> Block:
        r""":math:`\bar J_S^\top C`."""
        return self.train.pull(C)

    def push_test(self, X: Block) -> Block:
        r""":math:`\bar J_Q X`."""
        return X.new_zeros(0, X.shape[1]) if self.test is None else self.test.push(X)

    def push_test_adjoint(self, C: Block) -> Block:
        r""":math:`\bar J_Q^\top C`."""
        return C.new_zeros(len(self.weights), C.shape[1]) if self.test is None else self.test.pull(C)

    def bend(self, Y: Block) -> Block:
        r""":math:`\bar B Y`."""
        return self.curvature.apply(Y)

    def to_dense(self) -> "DenseStep":
        """The same step with its Jacobians formed."""
        J = self.model.output_jacobian(self.weights, self.batch_inputs).flatten(0, 1)
        p = J.shape[0] // max(1, len(self.step.batch))
        rows = (self.step.batch[:, None] * p + torch.arange(p, device=J.device)).reshape(-1)
        return DenseStep(
            step=self.step,
            batch_jacobian=J * self.step.selection.to(J.dtype).repeat_interleave(p)[:, None],
            batch_rows=rows,
            num_outputs=self.num_examples * p,
            train_jacobian=self.train.to_dense(),
            test_jacobian=J.new_zeros(0, J.shape[1]) if self.test is None else self.test.to_dense(),
            curvature=self.curvature,
            train_correction=self.train_correction,
            test_correction=self.test_correction,
            curvature_correction=self.curvature_correction,
            nodes=self.nodes,
        )


@dataclass
class DenseStep:
    """The maps of a step as matrices, for windows small enough to hold them."""

    step: AffineStep
    batch_jacobian: Float[Tensor, "bp d"]
    r"""Rows of :math:`S_k J_k` that belong to the batch."""
    batch_rows: Tensor
    num_outputs: int
    train_jacobian: Float[Tensor, "N d"]
    test_jacobian: Float[Tensor, "M d"]
    curvature: SegmentCurvature
    train_correction: float
    test_correction: float
    curvature_correction: float
    nodes: int

    def gather(self, Z: Block) -> Block:
        """The rows of Z that belong to the batch."""
        return Z[self.batch_rows]

    def pull_gathered(self, rows: Block) -> Block:
        r""":math:`J_k^\top S_k Z` from the rows of Z that belong to the batch."""
        return self.batch_jacobian.T @ rows

    def pull(self, Z: Block) -> Block:
        r""":math:`J_k^\top S_k Z`."""
        return self.pull_gathered(self.gather(Z))

    def pull_adjoint(self, Y: Block) -> Block:
        r""":math:`S_k J_k Y`."""
        out = Y.new_zeros(self.num_outputs, Y.shape[1])
        return out.index_add_(0, self.batch_rows, self.batch_jacobian @ Y)

    def push(self, X: Block) -> Block:
        r""":math:`\bar J_S X`."""
        return self.train_jacobian @ X

    def push_adjoint(self, C: Block) -> Block:
        r""":math:`\bar J_S^\top C`."""
        return self.train_jacobian.T @ C

    def push_test(self, X: Block) -> Block:
        r""":math:`\bar J_Q X`."""
        return self.test_jacobian @ X

    def push_test_adjoint(self, C: Block) -> Block:
        r""":math:`\bar J_Q^\top C`."""
        return self.test_jacobian.T @ C

    def bend(self, Y: Block) -> Block:
        r""":math:`\bar B Y`."""
        return self.curvature.apply(Y)


def scale_rows(diagonal: PerWeight, X: Block) -> Block:
    """Diag(diagonal) X, where the diagonal may be one number for all weights.

    >>> scale_rows(torch.tensor([1.0, 2.0]), torch.ones(2, 1)).flatten()
    tensor([1., 2.])
    """
    return diagonal[:, None] * X if isinstance(diagonal, Tensor) else diagonal * X
