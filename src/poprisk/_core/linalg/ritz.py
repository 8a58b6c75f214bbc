r"""The search behind eigenpairs and singular triplets: grow a space by the residuals of what has not converged.

The space starts from k + p random directions, so every eigenvalue is met with min(multiplicity, k) independent
components from the outset, which a Krylov space from fewer vectors never does. Each round adds the residuals of all
those k + p leading pairs that are still open: as many as that, because copies of an eigenvalue then converge together,
and a round of fewer could finish some copies and never look at the others. Converged pairs cost no further products,
and the whole history stays in the space, so convergence is that of a block Krylov method; on an exhausted space the
residuals are rounding, and their place is taken by fresh random directions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg.norms import column_norms
from poprisk._core.linalg.operator import LinearOperator
from poprisk._core.linalg.random_vectors import gaussian
from poprisk.errors import DataError, DeviceError, HyperparameterError

Progress = Callable[[int, int], None]
"""Called after every round with the products made and the pairs converged so far."""

# The residual followed during the search is a combination of stored products; the certificate is computed anew at the
# end, and this much is left for the rounding between the two.
_MARGIN = 0.9


@dataclass(frozen=True)
class SearchOptions:
    """What a search accepts and may cost; None for the defaults."""

    tolerance: float | None
    """Largest residual accepted, relative to the largest value found."""
    max_products: int | None
    """Products with the operator, those of the certificate included."""
    oversampling: int
    """Pairs followed beyond k; they make the k-th converge and would bring up what was missed."""
    max_basis: int | None
    """Dimension at which the space is compressed to its leading half."""
    progress: Progress | None


class RitzSpace(ABC):
    """A subspace with the products on it, from which approximate pairs and their residuals are drawn."""

    products_per_direction = 1
    """What one more direction costs."""

    def __init__(self, A: LinearOperator, generator: torch.Generator) -> None:
        self.A, self.generator = A, generator
        self.basis = torch.empty(A.shape[1], 0, dtype=A.dtype, device=A.device)
        """Orthonormal directions; at as many as it has rows the space is everything and the pairs are exact."""
        self.products = 0
        """Products with the operator made so far."""

    @abstractmethod
    def residuals(self, count: int) -> tuple[Tensor, Tensor]:
        """Residuals of the leading pairs as columns, and the scale they are compared with."""

    @abstractmethod
    def grow(self, W: Tensor) -> None:
        """Takes the directions W into the space."""

    @abstractmethod
    def compress(self, keep: int) -> None:
        """Reduces the space to its leading pairs."""


def search(
    A: LinearOperator, space: RitzSpace, k: int, options: SearchOptions, initial: Float[Tensor, "n j"] | None
) -> float:
    """Grows an empty space until its k leading pairs have converged and stay so, or the budget is used up.

    The random directions are never fewer for a warm start: with the initial ones alone, pairs of an earlier operator
    could converge at once and a new, larger one never be seen.

    Returns:
        The tolerance.
    """
    n, warm = space.basis.shape[0], 0 if initial is None else initial.shape[1]
    guards = min(n, k + options.oversampling + warm) - k
    tolerance, max_products, max_basis = _checked(A, space, k, guards, options)
    Omega = gaussian(n, min(n, k + options.oversampling), space.generator, space.basis)
    space.grow(Omega if initial is None else torch.cat([initial, Omega], dim=1)[:, :n])
    quiet_rounds, confirmations = 0, 2 if warm else 1  # rounds in which only the guards grow and nothing new comes up
    while True:
        R, scale = space.residuals(k + guards)
        is_open = column_norms(R) > _MARGIN * tolerance * scale
        open_pairs = is_open[:k].nonzero().squeeze(1)
        if options.progress is not None:
            options.progress(space.products, k - len(open_pairs))
        quiet_rounds = 0 if len(open_pairs) else quiet_rounds + 1
        affordable = (max_products - space.products) // space.products_per_direction
        dimension = space.basis.shape[1]
        width = min(n - dimension, affordable)
        if quiet_rounds > confirmations or width < 1:
            return tolerance
        grown = is_open.nonzero().squeeze(1) if len(open_pairs) else torch.arange(k, R.shape[1], device=R.device)
        W = R[:, grown[:width]]
        if dimension + W.shape[1] > max_basis:
            space.compress(max(k + guards, max_basis // 2))
        space.grow(W)


def orthonormal_extension(
    W: Float[Tensor, "n k"], basis: Float[Tensor, "n m"], generator: torch.Generator
) -> Float[Tensor, "n k"]:
    """Orthonormal columns, orthogonal to the basis, that with it span W; random where W adds nothing.

    Projections are repeated until a pass loses nothing, so the result is orthogonal to rounding even when W lies in
    the basis up to rounding.

    >>> e = torch.eye(3)
    >>> orthonormal_extension(torch.ones(3, 1), e[:, :2], torch.Generator()).abs()
    tensor([[0.],
            [0.],
            [1.]])
    """
    n = W.shape[0]
    lengths = column_norms(W)
    W = W / torch.where(lengths > 0, lengths, 1)
    rounding = 10 * n**0.5 * torch.finfo(W.dtype).eps
    for _ in range(6):
        W, R = torch.linalg.qr(W - basis @ (basis.T @ W))
        kept = R.diagonal().abs()
        if (kept > 0.5).all():
            break
        lost = kept <= rounding
        if lost.any():  # a column that vanished is rounding: nothing says it would point anywhere new
            fresh = gaussian(n, W.shape[1], generator, W)
            W = torch.where(lost, fresh / fresh.norm(dim=0), W)
    return W


def rounding_level(A: LinearOperator) -> float:
    r"""Size, relative to the largest value, below which a value counts as zero: :math:`4 \sqrt n\, eps`.

    Errors of single products add like a random walk; measured null spaces stay well below this line.
    """
    return 4 * max(A.shape) ** 0.5 * torch.finfo(A.dtype).eps


def check_initial(initial: Tensor | None, n: int, A: LinearOperator) -> None:
    """A warm start is a matrix of columns in the space of the vectors sought."""
    if initial is None:
        return
    if initial.dim() != 2 or initial.shape[0] != n or initial.dtype != A.dtype:
        raise DataError(
            f"initial must be a matrix [{n}, j] in {A.dtype}, got {list(initial.shape)} in {initial.dtype}: pass the "
            "vectors of an earlier result"
        )
    if initial.device != A.device:
        raise DeviceError(f"initial must lie on {A.device}, got {initial.device}: move it with .to(...)")
    if not torch.isfinite(initial).all():
        raise DataError("initial must be finite, got NaN or infinity: leave it out")


def _checked(
    A: LinearOperator, space: RitzSpace, k: int, guards: int, options: SearchOptions
) -> tuple[float, int, int]:
    """Tolerance, products that the search may use, and size of the basis."""
    n, oversampling, per_direction = space.basis.shape[0], options.oversampling, space.products_per_direction
    if A.dtype not in (torch.float32, torch.float64):
        raise DataError(f"spectra need float32 or float64, got {A.dtype}: build the operator in float32")
    if not 1 <= k <= n:
        raise HyperparameterError(f"k must lie between 1 and {n} for {A!r}, got {k}")
    if oversampling < 1:
        raise HyperparameterError(f"oversampling must be a positive whole number, got {oversampling}: try 5")
    finest = 2 * rounding_level(A)
    tolerance = max(finest, torch.finfo(A.dtype).eps ** 0.5) if options.tolerance is None else options.tolerance
    if not finest <= tolerance < 1:
        raise HyperparameterError(
            f"tolerance must lie between {finest:.1e}, the finest that {A!r} allows, and 1, got {tolerance}"
        )
    width, certificate = k + guards, per_direction * k
    default = 50 * per_direction * (k + oversampling) + certificate
    budget = (default if options.max_products is None else options.max_products) - certificate
    needed = per_direction * width + space.products
    if budget < needed:
        raise HyperparameterError(
            f"max_products must be at least {needed + certificate} for k = {k}: {needed} for the start and "
            f"{certificate} for the certificate, got {options.max_products}"
        )
    smallest = 2 * width
    basis = max(256, 8 * width) if options.max_basis is None else options.max_basis
    if basis < smallest:
        raise HyperparameterError(f"max_basis must be at least {smallest} for k = {k}, got {basis}")
    return tolerance, budget, basis
