r"""How far a kernel has moved from where it started: feature learning, measured in operator norm."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, take_examples
from poprisk._core.linalg import LinearOperator, top_eigenpairs
from poprisk.errors import DataError
from poprisk.operators._kernels.method import Method, check_request
from poprisk.operators._kernels.products import kernel_operator
from poprisk.operators._kernels.tangent import train_kernel
from poprisk.operators._kernels.validation import Diagonal

# Largest side of a kernel whose spectrum is taken densely if the caller does not say.
_DENSE_SIDE = 4000


@dataclass(frozen=True, eq=False)
class KernelDrift:
    r"""Operator norms along a run, relative to the first kernel."""

    drift: Float[Tensor, "times"]
    r""":math:`\|K(t) - K(0)\| / \|K(0)\|`; the first is 0."""
    norms: Float[Tensor, "times"]
    r""":math:`\|K(t)\|`."""
    residuals: Float[Tensor, "times"]
    """Certificate of each drift, relative like it: an eigenvalue of the difference lies that near; 0 for dense work."""
    converged: bool
    """Whether every matrix-free search reached its tolerance."""


def kernel_drift(
    model: FlatModel,
    weights: Iterable[Float[Tensor, "d"]],
    inputs: Inputs,
    *,
    preconditioner: Diagonal | None = None,
    dense: bool | None = None,
    method: Method | str = Method.AUTO,
    memory: int | None = None,
    tolerance: float = 1e-3,
    max_products: int | None = None,
) -> KernelDrift:
    r"""The relative drift of the train kernel over recorded weights.

    .. math:: \frac{\|K_{SS}(t) - K_{SS}(0)\|_{\mathrm{op}}}{\|K_{SS}(0)\|_{\mathrm{op}}}

    Args:
        model: The model and its loss; the loss is not used.
        weights: Flat weights at the times wanted, the first being time 0 (``run.weights(k)`` for some k).
        inputs: The n examples.
        preconditioner: The diagonal of one M for all times: a number, or a vector like w.
        dense: Whether kernels are formed; default: up to a side of 4000.
        method: The algorithm of dense kernels.
        memory: Limit in bytes for each dense kernel's work.
        tolerance: Residual accepted by the matrix-free search, relative to the norm.
        max_products: Most kernel-vector products for each norm; as in ``top_eigenpairs``.

    Raises:
        DataError: no weights, weights that do not fit, or a first kernel that is zero.

    >>> model = FlatModel(torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Tanh()), "squared")
    >>> kernel_drift(model, [torch.zeros(1), torch.ones(1)], torch.ones(1, 1)).drift  # K = 1/cosh(w)⁴
    tensor([0.0000, 0.8236], dtype=torch.float64)
    """
    norms, distances, residuals, converged = [], [], [], True
    first: Tensor | LinearOperator | None = None
    for w in weights:
        if dense is None:
            n, _ = check_request(model, w, inputs, None)
            dense = n * model.outputs(w, take_examples(inputs, slice(0, 1))).shape[1] <= _DENSE_SIDE
        K: Tensor | LinearOperator
        if dense:
            K = train_kernel(model, w, inputs, preconditioner=preconditioner, method=method, memory=memory)
        else:
            K = kernel_operator(model, w, inputs, preconditioner=preconditioner)
        first = K if first is None else first
        size = operator_norm(K, tolerance=tolerance, max_products=max_products)
        moved = OperatorNorm(0.0, 0.0, True)
        if K is not first:
            difference: Any = K - first  # type: ignore[operator]
            moved = operator_norm(difference, tolerance=tolerance, max_products=max_products)
        norms.append(size.value)
        distances.append(moved.value)
        residuals.append(moved.residual)
        converged = converged and size.converged and moved.converged
    if not norms:
        raise DataError("kernel drift needs the weights of at least one time, got none")
    start = norms[0]
    if not start > 0:
        raise DataError("the first kernel must not be zero: start from weights at which the outputs can move")
    as_tensor = lambda numbers: torch.tensor(numbers, dtype=torch.float64)  # noqa: E731
    return KernelDrift(as_tensor(distances) / start, as_tensor(norms), as_tensor(residuals) / start, converged)


@dataclass(frozen=True)
class OperatorNorm:
    """The largest singular value of a symmetric matrix, with its certificate."""

    value: float
    residual: float
    converged: bool


def operator_norm(
    K: Float[Tensor, "N N"] | LinearOperator, *, tolerance: float = 1e-3, max_products: int | None = None
) -> OperatorNorm:
    r"""The norm :math:`\|K\|_{\mathrm{op}} = \max_i |\lambda_i|` of a symmetric matrix or operator.

    >>> operator_norm(torch.tensor([[-3.0, 0.0], [0.0, 2.0]])).value
    3.0
    """
    if isinstance(K, Tensor):
        return OperatorNorm(torch.linalg.eigvalsh(K).abs().max().item(), 0.0, True)
    pairs = top_eigenpairs(K, 1, which="magnitude", tolerance=tolerance, max_products=max_products)
    return OperatorNorm(pairs.values[0].abs().item(), pairs.residuals[0].item(), pairs.converged)
