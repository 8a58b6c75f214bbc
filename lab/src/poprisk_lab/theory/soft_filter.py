r"""The continuous relaxation of a rank: contractions of bounded trace, and the best of them.

.. math:: \min_{0 \preceq V \preceq I,\ \operatorname{tr} V \le \tau} \|C_R^{1/2}(I - V)\|^2 = \mu, \qquad
   v_j = \bigl(1 - \sqrt{\mu/\lambda_j}\bigr)_+, \qquad \sum_j v_j = \tau

The paper (``thm:continuous_signal_filter``) describes the filter and gives no formula. Proof, on the range of C:
X = I - V with :math:`\|C^{1/2} X\|^2 \le \mu` has :math:`X^2 \preceq \mu C^{-1}`, so
:math:`X \preceq \sqrt\mu\, C^{-1/2}` (the root is operator monotone), and :math:`X \preceq I`; on the eigenbasis of C,
:math:`X_{jj} \le \min(1, \sqrt{\mu/\lambda_j})`, and the trace of V is at least the sum above, with equality for the V
that is diagonal there.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError


@dataclass(frozen=True, eq=False)
class TraceBudgetFilter:
    """The best contraction of a trace budget, diagonal in the signal directions."""

    weights: Float[Tensor, "r"]
    """v, one per direction, between 0 and 1."""
    level: float
    r"""μ, the worst-case lost motion per unit of visibility."""
    active: int
    """Directions with a weight above 0."""


def trace_budget_filter(values: Float[Tensor, "r"], budget: float) -> TraceBudgetFilter:
    r"""The optimal :math:`v_j = (1 - \sqrt{\mu/\lambda_j})_+` with :math:`\sum v_j = \tau`, in closed form.

    With k directions active, :math:`\sqrt\mu = (k - \tau) / \sum_{j \le k} \lambda_j^{-1/2}`; k is the one for which
    :math:`\lambda_{k+1} \le \mu < \lambda_k`. At a budget of the rank or more nothing is lost.

    Args:
        values: Eigenvalues of C_R, descending, not negative.
        budget: τ ≥ 0.

    Raises:
        DataError: values that do not descend or are negative.
        HyperparameterError: a negative budget.

    >>> found = trace_budget_filter(torch.tensor([100.0, 1.0]), 1.0)
    >>> found.weights, round(found.level, 4)  # below λ_2 = 1, the value of the best projector of trace 1
    (tensor([0.9091, 0.0909]), 0.8264)
    """
    if not budget >= 0:
        raise HyperparameterError(f"the trace budget must not be negative, got {budget}")
    if values.dim() != 1 or (values < 0).any() or (values.diff() > 0).any():
        raise DataError("eigenvalues must be a descending vector without negative entries")
    positive = values[values > 0].double()
    if budget >= len(positive):
        return TraceBudgetFilter((values > 0).to(values.dtype), 0.0, len(positive))
    counts = torch.arange(1, len(positive) + 1, dtype=torch.float64, device=values.device)
    levels = ((counts - budget) / positive.rsqrt().cumsum(0)).clamp(min=0).square()
    following = torch.cat([positive[1:], positive.new_zeros(1)])
    k = int(((levels >= following) & (counts > budget)).nonzero()[0]) + 1
    level = levels[k - 1].item()
    weights = torch.where(values.double() > level, 1 - (level / values.double().clamp(min=level)).sqrt(), 0.0)
    return TraceBudgetFilter(weights.to(values.dtype), level, int((weights > 0).sum()))
