"""The exponent of a power law from a few measured values, with an error that says where it came from."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.estimate import Estimate
from poprisk.errors import DataError


def power_law_exponent(sizes: Sequence[int | float], values: Sequence[Estimate]) -> Estimate:
    r"""The slope of log value against log size, every value weighted by its own error.

    .. math:: \hat p = \frac{\sum_i \omega_i (x_i - \bar x) y_i}{\sum_i \omega_i (x_i - \bar x)^2}, \qquad
       \omega_i = (value_i / error_i)^2, \qquad SE = \Bigl(\sum_i \omega_i (x_i - \bar x)^2\Bigr)^{-1/2}

    The error is what the errors of the values (independent of each other) lead to; it says nothing about bends in the
    line.

    Args:
        sizes: At least two different positive numbers.
        values: One for each.

    Returns:
        The exponent; not valid where a value is not positive or has no error.

    Raises:
        DataError: lists of different lengths, or sizes that are not positive or all the same.

    >>> print(power_law_exponent([1, 10, 100], [Estimate(5.0, 0.5), Estimate(0.5, 0.05), Estimate(0.05, 0.005)]))
    -1.000 ± 0.031 (valid)
    """
    if len(sizes) != len(values) or not all(s > 0 for s in sizes) or len(set(sizes)) < 2:
        raise DataError(
            f"an exponent needs one value for each of at least two different positive sizes, got sizes {list(sizes)} "
            f"and {len(values)} values"
        )
    pairs = [(float(v.value), float(v.standard_error)) for v in values]
    if not all(value > 0 and error > 0 for value, error in pairs):
        reason = "a value is not positive, or its error is 0 or unknown: there is no line through its logarithm"
        return Estimate(math.nan, math.nan, valid=False, reason=reason)
    y = torch.tensor([math.log(value) for value, _ in pairs], dtype=torch.float64)
    weights = torch.tensor([(value / error) ** 2 for value, error in pairs], dtype=torch.float64)
    x = _centred_logs(sizes, weights)
    curvature = (weights * x).dot(x).item()
    return Estimate((weights * x).dot(y).item() / curvature, curvature**-0.5, cost=sum(v.cost for v in values))


def replicate_exponent(
    sizes: Sequence[int | float],
    squares: Float[Tensor, "replicates sizes"],
    *,
    resamples: int = 200,
    generator: torch.Generator | None = None,
) -> Estimate:
    r"""The exponent of a root mean square over replicates, with the error of a bootstrap over the replicates.

    Every size counts alike. The values of one replicate may depend on each other, as prefixes of one run do, which is
    why the error is not read from the residuals of the line.

    Args:
        sizes: At least two different positive numbers.
        squares: One squared norm per replicate and size.
        resamples: Bootstrap samples of the replicates.
        generator: Generator for the bootstrap; by default one with a fixed seed.

    Returns:
        The exponent; not valid for fewer than three replicates or where a mean square is 0.

    Raises:
        DataError: shapes that do not fit, or sizes that are not positive or all the same.

    >>> squares = torch.tensor([[1.0, 4.0, 16.0], [2.0, 8.0, 32.0], [4.0, 16.0, 64.0]])
    >>> round(replicate_exponent([1, 2, 4], squares).value, 6)
    1.0
    """
    if squares.dim() != 2 or squares.shape[1] != len(sizes) or not all(s > 0 for s in sizes) or len(set(sizes)) < 2:
        raise DataError(
            f"an exponent needs squares [replicates, sizes] for at least two different positive sizes, got shape "
            f"{list(squares.shape)} and sizes {list(sizes)}"
        )
    count = squares.shape[0]
    squares = squares.double().cpu()
    if not bool((squares.mean(0) > 0).all()):
        return Estimate(math.nan, math.nan, valid=False, reason="a mean square is 0: there is nothing that grows")
    slope = _plain_slopes(sizes, squares.mean(0)[None]).item()
    if count < 3:
        return Estimate(slope, math.nan, valid=False, reason=f"{count} replicates are too few to resample", cost=count)
    generator = generator or torch.Generator().manual_seed(0)
    picks = torch.randint(count, (resamples, count), generator=generator)
    means = squares[picks].mean(1)
    return Estimate(slope, _plain_slopes(sizes, means[(means > 0).all(1)]).std().item(), cost=count)


def _plain_slopes(sizes: Sequence[int | float], mean_squares: Tensor) -> Tensor:
    x = _centred_logs(sizes, torch.ones(len(sizes), dtype=torch.float64))
    return (mean_squares.log() / 2) @ x / x.dot(x)


def _centred_logs(sizes: Sequence[int | float], weights: Tensor) -> Tensor:
    x = torch.tensor([math.log(s) for s in sizes], dtype=torch.float64)
    return x - (weights * x).sum() / weights.sum()
