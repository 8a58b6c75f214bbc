r"""The risk along the predictive ranks: how the test error changes as one direction after the other is fitted.

With :math:`\Gamma_0 = \sum_j \lambda_j \psi_j \psi_j^\top` (``cor:predictive_rank_law``),

.. math:: \mathcal R_r = \sum_{j>r} \lambda_j \langle\psi_j, \bar a\rangle^2
   + \sum_{j \le r} \lambda_j \langle\psi_j, \Sigma_\zeta \psi_j\rangle, \qquad
   \mathcal R_{r+1} - \mathcal R_r = \lambda_{r+1} \bigl(\langle\psi_{r+1}, \Sigma_\zeta \psi_{r+1}\rangle
   - \langle\psi_{r+1}, \bar a\rangle^2\bigr)

Risk rises where the noise of the next direction is larger than its signal and falls where it is smaller; a peak is
where a rise is followed by a fall.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.theory.bias_variance import Noise, noise_covariance
from poprisk.theory.filters import predictive_basis
from poprisk.theory.frozen import FrozenProblem

# Rounding errors of the largest risk that an increment must exceed to count as a rise or a fall.
_MARGIN = 100.0


@dataclass(frozen=True, eq=False)
class PredictiveRankPath:
    """Risk and its increments for r = 0 … rank of the kernel. Made by ``predictive_rank_path``."""

    visibility: Float[Tensor, "r"]
    r"""λ, the eigenvalues of :math:`\Gamma_0`."""
    signal: Float[Tensor, "r"]
    r""":math:`\langle\psi_j, \bar a\rangle^2`."""
    noise: Float[Tensor, "r"]
    r""":math:`\langle\psi_j, \Sigma_\zeta \psi_j\rangle`."""

    @property
    def increments(self) -> Float[Tensor, "r"]:
        r""":math:`\mathcal R_{r+1} - \mathcal R_r`, for r from 0."""
        return self.visibility * (self.noise - self.signal)

    @property
    def bias(self) -> Float[Tensor, "ranks"]:
        """The first sum, for r = 0, 1, …, rank: what is not yet fitted."""
        lost = self.visibility * self.signal
        return torch.cat([lost.flip(0).cumsum(0).flip(0), lost.new_zeros(1)])

    @property
    def variance(self) -> Float[Tensor, "ranks"]:
        """The second sum: the noise that is fitted already."""
        fitted = self.visibility * self.noise
        return torch.cat([fitted.new_zeros(1), fitted.cumsum(0)])

    @property
    def risks(self) -> Float[Tensor, "ranks"]:
        r""":math:`\mathcal R_r`."""
        return self.bias + self.variance

    @property
    def local_peaks(self) -> list[int]:
        """Interior ranks at which a rise is followed by a fall; increments that are only rounding are passed over."""
        rounding = _MARGIN * torch.finfo(self.visibility.dtype).eps * self.risks.max().item()
        steps = [(r, x) for r, x in enumerate(self.increments.tolist()) if abs(x) > rounding]
        return [r + 1 for (r, x), (_, after) in pairwise(steps) if x > 0 > after]

    @property
    def peak(self) -> int | None:
        """The local peak of the largest risk; None where the risk never rises and then falls."""
        risks = self.risks
        return max(self.local_peaks, key=lambda r: risks[r].item(), default=None)

    @property
    def is_highest(self) -> bool:
        """Whether the peak is the maximum of the whole path, not only higher than its surroundings."""
        return self.peak is not None and bool(self.risks[self.peak] >= self.risks.max())


def predictive_rank_path(problem: FrozenProblem, signal: Float[Tensor, "N"], noise: Noise) -> PredictiveRankPath:
    r"""The path of a problem, for targets :math:`\bar y` and a covariance of the noise as in ``risk``.

    Raises:
        DataError: sizes do not fit.

    >>> from poprisk.theory import frozen_problem
    >>> problem = frozen_problem(torch.eye(2), torch.diag(torch.tensor([2.0, 1.0])))
    >>> path = predictive_rank_path(problem, torch.tensor([0.0, 3.0]), noise=1.0)
    >>> path.risks, path.peak  # 9, then 4 of noise more, then 9 - 1 less
    (tensor([ 9., 13.,  5.]), 1)
    """
    values, psi = predictive_basis(problem)
    signals = (psi.T @ problem.coordinates(signal)).square()
    noises = ((noise_covariance(problem, noise) @ psi) * psi).sum(dim=0)
    return PredictiveRankPath(values, signals, noises)
