r"""Complexity measures: positive definite matrices R on outputs, with :math:`R^{1/2}` and :math:`R^{-1/2}` to apply.

The signal directions of a run are those in which it dissipated the most loss per unit of complexity; R says what a unit
of complexity is. Any positive definite R will do (``thm:train_only_minimax_signal``).
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import (
    LinearOperator,
    column_norms,
    default_generator,
    from_dense,
    from_functions,
    gaussian,
    identity,
    top_eigenpairs,
)
from poprisk.errors import DataError
from poprisk.theory.matrix_functions import operator_function

# An iterative norm approaches from below; outside its interval a Chebyshev polynomial is worthless.
_MARGIN = 1.05


@dataclass(frozen=True, eq=False)
class Metric:
    r"""A complexity measure R with its two roots, as operators on vectors of N = n·p outputs, example by example.

    Made by ``metric_of``, ``euclidean_metric``, ``graph_metric`` or ``self_influence_metric``.
    """

    matrix: LinearOperator
    """R."""
    root: LinearOperator
    r""":math:`R^{1/2}`, the symmetric one."""
    inverse_root: LinearOperator
    r""":math:`R^{-1/2}`."""
    interval: tuple[float, float]
    """Numbers between which the eigenvalues of R lie."""
    accuracy: float
    """Error of the roots in operator norm, relative to their largest eigenvalue: rounding, or a polynomial's."""

    @property
    def size(self) -> int:
        """N."""
        return self.matrix.shape[0]

    def defect(self, probes: int = 4) -> float:
        r"""The certificate: :math:`\max_x \|R^{-1/2} R R^{-1/2} x - x\| / \|x\|` over random x.

        >>> euclidean_metric(3).defect()
        0.0
        """
        like = torch.empty(0, dtype=self.matrix.dtype, device=self.matrix.device)
        X = gaussian(self.size, probes, default_generator(self.matrix.device), like)
        Y = self.inverse_root @ (self.matrix @ (self.inverse_root @ X))
        return (column_norms(Y - X) / column_norms(X)).max().item()


def euclidean_metric(size: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Metric:
    """R = I: no direction is more complex than another.

    >>> euclidean_metric(2).root @ torch.ones(2, dtype=torch.float64)
    tensor([1., 1.], dtype=torch.float64)
    """
    eye = identity(size, dtype=dtype, device=device)
    return Metric(eye, eye, eye, (1.0, 1.0), 0.0)


def metric_of(
    R: Float[Tensor, "N N"] | LinearOperator,
    *,
    smallest: float | None = None,
    largest: float | None = None,
    accuracy: float = 1e-13,
) -> Metric:
    r"""Any positive definite matrix or operator as a metric.

    A matrix is decomposed. For an operator the roots are Chebyshev polynomials of it, which need an interval that holds
    its eigenvalues and cost about :math:`\tfrac12\sqrt{\kappa}\,\log(1/\varepsilon)` products each, with κ the ratio
    of its ends.

    Args:
        R: A matrix; or an operator known to be symmetric.
        smallest: A positive lower bound on the eigenvalues of an operator; required for one.
        largest: An upper bound; if not given, the norm by an iterative search, with a margin of 5 %.
        accuracy: ε of the polynomial, relative to the largest value of the root.

    Raises:
        DataError: not symmetric, not positive definite, or no lower bound for an operator.
        HyperparameterError: the operator is too badly conditioned for a polynomial.

    >>> metric_of(torch.diag(torch.tensor([4.0, 9.0]))).inverse_root @ torch.tensor([2.0, 3.0])
    tensor([1., 1.])
    """
    if isinstance(R, Tensor):
        return _dense_metric(R)
    if smallest is None or not smallest > 0:
        raise DataError(
            f"a metric known by its products needs a positive lower bound on its eigenvalues, got {smallest}: pass "
            "smallest=…, or the matrix itself"
        )
    if largest is None:
        pairs = top_eigenpairs(R, 1, tolerance=1e-3)
        largest = _MARGIN * (pairs.values[0].item() + pairs.residuals[0].item())
    interval = (smallest, max(smallest, largest))
    root = operator_function(R, np.sqrt, interval, accuracy=accuracy)
    inverse = operator_function(R, lambda x: 1 / np.sqrt(x), interval, accuracy=accuracy)
    return Metric(R, root, inverse, interval, accuracy)


def lifted_over_outputs(metric: Metric, outputs: int) -> Metric:
    r""":math:`R \otimes I_p`: a metric on n examples, applied to each of their p outputs alike.

    >>> two = lifted_over_outputs(metric_of(torch.diag(torch.tensor([4.0, 9.0]))), 2)
    >>> two.root @ torch.ones(4)
    tensor([2., 2., 3., 3.])
    """
    if outputs < 1:
        raise DataError(f"the number of outputs must be positive, got {outputs}")
    if outputs == 1:
        return metric
    matrix, root, inverse = (_kronecker(A, outputs) for A in (metric.matrix, metric.root, metric.inverse_root))
    return Metric(matrix, root, inverse, metric.interval, metric.accuracy)


def _dense_metric(R: Tensor) -> Metric:
    if R.dim() != 2 or R.shape[0] != R.shape[1] or not torch.isfinite(R).all():
        raise DataError(f"a metric is a finite square matrix, got shape {list(R.shape)}: check how it is made")
    eps = torch.finfo(R.dtype).eps
    if (R - R.T).abs().max() > eps**0.5 * R.abs().max():
        raise DataError("a metric must be symmetric, got a matrix that differs from its transpose: symmetrize it first")
    values, V = torch.linalg.eigh((R + R.T) / 2)
    low, high = values[0].item(), values[-1].item()
    if not low > len(R) * eps * abs(high):
        raise DataError(
            f"a metric must be positive definite, got eigenvalues from {low:.3g} to {high:.3g}: add a multiple of the "
            "identity"
        )
    roots = values.sqrt()
    root, inverse = (V * roots) @ V.T, (V / roots) @ V.T
    operators = (from_dense(X, symmetric=True) for X in ((R + R.T) / 2, root, inverse))
    return Metric(*operators, interval=(low, high), accuracy=len(R) * eps)


def _kronecker(A: LinearOperator, p: int) -> LinearOperator:
    n = A.shape[0]

    def product(X: Tensor) -> Tensor:
        return A.matmat(X.reshape(n, p * X.shape[1])).reshape(n * p, X.shape[1])

    return from_functions(product, None, (n * p, n * p), A.dtype, A.device, symmetric=True)
