r"""One bias–variance decomposition for every filter (``thm:unified_bias_variance``), with exact risk.

For targets :math:`y = \bar y + \xi` with noise of mean 0 and any filter M,

.. math:: U_Q^M - \bar U_Q = -C_0 (I - M) \bar a + C_0 M \zeta, \qquad
   E\|U_Q^M - \bar U_Q\|^2 = \bar a^\top (I - M) \Gamma_0 (I - M) \bar a + \operatorname{tr}(M \Gamma_0 M \Sigma_\zeta)

This risk is against :math:`\bar U_Q`, the interpolant of the clean targets, not against the truth :math:`f^*(Q)`, as
the paper's prose suggests. Against the truth two more terms enter, which change with the kernel and not with the noise:

.. math:: E\|U_Q^M - f^*\|^2 = \text{bias} + \text{variance} + \|\bar U_Q - f^*\|^2
   - 2 \langle C_0 (I - M) \bar a,\; \bar U_Q - f^* \rangle
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError
from poprisk.operators import require_length
from poprisk.theory.filters import checked_filter
from poprisk.theory.frozen import Filter, FrozenProblem, apply_filter

Noise = float | Float[Tensor, "*N"]
"""Covariance of the noise ξ: a variance, variances [N] or a matrix [N, N]."""


@dataclass(frozen=True)
class Risk:
    """Squared error summed over test outputs, in expectation over the noise or for one draw of it."""

    bias: float
    r""":math:`\|C_0 (I - M) \bar a\|^2`."""
    variance: float
    r""":math:`E\|C_0 M \zeta\|^2`, or :math:`\|C_0 M \zeta\|^2` of one draw."""
    misfit: float = 0.0
    r""":math:`\|\bar U_Q - f^*\|^2`: what interpolating the clean targets gets wrong; 0 for risk against it."""
    cross: float = 0.0
    """The cross terms: bias with misfit and, for one draw, noise with both. May be negative."""

    @property
    def total(self) -> float:
        """The risk."""
        return self.bias + self.variance + self.misfit + self.cross


def noise_covariance(problem: FrozenProblem, noise: Noise) -> Float[Tensor, "r r"]:
    r""":math:`\Sigma_\zeta = U^\top \operatorname{Cov}(\xi) U`.

    Args:
        problem: The problem.
        noise: A variance for independent noise of one size, variances [N], or the covariance [N, N] of ξ.

    Raises:
        DataError: another shape, or negative variances.

    >>> from poprisk.theory import frozen_problem
    >>> noise_covariance(frozen_problem(torch.eye(2), torch.ones(1, 2)), 4.0)
    tensor([[4., 0.],
            [0., 4.]])
    """
    U, N = problem.left, len(problem.start_train)
    if not isinstance(noise, Tensor) or noise.dim() == 0:
        if not float(noise) >= 0:
            raise DataError(f"a noise variance must not be negative, got {float(noise)}")
        return float(noise) * torch.eye(problem.rank, dtype=U.dtype, device=U.device)
    if tuple(noise.shape) == (N,) and (noise >= 0).all():
        return U.T @ (noise[:, None] * U)
    if tuple(noise.shape) == (N, N) and (noise.diagonal() >= 0).all():
        return U.T @ noise @ U
    raise DataError(f"noise is a variance, variances ≥ 0 [{N}] or a covariance [{N}, {N}], got {list(noise.shape)}")


def risk(
    problem: FrozenProblem,
    M: Filter,
    signal: Float[Tensor, "N"],
    noise: Noise,
    truth: Float[Tensor, "M"] | None = None,
) -> Risk:
    r"""The exact expected squared test error of a filter, by its parts.

    Args:
        problem: Kernel and test map.
        M: A filter of this problem.
        signal: :math:`\bar y`, the targets without noise.
        noise: The covariance of the noise.
        truth: :math:`f^*(Q)`; without it the risk is against the interpolant of the clean targets.

    Raises:
        DataError: no filter, or sizes that do not fit.

    >>> from poprisk.theory import frozen_problem
    >>> problem = frozen_problem(torch.eye(1), torch.tensor([[2.0]]))
    >>> risk(problem, torch.tensor([0.5]), torch.tensor([3.0]), noise=1.0)  # 4·(3/2)², 4·(1/2)²
    Risk(bias=9.0, variance=1.0, misfit=0.0, cross=0.0)
    """
    M = checked_filter(problem, M)
    unfit = _unfit(problem, M, signal)
    spread = problem.test_map @ apply_filter(M, torch.eye(problem.rank, dtype=M.dtype, device=M.device))
    variance = ((spread @ noise_covariance(problem, noise)) * spread).sum().item()
    misfit, cross = _against(problem, unfit, signal, truth)
    return Risk(unfit.square().sum().item(), variance, misfit, cross)


def realized_risk(
    problem: FrozenProblem,
    M: Filter,
    signal: Float[Tensor, "N"],
    draw: Float[Tensor, "N"],
    truth: Float[Tensor, "M"] | None = None,
) -> Risk:
    r"""The squared test error for one draw ξ of the noise, by its parts; they add up to :math:`\|U_Q^M - \bar U_Q\|^2`.

    >>> from poprisk.theory import frozen_problem
    >>> problem = frozen_problem(torch.eye(1), torch.tensor([[2.0]]))
    >>> realized_risk(problem, torch.tensor([0.5]), torch.tensor([3.0]), torch.tensor([1.0])).total  # (4 - 6)²
    4.0
    """
    M = checked_filter(problem, M)
    require_length(draw, len(problem.start_train), "draw")
    unfit = _unfit(problem, M, signal)
    fitted_noise = problem.test_map @ apply_filter(M, problem.left.T @ draw)
    misfit, cross = _against(problem, unfit, signal, truth)
    cross -= 2 * (unfit @ fitted_noise).item()
    if truth is not None:
        cross += 2 * (fitted_noise @ (problem.interpolant(signal) - truth)).item()
    return Risk(unfit.square().sum().item(), fitted_noise.square().sum().item(), misfit, cross)


def interpolation_variance(problem: FrozenProblem, noise: Noise) -> float:
    r"""The variance of interpolation, :math:`\operatorname{tr}(\Gamma_0 \Sigma_\zeta)` (``cor:benign_overfitting``).

    .. math:: \sigma^2 \operatorname{tr}\Gamma_0 = \sigma^2 \sum_j \|J_Q v_j\|^2 / \sigma_j^2

    for independent noise: overfitting is benign where the test set sees little of the directions that hold the noise.

    >>> from poprisk.theory import frozen_problem
    >>> interpolation_variance(frozen_problem(4 * torch.eye(1), torch.tensor([[2.0]])), 8.0)
    2.0
    """
    return ((problem.test_map @ noise_covariance(problem, noise)) * problem.test_map).sum().item()


def _unfit(problem: FrozenProblem, M: Tensor, signal: Tensor) -> Tensor:
    r""":math:`C_0 (I - M) \bar a`."""
    a = problem.coordinates(signal)
    return problem.test_map @ (a - apply_filter(M, a))


def _against(problem: FrozenProblem, unfit: Tensor, signal: Tensor, truth: Tensor | None) -> tuple[float, float]:
    if truth is None:
        return 0.0, 0.0
    require_length(truth, len(problem.start_test), "truth")
    gap = problem.interpolant(signal) - truth
    return gap.square().sum().item(), -2 * (unfit @ gap).item()
