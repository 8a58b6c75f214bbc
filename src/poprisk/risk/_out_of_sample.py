"""Out-of-sample class probabilities of every training example, from one run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.optim import KeepBest
from poprisk.risk._classes import ClassView, class_view
from poprisk.risk._exclusion import check_budget, exclusion
from poprisk.risk._features import left_out_probabilities
from poprisk.risk._k_fold import k_fold, most_folds
from poprisk.risk._leverage.leverage import leverage_of_all
from poprisk.risk._leverage.pace import gate_closes
from poprisk.risk._moments import Network, kept_features
from poprisk.risk._verdict import FEWEST_FOLDS, FOLDS, RiskEstimate, judge_single
from poprisk.runs import Run, as_run

OutOfSampleMethod = Literal["auto", "exclusion", "features", "leverage", "k_fold"]

MOST_EXCLUDED = 2000
"""Number of examples up to which each of them is excluded."""


@dataclass(frozen=True, eq=False)
class OutOfSample:
    """Class probabilities of every training example, as if the example had not been trained on."""

    probabilities: Float[Tensor, "n classes"]
    labels: Int[Tensor, "n"]
    """The given labels."""
    method: str
    valid: bool
    reason: str
    """Why the probabilities are not valid, or what a reader of valid ones should know."""
    cost: float
    """As in :class:`~poprisk.risk.RiskEstimate`; 0 for features, which take one pass over the examples."""

    def __str__(self) -> str:
        n, classes = self.probabilities.shape
        verdict = "valid" if self.valid else "not valid"
        return f"probabilities of {n} examples and {classes} classes by {self.method} ({verdict}: {self.reason})"

    @property
    def log_loss(self) -> float:
        """Mean of -log of the probability of the given label."""
        own = self.probabilities.gather(1, self.labels[:, None])[:, 0]
        return -float(own.double().clamp_min(torch.finfo(torch.float32).tiny).log().mean())


def out_of_sample_probabilities(
    run: Run | KeepBest | str | Path,
    method: OutOfSampleMethod = "auto",
    retrain_budget: int = 0,
    *,
    data: Any = None,
    seed: int = 0,
) -> OutOfSample:
    """Class probabilities of every training example, as if the example had not been trained on.

    They are what confident learning, calibration and label audits need, and what a trained network does not give: on
    its own examples it is too sure of the labels it has seen.

    Args:
        run: A recorded run with its problem, whose targets are classes, or the path of its directory. Or, for a
            training that was not recorded, its :class:`~poprisk.KeepBest` after ``finish()``, together with ``data``.
        method: "exclusion" follows the run without each example, linearized. "features" is for any size, and for
            networks trained with augmentation or batch statistics: with held-back examples, it leaves each example out
            of a regression on the last features of the kept weights. "leverage" follows the outputs alone, for any
            network; "k_fold" trains again without each fold. "auto" returns the first that is valid, K-fold only where
            the budget allows it; if none is, it returns K-fold, or else the first of them, marked as not valid.
        retrain_budget: Number of trainings allowed; 0 trains nothing.
        data: With a ``KeepBest``, the examples that were trained on, in the form of the held-back ones and without
            augmentation: the first part of what :func:`~poprisk.hold_back` returned.
        seed: Seed for the folds.

    Returns:
        Probabilities, labels, and the verdict of the population risk that the same outputs give; those of exclusion
        must agree with real deletions without a correction, those of features with the held-back examples.

    Raises:
        DataError: the targets are not one class per example.
        RunError: the run allows no method within the budget.
        HyperparameterError: an unknown method, or one that needs a larger budget.

    >>> from poprisk import Problem, train
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(60, 2, generator=generator)
    >>> y = (x[:, 0] + torch.randn(60, generator=generator) > 0).long()
    >>> problem = Problem(torch.nn.Linear, "cross_entropy", x, y, arguments={"in_features": 2, "out_features": 2})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.5), steps=50, progress=False)
    >>> found = out_of_sample_probabilities(run)
    >>> found.method, found.valid, found.probabilities.shape
    ('exclusion', True, torch.Size([60, 2]))
    """
    _check(method, retrain_budget)
    if isinstance(run, KeepBest):
        return _of_keeper(run, method, data)
    if data is not None:
        raise HyperparameterError("data is for a KeepBest; a recorded run knows its examples: leave data out")
    run = as_run(run)
    ways = {
        "exclusion": _by_exclusion,
        "features": _by_features,
        "leverage": _by_leverage,
        "k_fold": _by_folds,
    }
    found: list[OutOfSample] = []
    obstacles: list[RunError] = []
    for name, way in ways.items():
        if method not in ("auto", name) or (name == "k_fold" and retrain_budget < FEWEST_FOLDS):
            continue
        try:
            each = way(run, seed, retrain_budget if method == "auto" else max(retrain_budget, FEWEST_FOLDS))
        except RunError as error:
            obstacles.append(error)
            continue
        if each.valid or method != "auto":
            return each
        found.append(each)
    if not found:
        raise obstacles[-1]
    return found[-1] if found[-1].method == "k_fold" else found[0]


def _by_exclusion(run: Run, seed: int, budget: int) -> OutOfSample:
    if run.num_examples > MOST_EXCLUDED:
        raise RunError(f"{run.num_examples} examples are too many to exclude each of them (limit {MOST_EXCLUDED})")
    found = exclusion(run)
    return probabilities_of(run, found.excluded_outputs, found.predictions)


def _by_features(run: Run, seed: int, budget: int) -> OutOfSample:
    points, outputs = kept_features(run)
    view = _classes(run, outputs)
    held = torch.zeros(run.num_examples, dtype=torch.bool)
    held[run.kept.held if run.kept is not None else []] = True
    found = left_out_probabilities(points[~held], view.labels[~held], points[held], view.labels[held], view.num_classes)
    p = torch.empty(run.num_examples, view.num_classes)
    p[~held], p[held] = found.trained, found.held
    return OutOfSample(p, view.labels, "features", found.valid, found.reason, 0.0)


def _of_keeper(keeper: KeepBest, method: str, data: Any) -> OutOfSample:
    if method not in ("auto", "features") or data is None:
        raise HyperparameterError(
            "a KeepBest gives probabilities by their features, from the examples that were trained on: "
            f"out_of_sample_probabilities(keeper, data=(inputs, labels)), got method={method!r} and data={data!r:.40}"
        )
    held_points, _, held_labels = keeper.features()
    points, outputs, labels = keeper.features(data)
    classes = outputs[0].numel()
    for y in (labels, held_labels):
        if y.dim() != 1 or y.is_floating_point() or not 0 <= int(y.min()) <= int(y.max()) < max(classes, 2):
            raise DataError(
                "out-of-sample probabilities need one class label per example, got targets of "
                f"{y.dtype} {list(y.shape)} for {classes} outputs"
            )
    found = left_out_probabilities(points, labels, held_points, held_labels, max(classes, 2))
    return OutOfSample(found.trained, labels, "features", found.valid, found.reason, 0.0)


def _by_leverage(run: Run, seed: int, budget: int) -> OutOfSample:
    found = leverage_of_all(run, seed=seed)
    network = Network(run, 1024)
    network.go_to(run.num_steps)
    outputs = network.outputs()  # those of held-back examples are out of sample as they are
    outputs[found.examples] = found.excluded_outputs
    return probabilities_of(run, outputs, judge_single(found.risk, gate_closes=gate_closes(run)))


def _by_folds(run: Run, seed: int, budget: int) -> OutOfSample:
    found = k_fold(run, min(FOLDS, budget, most_folds(run)), seed)
    return probabilities_of(run, found.outputs, found.risk)


def probabilities_of(run: Run, outputs: Float[Tensor, "n *out"], risk: RiskEstimate) -> OutOfSample:
    """Probabilities from the outputs of models that have not seen the example, with the verdict of their risk.

    Raises:
        DataError: the targets are not one class per example.
    """
    outputs = outputs.detach().cpu()
    view = _classes(run, outputs)
    finite = outputs.reshape(len(outputs), -1).isfinite().all(1)
    p = view.probabilities(view.scores(outputs))
    p = torch.where(finite[:, None], p, 1 / view.num_classes)
    valid, reason = risk.valid, risk.reason
    if not bool(finite.all()):
        valid, reason = False, f"the outputs of {int((~finite).sum())} examples are not finite; {risk.reason}"
    return OutOfSample(p, view.labels, risk.method, valid, reason, risk.cost)


def _classes(run: Run, outputs: Tensor) -> ClassView:
    view = class_view(run.problem, outputs)
    if view is None:
        raise DataError(
            "out-of-sample probabilities need one class label per example, got targets of "
            f"{run.problem.targets.dtype} {list(run.problem.targets.shape)} under loss={run.problem.loss!r}"
        )
    return view


def _check(method: str, budget: int) -> None:
    check_budget(budget)
    if method == "k_fold" and budget < FEWEST_FOLDS:
        raise HyperparameterError(
            f"k_fold trains at least {FEWEST_FOLDS} times, got retrain_budget={budget}: allow {FOLDS}"
        )
