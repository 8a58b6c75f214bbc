r"""The ridge path of a frozen problem, and the best point on it (``prop:linear_ridge_tradeoff``)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError
from poprisk.theory.bias_variance import Noise, noise_covariance
from poprisk.theory.filters import ridge_filter
from poprisk.theory.frozen import FrozenProblem

# Points of the first look at the path, spread over where the filter changes from 1 to 0.
_GRID = 200


@dataclass(frozen=True, eq=False)
class RidgePath:
    """Bias and variance for a row of penalties."""

    etas: Float[Tensor, "k"]
    bias: Float[Tensor, "k"]
    """Grows with the penalty, where singular and predictive directions agree."""
    variance: Float[Tensor, "k"]
    """Falls with the penalty, likewise."""

    @property
    def total(self) -> Float[Tensor, "k"]:
        """The risk."""
        return self.bias + self.variance


@dataclass(frozen=True)
class OptimalRidge:
    """The best penalty of a problem."""

    eta: float
    """η; 0 where interpolation is best, infinite where no fit is."""
    risk: float


def ridge_path(problem: FrozenProblem, etas: Float[Tensor, "k"], signal: Float[Tensor, "N"], noise: Noise) -> RidgePath:
    r"""The objective of Eq. ``lin_ridge_objective``, its two parts apart.

    .. math:: \bar a^\top (I - M_\eta)\Gamma_0(I - M_\eta)\bar a + \operatorname{tr}(M_\eta\Gamma_0 M_\eta\Sigma_\zeta)

    >>> from poprisk.theory import frozen_problem
    >>> problem = frozen_problem(torch.eye(1), torch.tensor([[1.0]]))
    >>> ridge_path(problem, torch.tensor([0.0, 1.0]), torch.tensor([2.0]), noise=4.0).total
    tensor([4., 2.])
    """
    if not (etas >= 0).all():
        raise DataError("penalties must not be negative")
    filters = torch.stack([ridge_filter(problem, eta) for eta in etas.tolist()])
    a, Gamma = problem.coordinates(signal), problem.visibility
    unfit = ((1 - filters) * a) @ problem.test_map.T
    weighed = Gamma * noise_covariance(problem, noise)  # diagonal filters: tr(M Γ M Σ) = mᵀ (Γ ∘ Σ) m
    return RidgePath(etas, unfit.square().sum(dim=1), ((filters @ weighed) * filters).sum(dim=1))


def optimal_ridge(problem: FrozenProblem, signal: Float[Tensor, "N"], noise: Noise) -> OptimalRidge:
    r"""The penalty η of least risk: a grid over where the filter moves, refined, with η = 0 and ∞ as candidates.

    The objective can have several minima where singular and predictive directions disagree; the grid has 200 points
    and the best cell is refined to rounding.

    >>> from poprisk.theory import frozen_problem
    >>> problem = frozen_problem(torch.eye(1).double(), torch.tensor([[1.0]]).double())
    >>> found = optimal_ridge(problem, torch.tensor([2.0]).double(), noise=4.0)  # best share of the fit: 4/(4 + 4)
    >>> round(found.eta, 6), round(found.risk, 6)
    (1.0, 2.0)
    """
    from scipy.optimize import minimize_scalar

    def objective(log_eta: float) -> float:
        eta = torch.tensor([math.exp(log_eta)], dtype=problem.roots.dtype, device=problem.roots.device)
        return ridge_path(problem, eta, signal, noise).total.item()

    scale = np.log(problem.mobility.double().cpu().numpy() / problem.num_examples)
    grid = np.linspace(scale.min() - 12, scale.max() + 12, _GRID)
    heights = [objective(x) for x in grid]
    k = int(np.argmin(heights))
    ends = (grid[max(k - 1, 0)], grid[min(k + 1, _GRID - 1)])
    refined: Any = minimize_scalar(objective, bounds=ends, method="bounded", options={"xatol": 1e-12})
    edges = torch.tensor([0.0, math.inf], dtype=problem.roots.dtype, device=problem.roots.device)
    candidates = [(float(refined.fun), math.exp(float(refined.x)))]
    candidates += list(zip(ridge_path(problem, edges, signal, noise).total.tolist(), edges.tolist(), strict=True))
    best, eta = min(candidates)
    return OptimalRidge(eta, best)
