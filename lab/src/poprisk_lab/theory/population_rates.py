r"""The rate at which each step lowered population risk, estimated from the gradients of its batch alone."""

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

    A positive rate is about how much this step lowers the loss of a fresh batch (learning rate inside M). At zero or
    below, the step only fits its own examples. The preconditioner of step k depends on batch k and looks good on it
    even for pure noise; that of step k - 1 has not seen the batch. In later epochs the weights have seen it, so that
    the rate is optimistic again (the paper's multi-epoch caveat).

    Args:
        run: A recorded run with its problem.
        steps: The steps, from 1 on; default: all. Step 0 has no step before it.
        lagged: False evaluates each preconditioner on its own batch, for comparison.
        dtype: Precision of the gradients; default: that of the run.

    Raises:
        DataError: a step outside the run, or a batch of one example.
        RunError: no exact analysis of the run is possible.

    >>> from poprisk.runs import Problem, train
    >>> x = torch.linspace(-1, 1, 8)[:, None]
    >>> problem = Problem(torch.nn.Linear, "squared", x, 3 * x, arguments={"in_features": 1, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.1), steps=6, batch_size=4, progress=False)
    >>> bool(population_rates(run).mean() > 0)
    True
    """
    run.require_exact()
    if run.augmented:
        raise RunError("the inputs of this run were augmented, so that its batches are unknown: train without augment")
    first = 1 if lagged else 0
    chosen = range(first, run.num_steps) if steps is None else list(steps)
    if any(not first <= k < run.num_steps for k in chosen):
        raise DataError(f"steps must lie in {first} … {run.num_steps - 1}, got {list(chosen)}")
    model = run.model(dtype)
    inputs, targets = run.problem.batch(dtype=model.weights.dtype)
    rates = []
    for k in chosen:
        rows = run.batch(k).to(targets.device)
        w = run.weights(k).to(model.weights)
        g = model.per_example_gradients(w, take_examples(inputs, rows), targets[rows])
        rates.append(population_rate(g, run.step(k - 1 if lagged else k).preconditioner.to(w)))
    return torch.stack(rates) if rates else model.weights.new_zeros(0)
