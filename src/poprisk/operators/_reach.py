r"""How far one gradient reaches through the momentum: the preconditioners :math:`\tilde M_j` of the dissipation.

A gradient goes on acting after its own step, so its preconditioner is the sum of all it will have been multiplied with:

.. math:: \tilde M_j = \kappa_j N_j + b_j M_j, \qquad N_j = a_j M_j + \beta_{j+1} N_{j+1}

With :math:`M_j` in its place the reservoir would be seen at test: a gate closed at the step of a gradient does not stop
it from acting at the next one.
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from poprisk.runs import AffineStep


def effective_preconditioners(steps: Sequence[AffineStep]) -> list[Float[Tensor, "d"]]:
    r""":math:`\tilde M_j` of each step of a window, by one backward pass.

    >>> import torch
    >>> half = {"batch": torch.tensor([0]), "selection": torch.ones(1), "momentum": 0.5, "new_gradient": 0.5}
    >>> closed, opened = (AffineStep(preconditioner=M, **half) for M in (torch.zeros(1), torch.ones(1)))
    >>> effective_preconditioners([closed, opened])  # the first gradient acts at the second step
    [tensor([0.2500]), tensor([0.5000])]
    """
    reversed_result: list[Tensor] = []
    later: Tensor | None = None
    for step in reversed(steps):
        N = step.buffer_share * step.preconditioner
        if later is not None:
            N = N + later
        reversed_result.append(step.new_gradient * N + step.direct_share * step.preconditioner)
        later = step.momentum * N
    return reversed_result[::-1]
