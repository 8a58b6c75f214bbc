r"""What a test set sees of a frozen kernel's training as time goes on: the mechanism behind delayed generalization.

.. math:: G_Q(t, 0) = n K_{QS} K_{SS}^\dagger (I - e^{-tK_{SS}/n}), \qquad
   U^\top G_Q^\top G_Q U = n^2 M_t \Gamma_0 M_t

Directions of high mobility saturate first; those that the test set sees, but that move slowly, come later.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk.errors import DataError
from poprisk.theory.filters import gradient_flow_filter
from poprisk.theory.frozen import FrozenProblem


def transfer_operator(problem: FrozenProblem, t: float) -> Float[Tensor, "r r"]:
    r""":math:`n^2 M_t \Gamma_0 M_t`, the squared test transfer on the singular directions.

    >>> from poprisk.theory import frozen_problem
    >>> transfer_operator(frozen_problem(torch.eye(1), torch.tensor([[3.0]])), float("inf"))
    tensor([[9.]])
    """
    reached = problem.test_map * gradient_flow_filter(problem, t)
    return problem.num_examples**2 * reached.T @ reached


def transfer_mass(problem: FrozenProblem, times: Sequence[float]) -> Float[Tensor, "times r"]:
    r"""The mass of each singular direction, the diagonal of :math:`n^2 M_t \Gamma_0 M_t`; a row adds up to its trace.

    >>> from poprisk.theory import frozen_problem
    >>> transfer_mass(frozen_problem(torch.eye(1), torch.tensor([[3.0]])), [0.0, float("inf")])
    tensor([[0.],
            [9.]])
    """
    seen = problem.test_map.square().sum(dim=0)
    rows = [gradient_flow_filter(problem, t).square() * seen for t in times]
    return problem.num_examples**2 * torch.stack(rows)


def transfer_spectra(problem: FrozenProblem, times: Sequence[float]) -> Float[Tensor, "times k"]:
    r"""The eigenvalues of :math:`n^2 M_t \Gamma_0 M_t` at each time, largest first.

    >>> from poprisk.theory import frozen_problem
    >>> transfer_spectra(frozen_problem(torch.eye(1), torch.tensor([[3.0]])), [float("inf")])
    tensor([[9.]])
    """
    rows = [torch.linalg.svdvals(problem.test_map * gradient_flow_filter(problem, t)).square() for t in times]
    return problem.num_examples**2 * torch.stack(rows)


def mobility_groups(problem: FrozenProblem, edges: Sequence[float]) -> Int[Tensor, "r"]:
    """The group of each singular direction by its mobility σ²: 0 above the first edge, 1 above the second, and so on.

    Args:
        problem: The problem.
        edges: Mobilities, descending.

    Raises:
        DataError: edges that do not descend.

    >>> from poprisk.theory import frozen_problem
    >>> mobility_groups(frozen_problem(torch.diag(torch.tensor([9.0, 1.0])), torch.ones(1, 2)), [4.0])
    tensor([0, 1])
    """
    if any(b >= a for a, b in pairwise(edges)):
        raise DataError(f"edges of mobility must descend, got {list(edges)}")
    limits = problem.roots.new_tensor(list(edges))
    return (problem.mobility[:, None] <= limits).sum(dim=1)


def grouped_mass(
    problem: FrozenProblem, times: Sequence[float], groups: Int[Tensor, "r"]
) -> Float[Tensor, "times groups"]:
    """The transfer mass by group of directions; the columns add up to the whole.

    >>> from poprisk.theory import frozen_problem
    >>> problem = frozen_problem(torch.eye(2), torch.tensor([[1.0, 2.0]]))
    >>> grouped_mass(problem, [float("inf")], torch.tensor([0, 0]))
    tensor([[20.]])
    """
    if tuple(groups.shape) != (problem.rank,):
        raise DataError(f"groups must name one group for each of {problem.rank} directions, got {list(groups.shape)}")
    mass = transfer_mass(problem, times)
    return mass.new_zeros(len(times), int(groups.max()) + 1).index_add_(1, groups, mass)


def frozen_visibility(problem: FrozenProblem, t: float) -> Float[Tensor, "r r"]:
    r""":math:`\Gamma_Q(0, t) = W^{\dagger/2} G^\top G W^{\dagger/2}` of the frozen kernel, on the singular directions.

    .. math:: \Gamma_Q = 2n\, B_t \Gamma_0 B_t, \qquad
       B_t = \frac{1 - e^{-x}}{\sqrt{1 - e^{-2x}}}, \quad x = t\Sigma^2/n

    Differs from the paper, which calls :math:`\Gamma_0` the frozen limit of :math:`\Gamma_Q`: as t → ∞ it is
    :math:`2n\,\Gamma_0`.

    >>> from poprisk.theory import frozen_problem
    >>> frozen_visibility(frozen_problem(torch.eye(1), torch.tensor([[3.0]])), float("inf"))
    tensor([[18.]])
    """
    x = problem.mobility * (t / problem.num_examples)
    # (1 - e^{-x})/√(1 - e^{-2x}) = √tanh(x/2), which needs no limit at 0.
    seen = problem.test_map * torch.tanh(x / 2).sqrt()
    return 2 * problem.num_examples * seen.T @ seen
