r"""Whether the two products of an operator belong together: the dot-product test."""

import torch

from poprisk._core.linalg.norms import column_norms
from poprisk._core.linalg.operator import LinearOperator
from poprisk._core.linalg.random_vectors import default_generator, gaussian
from poprisk.errors import HyperparameterError


def adjoint_mismatch(A: LinearOperator, probes: int = 8, *, generator: torch.Generator | None = None) -> float:
    r"""How far :math:`\langle y, A x\rangle` and :math:`\langle A^\top y, x\rangle` differ, at worst over random pairs.

    .. math:: \max_i \frac{|\langle y_i, A x_i\rangle - \langle A^\top y_i, x_i\rangle|}
        {\|y_i\| \|A x_i\| + \|A^\top y_i\| \|x_i\|}

    Rounding leaves a small multiple of the machine epsilon; a wrong adjoint of an n×n operator leaves about
    :math:`n^{-1/2}`. A product with NaN gives NaN.

    A symmetric operator is compared with itself.

    >>> from poprisk._core.linalg import from_functions
    >>> double = from_functions(lambda X: 2 * X, lambda Y: 3 * Y, (4, 4), torch.float64)
    >>> adjoint_mismatch(double) > 0.01
    True
    """
    if probes < 1:
        raise HyperparameterError(f"probes must be a positive whole number, got {probes}: try 8")
    generator = generator or default_generator(A.device)
    like = torch.empty(0, dtype=A.dtype, device=A.device)
    X, Y = gaussian(A.shape[1], probes, generator, like), gaussian(A.shape[0], probes, generator, like)
    AX, AtY = A.matmat(X).detach(), A.adjoint().matmat(Y).detach()
    difference = ((Y * AX).sum(dim=0) - (AtY * X).sum(dim=0)).abs()
    scale = column_norms(Y) * column_norms(AX) + column_norms(AtY) * column_norms(X)
    return torch.where(difference == 0, difference, difference / scale).max().item()
