r"""Functions of a symmetric operator, such as its root, from products alone: a Chebyshev polynomial."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from poprisk._core.linalg import LinearOperator, from_functions
from poprisk.errors import DataError, HyperparameterError

MAX_DEGREE = 4096
# Shares of the largest value that the polynomial may miss; below a few rounding errors no degree helps.
_FINEST = 16.0


def operator_function(
    A: LinearOperator,
    function: Callable[[np.ndarray], np.ndarray],
    interval: tuple[float, float],
    *,
    accuracy: float = 1e-13,
) -> LinearOperator:
    r"""f(A) for a symmetric operator whose eigenvalues lie in a known interval.

    .. math:: f(A) \approx \sum_{k=0}^{m} c_k T_k\!\left(\tfrac{2A - (a+b)I}{b-a}\right), \qquad
       \|f(A) - p(A)\| \le \varepsilon \max_{[a,b]} |f|

    The degree m is the smallest for which the coefficients left out add up to at most ε times the largest value; for
    powers of x it grows like :math:`\tfrac12\sqrt{b/a}\,\log(1/\varepsilon)`, and one product with f(A) costs m
    products with A. Eigenvalues outside the interval are amplified without limit: give it a margin.

    Args:
        A: The operator, known to be symmetric.
        function: f, on arrays; smooth on the interval.
        interval: a and b.
        accuracy: ε; at least a few rounding errors of the operator's dtype are allowed for.

    Raises:
        DataError: the operator is not known to be symmetric, or f is not finite on the interval.
        HyperparameterError: an empty interval, an accuracy that is not positive, or a degree above 4096.

    >>> from poprisk._core.linalg import diagonal
    >>> A = diagonal(torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64))
    >>> operator_function(A, np.sqrt, (1.0, 9.0)) @ torch.ones(3, dtype=torch.float64)
    tensor([1.0000, 2.0000, 3.0000], dtype=torch.float64)
    """
    if not A.symmetric:
        raise DataError(f"a function of an operator needs a symmetric one, got {A!r}: pass declare_symmetric(A)")
    low, high = interval
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise HyperparameterError(f"the interval of the eigenvalues must have low ≤ high, got {low} and {high}")
    if not accuracy > 0:
        raise HyperparameterError(f"accuracy must be positive, got {accuracy}: try 1e-13")
    middle, half = (high + low) / 2, (high - low) / 2
    coefficients = _coefficients(
        lambda x: function(middle + half * x), max(accuracy, _FINEST * torch.finfo(A.dtype).eps)
    )

    def product(X: Tensor) -> Tensor:
        if half == 0:
            return sum(coefficients) * X
        scaled = lambda Y: (A.matmat(Y) - middle * Y) / half  # noqa: E731
        before, now = X, scaled(X) if len(coefficients) > 1 else X
        total = coefficients[0] * X
        for k, c in enumerate(coefficients[1:], 1):
            total = total + c * now
            if k + 1 < len(coefficients):
                before, now = now, 2 * scaled(now) - before
        return total

    return from_functions(product, None, A.shape, A.dtype, A.device, symmetric=True)


def _coefficients(function: Callable[[np.ndarray], np.ndarray], accuracy: float) -> list[float]:
    """Chebyshev coefficients on [-1, 1], as many as the accuracy needs."""
    from scipy.fft import dct

    size = 16
    while size <= MAX_DEGREE:
        nodes = np.cos(np.pi * (np.arange(size) + 0.5) / size)
        values = np.asarray(function(nodes), dtype=np.float64)
        if not np.isfinite(values).all():
            raise DataError("the function must be finite on the interval of the eigenvalues, got NaN or infinity")
        coefficients = np.asarray(dct(values, type=2)) / size
        coefficients[0] /= 2
        tails = np.cumsum(np.abs(coefficients[::-1]))[::-1]
        allowed = accuracy * np.abs(values).max()
        # Where the upper half is not negligible, what was folded back into the lower half is not either.
        if tails[size // 2] <= allowed:
            return coefficients[: max(1, int((tails > allowed).sum()))].tolist()
        size *= 2
    raise HyperparameterError(
        f"a polynomial of degree {MAX_DEGREE} does not reach the accuracy {accuracy:.1g} on this interval: the "
        "operator is too badly conditioned; make it dense, or ask for less"
    )
