r"""Filters of a frozen problem: each way to fit, as what it does to the singular directions of the kernel.

A filter that acts on each singular direction is returned as its diagonal [r]; the predictive rank filter, which lives
in the eigenbasis of :math:`\Gamma_0`, as a matrix [r, r].
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError
from poprisk.theory.frozen import Filter, FrozenProblem

# Rounding errors by which a user's filter may leave [0, 1] or differ from its transpose.
_MARGIN = 100.0


def gradient_flow_filter(problem: FrozenProblem, t: float) -> Float[Tensor, "r"]:
    r""":math:`M_t = I - e^{-t\Sigma^2/n}`: gradient flow up to time t; directions of high mobility come first.

    >>> from poprisk.theory import frozen_problem
    >>> gradient_flow_filter(frozen_problem(torch.eye(1), torch.ones(1, 1)), math.log(2))
    tensor([0.5000])
    """
    _require_not_negative("t", t)
    return -torch.expm1(-problem.mobility * (t / problem.num_examples))


def ridge_filter(problem: FrozenProblem, eta: float) -> Float[Tensor, "r"]:
    r""":math:`M_\eta = \Sigma^2 (\Sigma^2 + n\eta I)^{-1}`: ridge regression; η = 0 interpolates.

    >>> from poprisk.theory import frozen_problem
    >>> ridge_filter(frozen_problem(torch.eye(1), torch.ones(1, 1)), 1.0)
    tensor([0.5000])
    """
    _require_not_negative("eta", eta)
    if math.isinf(eta):
        return torch.zeros_like(problem.roots)
    return problem.mobility / (problem.mobility + problem.num_examples * eta)


def threshold_filter(problem: FrozenProblem, tau: float) -> Float[Tensor, "r"]:
    r""":math:`M_\tau = 1_{[\tau,\infty)}(\Sigma^2)`: directions of at least this mobility, wholly.

    >>> from poprisk.theory import frozen_problem
    >>> threshold_filter(frozen_problem(torch.diag(torch.tensor([4.0, 1.0])), torch.ones(1, 2)), 2.0)
    tensor([1., 0.])
    """
    return (problem.mobility >= tau).to(problem.roots.dtype)


def rank_filter(problem: FrozenProblem, r: int) -> Float[Tensor, "r r"]:
    r""":math:`P_r = \sum_{j \le r} \psi_j \psi_j^\top`: the r directions that the test set sees best.

    The ψ are eigenvectors of :math:`\Gamma_0`, not singular directions of the kernel, so this is a matrix.

    >>> from poprisk.theory import frozen_problem
    >>> rank_filter(frozen_problem(torch.diag(torch.tensor([4.0, 1.0])), torch.tensor([[0.0, 3.0]])), 1).abs()
    tensor([[0., 0.],
            [0., 1.]])
    """
    if not 0 <= r <= problem.rank:
        raise HyperparameterError(f"r must lie between 0 and {problem.rank}, the rank of the kernel, got {r}")
    psi = predictive_basis(problem)[1][:, :r]
    return psi @ psi.T


def interpolation_filter(problem: FrozenProblem) -> Float[Tensor, "r"]:
    """M = I: every training output is fitted.

    >>> from poprisk.theory import frozen_problem
    >>> interpolation_filter(frozen_problem(torch.eye(2), torch.ones(1, 2)))
    tensor([1., 1.])
    """
    return torch.ones_like(problem.roots)


def decayed_flow_filter(problem: FrozenProblem, decay: float, t: float) -> Float[Tensor, "r"]:
    r"""Gradient flow with weight decay λ up to time t, Eq. ``lin_wd_filter``.

    .. math:: M^\lambda_j(t) = \frac{\sigma_j^2}{\sigma_j^2 + n\lambda}
       \bigl(1 - e^{-(\sigma_j^2 + n\lambda) t / n}\bigr)

    λ = 0 is gradient flow, t = ∞ is ridge regression with η = λ, both together interpolation. It is the flow of
    parameters that start at 0, or that decay toward where they start; with outputs that are not 0 at the start and
    decay toward the origin the outputs are no filter of the targets (see ``decayed_weights``).

    >>> from poprisk.theory import frozen_problem
    >>> problem = frozen_problem(torch.eye(1), torch.ones(1, 1))
    >>> decayed_flow_filter(problem, 1.0, math.inf), decayed_flow_filter(problem, 1.0, math.log(2) / 2)
    (tensor([0.5000]), tensor([0.2500]))
    """
    _require_not_negative("decay", decay)
    _require_not_negative("t", t)
    total = problem.mobility + problem.num_examples * decay
    return problem.mobility / total * -torch.expm1(-total * (t / problem.num_examples))


def checked_filter(problem: FrozenProblem, M: Filter) -> Filter:
    r"""A filter of one's own, if it is one: :math:`0 \preceq M \preceq I`, symmetric, of the problem's size.

    Raises:
        DataError: with what is wrong.

    >>> from poprisk.theory import frozen_problem
    >>> checked_filter(frozen_problem(torch.eye(1), torch.ones(1, 1)), torch.tensor([0.3]))
    tensor([0.3000])
    """
    r = problem.rank
    if tuple(M.shape) not in ((r,), (r, r)) or M.dtype != problem.roots.dtype:
        raise DataError(
            f"a filter is a diagonal [{r}] or a matrix [{r}, {r}] in {problem.roots.dtype}, got {list(M.shape)} in "
            f"{M.dtype}"
        )
    slack = _MARGIN * r * torch.finfo(M.dtype).eps
    if M.dim() == 2 and not (M - M.T).abs().max() <= slack:
        raise DataError("a filter must be symmetric, got a matrix that differs from its transpose")
    values = M if M.dim() == 1 else torch.linalg.eigvalsh((M + M.T) / 2)
    if not ((values >= -slack).all() and (values <= 1 + slack).all()):
        raise DataError(
            f"a filter must have its eigenvalues in [0, 1], got {values.min().item():.3g} to {values.max().item():.3g}"
        )
    return M


def predictive_basis(problem: FrozenProblem) -> tuple[Float[Tensor, "r"], Float[Tensor, "r r"]]:
    r"""Eigenvalues λ and vectors ψ of :math:`\Gamma_0`, largest first, from the singular values of :math:`C_0`.

    >>> from poprisk.theory import frozen_problem
    >>> predictive_basis(frozen_problem(torch.eye(2), torch.tensor([[0.0, 3.0]])))[0]
    tensor([9., 0.])
    """
    r = problem.rank
    _, roots, Vt = torch.linalg.svd(problem.test_map, full_matrices=True)
    values = roots.new_zeros(r)
    values[: len(roots)] = roots.square()
    psi = Vt.T
    # Signs are free; fixed here so that the same problem gives the same vectors everywhere.
    signs = torch.where(psi.gather(0, psi.abs().argmax(dim=0, keepdim=True)) < 0, -1.0, 1.0).to(psi.dtype)
    return values, psi * signs


def _require_not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise HyperparameterError(f"{name} must not be negative, got {value}")
