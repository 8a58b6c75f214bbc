r"""What trace and diagonal estimators share: checks, samples to estimates, and leave-one-out directions."""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.estimate import Estimate
from poprisk._core.linalg.operator import LinearOperator
from poprisk.errors import DataError, HyperparameterError

# Leave-one-out samples: given the other probes each has the right mean, so only effects of two or more probes together
# correlate them, and those of two can at most double the variance of the mean.
LEAVE_ONE_OUT_VARIANCE = 2.0

# With fewer samples the spread says too little about the error.
_FEWEST_SAMPLES = 5


def check_square(A: LinearOperator, products: int, fewest: int) -> int:
    """Size of a square operator, once it is known that the budget reaches."""
    n, columns = A.shape
    if n != columns or n == 0:
        raise DataError(f"a trace or diagonal needs a square operator with entries, got {A!r}: transpose or compose it")
    if products < fewest:
        raise HyperparameterError(f"this estimator needs at least {fewest} products, got {products}: try 30")
    return n


def blank(A: LinearOperator) -> Tensor:
    """An empty tensor with the operator's dtype and device."""
    return torch.empty(0, dtype=A.dtype, device=A.device)


def from_samples(samples: Float[Tensor, "*entries m"], products: int, *, variance_factor: float = 1.0) -> Estimate:
    """Mean and standard error over the last axis, with a verdict.

    Args:
        samples: Unbiased, along the last axis.
        products: What they cost.
        variance_factor: How much larger the variance of the mean is than for independent samples.

    >>> print(from_samples(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), 5))
    3.00 ± 0.71 (valid)
    """
    m = samples.shape[-1]
    value, error = samples.mean(dim=-1), samples.std(dim=-1) * (variance_factor / m) ** 0.5
    if not (torch.isfinite(value).all() and torch.isfinite(error).all()):
        return not_finite(value, products)
    if m < _FEWEST_SAMPLES:
        return Estimate(
            value, error, False, f"{m} samples are too few for a standard error: use more products", products
        )
    return Estimate(value, error, cost=products)


def exactly(value: Float[Tensor, "*entries"], products: int) -> Estimate:
    """The result where the budget covers the whole matrix."""
    if not torch.isfinite(value).all():
        return not_finite(value, products)
    return Estimate(value, torch.zeros_like(value), reason="exact: the budget covers the whole matrix", cost=products)


def not_finite(value: Float[Tensor, "*entries"], products: int) -> Estimate:
    """The answer to NaN or infinity: nothing is known."""
    nan = torch.full_like(value, torch.nan)
    return Estimate(nan, nan, False, "products with the operator are not finite", products)


def leave_one_out_directions(R: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    r"""Unit vectors s_i orthogonal to all columns of R but the i-th: the normalized columns of :math:`R^{-\top}`.

    A diagonal within rounding of 0 (the operator's rank is below the number of probes) is lifted to rounding size:
    the leave-one-out range is then the whole range whichever direction is taken out.

    >>> leave_one_out_directions(torch.tensor([[2.0, 3.0], [0.0, 4.0]]))
    tensor([[ 0.8000,  0.0000],
            [-0.6000,  1.0000]])
    """
    scale = R.abs().max()
    smallest = R.shape[0] * torch.finfo(R.dtype).eps * torch.where(scale > 0, scale, 1.0)
    d = R.diagonal()
    lifted = torch.where(d.abs() > smallest, d, torch.where(d < 0, -smallest, smallest))
    eye = torch.eye(R.shape[0], dtype=R.dtype, device=R.device)
    S = torch.linalg.solve_triangular((R + torch.diag(lifted - d)).T, eye, upper=False)
    return S / S.norm(dim=0)
