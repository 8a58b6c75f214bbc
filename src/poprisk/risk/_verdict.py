r"""When an estimate of population risk is valid: every limit and every "not valid" sentence, once.

===================== ========================================= ===================================================
method                risk of                                   valid while
===================== ========================================= ===================================================
``"held_back"``       the kept weights, or those of the last    10 examples were held back
                      step
``"exclusion"``       a model trained on n - 1 examples         16 or more real deletions, which correct the
                                                                predicted ones, leave it uncertain by at most 20%;
                                                                where the run is smooth, the jackknife variance of
                                                                predictions at new inputs is at most 1.5 times the
                                                                risk; and a quarter of the inputs are different
``"leverage"``        a model trained on n - 1 examples         with real deletions: as for exclusion; without: its
                                                                error, with half of what it adds to the training loss
                                                                (all of it where a gate closes), is at most 40% of it;
                                                                two of its forms differ by at most 30%; no inputs were
                                                                augmented, and no gate is hard and literal; a quarter
                                                                of the inputs are different
``"first_order"``     this model                                exclusion is valid and differs by at most 10%, and
                                                                the standard error is at most 7% of the risk
``"k_fold"`` and      a model trained on the examples kept      no training diverged, and at most 5% of the held-out
other retraining                                                inputs were also trained on; for K-fold, the fold
                                                                models fit their own examples as well, to 25% of the
                                                                risk, and they are like the run's model, or half of
                                                                the risk is in the training loss: the other half is
                                                                then part of the error
===================== ========================================= ===================================================

All of them need 10 examples, finite numbers, and a standard error that is at most as large as the risk, or half as
large as the loss before training. A reason says what was measured, the limit, and what to do.
To add a check, add its limit and its sentence here, and call it from the method's function below.
"""

import math
from dataclasses import dataclass, replace

from poprisk._core.estimate import Estimate
from poprisk.optim import KeptRisk
from poprisk.risk._fold_checks import FoldChecks

FOLDS = 10
"""Number of folds of K-fold, if the budget allows it."""
FEWEST_FOLDS = 3
"""Smallest number of folds, and smallest budget of trainings, for K-fold."""
FEWEST_EXAMPLES = 10
"""Smallest number of examples whose losses give a standard error."""
LARGEST_DISAGREEMENT = 0.1
"""Largest difference between two estimates of a risk, as a share of it."""
DOUBTFUL_BEND = 0.25
"""Relative difference between actual and linearized displacement beyond which an example's prediction is doubtful."""
DOUBTFUL_SENSITIVITY = 0.5
"""Sensitivity to an example's own label beyond which changing the label does not stand for removing the example."""
LARGEST_FOLD_DISTANCE = 1.0
"""Largest distance of the run's model from the fold models, relative to that between two fold models (about 0.7)."""
LARGEST_SIZE_RATIO = 1.2
"""Largest ratio, in either direction, of the standard deviations of the outputs of the run's model and fold models."""
LARGEST_HIDDEN = 0.5
"""Share of a risk by folds that is not in the training loss, beyond which fold models unlike the run's say nothing."""
LARGEST_LAG = 0.25
"""Largest difference between the losses of fold models and the run's model on kept examples, as a share of the risk."""
LARGEST_TWIN_SHARE = 0.05
"""Largest share of held-out examples whose inputs may have been trained on."""
FIRST_CONTROLS = 16
"""Number of real deletions that check exclusion at first."""
FEWEST_CONTROLS = 8
"""Smallest number of them that may be asked for."""
MOST_LEVERAGE_CONTROLS = 32
"""Largest number of them for leverage, which trains them one after another where it has to."""
ENOUGH_OF_ERROR = 0.3
"""Share of the standard error up to which the part of the controls does not ask for more of them."""
ENOUGH_OF_RISK = 0.05
"""The same as a share of the risk."""
LARGEST_CONTROL_ERROR = 0.2
"""Largest standard error from the choice of the controls, as a share of the risk."""
LARGEST_MOVED = 1.5
"""Largest jackknife variance of the predictions at new inputs, as a share of the risk."""
SMOOTH_BEND = 0.1
"""Median difference of actual and linearized displacement up to which the run is smooth enough for a jackknife."""
ROUGH_MOVED = 0.5
"""What stands for the jackknife variance, as a share of the risk, in the standard error of a run that is not smooth."""
FEWEST_DISTINCT = 0.25
"""Smallest number of different inputs, as a share of the examples."""
LARGEST_ERROR_SHARE = 0.07
"""Largest standard error of the first order, as a share of the risk; it does not cover the higher orders."""

LARGEST_ERROR, LARGEST_ERROR_OF_FIRST = 1.0, 0.5
"""Largest standard error of any estimate, as a share of the risk, or of the loss before training."""
LARGEST_LEVERAGE_ERROR = 0.4
"""Largest standard error of leverage, as a share of the risk."""
LARGEST_CORRECTION = 0.6
"""Largest share of the risk by leverage that is a correction of the training loss, for single predictions."""
LARGEST_LEVERAGE_GAP = 0.3
"""Largest difference between leverage along the run and by its end, as a share of the risk."""
LEVERAGE_ERROR, GATED_LEVERAGE_ERROR = 0.5, 1.0
"""Standard error of the correction by leverage, as a share of it, apart from sampling: two reach the training loss. The
second is for a gate that opens and closes, which may let more of a missing example through than leverage follows."""
LARGEST_ENOUGH = 0.1
"""Largest standard error of a held-back risk, as a share of it, beside which no folds are trained, if they may be."""
LARGEST_CONTRADICTION = 2.5
"""Standard errors by which another estimate may differ from the held-back risk of the same weights."""
LAST_WEIGHTS = "the weights at the last step"
"""Target of an estimate for the model of the last step."""

_BY_HAND = "Check some of the suspects by hand."
_RETRAIN_OR_BY_HAND = f"Use audit(run, retrain_budget=5). {_BY_HAND}"
LARGEST_TIED_SHARE = 0.5
"""Share of examples predicted as classes where two labels are about as frequent, beyond which nothing is counted."""
LEAST_AGREEMENT = 0.8
"""Share of examples that two kinds of models must predict alike for contradicted labels to be counted as wrong."""
BEYOND_LOW, BEYOND_HIGH = 0.1, 0.2
"""How far the number of wrong labels may lie beyond both ends of its range, as a share of the range."""
WIDEST_OF_ALL, WIDEST_OF_COUNT = 0.12, 0.6
"""Largest two standard errors of a count of wrong labels, as a share of all examples or of the count."""


@dataclass(frozen=True, eq=False)
class RiskEstimate(Estimate):
    """An estimate of population risk that says which model's risk it is.

    ``cost`` counts trainings for "k_fold" and other retraining, and directions through the run for "exclusion" and
    "first_order" (each about the arithmetic of two trainings; all of them take one replay).
    """

    target: str = ""
    """The model whose risk is estimated: "this model", the kept weights, or a model trained on fewer examples."""
    method: str = ""
    training_loss: float = math.nan
    """The mean training loss at the same weights."""

    @property
    def gap(self) -> float:
        """Estimated population risk minus training loss."""
        return float(self.value) - self.training_loss


@dataclass(frozen=True)
class Found:
    """The result of a method, before the verdict."""

    value: float
    error: float
    method: str
    target: str
    training_loss: float
    cost: float
    examples: int
    """Number of different examples that the value and its error are computed from."""
    of: int
    """Number of training examples."""
    notes: tuple[str, ...] = ()
    first_loss: float = math.nan
    """Loss before training; NaN if not known."""


@dataclass(frozen=True)
class Counted:
    """What out-of-sample predictions say about the number of wrong labels, before the verdict."""

    low: float
    """Contradicted labels at the rate of the most certain predictions."""
    high: int
    """All contradicted labels."""
    deviation: float
    """Standard deviation by chance, of both."""
    tied: float
    """How many more are wrong if, where two labels are about as frequent, the rarer one is right."""
    tied_share: float
    """Share of the examples in predicted classes where two labels are about as frequent."""


@dataclass(frozen=True)
class Checked:
    """What real deletions say about an exclusion."""

    controls: int
    """Number of deletions; 0 if nothing was checked."""
    change: float
    """By how much they change the risk."""
    error: float
    """The standard error that is left by their choice."""
    moved: float
    """Jackknife variance of the predictions at new inputs as a share of the risk, for smooth runs; else 0."""
    distinct: int
    """Number of different inputs among the training examples."""
    obstacle: str = ""
    """Why there are none."""


def trained_on(kept: int | tuple[int, int], n: int) -> str:
    """The target of an estimate.

    >>> trained_on(599, 600), trained_on((9, 10), 12)
    ('a model trained on 599 of the 600 examples', 'a model trained on 9 to 10 of the 12 examples')
    """
    low, high = (kept, kept) if isinstance(kept, int) else kept
    return f"a model trained on {low if low == high else f'{low} to {high}'} of the {n} examples"


def judge_kept(
    risk: KeptRisk, steps: int, training_loss: float, target: str = "", first_loss: float = math.nan
) -> RiskEstimate:
    """The estimate that ``KeepBest`` made, in the form of the others; its verdict stays, unless its error is large."""
    mean = "" if risk.tail is None else f", averaged over about the last {100 * risk.tail:.3g}% of the steps up to it"
    target = target or f"the kept weights, step {risk.step} of {steps}{mean}"
    wide = _too_wide(float(risk.value), float(risk.standard_error), first_loss) if risk.valid else ""
    reason = wide or (risk.reason if risk.valid else f"{risk.reason}. {_INSTEAD}")
    about = {"target": target, "method": "held_back", "training_loss": training_loss, "cost": risk.cost}
    return RiskEstimate(risk.value, risk.standard_error, risk.valid and not wide, reason, **about)


def judge_held_back(found: Found) -> RiskEstimate:
    """The verdict on the mean loss of held-back examples at weights that were not chosen by them."""
    few = f"{found.examples} held-back examples are too few for a standard error (limit {FEWEST_EXAMPLES})"
    reason = f"{few}. Hold more back." if found.examples < FEWEST_EXAMPLES else ""
    reason = reason or _not_finite(found, "the losses of the held-back examples are not finite")
    return _verdict(found, reason, f"{found.examples} examples that no step trained on")


def is_enough(held: RiskEstimate) -> bool:
    """Whether a held-back risk is so precise that no folds are trained."""
    return float(held.standard_error) <= LARGEST_ENOUGH * float(held.value)


def narrower(held: RiskEstimate, other: RiskEstimate) -> RiskEstimate:
    """The more precise of two valid estimates; the held-back one if it contradicts the other.

    Estimates from all examples include the held-back ones, so that there is nothing to gain from a mean of both.
    """
    apart = abs(float(held.value) - float(other.value))
    errors = apart / max(math.hypot(float(held.standard_error), float(other.standard_error)), math.ulp(0))
    size = f"{float(other.value):.3g} ± {float(other.standard_error):.2g}"
    if errors > LARGEST_CONTRADICTION:
        against = f"{other.method} gives {size}, which the held-back examples contradict"
        return replace(held, reason=f"{held.reason}; {against}")
    if float(other.standard_error) >= float(held.standard_error):
        return replace(held, reason=f"{held.reason}; {other.method} agrees: {size}")
    size = f"{float(held.value):.3g} ± {float(held.standard_error):.2g}"
    return replace(other, reason=f"{other.reason}; the held-back examples agree: {size}")


def judge_retraining(found: Found, checks: FoldChecks | None = None) -> RiskEstimate:
    """The verdict on a mean held-out loss."""
    checks = FoldChecks() if checks is None else checks
    reason = _too_few(found) or _not_finite(found, "a training without some of the examples diverged")
    reason = reason or _against_folds(found, checks)
    hidden = max(found.value - found.training_loss, 0.0)  # what can differ between models that fit alike
    doubt = 1.0 if _unlike(checks) else 0.5 if checks.size < 1 / LARGEST_SIZE_RATIO else 0.0
    return _verdict(replace(found, error=math.hypot(found.error, doubt * hidden)), reason, f"risk of {found.target}")


def _unlike(checks: FoldChecks) -> str:
    """How the run's model lies outside the fold models; comparisons with NaN are False."""
    if checks.size > LARGEST_SIZE_RATIO:
        return f"its outputs are {checks.size:.2g} times as large as theirs (limit {LARGEST_SIZE_RATIO:g})"
    if checks.distance > LARGEST_FOLD_DISTANCE:
        ratio = f"{checks.distance:.2g} times as far from them as they are from each other"
        return f"it is {ratio} (limit {LARGEST_FOLD_DISTANCE:g})"
    return ""


def _against_folds(found: Found, checks: FoldChecks) -> str:
    """Why the fold models do not stand for the run's model."""
    if checks.twins > LARGEST_TWIN_SHARE:
        return (
            f"{100 * checks.twins:.0f}% of the held-out inputs were also trained on (limit "
            f"{100 * LARGEST_TWIN_SHARE:.0f}%). Use k_fold, which leaves equal inputs out together."
        )
    if _unlike(checks) and found.value - found.training_loss > LARGEST_HIDDEN * found.value:
        return (
            f"the models trained without a fold do not stand for the run's model: {_unlike(checks)}, as happens where "
            f"a model just fits all of its examples. {_HOLD_BACK}"
        )
    if checks.lag > LARGEST_LAG * found.value:
        return (
            f"the models trained without a fold are behind: their loss on the examples they kept is "
            f"{checks.kept_loss:.3g}, that of the run on the same {checks.own_loss:.3g} (limit: a difference of "
            f"{100 * LARGEST_LAG:.0f}% of the risk). Train longer, or {_HOLD_BACK[0].lower()}{_HOLD_BACK[1:]}"
        )
    return ""


def judge_controlled(found: Found, checked: Checked) -> RiskEstimate:
    """The verdict on predictions whose mean is corrected by real deletions of some of the examples."""
    reason = _too_few(found) or _unchecked(found, checked)
    reason = reason or _not_finite(found, "the losses without an example are not finite", checked.error)
    size = max(abs(found.value), math.ulp(0))
    error, change = checked.error / size, checked.change / size
    reason = reason or _repetitions(checked.distinct, found.of)
    if not reason and error > LARGEST_CONTROL_ERROR:
        reason = (
            f"{checked.controls} real deletions leave the risk uncertain by {100 * error:.0f}% "
            f"(limit {100 * LARGEST_CONTROL_ERROR:.0f}%). {_retrain(found)}"
        )
    if not reason and checked.moved > LARGEST_MOVED:
        reason = (
            f"{UNSTABLE}: their jackknife variance is "
            f"{checked.moved:.1f} times the risk (limit {LARGEST_MOVED}), as where there are about as many weights as "
            "examples. Use fewer weights, a weight decay or more data."
        )
    checks = f"{checked.controls} real deletions change the risk by {100 * change:+.1f}% ± {100 * error:.1f}%"
    return _verdict(found, reason, checks)


def judge_predictions(risk: RiskEstimate, checked: Checked) -> RiskEstimate:
    """The verdict on the single predictions of an exclusion, which its risk corrects in their mean only."""
    share = abs(checked.change) / max(abs(float(risk.value)), math.ulp(0))
    if not risk.valid or share <= LARGEST_DISAGREEMENT:
        return risk
    reason = (
        f"{checked.controls} real deletions change the mean of the predicted losses by {100 * share:.0f}% of the risk "
        f"(limit {100 * LARGEST_DISAGREEMENT:.0f}%): their mean can be corrected, single predictions cannot. "
        f"Allow {FOLDS}-fold cross-validation with retrain_budget={FOLDS}."
    )
    return replace(risk, valid=False, reason=reason)


def enough_controls(value: float, error: float, uncertain: float) -> bool:
    """Whether the uncertainty that the controls leave is small beside the risk or beside its standard error."""
    return uncertain <= max(ENOUGH_OF_ERROR * error, ENOUGH_OF_RISK * abs(value))


def judge_leverage(
    found: Found, at_end: float, half: float, distinct: int, *, gated: bool = False, unfollowed: str = ""
) -> RiskEstimate:
    """The verdict on leverage without real deletions.

    Args:
        found: The risk with the absence of an example followed along the run, and its sampling error.
        at_end: The risk by the leverages of the last moment alone.
        half: The risk from half of the examples used, where these are not all; otherwise the same.
        distinct: Number of different inputs among the training examples.
        gated: Whether a gate opens and closes for single weights.
        unfollowed: What else of the run leverage does not follow, and what to do.
    """
    correction, size = found.value - found.training_loss, max(abs(found.value), math.ulp(0))
    reason = _too_few(found) or _not_finite(found, "the losses without an example are not finite", at_end, half)
    of_correction = (GATED_LEVERAGE_ERROR if gated else LEVERAGE_ERROR) * correction
    found = replace(found, error=math.hypot(found.error, of_correction, found.value - half))
    reason = reason or unfollowed
    reason = reason or _repetitions(distinct, found.of)
    share = f"{100 * max(correction / size, 0.0):.0f}% of it is a correction of the training loss"
    if not reason and not found.error <= LARGEST_LEVERAGE_ERROR * size:
        reason = (
            f"the standard error is {100 * found.error / size:.0f}% of the risk (limit "
            f"{100 * LARGEST_LEVERAGE_ERROR:.0f}%); {share}. {_retrain(found)}"
        )
    if not reason and _difference(found.value, at_end) > LARGEST_LEVERAGE_GAP:
        reason = (
            f"the leverages of the run and of its end differ by {100 * _difference(found.value, at_end):.0f}% of the "
            f"risk (limit {100 * LARGEST_LEVERAGE_GAP:.0f}%). {_retrain(found)}"
        )
    return _verdict(found, reason, share)


def judge_single(risk: RiskEstimate, *, gate_closes: bool = False) -> RiskEstimate:
    """The verdict on the single predictions by leverage, whose errors do not cancel as those of their mean do."""
    share = risk.gap / max(abs(float(risk.value)), math.ulp(0))
    if not risk.valid or not (gate_closes or share > LARGEST_CORRECTION):
        return risk
    reason = (
        f"{100 * share:.0f}% of the mean of the predicted losses is a correction of the training loss (limit "
        f"{100 * LARGEST_CORRECTION:.0f}%)"
    )
    if gate_closes:
        reason = "single predictions do not follow a hard or literal gate, which opens and closes"
    folds = f"Allow {FOLDS}-fold cross-validation with retrain_budget={FOLDS}."
    return replace(risk, valid=False, reason=f"{reason}. {folds}")


def judge_first_order(found: Found, exclusion: RiskEstimate) -> RiskEstimate:
    """The verdict on the first order, checked by exclusion of the same examples."""
    if not exclusion.valid:
        return _verdict(found, f"exclusion, which checks the first order, is not valid: {exclusion.reason}", "")
    apart = _difference(float(exclusion.value), found.value)
    share = found.error / max(abs(found.value), math.ulp(0))
    reason = _not_finite(found, "losses or their derivatives are not finite")
    if not reason and apart > LARGEST_DISAGREEMENT:
        reason = (
            f"the risk by exclusion, which keeps higher orders, differs by {100 * apart:.0f}% "
            f"(limit {100 * LARGEST_DISAGREEMENT:.0f}%). Use method='exclusion'."
        )
    if not reason and share > LARGEST_ERROR_SHARE:
        reason = (
            f"the standard error is {100 * share:.0f}% of the risk (limit {100 * LARGEST_ERROR_SHARE:.0f}%). "
            "Use method='exclusion', or more examples."
        )
    return _verdict(found, reason, f"within {100 * apart:.1f}% of the risk by exclusion")


UNSTABLE = "single examples change the predictions for new inputs too much"
"""A reason that no estimate from the run alone can answer, as the examples of the run do not show it."""
_HOLD_BACK = "Hold examples back: train(…, hold_back=0.1)."
_INSTEAD = (
    f'Use population_risk(run, retrain_budget={FOLDS}), or population_risk(run, weights="last") for the weights at the '
    "last step."
)


def judge_count(found: Counted, agreed: float, n: int, source: str) -> Estimate:
    """The number of wrong labels, with a standard error two of which reach both ends of its range.

    Args:
        found: Labels contradicted by out-of-sample predictions.
        agreed: Share of the examples that another kind of model predicts like them: the network at the step where both
            agree most, or a regression where they are predictions of networks.
        n: Number of examples.
        source: Where the out-of-sample predictions come from.
    """
    trusted = agreed >= LEAST_AGREEMENT
    low = found.low if trusted else 0.0
    spread = found.high - low
    low, high = max(low - BEYOND_LOW * spread, 0.0), min(found.high + BEYOND_HIGH * spread + found.tied, float(n))
    value, error = (low + high) / 2, (high - low) / 4 + found.deviation + 0.5
    if found.tied_share > LARGEST_TIED_SHARE:
        reason = (
            f"for {100 * found.tied_share:.0f}% of the examples two labels are about as frequent where one class is "
            f"predicted (limit {100 * LARGEST_TIED_SHARE:.0f}%): which one is wrong cannot be told. {_BY_HAND}"
        )
        return Estimate(math.nan, math.nan, valid=False, reason=reason)
    if 2 * error <= max(WIDEST_OF_ALL * n, WIDEST_OF_COUNT * value):
        return Estimate(value, error, reason=f"{found.high} labels are contradicted by {source}")
    why = "ambiguous examples"
    if not trusted:
        share, limit = (f"{100 * x:.0f}%" for x in (agreed, LEAST_AGREEMENT))
        other = "the network" if source.startswith("a regression") else "another model"
        why = f"mistakes of the predictions, which agree with {other} on {share} of the examples (limit {limit})"
    reason = (
        f"{found.high} labels are contradicted by {source}, but wrong labels cannot be told from {why}: {low:.0f} to "
        f"{high:.0f} may be wrong. {_RETRAIN_OR_BY_HAND if source.startswith('a regression') else _BY_HAND}"
    )
    return Estimate(value, error, valid=False, reason=reason)


def no_count() -> Estimate:
    """The verdict where nothing predicts an example without having seen it."""
    reason = f"inputs and network allow no out-of-sample prediction without training. {_RETRAIN_OR_BY_HAND}"
    return Estimate(math.nan, math.nan, valid=False, reason=reason)


def _repetitions(distinct: int, n: int) -> str:
    if distinct >= FEWEST_DISTINCT * n:
        return ""
    return (
        f"only {distinct} of the {n} inputs are different (limit {100 * FEWEST_DISTINCT:.0f}%), and the run does not "
        "show whether new data repeat them. Remove the repetitions, or use a test set."
    )


def _too_wide(value: float, error: float, first_loss: float) -> str:
    """Why an estimate says too little, whatever made it; comparisons with NaN are False."""
    if error <= LARGEST_ERROR * abs(value) or error <= LARGEST_ERROR_OF_FIRST * first_loss:
        return ""
    first = "" if math.isnan(first_loss) else f", and than half of the loss before training, {first_loss:.2g}"
    return (
        f"the standard error, {error:.2g}, is larger than the risk, {value:.2g}{first}. Use more examples, or a test "
        "set."
    )


def _verdict(found: Found, reason: str, otherwise: str) -> RiskEstimate:
    reason = reason or _too_wide(found.value, abs(found.error), found.first_loss)
    about = {"target": found.target, "method": found.method, "training_loss": found.training_loss, "cost": found.cost}
    error = abs(found.error) if math.isfinite(found.error) and math.isfinite(found.value) else math.nan
    return RiskEstimate(found.value, error, not reason, reason or "; ".join((otherwise, *found.notes)), **about)


def _too_few(found: Found) -> str:
    if found.examples >= FEWEST_EXAMPLES:
        return ""
    what = "Use more of the training examples" if found.of >= FEWEST_EXAMPLES else "Use more training data"
    return f"{found.examples} examples are too few for a standard error (limit {FEWEST_EXAMPLES}). {what}."


def _unchecked(found: Found, checked: Checked) -> str:
    if checked.controls:
        return ""
    if checked.obstacle:
        return f"no deletion can be trained to check the predictions: {checked.obstacle}"
    return f"no deletion was trained to check the predictions (controls=0). Use controls=None. {_retrain(found)}"


def _not_finite(found: Found, what: str, *others: float) -> str:
    if all(math.isfinite(x) for x in (found.value, found.error, *others)):
        return ""
    return (
        f"{what}. {_retrain(found) if found.method == 'exclusion' else 'Use an earlier step or a lower learning rate.'}"
    )


def _retrain(found: Found) -> str:
    folds = min(FOLDS, found.of)
    return f"Use population_risk(run, retrain_budget={folds}), which allows {folds}-fold cross-validation."


def _difference(value: float, other: float) -> float:
    return abs(value - other) / max(abs(value), math.ulp(0))
