r"""Population risk from one run: which estimator to use, within which budget.

``"held_back"`` is measured on examples that no step trained on. ``"exclusion"`` follows the run without each of some
examples, linearized; ``"first_order"`` is the paper's L_pop, the training loss plus tr(J C_n)/(n - 1). The first order
fails at interpolation, where every derivative by an example's weight vanishes with its residual. Both are checked, and
exclusion is corrected, by a few real deletions (``controls``). ``"leverage"`` follows the outputs alone, for any
network; where much of the risk is memorization, it takes real deletions, too. ``"k_fold"`` takes K trainings, of a run
that can be trained again with other example weights. :mod:`poprisk.risk._verdict` says when each of them is valid.

:data:`ROADS` lists the methods; "auto" tries them in this order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from jaxtyping import Int
from torch import Tensor

from poprisk._core.costs import is_out_of_memory
from poprisk._core.progress import limits
from poprisk._core.text import first_line
from poprisk.errors import DataError, HyperparameterError, JobError, RunError
from poprisk.risk._exclusion import MOST_EXAMPLES, check_budget, check_controls, choose_examples, exclusion_risk
from poprisk.risk._first_order import first_order_risk
from poprisk.risk._held_back import Weights, held_back_risk
from poprisk.risk._influence.sensitivity import Unrolled, as_unrolled
from poprisk.risk._k_fold import k_fold_curve
from poprisk.risk._kept_folds import kept_k_fold_risk
from poprisk.risk._leverage.controlled import LeverageControls
from poprisk.risk._under_training import under_training
from poprisk.risk._verdict import FEWEST_FOLDS, FOLDS, UNSTABLE, RiskEstimate, is_enough, narrower
from poprisk.runs import Run, as_run

_KEPT = "the examples followed so far, if they are 32 or more"
RiskMethod = Literal["auto", "held_back", "exclusion", "leverage", "first_order", "k_fold"]


@dataclass(frozen=True)
class Question:
    """What is asked for: the risk of which weights of which run, and how much may be spent on it."""

    given: Run | Unrolled
    weights: Weights = "last"
    retrain_budget: int = 0
    examples: int | Int[Tensor, "m"] | None = None
    seed: int = 0
    at: int | None = None
    """The weights are those before this step; None for the end of what is given."""
    controls: int | None = None
    """Number of real deletions that check exclusion; None lets it decide."""

    @property
    def run(self) -> Run:
        """The recorded run."""
        return self.given.run if isinstance(self.given, Unrolled) else self.given

    @property
    def stop(self) -> int:
        """The weights are those before this step."""
        end = self.given.stop if isinstance(self.given, Unrolled) else self.given.num_steps
        return end if self.at is None else self.at

    @cached_property
    def unrolled(self) -> Unrolled:
        """The whole run, linearized.

        Raises:
            RunError: this is not possible, or the run given is differentiated only in part.
        """
        return _whole(as_unrolled(self.given) if self.at is None else Unrolled(self.run, stop=self.at))

    @cached_property
    def chosen(self) -> Int[Tensor, "m"]:
        """The examples to use, up to a maximum number."""
        return choose_examples(self.run.num_examples, self.examples, self.seed, most=MOST_EXAMPLES)


@dataclass(frozen=True)
class Road:
    """One way to estimate population risk.

    To add one, add it to :data:`ROADS` and its name to :data:`RiskMethod`, and its verdict to
    :mod:`poprisk.risk._verdict`.
    """

    method: RiskMethod
    estimate: Callable[[Question], RiskEstimate]
    """Raises a RunError where it is not possible for a run."""
    trainings: int = 0
    """Smallest budget of trainings that it needs."""
    of: tuple[Weights, ...] = ("last",)
    """The weights whose risk it can estimate."""
    same_model: bool = True
    """Whether it estimates the risk of these weights, up to one example more or less."""
    in_auto: bool = True


def _held_back(question: Question) -> RiskEstimate:
    return held_back_risk(question.run, question.weights, question.stop)


def _exclusion(question: Question) -> RiskEstimate:
    return exclusion_risk(question.unrolled, question.chosen, controls=question.controls, seed=question.seed)


def _first_order(question: Question) -> RiskEstimate:
    about = {"controls": question.controls, "seed": question.seed}
    return first_order_risk(question.unrolled, examples=question.chosen, **about)


def _leverage(question: Question) -> RiskEstimate:
    if isinstance(question.given, Unrolled):
        _whole(question.given)
    controls = LeverageControls(leverage_controls(question), question.seed)
    return controls.at(question.run, question.stop, question.examples).risk


def leverage_controls(question: Question) -> int | None:
    """Number of real deletions for leverage: none, unless they are asked for, where folds are allowed and say more."""
    folds = question.retrain_budget >= FEWEST_FOLDS
    return 0 if question.controls is None and folds else question.controls


def _k_fold(question: Question) -> RiskEstimate:
    run = question.run
    folds = min(FOLDS, question.retrain_budget, run.num_examples)
    if question.weights == "kept":
        return kept_k_fold_risk(run, folds, seed=question.seed)
    return k_fold_curve(run, [question.stop], folds, seed=question.seed)[0]


ROADS: tuple[Road, ...] = (
    Road("held_back", _held_back, of=("kept", "last")),
    Road("exclusion", _exclusion),
    Road("leverage", _leverage),
    Road("first_order", _first_order, in_auto=False),
    Road("k_fold", _k_fold, trainings=FEWEST_FOLDS, of=("kept", "last"), same_model=False),
)
"""All methods. "auto" takes the first valid estimate in this order; where held-back examples give one, a more precise
estimate for the same weights that does not contradict it is preferred (:func:`poprisk.risk._verdict.narrower`). For
this, folds are trained only if they are allowed and held-back examples leave much open."""


def population_risk(
    run: Run | Unrolled | str | Path,
    method: RiskMethod = "auto",
    retrain_budget: int = 0,
    *,
    weights: Weights | None = None,
    examples: int | Int[Tensor, "m"] | None = None,
    controls: int | None = None,
    seed: int = 0,
    budget: float | None = None,
    memory: int | str | None = None,
    progress: bool = True,
) -> RiskEstimate:
    r"""Population risk: the expected loss of a trained model on new data from the same source, from its training run.

    Args:
        run: A recorded run with its problem, or the path of its directory; or an :class:`Unrolled` of
            it, to stop earlier or in another precision.
        method: "held_back", "exclusion", "leverage", "first_order" or "k_fold". "auto" uses the first that is valid:
            the held-back risk where examples were held back, exclusion, leverage, and K-fold where the budget allows
            it. If none is valid, it returns K-fold, or else the first of them, marked as not valid. Where held-back
            examples leave more than 10% of the risk open, K-fold is preferred, unless they contradict it.
        retrain_budget: Number of trainings allowed for K-fold; 0 uses no folds.
        weights: The weights whose risk to estimate: "kept", those that were chosen on held-back examples, or "last",
            those of the last step. Default: the kept ones, if the run has any, for "auto" and "held_back". "k_fold"
            knows both, all other methods know only the last ones. ``target`` of the estimate names them.
        examples: Indices of the examples used by exclusion, leverage and first order, or a number of them to draw at
            random; default: all, up to 256 (for leverage up to 1000 outputs).
        controls: Number of single deletions that are trained as a check of exclusion, or of leverage. Default: for
            exclusion 16, and up to half of the examples used, which costs a quarter of their exclusion, as long as that
            makes the risk more certain; for leverage, where it is not certain without them and no folds are allowed, 16
            to 32, if that takes about half a minute at most. 0 trains nothing, and then exclusion and first order are
            not valid.
        seed: Seed for the random draw and for the folds.
        budget: Seconds that the call may take: exclusion then uses fewer examples, 32 or more, and a method that would
            take longer is left out. None sets no limit.
        memory: Bytes that the process may use, or "2 GB": work is done in smaller pieces. None sets no limit.
        progress: Whether to announce on stderr what takes longer than ten seconds, and to show how far it is.

    Returns:
        Value, standard error, verdict, reason, target and cost. The standard error is that of the estimate as the risk
        of this model. A sample of n examples cannot show mistakes rarer than 1 in n: where targets are classes, one
        unseen mistake is part of the error.

    Raises:
        RunError: the run allows no exact analysis, its loss is not finite at the end, or nothing was held back in it.
        LimitError: a limit allows no method.
        DataError: fewer than 3 examples.
        HyperparameterError: an unknown method, one that needs a larger budget, or one that does not know these weights.

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
    check_budget(retrain_budget)
    check_controls(controls)
    with limits("population_risk", budget=budget, memory=memory, progress=progress, keeps=_KEPT):
        return _answer(run, method, retrain_budget, weights, examples, controls, seed)


def _answer(
    run: Run | Unrolled | str | Path,
    method: RiskMethod,
    retrain_budget: int,
    weights: Weights | None,
    examples: int | Int[Tensor, "m"] | None,
    controls: int | None,
    seed: int,
) -> RiskEstimate:
    run = run if isinstance(run, Unrolled) else as_run(run)
    question = Question(run, _asked_weights(run, method, weights), retrain_budget, examples, seed, controls=controls)
    if method == "auto":
        return first_valid(question, ROADS)
    road = next(each for each in ROADS if each.method == method)
    if retrain_budget < road.trainings:
        raise HyperparameterError(
            f"{method} trains at least {road.trainings} times, got retrain_budget={retrain_budget}: allow {FOLDS}"
        )
    if question.weights not in road.of:
        raise HyperparameterError(
            f'{method} estimates the risk of the weights at the last step, got weights="{question.weights}": use '
            'method="held_back" or "k_fold" for those that were kept'
        )
    return _told(question, _estimated(road, question))


def _asked_weights(run: Run | Unrolled, method: str, weights: Weights | None) -> Weights:
    if weights == "kept" and isinstance(run, Unrolled):
        raise HyperparameterError('weights="kept" needs the run itself, got an Unrolled: pass its run')
    if weights is not None:
        return weights
    can_keep = method in ("auto", "held_back") and not isinstance(run, Unrolled) and run.kept is not None
    return "kept" if can_keep else "last"


def first_valid(question: Question, roads: Sequence[Road]) -> RiskEstimate:
    """What "auto" returns: the first valid estimate; if none is, the first one; if there is none, the first error."""
    return _told(question, _first_valid(question, roads))


def _told(question: Question, estimate: RiskEstimate) -> RiskEstimate:
    """The estimate, with the reason why the run is unfinished first."""
    ended = question.stop == question.run.num_steps
    unfinished = under_training(question.run, estimate) if ended else ""
    return replace(estimate, reason=f"{unfinished}; {estimate.reason}") if unfinished else estimate


def _first_valid(question: Question, roads: Sequence[Road]) -> RiskEstimate:
    found: list[RiskEstimate] = []
    held: RiskEstimate | None = None
    obstacles: list[tuple[Road, RunError]] = []
    if question.run.num_examples < 3:
        raise DataError(f"population risk needs at least 3 training examples, got {question.run.num_examples}")
    _ = question.chosen  # refuses examples that do not exist
    for road in roads:
        fits = road.in_auto and question.weights in road.of and road.trainings <= question.retrain_budget
        if not fits or (held is not None and not road.same_model and is_enough(held)):
            continue
        if road.method == "leverage" and any(UNSTABLE in estimate.reason for estimate in found):
            continue
        try:
            estimate = _estimated(road, question)
        except RunError as error:  # e.g. augmented: it can be retrained
            obstacles.append((road, error))
            continue
        if estimate.valid and road.method == "held_back":
            held = estimate
        elif estimate.valid:
            return _noted(estimate, obstacles) if held is None else narrower(held, estimate)
        found.insert(0 if road.trainings else len(found), estimate)  # what was trained for is what is said
    if held is None and not found:
        raise _with_advice(obstacles, question.retrain_budget)
    return _noted(held or found[0], [] if held else obstacles)


def _estimated(road: Road, question: Question) -> RiskEstimate:
    """The estimate; a RunError of one line where the model does not allow it."""
    try:
        return road.estimate(question)
    except (RunError, JobError):  # when a scheduler dies, the same call continues
        raise
    except (DataError, RuntimeError) as error:  # from PyTorch: an operation without the derivatives needed
        if is_out_of_memory(error):
            raise
        raise RunError(first_line(error)) from error


def _with_advice(obstacles: list[tuple[Road, RunError]], budget: int) -> RunError:
    """What stood in the way of K-fold if it was allowed, else the first obstacle and what to do about it."""
    error = next((e for road, e in obstacles if road.method != "held_back"), obstacles[0][1])
    if budget >= FEWEST_FOLDS or "retrain_budget" in str(error):
        return obstacles[-1][1]
    said = RunError(f"{str(error).removesuffix('.')}. Or use population_risk(run, retrain_budget={FOLDS}).")
    said.__cause__ = error
    return said


def _noted(estimate: RiskEstimate, obstacles: list[tuple[Road, RunError]]) -> RiskEstimate:
    """The estimate, with the reason why others were not possible."""
    notes = [f"{road.method} is not possible: {error}" for road, error in obstacles if road.method != "held_back"]
    return replace(estimate, reason="; ".join((estimate.reason, *notes))) if notes else estimate


def _whole(unrolled: Unrolled) -> Unrolled:
    """Refuse a run that is differentiated only in part."""
    restricted = unrolled.num_weights != unrolled.run.num_weights
    if unrolled.start != 0 or unrolled.gate == "frozen" or restricted:
        what = "some of its parameters" if restricted else f"gate={unrolled.gate!r}"
        raise RunError(
            f"population risk needs the whole run with its gate differentiated, got start={unrolled.start} and "
            f"{what}: pass the run itself, or Unrolled(run, stop=…)"
        )
    return unrolled
