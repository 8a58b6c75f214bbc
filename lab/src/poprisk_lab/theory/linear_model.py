r"""The linear model :math:`u = X w` under :math:`\|u - y\|^2/2n`, in closed form (``sec:linear_model``)."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import HyperparameterError
from poprisk.operators import require_length
from poprisk.theory.filters import decayed_flow_filter, gradient_flow_filter
from poprisk.theory.frozen import FrozenProblem, frozen_problem_of_features


@dataclass(frozen=True, eq=False)
class LinearOperators:
    """The operators on [0, T] of ``prop:linear_operators``."""

    propagator: Float[Tensor, "n n"]
    r""":math:`e^{-TK_{SS}/n}`."""
    factor: Float[Tensor, "r n"]
    r"""A factor of the dissipation gramian, :math:`W = F^\top F`, exact also for directions that hardly moved."""
    train_transfer: Float[Tensor, "n n"]
    """D."""
    test_transfer: Float[Tensor, "m n"]
    """G."""
    coupling: Float[Tensor, "m n"]
    r""":math:`A_\circ = K_{QS} K_{SS}^\dagger`; the remainder is 0."""

    @property
    def dissipation_gramian(self) -> Float[Tensor, "n n"]:
        """W."""
        return self.factor.T @ self.factor


def linear_operators(X: Float[Tensor, "n d"], X_test: Float[Tensor, "m d"], T: float) -> LinearOperators:
    r"""Propagator, dissipation gramian, transfers and coupling of gradient flow up to time T.

    .. math:: P = e^{-TK/n}, \quad W = \tfrac n2 (I - e^{-2TK/n}), \quad D = n (I - e^{-TK/n}), \quad
       G = n K_{QS} K^\dagger (I - e^{-TK/n})

    Args:
        X: Training inputs.
        X_test: Test inputs.
        T: The time, ≥ 0.

    Raises:
        DataError: shapes do not fit.
        HyperparameterError: a negative time.

    >>> ops = linear_operators(torch.eye(1), torch.tensor([[3.0]]), math.log(2))
    >>> ops.propagator, ops.dissipation_gramian, ops.train_transfer, ops.test_transfer
    (tensor([[0.5000]]), tensor([[0.3750]]), tensor([[0.5000]]), tensor([[1.5000]]))
    """
    problem = frozen_problem_of_features(X, X_test)
    n, U = problem.num_examples, problem.left
    m = gradient_flow_filter(problem, T)
    spent = gradient_flow_filter(problem, 2 * T)
    eye = torch.eye(n, dtype=X.dtype, device=X.device)
    return LinearOperators(
        propagator=eye - (U * m) @ U.T,
        factor=(n / 2 * spent).sqrt()[:, None] * U.T,
        train_transfer=n * (U * m) @ U.T,
        test_transfer=n * (problem.test_map * m) @ U.T,
        coupling=problem.test_map @ U.T,
    )


def decayed_weights(
    X: Float[Tensor, "n d"],
    y: Float[Tensor, "n"],
    decay: float,
    t: float,
    w_0: Float[Tensor, "d"] | None = None,
    *,
    toward_start: bool = False,
) -> Float[Tensor, "d"]:
    r"""The weights at time t of :math:`\partial_t w = -\nabla L_S(w) - \lambda w`, in closed form.

    .. math:: \alpha_j(t) = e^{-\gamma_j t} \alpha_j(0)
       + \frac{\sigma_j (U^\top y)_j}{\sigma_j^2 + n\lambda} (1 - e^{-\gamma_j t}), \qquad
       \gamma_j = \sigma_j^2/n + \lambda

    on the right singular vectors; what is orthogonal to them decays like :math:`e^{-\lambda t}`. From
    :math:`w_0 = 0` this is ``thm:linear_ridge``, whose filter :math:`M^\lambda(t)` holds for that start only, or with
    decay toward the start.

    Args:
        X: Training inputs.
        y: Targets.
        decay: λ ≥ 0; 0 is gradient flow.
        t: The time, which may be infinite: ridge regression for λ > 0, the interpolant nearest to the start for λ = 0.
        w_0: The start; default: 0.
        toward_start: Decay by :math:`-\lambda (w - w_0)` instead.

    Raises:
        DataError: shapes do not fit.
        HyperparameterError: a negative decay or time.

    >>> decayed_weights(torch.tensor([[2.0, 0.0]]), torch.tensor([6.0]), 0.0, math.inf, torch.tensor([0.0, 1.0]))
    tensor([3., 1.])
    """
    if not decay >= 0 or not t >= 0:
        raise HyperparameterError(f"decay and time must not be negative, got {decay} and {t}")
    start = X.new_zeros(X.shape[1]) if w_0 is None else w_0
    require_length(start, X.shape[1], "w_0")
    require_length(y, X.shape[0], "y")
    problem = frozen_problem_of_features(X, X[:0])
    if toward_start:
        return start + problem.displacement(decayed_flow_filter(problem, decay, t), y - X @ start)
    V = _right(problem)
    inside = V.T @ start
    outside = start - V @ inside
    rates = problem.mobility / problem.num_examples + decay
    kept = V @ (torch.exp(-rates * t) * inside)
    lasting = math.exp(-decay * t) if decay > 0 else 1.0  # 0·∞ has no value
    return kept + lasting * outside + problem.displacement(decayed_flow_filter(problem, decay, t), y)


def ridge_weights(X: Float[Tensor, "n d"], y: Float[Tensor, "n"], decay: float) -> Float[Tensor, "d"]:
    r"""The limit :math:`X^\top (X X^\top + n\lambda I)^{-1} y` of Eq. ``lin_wd_limit``, by a linear solve.

    >>> ridge_weights(torch.tensor([[2.0]]), torch.tensor([6.0]), 4.0)  # 2·6/(4 + 4)
    tensor([1.5000])
    """
    if not decay > 0:
        raise HyperparameterError(f"ridge regression needs a positive decay, got {decay}: use least_norm_weights for 0")
    n = X.shape[0]
    eye = torch.eye(n, dtype=X.dtype, device=X.device)
    return X.T @ torch.linalg.solve(X @ X.T + n * decay * eye, y)


def least_norm_weights(
    X: Float[Tensor, "n d"], y: Float[Tensor, "n"], w_0: Float[Tensor, "d"] | None = None
) -> Float[Tensor, "d"]:
    r"""The limit of gradient flow, :math:`w_0 + X^\dagger (y - X w_0)`.

    >>> least_norm_weights(torch.tensor([[1.0, 1.0]]), torch.tensor([4.0])).round(decimals=3)
    tensor([2., 2.])
    """
    start = X.new_zeros(X.shape[1]) if w_0 is None else w_0
    return start + torch.linalg.pinv(X) @ (y - X @ start)


def _right(problem: FrozenProblem) -> Tensor:
    assert problem.right is not None, "a problem made of features knows its right singular vectors"
    return problem.right
