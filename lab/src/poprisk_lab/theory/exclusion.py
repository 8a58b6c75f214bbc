r"""What leaving out one example is predicted to change: its own prediction, and the last weights."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.autodiff import slices
from poprisk.risk import Unrolled, exclusion
from poprisk.risk._exclusion import ExclusionMethod
from poprisk.risk._influence.exclusion_sweep import ExclusionSweep
from poprisk.risk._influence.sensitivity import as_unrolled
from poprisk.runs import Run


def exclusion_displacement(
    run: Run | Unrolled, examples: int | Int[Tensor, "m"] | None = None, *, method: ExclusionMethod = "linearized"
) -> Float[Tensor, "m p"]:
    r"""The predicted :math:`\Delta_i^{ex} = U_{Q_i}^{S_{-i}}(T) - U_{Q_i}^S(T)` of each example, training nothing.

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        examples: Indices of the examples, or a number of them to draw at random; default: all.
        method: How it is predicted; see :func:`exclusion`.

    >>> from poprisk import Problem, train
    >>> y = torch.tensor([[0.0], [0.0], [3.0]])
    >>> problem = Problem(torch.nn.Linear, "squared", torch.ones(3, 1), y,
    ...                   arguments={"in_features": 1, "out_features": 1, "bias": False})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.5), steps=60, progress=False)
    >>> exclusion_displacement(run).squeeze(1).round(decimals=3)  # from the mean of three to that of the two others
    tensor([ 0.5000,  0.5000, -1.0000])
    """
    return exclusion(run, examples, method=method).displacement


def excluded_weights(
    run: Run | Unrolled, examples: Int[Tensor, "m"], *, mass_preserving: bool = True
) -> Float[Tensor, "d m"]:
    r"""The predicted change of the last weights when each example, alone, is left out of the run.

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        examples: Indices of the examples.
        mass_preserving: Whether the weights of the others grow by n/(n - 1), as in a mean over n - 1 examples.
    """
    unrolled = as_unrolled(run)
    parts = []
    for rows in slices(len(examples), unrolled.columns_at_a_time()):
        sweep = ExclusionSweep(unrolled, examples[rows], mass_preserving=mass_preserving)
        parts.append(sweep.at(unrolled.stop))
    return torch.cat(parts).T
