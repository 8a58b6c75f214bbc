r"""Population risk from one run: which estimator, whose risk, how far to trust it, and what it cost.

===================== ============================== ================================ ================================
method                what it does                   target                           believed while
===================== ============================== ================================ ================================
``"exclusion"``       the run without each sampled   a learner on n - 1 points        tangent and network agree on the
                      example, linearized                                             risk to a tenth
``"first_order"``     training loss + tr(J C_n)/     this model                       exclusion is believed, and agrees
                      (n - 1), the paper's L_pop                                      with it to a tenth
``"k_fold"``          K stacked trainings            a learner on n(1 - 1/K) points   no training diverged
===================== ============================== ================================ ================================

The first two train nothing. The first order dies at interpolation (every derivative by an example's weight is
proportional to its residual); exclusion goes further, until the run has become too chaotic to be linearized; K-fold
costs K trainings and needs a run that can be trained again with other example weights.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from poprisk._core.autodiff import take_examples
from poprisk._core.estimate import Estimate
from poprisk.errors import HyperparameterError, RunError
from poprisk.risk._examples import choose_examples
from poprisk.risk._fold_error import FEWEST
from poprisk.risk._influence.exclusion_sweep import ExcludedOutputs, excluded_outputs
from poprisk.risk._influence.sensitivity import Unrolled, as_unrolled
from poprisk.risk._risk_error import corrected_risk_error, example_losses_of, unseen_mistake
from poprisk.runs import Run

RiskMethod = Literal["auto", "exclusion", "first_order", "k_fold"]

FOLDS = 10
"""Folds of "k_fold" where the budget allows as many."""
FEWEST_FOLDS = 3
MOST_EXAMPLES = 256
"""Examples that exclusion and first order look at, where there are more."""
_AGREEMENT = 0.1
"""How far two predictions of one risk may differ, as a share of it."""
_LOST = 0.05
"""The share of examples whose two predictions may differ by more than their size: beyond it the run is chaotic."""
_PRECISION = 0.07
"""First order has no error of its own for what it leaves out, so its sampling error must be small: three of it, 20%."""


@dataclass(frozen=True, eq=False)
class RiskEstimate(Estimate):
    """An estimate of population risk that says whose risk it is.

    ``cost`` is in trainings for "k_fold", in directions through the run (each about two trainings' arithmetic, all of
    them together one replay) for the others.
    """

    target: str = ""
    """Whose risk: "this model", or a learner on fewer points."""
    method: str = ""
    training_loss: float = math.nan
    """The mean training loss at the same weights."""

    @property
    def gap(self) -> float:
        """Estimated population risk minus training loss."""
        return float(self.value) - self.training_loss


def population_risk(
    run: Run | Unrolled,
    method: RiskMethod = "auto",
    retrain_budget: int = 0,
    *,
    examples: int | Int[Tensor, "m"] | None = None,
    seed: int = 0,
) -> RiskEstimate:
    r"""The risk of a trained model on new data from the same source, from its training run alone.

    Args:
        run: A recorded run with its problem; or one made differentiable, to stop earlier or in another precision.
        method: "auto" takes exclusion where it may be believed, else K-fold where the budget allows it, else returns
            exclusion marked as not valid, with the price of K-fold.
        retrain_budget: How many trainings may be spent. 0: nothing is ever trained.
        examples: Which examples exclusion and first order look at, or how many (drawn at random); default: all up to
            256.
        seed: Of the draw, and of the folds.

    Returns:
        Value, standard error, verdict, reason, target and cost. The error is of the estimate against the risk of this
        model, as far as it can be told; no sample of n knows of mistakes rarer than 1 in n, and for classification one
        unseen mistake is part of the error.

    Raises:
        RunError: the run allows no exact analysis.
        DataError: fewer than 3 examples.
        HyperparameterError: an unknown method, or one whose price is beyond the budget.

    >>> from poprisk.runs import Problem
    >>> from poprisk.runs import train
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(60, 3, generator=generator)
    >>> y = x[:, :1] + 0.5 * torch.randn(60, 1, generator=generator)
    >>> problem = Problem(torch.nn.Linear, "squared", x, y, arguments={"in_features": 3, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.1), steps=50, progress=False)
    >>> risk = population_risk(run)
    >>> risk.method, risk.valid, risk.value > risk.training_loss, risk.target
    ('exclusion', True, True, 'a learner on 59 of 60 points')
    """
    _check(method, retrain_budget)
    if method == "k_fold":
        if retrain_budget < FEWEST_FOLDS:
            raise HyperparameterError(
                f"k_fold trains at least {FEWEST_FOLDS} times, retrain_budget={retrain_budget}: allow {FOLDS}"
            )
        return _k_fold(run, retrain_budget, seed)
    try:
        unrolled = _whole(as_unrolled(run))
    except RunError as error:
        if method != "auto" or retrain_budget < FEWEST_FOLDS or isinstance(run, Unrolled):
            raise
        return _k_fold(run, retrain_budget, seed, because=str(error))  # e.g. augmented: it can still be trained again
    chosen = choose_examples(unrolled.num_examples, examples, seed, most=MOST_EXAMPLES)
    excluded = excluded_outputs(unrolled, chosen)
    found = exclusion_reading(unrolled, excluded, unrolled.stop)
    if method == "first_order":
        return first_order_reading(unrolled, chosen, reference=found)
    if method == "exclusion" or found.valid:
        return found
    if retrain_budget >= FEWEST_FOLDS:
        return _k_fold(run, retrain_budget, seed)
    return with_price(found, unrolled.num_examples)


def exclusion_reading(unrolled: Unrolled, excluded: ExcludedOutputs, k: int) -> RiskEstimate:
    r"""Leave-one-out risk at the weights before step k, by linearized exclusion of the sampled examples.

    .. math:: \frac1n \sum_i \ell_i(u_i) + \frac1m \sum_{i \in M} \bigl(\ell_i(u_i + \Delta_i) - \ell_i(u_i)\bigr)

    The displacement is taken along the tangent, and again by the network itself: where the two disagree on the risk by
    more than a tenth, or by the whole displacement for more than 1 example in 20, the run has moved too far to be
    linearized, and neither is believed.

    Args:
        unrolled: The run, made differentiable.
        excluded: Some of its examples' outputs with and without them, at the weights before step k.
        k: The step.
    """
    model, targets = unrolled.model, unrolled.targets[excluded.examples]

    def losses(outputs: Tensor) -> Tensor:
        return example_losses_of(model.loss, excluded.shaped(outputs), targets)

    own = losses(excluded.outputs)
    along, itself = (losses(excluded.outputs + du) for du in (excluded.tangent, excluded.displaced))
    everyone = model.per_example_losses(unrolled.weights(k), unrolled.inputs, unrolled.targets).double()
    training = everyone.mean().item()
    value, other = (training + (x - own).mean().item() for x in (along, itself))
    n, m = unrolled.num_examples, len(own)
    mistake = unseen_mistake(model.loss, excluded.shaped(excluded.outputs + excluded.tangent), targets, n)
    error = corrected_risk_error(everyone, own, along, mistake)
    about = {
        "target": f"a learner on {n - 1} of {n} points",
        "method": "exclusion",
        "training_loss": training,
        "cost": float(m),
    }
    if m < FEWEST:
        reason = f"{m} examples are too few to tell a standard error, {FEWEST} are needed"
        return RiskEstimate(value, error, False, reason, **about)
    if not (math.isfinite(value) and math.isfinite(error) and math.isfinite(other)):
        return RiskEstimate(value, math.nan, False, "excluded losses are not finite: the run is chaotic", **about)
    apart = abs(value - other) / max(abs(value), torch.finfo(torch.float64).tiny)
    lost = (excluded.bend > 1).double().mean().item()
    if apart > _AGREEMENT or lost > _LOST:
        reason = (
            f"tangent and network disagree on the risk by {100 * apart:.0f}%, and altogether on {100 * lost:.0f}% of "
            "the examples: the run cannot be linearized so far"
        )
        return RiskEstimate(value, error, False, reason, **about)
    reason = "; ".join(filter(None, (f"tangent and network agree on the risk to {100 * apart:.1f}%", unrolled.note)))
    return RiskEstimate(value, error, True, reason, **about)


def first_order_reading(
    unrolled: Unrolled, examples: Int[Tensor, "m"], *, reference: RiskEstimate | None = None
) -> RiskEstimate:
    r"""The paper's :math:`\mathcal L_{pop} = \hat L_S + \operatorname{tr}(\mathsf J C_n)/(n-1)` from sampled examples.

    Believed where exclusion, which keeps what first order leaves out, is believed and agrees with it to a tenth, and
    where its sampling error is below 7% of it.

    Args:
        unrolled: The run, made differentiable, up to the moment in question.
        examples: Which examples to look at.
        reference: The risk by exclusion of the same examples, where it is known already.
    """
    n, m, model, w = unrolled.num_examples, len(examples), unrolled.model, unrolled.last_weights
    x, y = take_examples(unrolled.inputs, examples), unrolled.targets[examples]
    found = unrolled.adjoint(model.per_example_gradients(w, x, y).T).weights
    assert found is not None
    own = -found[torch.arange(m), examples] + found.mean(1)
    with_it = model.per_example_losses(w, x, y).double()
    all_losses = model.per_example_losses(w, unrolled.inputs, unrolled.targets).double()
    training = all_losses.mean().item()
    predicted = with_it + own.double() * (n / (n - 1))
    value = training + (predicted - with_it).mean().item()
    if reference is None:
        reference = exclusion_reading(unrolled, excluded_outputs(unrolled, examples), unrolled.stop)
    error = float(reference.standard_error)
    about = {"target": "this model", "method": "first_order", "training_loss": training, "cost": 2.0 * m}
    if not reference.valid:
        spread = predicted.std().item() / math.sqrt(n) if m > 1 else math.nan
        return RiskEstimate(value, spread, False, f"cannot be checked: {reference.reason}", **about)
    apart = abs(value - float(reference.value)) / max(abs(float(reference.value)), torch.finfo(torch.float64).tiny)
    if apart > _AGREEMENT:
        reason = f"{100 * apart:.0f}% off the risk by exclusion, which keeps higher orders"
        return RiskEstimate(value, error, False, reason, **about)
    if error > _PRECISION * abs(value):
        reason = f"its sampling error is {100 * error / abs(value):.0f}% of it, more than {100 * _PRECISION:.0f}%"
        return RiskEstimate(value, error, False, reason, **about)
    return RiskEstimate(value, error, True, f"within {100 * apart:.1f}% of the risk by exclusion", **about)


def with_price(found: RiskEstimate, n: int) -> RiskEstimate:
    """The same verdict, with what it would take to know."""
    K = min(FOLDS, n)
    price = f"{found.reason}; {K}-fold would tell, for {K} trainings: retrain_budget={K}"
    kept = {name: getattr(found, name) for name in ("target", "method", "training_loss", "cost")}
    return RiskEstimate(found.value, found.standard_error, False, price, **kept)


def _whole(unrolled: Unrolled) -> Unrolled:
    """Refuses a run that is differentiated only in part: the risk of that would be nobody's."""
    if unrolled.start != 0 or unrolled.gate == "frozen":
        raise RunError(
            f"population risk needs the whole run with its gate differentiated, got start={unrolled.start} and "
            f"gate={unrolled.gate!r}: pass the run itself, or Unrolled(run, stop=…)"
        )
    return unrolled


def _k_fold(run: Run | Unrolled, budget: int, seed: int, because: str = "") -> RiskEstimate:
    from poprisk.risk._meter import k_fold_curve

    recorded, stop = (run.run, run.stop) if isinstance(run, Unrolled) else (run, run.num_steps)
    found = k_fold_curve(recorded, [stop], min(FOLDS, budget, recorded.num_examples), seed=seed)[0]
    return replace(found, reason=f"{found.reason}; no exclusion: {because}") if because else found


def _check(method: str, budget: int) -> None:
    if method not in get_args(RiskMethod):
        raise HyperparameterError(f"method must be one of {', '.join(get_args(RiskMethod))}, got {method!r}")
    if not isinstance(budget, int) or budget < 0:
        raise HyperparameterError(f"retrain_budget must be a whole number of trainings, 0 or more, got {budget!r}")
