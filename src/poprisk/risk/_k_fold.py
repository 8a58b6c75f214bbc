"""K-fold cross-validation of a run: the partition, the trainings (at once, as jobs, along the run), and the risk."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.seeds import shuffled
from poprisk.errors import DataError
from poprisk.risk._duplicates import duplicate_groups
from poprisk.risk._error import NestedSplit, nested_error
from poprisk.risk._moments import buffers_at
from poprisk.risk._resampled import (
    Resampled,
    RetrainOptions,
    Trained,
    held_out_result,
    members_without,
    mistake_of,
    picked,
    resample,
)
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import Retrained, retrain
from poprisk.risk._verdict import FOLDS, Found, RiskEstimate, judge_retraining, trained_on
from poprisk.runs import Run

MOST_TRAININGS = 10**6
"""Number of trainings, or of their repetitions, beyond which a call is a mistake."""


def k_fold(
    run: Run,
    folds: int = 10,
    seed: int = 0,
    *,
    nested: int = 0,
    renormalize: bool = True,
    **options: Unpack[RetrainOptions],
) -> Resampled:
    r"""K-fold cross-validation: K trainings, each without one fold of a random partition.

    The risk is that of a model trained on n(1 - 1/K) examples, a little higher than that of the model at hand;
    :attr:`Resampled.bias_corrected` corrects it to n.

    The standard error is :func:`~poprisk.risk._error.inflated_error`, which takes no further training, or with
    ``nested`` that of :func:`~poprisk.risk._error.nested_error`.

    Args:
        run: What was recorded.
        folds: K, from 2 to n.
        seed: Seed for the partition.
        nested: Number of repetitions of nested cross-validation, each of K + K(K-1)/2 trainings (55 for K = 10) over a
            partition of its own; 0 means plain K-fold, with K trainings.
        renormalize: As in :func:`leave_one_out`.
        options: ``dtype``, ``memory`` and ``progress`` of :func:`poprisk.risk.retrain`.

    Returns:
        One row for each example, in order (with ``nested``: of the first partition; the risk is the mean over all).

    Raises:
        DataError: folds or nested are out of range.
        RunError: the run cannot be trained again.

    >>> from poprisk import Problem, train
    >>> x = torch.linspace(-1, 1, 20).reshape(20, 1)
    >>> problem = Problem(torch.nn.Linear, "squared", x, 2 * x, arguments={"in_features": 1, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.5), steps=200, progress=False)
    >>> found = k_fold(run, folds=5)
    >>> found.target, found.trainings, found.risk.valid, found.risk.value < 1e-6
    ('a model trained on 16 of the 20 examples', 5.0, True, True)
    """
    n = run.num_examples
    if nested and folds < 3:
        raise DataError(f"folds must lie between 3 and the {n} examples, got {folds}")
    held = held_by_fold(run, folds, seed)
    if not 0 <= nested <= MOST_TRAININGS:
        raise DataError(f"nested must be 0 or a number of repetitions up to {MOST_TRAININGS}, got {nested}")
    if nested:
        return _nested(run, folds, seed, nested, renormalize, options)
    return resample(run, f"{folds}-fold", held, renormalize, options, partition=True)


def k_fold_members(run: Run, folds: int = FOLDS, seed: int = 0, *, renormalize: bool = True) -> Members:
    """The trainings of :func:`k_fold`, to run them in several places.

    Raises:
        DataError: folds is out of range.
    """
    n = run.num_examples
    return members_without(n, held_by_fold(run, folds, seed), renormalize=renormalize)


def k_fold_of_weights(
    run: Run,
    weights: Float[Tensor, "members d"],
    seed: int = 0,
    *,
    notes: tuple[str, ...] = (),
    buffers: list[dict[str, Tensor]] | None = None,
) -> Resampled:
    """What :func:`k_fold` returns, from the last weights of the trainings of :func:`k_fold_members`.

    Args:
        run: What was recorded.
        weights: Each member's last weights, in the run's precision.
        seed: Seed for the partition.
        notes: What was taken over from the run, as :func:`poprisk.risk.retrain` returns it.
        buffers: Each member's buffers, if they were trained one after another.

    Raises:
        DataError: there are fewer than two members, or more than examples.
    """
    folds, own = len(weights), run.weights(run.num_steps).to(weights)
    every = None if buffers is None else (*buffers, buffers_at(run, run.num_steps))
    return _result(run, held_by_fold(run, folds, seed), Trained(weights, own, notes, float(folds), every))


class FoldEnsemble:
    """K trainings along a run, each without one fold; they resume when the run has grown.

    Args:
        run: What is recorded; it may grow.
        folds: K.
        seed: Seed for the partition.
    """

    def __init__(self, run: Run, folds: int, seed: int = 0) -> None:
        self.folds, self._held = folds, held_by_fold(run, folds, seed)
        self.members = members_without(run.num_examples, self._held)
        self._trained: Retrained | None = None

    def advance(self, run: Run, steps: Sequence[int]) -> list[int]:
        """Train on to these steps, and keep the members there."""
        self._trained = retrain(run, self.members, keep=steps, stop=max(steps), resume=self._trained, progress=False)
        return list(steps)

    def reading(self, run: Run, k: int) -> RiskEstimate:
        """The risk by K-fold before step k."""
        if self._trained is None or k not in self._trained.kept:
            raise DataError(f"the members were not kept before step {k}: call advance(run, [{k}]) first")
        weights, cost = self._trained.kept[k], self.folds * k / run.num_steps
        own, buffers = run.weights(k).to(weights), self._trained.buffers.get(k)
        buffers = None if buffers is None else (*buffers, buffers_at(run, k))
        return _result(run, self._held, Trained(weights, own, self._trained.notes, cost, buffers)).risk


def k_fold_curve(run: Run, steps: Sequence[int], folds: int = FOLDS, *, seed: int = 0) -> list[RiskEstimate]:
    """K-fold estimates at several steps of a run, from K trainings in all, or one for each different input."""
    ensemble = FoldEnsemble(run, min(folds, most_folds(run)), seed)
    return [ensemble.reading(run, k) for k in ensemble.advance(run, steps)]


def _result(run: Run, held: list[Tensor], trained: Trained) -> Resampled:
    return held_out_result(run, f"{len(held)}-fold", held, trained, partition=True)


def held_by_fold(run: Run, folds: int, seed: int) -> list[Tensor]:
    """The examples of each fold."""
    fold = _partition(run, folds, seed)
    return [(fold == f).nonzero().squeeze(1) for f in range(folds)]


def most_folds(run: Run) -> int:
    """Largest number of folds: one for each group of examples with equal inputs."""
    different = int(duplicate_groups(run.problem.inputs).max()) + 1
    return different if different > 1 else run.num_examples


def _partition(run: Run, folds: int, seed: int) -> Int[Tensor, "n"]:
    """The fold of each example; examples with equal inputs are in one fold, unless all are equal."""
    n, groups = run.num_examples, duplicate_groups(run.problem.inputs)
    sizes = torch.bincount(groups)
    if len(sizes) in (1, n):
        if not 2 <= folds <= n:
            raise DataError(f"folds must lie between 2 and the {n} examples, got {folds}")
        fold = torch.empty(n, dtype=torch.long)
        fold[shuffled(n, seed, "folds")] = torch.arange(n) % folds
        return fold
    if not 2 <= folds <= len(sizes):
        raise DataError(f"folds must lie between 2 and the {len(sizes)} different inputs, got {folds}")
    order = shuffled(len(sizes), seed, "folds")
    filled, of_group = [0] * folds, torch.empty(len(sizes), dtype=torch.long)
    for g in order[
        sizes[order].argsort(descending=True, stable=True)
    ].tolist():  # the largest first, each where it fits
        of_group[g] = smallest = filled.index(min(filled))
        filled[smallest] += int(sizes[g])
    return of_group[groups]


def _nested(run: Run, folds: int, seed: int, repeats: int, renormalize: bool, options: RetrainOptions) -> Resampled:
    n = run.num_examples
    outer, pairs = list(range(folds)), [(f, g) for f in range(folds) for g in range(f)]
    partitions = [_partition(run, folds, seed + 1000003 * r) for r in range(repeats)]
    left_out = [
        torch.isin(fold, torch.tensor(away)).nonzero().squeeze(1)
        for fold in partitions
        for away in [*[(f,) for f in outer], *pairs]
    ]
    found = resample(run, f"nested {folds}-fold", left_out, renormalize, options)
    each = folds + len(pairs)
    splits = [_split(found, fold, r * each, pairs, folds) for r, fold in enumerate(partitions)]
    error, corrected = nested_error(splits)
    first = picked(found, found.member < folds)
    first = picked(first, first.example.argsort())
    error = math.hypot(error, mistake_of(run, first.outputs, first.example))
    value = float(torch.stack([split.losses.double() for split in splits]).mean())
    sizes = torch.bincount(partitions[0])
    target = trained_on((n - int(sizes.max()), n - int(sizes.min())), n)
    about = (found.risk.training_loss, found.risk.cost, n, n)
    notes = ("standard error from nested cross-validation", *found.notes)
    risk = judge_retraining(Found(value, error, "k_fold", target, *about, notes, float(run.losses[0])))
    buffers = found.buffers and (*found.buffers[:folds], found.buffers[-1])
    outer_models = Trained(found.weights[:folds], found.own_weights, found.notes, float(folds), buffers)
    plain = _result(run, left_out[:folds], outer_models).risk
    if risk.valid and not plain.valid:  # what speaks against the folds themselves
        risk = replace(risk, valid=False, reason=plain.reason)
    whole = replace(first, target=target, risk=risk)
    return replace(whole, extrapolated=whole.corrected(corrected, "extrapolated by nested cross-validation"))


def _split(found: Resampled, fold: Tensor, first: int, pairs: list[tuple[int, int]], folds: int) -> NestedSplit:
    """The losses of one partition, from the rows of its trainings."""
    n = len(fold)
    losses = torch.empty(n, dtype=found.losses.dtype, device=found.losses.device)
    rows = (found.member >= first) & (found.member < first + folds)
    losses[found.example[rows]] = found.losses[rows.to(found.losses.device)]
    inner: list[list[Tensor | None]] = [[None] * folds for _ in range(folds)]
    for place, (f, g) in enumerate(pairs):
        rows = found.member == first + folds + place
        values, which = found.losses[rows.to(found.losses.device)], fold[found.example[rows]].to(found.losses.device)
        inner[f][g], inner[g][f] = values[which == g], values[which == f]
    return NestedSplit(losses, fold.to(found.losses.device), inner)
