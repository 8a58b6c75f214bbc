r"""How fast each step lowered population risk, from the gradients of its batch: a signal that needs no other data."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import take_examples
from poprisk.errors import DataError, RunError
from poprisk.optim import population_rate
from poprisk.runs import Run


def population_rates(
    run: Run, steps: Sequence[int] | None = None, *, lagged: bool = True, dtype: torch.dtype | None = None
) -> Float[Tensor, "steps"]:
    r"""The population-risk rate :math:`\Omega_{B_k}(M)` of a run's batches, each with the gate of the step before.

    .. math:: \Omega_{B_k}(M_{k-1}) = \bar g_k^\top M_{k-1} \bar g_k - \operatorname{tr}(M_{k-1} \Sigma_k)/(b-1)

    Positive: a fresh batch would have lost about as much by this step (learning rate inside M). Around zero or below:
    what the step did to its own batch, it did by fitting these examples. The preconditioner of step k was decided with
    batch k in hand, and scored on it looks good on pure noise; the one of step k - 1 has not seen the batch. In later
    epochs the weights have: there the rate is optimistic again (the paper's multi-epoch caveat).

    Args:
        run: With its problem.
        steps: Which ones, from 1 on; default: all. At step 0 there is no step before.
        lagged: False scores each preconditioner on its own batch, to see the difference.
        dtype: Of the gradients; default: the run's.

    Raises:
        DataError: a step outside the run, or a batch of one example.
        RunError: no exact analysis of the run is possible.

    >>> from poprisk.runs import Problem
    >>> from poprisk.runs import train
    >>> x = torch.linspace(-1, 1, 8)[:, None]
    >>> problem = Problem(torch.nn.Linear, "squared", x, 3 * x, arguments={"in_features": 1, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.1), steps=6, batch_size=4, progress=False)
    >>> bool(population_rates(run).mean() > 0)
    True
    """
    run.require_exact()
    if run.augmented:
        raise RunError("inputs of this run were augmented: its batches are not the problem's examples as they are")
    first = 1 if lagged else 0
    chosen = range(first, run.num_steps) if steps is None else list(steps)
    if any(not first <= k < run.num_steps for k in chosen):
        raise DataError(f"the rates are those of steps {first} … {run.num_steps - 1}, got {list(chosen)}")
    model = run.model(dtype)
    inputs, targets = run.problem.batch(dtype=model.weights.dtype)
    rates = []
    for k in chosen:
        rows = run.batch(k).to(targets.device)
        w = run.weights(k).to(model.weights)
        g = model.per_example_gradients(w, take_examples(inputs, rows), targets[rows])
        rates.append(population_rate(g, run.step(k - 1 if lagged else k).preconditioner.to(w)))
    return torch.stack(rates) if rates else model.weights.new_zeros(0)
