r"""Population risk from one run: which estimator to use, within which budget.

``"exclusion"`` follows the run without each of some examples, linearized; ``"first_order"`` is the paper's L_pop, the
training loss plus tr(J C_n)/(n - 1). Both train nothing. The first order fails at interpolation, where every derivative
by an example's weight vanishes with its residual. Exclusion holds until the run is too chaotic to be linearized.
``"k_fold"`` takes K trainings, of a run that can be trained again with other example weights.
:mod:`poprisk.risk._verdict` says when each of them is valid.
"""

from dataclasses import replace
from typing import Literal, get_args

from jaxtyping import Int
from torch import Tensor

from poprisk.errors import HyperparameterError, RunError
from poprisk.risk._exclusion import MOST_EXAMPLES, choose_examples, exclusion_risk
from poprisk.risk._first_order import first_order_risk
from poprisk.risk._influence.sensitivity import Unrolled, as_unrolled
from poprisk.risk._k_fold import k_fold_curve
from poprisk.risk._verdict import FEWEST_FOLDS, FOLDS, RiskEstimate
from poprisk.runs import Run

RiskMethod = Literal["auto", "exclusion", "first_order", "k_fold"]


def population_risk(
    run: Run | Unrolled,
    method: RiskMethod = "auto",
    retrain_budget: int = 0,
    *,
    examples: int | Int[Tensor, "m"] | None = None,
    seed: int = 0,
) -> RiskEstimate:
    r"""Population risk: the expected loss of a trained model on new data from the same source, from its training run.

    Args:
        run: A recorded run with its problem; or an :class:`Unrolled` of it, to stop earlier or in another precision.
        method: "exclusion", "first_order" or "k_fold". "auto" uses exclusion where it is valid, else K-fold where the
            budget allows it, else returns exclusion marked as not valid.
        retrain_budget: Number of trainings allowed; 0 trains nothing.
        examples: Indices of the examples used by exclusion and first order, or a number of them to draw at random;
            default: all, up to 256.
        seed: Seed for the random draw and for the folds.

    Returns:
        Value, standard error, verdict, reason, target and cost. The standard error is that of the estimate as the risk
        of this model. A sample of n examples cannot show mistakes rarer than 1 in n: where targets are classes, one
        unseen mistake is part of the error.

    Raises:
        RunError: the run allows no exact analysis.
        DataError: fewer than 3 examples.
        HyperparameterError: an unknown method, or one that needs a larger budget.

    >>> import torch
    >>> from poprisk import Problem, train
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(60, 3, generator=generator)
    >>> y = x[:, :1] + 0.5 * torch.randn(60, 1, generator=generator)
    >>> problem = Problem(torch.nn.Linear, "squared", x, y, arguments={"in_features": 3, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.1), steps=50, progress=False)
    >>> risk = population_risk(run)
    >>> risk.method, risk.valid, risk.value > risk.training_loss, risk.target
    ('exclusion', True, True, 'a model trained on 59 of the 60 examples')
    """
    _check(method, retrain_budget)
    if method == "k_fold":
        if retrain_budget < FEWEST_FOLDS:
            raise HyperparameterError(
                f"k_fold trains at least {FEWEST_FOLDS} times, got retrain_budget={retrain_budget}: allow {FOLDS}"
            )
        return _k_fold(run, retrain_budget, seed)
    try:
        unrolled = _whole(as_unrolled(run))
    except RunError as error:
        if method != "auto" or retrain_budget < FEWEST_FOLDS or isinstance(run, Unrolled):
            raise
        return _k_fold(run, retrain_budget, seed, because=str(error))  # e.g. augmented: it can be retrained
    chosen = choose_examples(unrolled.num_examples, examples, seed, most=MOST_EXAMPLES)
    if method == "first_order":
        return first_order_risk(unrolled, examples=chosen)
    found = exclusion_risk(unrolled, chosen)
    if method == "exclusion" or found.valid or retrain_budget < FEWEST_FOLDS:
        return found
    return _k_fold(run, retrain_budget, seed)


def _whole(unrolled: Unrolled) -> Unrolled:
    """Refuse a run that is differentiated only in part."""
    if unrolled.start != 0 or unrolled.gate == "frozen":
        raise RunError(
            f"population risk needs the whole run with its gate differentiated, got start={unrolled.start} and "
            f"gate={unrolled.gate!r}: pass the run itself, or Unrolled(run, stop=…)"
        )
    return unrolled


def _k_fold(run: Run | Unrolled, budget: int, seed: int, because: str = "") -> RiskEstimate:
    recorded, stop = (run.run, run.stop) if isinstance(run, Unrolled) else (run, run.num_steps)
    found = k_fold_curve(recorded, [stop], min(FOLDS, budget, recorded.num_examples), seed=seed)[0]
    return replace(found, reason=f"{found.reason}; exclusion is not possible: {because}") if because else found


def _check(method: str, budget: int) -> None:
    if method not in get_args(RiskMethod):
        raise HyperparameterError(f"method must be one of {', '.join(get_args(RiskMethod))}, got {method!r}")
    if not isinstance(budget, int) or budget < 0:
        raise HyperparameterError(f"retrain_budget must be a number of trainings, 0 or more, got {budget!r}")
