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
class SearchPlan:
    """What to look for and what it may cost; made by ``plan_search``, which checks it."""

    k: int
    """Pairs asked for."""
    guards: int
    """Pairs followed beyond k; they make the k-th converge and would bring up what was missed."""
    tolerance: float
    """Largest residual accepted, relative to the largest value found."""
    max_products: int
    """Products the search may use; the certificate has its own."""
    max_basis: int
    """Dimension at which the space is compressed to its leading half."""
    confirmations: int
    """Rounds in which only the guards grow and nothing new may come up before convergence is accepted."""
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


def search(space: RitzSpace, plan: SearchPlan) -> None:
    """Grows the space until the leading k pairs have converged and stay so, or the budget is used up."""
    quiet_rounds = 0
    while True:
        R, scale = space.residuals(plan.k + plan.guards)
        is_open = column_norms(R) > _MARGIN * plan.tolerance * scale
        open_pairs = is_open[: plan.k].nonzero().squeeze(1)
        if plan.progress is not None:
            plan.progress(space.products, plan.k - len(open_pairs))
        quiet_rounds = 0 if len(open_pairs) else quiet_rounds + 1
        affordable = (plan.max_products - space.products) // space.products_per_direction
        size, dimension = space.basis.shape
        width = min(size - dimension, affordable)
        if quiet_rounds > plan.confirmations or width < 1:
            return
        grown = is_open.nonzero().squeeze(1) if len(open_pairs) else torch.arange(plan.k, R.shape[1], device=R.device)
        W = R[:, grown[:width]]
        if dimension + W.shape[1] > plan.max_basis:
            space.compress(max(plan.k + plan.guards, plan.max_basis // 2))
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


def start_block(
    n: int, width: int, initial: Tensor | None, A: LinearOperator, generator: torch.Generator
) -> Float[Tensor, "n start"]:
    """The first directions: what a warm start brings, and random ones.

    The random ones are never fewer for a warm start: with the initial directions alone, pairs of an earlier operator
    could converge at once and a new, larger one never be seen.
    """
    like = torch.empty(0, dtype=A.dtype, device=A.device)
    Omega = gaussian(n, min(n, width), generator, like)
    return Omega if initial is None else torch.cat([initial, Omega], dim=1)[:, :n]


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


def plan_search(
    A: LinearOperator,
    k: int,
    *,
    n: int,
    tolerance: float | None,
    max_products: int | None,
    oversampling: int,
    max_basis: int | None,
    warm: int,
    products_per_direction: int,
    products_of_start: int = 0,
    progress: Progress | None,
) -> SearchPlan:
    """Checks what was asked for and fills in the defaults."""
    if A.dtype not in (torch.float32, torch.float64):
        raise DataError(f"spectra need float32 or float64, got {A.dtype}: build the operator in float32")
    if not 1 <= k <= n:
        raise HyperparameterError(f"k must lie between 1 and {n} for {A!r}, got {k}")
    if oversampling < 1:
        raise HyperparameterError(f"oversampling must be a positive whole number, got {oversampling}: try 5")
    finest = 2 * rounding_level(A)
    tolerance = max(finest, torch.finfo(A.dtype).eps ** 0.5) if tolerance is None else tolerance
    if not finest <= tolerance < 1:
        raise HyperparameterError(
            f"tolerance must lie between {finest:.1e}, the finest that {A!r} allows, and 1, got {tolerance}"
        )
    width = min(n, k + oversampling + warm)
    certificate = products_per_direction * k
    default = 50 * products_per_direction * (k + oversampling) + certificate
    budget = (default if max_products is None else max_products) - certificate
    needed = products_per_direction * width + products_of_start
    if budget < needed:
        raise HyperparameterError(
            f"max_products must be at least {needed + certificate} for k = {k}: {needed} for the start and "
            f"{certificate} for the certificate, got {max_products}"
        )
    smallest = 2 * width
    basis = max(256, 8 * width) if max_basis is None else max_basis
    if basis < smallest:
        raise HyperparameterError(f"max_basis must be at least {smallest} for k = {k}, got {basis}")
    return SearchPlan(
        k=k,
        guards=width - k,
        tolerance=tolerance,
        max_products=budget,
        max_basis=basis,
        confirmations=2 if warm else 1,
        progress=progress,
    )
