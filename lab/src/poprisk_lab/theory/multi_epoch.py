r"""What replaying examples does to the one-step leave-one-out risk: the residual of multi-epoch training.

The one-step leave-one-out risk of a batch is the population risk of the step in the mean, if the batch is independent
of the weights. A batch that was trained on before is not; what is then missing is measured against fresh examples.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, take_examples
from poprisk._core.estimate import Estimate
from poprisk._core.linalg import Preconditioner
from poprisk._core.types import Scalar
from poprisk.errors import DataError
from poprisk.optim import one_step_loo_risk

Examples = tuple[Inputs, Tensor]
"""Inputs and targets."""


def multi_epoch_residual(
    model: FlatModel,
    w: Float[Tensor, "d"],
    replayed: Examples,
    fresh: Examples,
    M: Preconditioner,
    lr: Scalar,
    *,
    batch_size: int,
    generator: torch.Generator | None = None,
) -> Estimate:
    r"""How far the one-step leave-one-out risk of replayed batches is from the truth.

    .. math:: r_t = \mathbb E[R^\eta_{1ex, B_t} \mid \mathcal F_t] - R^\eta_{fresh}(w_t, P_t), \qquad
       R^\eta_{1ex, B} = \tfrac1b \sum_a \ell_a(w_{-a}^+), \quad w_{-a}^+ = w - \eta M \bar g_{-a}

    (appendix, "Multi-epoch caveat", on Thm. ``kernel_increment``). Both sides are means of the same quantity
    (:func:`poprisk.optim._estimators.one_step_loo_risk`, actual steps on b - 1 examples) over disjoint random batches:
    batches of the examples that the next batch is drawn from, and batches of examples that were never trained on, where
    it is unbiased for the fresh-boundary risk. A negative residual means optimism: replayed examples are predicted too
    well.

    The residual vanishes in the first epoch, where what the next batch is drawn from,
    :func:`poprisk.operators.remaining_examples`, is fresh itself.

    Args:
        model: Network and loss as functions of flat weights.
        w: Weights before the step, :math:`w_t`.
        replayed: The examples that the next batch is drawn from: the training set at the start of an epoch.
        fresh: Examples of the population that w does not depend on.
        M: Preconditioner of the step, fixed before the batch is drawn; for Adam and gates, that of the previous step.
        lr: Learning rate η; 1 if M contains it.
        batch_size: Batch size b, at least 2.
        generator: Generator for the batches; by default one with a fixed seed.

    Returns:
        The residual; its error is that of the two means over batches. Not valid if there are fewer than two batches of
        either kind.

    Raises:
        DataError: fewer than b examples of either kind, b < 2, or inputs and targets of different lengths.

    Differs from the paper: the bound :math:`|r_t| \le 2M\,TV(P_{B_t \mid F_t}, \mathcal D^b)` has no counterpart here.
    Once every example has been seen, the law of a replayed batch sits on finitely many points: for data with a density
    the total variation is 1, and the bound says no more than that a risk below M is below M.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False), "squared")
    >>> w, ones, zeros = torch.ones(1), torch.ones(8, 1), torch.zeros(8, 1)
    >>> print(multi_epoch_residual(model, w, (ones, ones), (ones, zeros), 1.0, 0.0, batch_size=2))  # 0 against 1/2
    -0.5 ± 0 (valid)
    """
    generator = generator or torch.Generator().manual_seed(0)
    risks = []
    for kind, examples in (("replayed", replayed), ("fresh", fresh)):
        _check(kind, examples, batch_size)
        risks.append(_batch_risks(model, w, examples, M, lr, batch_size, generator))
    value = (risks[0].mean() - risks[1].mean()).item()
    cost = sum(len(r) for r in risks)
    fewest = min(len(r) for r in risks)
    if fewest < 2:
        reason = f"{fewest} batch of a kind has no spread: give at least {2 * batch_size} examples of each"
        return Estimate(value, math.nan, valid=False, reason=reason, cost=cost)
    error = math.sqrt(sum(r.var().item() / len(r) for r in risks))
    return Estimate(value, error, cost=cost)


def _batch_risks(
    model: FlatModel,
    w: Tensor,
    examples: Examples,
    M: Preconditioner,
    lr: Scalar,
    batch_size: int,
    generator: torch.Generator,
) -> Float[Tensor, "batches"]:
    inputs, targets = examples
    count = targets.shape[0] // batch_size
    order = torch.randperm(targets.shape[0], generator=generator)[: count * batch_size].to(targets.device)
    batches = order.view(count, batch_size)
    risks = [one_step_loo_risk(model, w, take_examples(inputs, rows), targets[rows], M, lr) for rows in batches]
    return torch.stack(risks).double()


def _check(kind: str, examples: Examples, batch_size: int) -> None:
    inputs, targets = examples
    lengths = {part.shape[0] for part in (inputs if isinstance(inputs, tuple) else (inputs,))} | {targets.shape[0]}
    if len(lengths) != 1:
        raise DataError(f"{kind} inputs and targets must have the same number of examples, got {sorted(lengths)}")
    if batch_size < 2 or targets.shape[0] < batch_size:
        raise DataError(
            f"a residual needs batches of at least 2 and at least one of them, got batch_size={batch_size} and "
            f"{targets.shape[0]} {kind} examples"
        )
