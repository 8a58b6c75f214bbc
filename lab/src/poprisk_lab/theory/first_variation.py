r"""The direction in which the example weights move to first order, common to every kind of holdout."""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError


def delete_direction(n: int, i: int, *, dtype: torch.dtype = torch.float64) -> Float[Tensor, "n"]:
    r"""The mass-preserving delete-one direction, 1 at i and -1/(n-1) elsewhere.

    .. math:: \nu^{(i)} = \frac{n}{n-1} C_n e_i, \qquad C_n = I - \tfrac1n 1 1^\top

    Weights :math:`1 - \nu^{(i)}` are those of the holdout of i alone.

    Raises:
        DataError: fewer than two examples, or no example i.

    >>> delete_direction(3, 1)
    tensor([-0.5000,  1.0000, -0.5000], dtype=torch.float64)
    """
    _check(n, i)
    nu = torch.full((n,), -1 / (n - 1), dtype=dtype)
    nu[i] = 1.0
    return nu


def common_first_variation(n: int, k: int, i: int, *, dtype: torch.dtype = torch.float64) -> Float[Tensor, "n"]:
    r"""The average of :math:`1 - \alpha^{(-I)}` over all holdouts I of size k that contain i, by counting them.

    Of the :math:`\binom{n-1}{k-1}` holdouts a share (k-1)/(n-1) contains a given j ≠ i, where the difference is 1; in
    the rest it is -k/(n-k). Prop. ``common_first_variation`` says that the result is :func:`delete_direction` for every
    k, so that leave-one-out, K-fold and any other holdout have one and the same first-order correction.

    Raises:
        DataError: k is not between 1 and n - 1, or there is no example i.

    >>> torch.equal(common_first_variation(5, 3, 2), delete_direction(5, 2))
    True
    """
    _check(n, i)
    if not 1 <= k <= n - 1:
        raise DataError(f"k must be 1 … {n - 1} of {n} examples, got {k}")
    holds, spares = (k - 1) / (n - 1), (n - k) / (n - 1)
    average = torch.full((n,), holds - spares * (k / (n - k)), dtype=dtype)
    average[i] = 1.0
    return average


def _check(n: int, i: int) -> None:
    if n < 2 or not 0 <= i < n:
        raise DataError(f"leaving one out needs at least 2 examples and one of 0 … {n - 1}, got n = {n} and i = {i}")
