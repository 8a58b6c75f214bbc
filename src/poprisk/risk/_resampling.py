r"""Risks from real retraining: leave-one-out, K-fold, holdouts, replace-one and subsets, each as one stacked training.

Every training repeats the recorded one (first weights, batches, learning rates) with other example weights: those left
out have weight 0 and keep their places in the batches, the others n/(n-k). By Theorem ``thm:cv_family`` the expected
held-out loss is the risk of a learner on n - k points, which is what each estimate names as its target.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from poprisk._core.autodiff import Inputs, slices, take_examples
from poprisk._core.estimate import Estimate
from poprisk.errors import DataError
from poprisk.risk._fold_error import FEWEST, NestedSplit, inflated_error, nested_error
from poprisk.risk._influence.holdout_weights import holdout_weights
from poprisk.risk._resampled import Resampled, by_example, finite_estimate, losses_of, picked
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import member_outputs, retrain
from poprisk.runs import Run

_FEW = 2**22
"""Outputs of so many examples are kept at a time, where most of them are not asked for."""


class RetrainOptions(TypedDict, total=False):
    """What is handed on to :func:`poprisk.risk._retraining.retrain`."""

    dtype: torch.dtype
    memory: int
    progress: bool | None


def leave_one_out(
    run: Run,
    indices: Sequence[int] | Tensor | None = None,
    *,
    renormalize: bool = True,
    **options: Unpack[RetrainOptions],
) -> Resampled:
    r"""Train once without each example: the exclusion displacement and risk of the paper's "Leave-One-Out Risk".

    .. math:: \Delta_i^{ex} = F(w_T(S_{-i}), z_i) - F(w_T(S), z_i), \qquad
       \mathcal L_{ex} = \frac1n \sum_i \ell\big(F(w_T(S_{-i}), z_i), y_i\big)

    Costs a training for each example asked for.

    Args:
        run: What was recorded.
        indices: Which examples; default: all of them.
        renormalize: Give the others weight n/(n-1), as the paper does; False leaves them at 1, so that exactly the one
            example's gradient is missing from each batch.
        options: ``dtype``, ``memory`` and ``progress`` of :func:`poprisk.risk._retraining.retrain`.

    Raises:
        DataError: fewer than three examples, or an index that does not exist or comes twice.
        RunError: the run cannot be trained again.

    >>> from poprisk.runs import Problem
    >>> from poprisk.runs import train
    >>> y = torch.tensor([[0.0], [0.0], [3.0]])
    >>> problem = Problem(torch.nn.Linear, "squared", torch.ones(3, 1), y,
    ...                   arguments={"in_features": 1, "out_features": 1, "bias": False})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.5), steps=60, progress=False)
    >>> leave_one_out(run).outputs.squeeze(1).round(decimals=3).abs()  # the mean of the two others
    tensor([1.5000, 1.5000, 0.0000])
    """
    n = run.num_examples
    if n < 3:
        raise DataError(f"leaving one out needs at least 3 examples, got {n}: two would be left to spread")
    index = torch.arange(n) if indices is None else _positions(indices, n)
    return _resample(run, "leave-one-out", [index[j : j + 1] for j in range(len(index))], renormalize, options)


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

    The target is a learner on n(1 - 1/K) points, a little worse than the model at hand;
    :attr:`Resampled.bias_corrected` carries it over to n.

    The standard error is :func:`~poprisk.risk._fold_error.inflated_error`, which costs nothing, or with ``nested``
    that of :func:`~poprisk.risk._fold_error.nested_error`.

    Args:
        run: What was recorded.
        folds: K, from 2 to n.
        seed: Of the partition.
        nested: Repetitions of nested cross-validation, each of K + K(K-1)/2 trainings (55 for K = 10) over a partition
            of its own; 0 is plain K-fold for K trainings.
        renormalize: As in :func:`leave_one_out`.
        options: ``dtype``, ``memory`` and ``progress`` of :func:`poprisk.risk._retraining.retrain`.

    Returns:
        One row for each example, in order (with ``nested``: of the first partition; the risk is the mean over all).

    Raises:
        DataError: folds or nested are out of range.
        RunError: the run cannot be trained again.

    >>> from poprisk.runs import Problem
    >>> from poprisk.runs import train
    >>> x = torch.linspace(-1, 1, 20).reshape(20, 1)
    >>> problem = Problem(torch.nn.Linear, "squared", x, 2 * x, arguments={"in_features": 1, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.5), steps=200, progress=False)
    >>> found = k_fold(run, folds=5)
    >>> found.target, found.trainings, found.risk.valid, found.risk.value < 1e-6
    ('a learner on 16 of 20 points', 5.0, True, True)
    """
    n = run.num_examples
    if nested and folds < 3:
        raise DataError(f"folds must lie between 3 and the {n} examples, got {folds}")
    held = _held_by_fold(n, folds, seed)
    if nested < 0:
        raise DataError(f"nested must be 0 or a number of repetitions, got {nested}")
    if nested:
        return _nested(run, folds, seed, nested, renormalize, options)
    return by_example(_resample(run, f"{folds}-fold", held, renormalize, options, partition=True))


def k_fold_members(run: Run, folds: int = 10, seed: int = 0, *, renormalize: bool = True) -> Members:
    """The trainings of :func:`k_fold`, for whoever carries them out elsewhere, some here and some there.

    Raises:
        DataError: folds is out of range.
    """
    n = run.num_examples
    held = _held_by_fold(n, folds, seed)
    return Members(torch.stack([holdout_weights(n, index, renormalize=renormalize) for index in held]))


def k_fold_of_weights(
    run: Run, weights: Float[Tensor, "members d"], seed: int = 0, *, notes: tuple[str, ...] = ()
) -> Resampled:
    """What :func:`k_fold` returns, where the trainings of :func:`k_fold_members` have been carried out.

    Args:
        run: What was recorded.
        weights: Where each member ended, in the run's precision.
        seed: Of the partition.
        notes: What was taken over from the run, as :func:`poprisk.risk._retraining.retrain` says it.

    Raises:
        DataError: there are fewer than two members, or more than examples.
    """
    folds, n = len(weights), run.num_examples
    held = _held_by_fold(n, folds, seed)
    own = run.weights(run.num_steps).to(weights)
    found = _scored(run, f"{folds}-fold", _holdout_target(n, held), held, (weights, own, notes, float(folds)), True)
    return by_example(found)


def _held_by_fold(n: int, folds: int, seed: int) -> list[Tensor]:
    if not 2 <= folds <= n:
        raise DataError(f"folds must lie between 2 and the {n} examples, got {folds}")
    fold = _partition(n, folds, seed)
    return [(fold == f).nonzero().squeeze(1) for f in range(folds)]


def cross_validation_risk(run: Run, k: int, *, seed: int = 0, **options: Unpack[RetrainOptions]) -> Estimate:
    r"""The paper's :math:`\mathcal L_k` (``eq:k_face_risk``): the risk of a learner on n - k points, by retraining.

    For k = 1 this is leave-one-out, n trainings; for k that divides n it is K-fold over a random partition, K = n/k
    trainings, an unbiased sample of the average over all subsets of size k.

    Args:
        run: What was recorded.
        k: How many examples are left out at a time; a divisor of n.
        seed: Of the partition.
        options: ``dtype``, ``memory`` and ``progress`` of :func:`poprisk.risk._retraining.retrain`.

    Raises:
        DataError: k does not divide n, or leaves fewer than 2 parts.
        RunError: the run cannot be trained again.
    """
    n = run.num_examples
    if k == 1:
        return leave_one_out(run, **options).risk
    if not 1 <= k <= n // 2 or n % k:
        raise DataError(
            f"k must divide the {n} examples into at least two parts, got {k}: use holdouts for other sizes"
        )
    return k_fold(run, n // k, seed, **options).risk


def holdouts(
    run: Run, k: int, count: int, seed: int = 0, *, renormalize: bool = True, **options: Unpack[RetrainOptions]
) -> Resampled:
    r"""Random holdouts of k examples each: the paper's average over all subsets of size k, sampled.

    Costs ``count`` trainings.

    Raises:
        DataError: k is not between 1 and n - 2, or there is no holdout.
        RunError: the run cannot be trained again.
    """
    n = run.num_examples
    if not 1 <= k <= n - 2 or count < 1:
        raise DataError(f"holdouts need 1 … {n - 2} of the {n} examples and a count of at least 1, got {k} and {count}")
    generator = torch.Generator().manual_seed(seed)
    held = [torch.randperm(n, generator=generator)[:k].sort().values for _ in range(count)]
    return _resample(run, f"holdouts of {k}", held, renormalize, options)


def subsets(
    run: Run, masks: Bool[Tensor, "members n"], *, renormalize: bool = True, **options: Unpack[RetrainOptions]
) -> Resampled:
    """Train on subsets of the examples, given as masks of those kept, and score each on those it left out.

    ``member_losses`` of the result scores every training on other examples, which is what datamodels and the linear
    datamodeling score are made of.

    Raises:
        DataError: the masks have the wrong form, or keep nothing.
        RunError: the run cannot be trained again.
    """
    n = run.num_examples
    if masks.dtype != torch.bool or masks.dim() != 2 or masks.shape[1] != n or not len(masks):
        raise DataError(
            f"masks must be rows of {n} booleans, True where an example is kept, got {masks.dtype} {list(masks.shape)}"
        )
    held = [(~mask).nonzero().squeeze(1) for mask in masks.to("cpu")]
    return _resample(run, "subsets", held, renormalize, options)


def replace_one(
    run: Run,
    pairs: Sequence[tuple[int, int]],
    *,
    pool: tuple[Inputs, Tensor] | None = None,
    **options: Unpack[RetrainOptions],
) -> Resampled:
    r"""Train with one example replaced by a stranger, and score the example that was replaced.

    Theorem ``thm:self_influence``: over independent strangers the mean of
    :math:`\ell(F(w_T(S^{(i)}), z_i), y_i) - \ell(F(w_T(S), z_i), y_i)` is the generalization gap, and the held-out loss
    alone is the risk of a learner on all n points. Costs a training for each pair.

    Args:
        run: What was recorded.
        pairs: (i, j): training example i gives its place to row j of the pool.
        pool: Inputs and targets drawn like the training examples; default: the problem's test examples.
        options: ``dtype``, ``memory`` and ``progress`` of :func:`poprisk.risk._retraining.retrain`.

    Raises:
        DataError: there is no pool, no pair, or an index is out of range.
        RunError: the run cannot be trained again.
    """
    n, strangers = run.num_examples, pool if pool is not None else run.problem.test
    if strangers is None:
        raise DataError(
            "replacing examples needs others: pass pool=(inputs, targets), or give the problem test examples"
        )
    index = torch.as_tensor(pairs, dtype=torch.long).reshape(-1, 2)
    limits = torch.tensor([n, len(strangers[1])])
    if not len(index) or bool(((index < 0) | (index >= limits)).any()):
        raise DataError(f"pairs must be (example, row) below {tuple(limits.tolist())}, at least one, got {pairs!r}")
    positions = torch.arange(n).repeat(len(index), 1)
    positions[torch.arange(len(index)), index[:, 0]] = n + index[:, 1]
    members = Members(torch.ones(len(index), n, dtype=torch.float64), index_map=positions, pool=strangers)
    held = [index[j : j + 1, 0] for j in range(len(index))]
    return _run_members(run, "replace-one", f"a learner on {n} points", members, held, options)


def _resample(
    run: Run,
    method: str,
    held: list[Tensor],
    renormalize: bool,
    options: RetrainOptions,
    *,
    partition: bool = False,
) -> Resampled:
    n = run.num_examples
    members = Members(torch.stack([holdout_weights(n, index, renormalize=renormalize) for index in held]))
    return _run_members(run, method, _holdout_target(n, held), members, held, options, partition=partition)


def _holdout_target(n: int, held: list[Tensor]) -> str:
    sizes = sorted({n - len(index) for index in held})
    points = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"a learner on {points} of {n} points"


def _run_members(
    run: Run,
    method: str,
    target: str,
    members: Members,
    held: list[Tensor],
    options: RetrainOptions,
    *,
    partition: bool = False,
) -> Resampled:
    return _scored(run, method, target, held, _train(run, members, options), partition)


def _scored(
    run: Run,
    method: str,
    target: str,
    held: list[Tensor],
    training: tuple[Tensor, Tensor, tuple[str, ...], float],
    partition: bool,
) -> Resampled:
    """The held-out losses of members, given their weights, those of the run, notes and cost."""
    trained, own_weights, notes, cost = training
    own = member_outputs(run, own_weights.unsqueeze(0), run.problem.inputs)[0]
    own_losses = losses_of(run, own, run.problem.targets)
    member = torch.cat([torch.full((len(index),), k) for k, index in enumerate(held)])
    example = torch.cat(held)
    outputs = _held_out(run, trained, held)
    losses = losses_of(run, outputs, run.problem.targets[example])
    groups = member if partition else None
    risk = _risk(losses, example, own_losses[example], groups, target, cost, notes)
    return Resampled(
        method,
        target,
        risk,
        example,
        member,
        outputs,
        losses,
        own_losses[example],
        outputs - own[example],
        trained,
        run,
        own_weights,
        notes,
        partition,
    )


def _train(run: Run, members: Members, options: RetrainOptions) -> tuple[Tensor, Tensor, tuple[str, ...], float]:
    """The members' weights, and those of the run: trained again where another precision is asked for."""
    again = options.get("dtype") not in (None, run.layout.dtype)
    if again:
        members = _with_the_run(run, members)
    found = retrain(run, members, **options)
    own = found.weights[-1] if again else run.weights(run.num_steps).to(found.weights)
    return found.weights[: len(found.weights) - again], own, found.notes, found.trainings


def _with_the_run(run: Run, members: Members) -> Members:
    ones = torch.cat([members.weights, torch.ones_like(members.weights[:1])])
    index = members.index_map
    if index is not None:
        index = torch.cat([index, torch.arange(run.num_examples, device=index.device).unsqueeze(0)])
    return Members(ones, index_map=index, pool=members.pool)


def _held_out(run: Run, weights: Tensor, held: list[Tensor]) -> Float[Tensor, "evaluations *out"]:
    """Each member's outputs for the examples it was trained without, gathered if they are few and picked if many."""
    problem, widest = run.problem, max(len(index) for index in held)
    inputs = problem.inputs
    if widest * len(held) > 4 * len(problem):
        found = []
        for rows in slices(len(held), max(1, _FEW // len(problem))):
            outputs = member_outputs(run, weights[rows], inputs)
            found += [outputs[k, index.to(outputs.device)] for k, index in enumerate(held[rows])]
        return torch.cat(found)
    if not widest:
        return member_outputs(run, weights[:1], take_examples(inputs, slice(0, 1)))[0, :0]
    padded = torch.nn.utils.rnn.pad_sequence(list(held), batch_first=True)
    real = torch.arange(widest) < torch.tensor([len(index) for index in held]).unsqueeze(1)
    own = take_examples(inputs, padded.to(problem.device))
    return member_outputs(run, weights, own, own=True)[real.to(weights.device)]


def _risk(
    losses: Tensor,
    example: Tensor,
    own: Tensor,
    groups: Tensor | None,
    target: str,
    cost: float,
    notes: tuple[str, ...],
) -> Estimate:
    about = "; ".join((f"the risk of {target}", *notes))
    device = losses.device
    distinct = len(example.unique())
    if distinct < FEWEST:
        value = float(losses.double().mean()) if len(losses) else float("nan")
        why = f"{about}: {distinct} held-out examples are too few to tell a standard error, {FEWEST} are needed"
        return Estimate(value, float("nan"), valid=False, reason=why, cost=cost)
    value = float(losses.double().mean())
    error = inflated_error(losses, example.to(device), own, None if groups is None else groups.to(device))
    return finite_estimate(value, error, about, cost)


def _nested(run: Run, folds: int, seed: int, repeats: int, renormalize: bool, options: RetrainOptions) -> Resampled:
    n = run.num_examples
    outer, pairs = list(range(folds)), [(f, g) for f in range(folds) for g in range(f)]
    partitions = [_partition(n, folds, seed + 1000003 * r) for r in range(repeats)]
    left_out = [
        torch.isin(fold, torch.tensor(away)).nonzero().squeeze(1)
        for fold in partitions
        for away in [*[(f,) for f in outer], *pairs]
    ]
    found = _resample(run, f"nested {folds}-fold", left_out, renormalize, options)
    each = folds + len(pairs)
    splits = [_split(found, fold, r * each, pairs, folds) for r, fold in enumerate(partitions)]
    error, corrected = nested_error(splits)
    value = float(torch.stack([split.losses.double() for split in splits]).mean())
    sizes = torch.bincount(partitions[0])
    low, high = n - int(sizes.max()), n - int(sizes.min())
    target = f"a learner on {low if low == high else f'{low} to {high}'} of {n} points"
    note = f"the risk of {target}; error by nested cross-validation"
    rows = found.member < folds
    whole = by_example(picked(found, rows))
    return replace(
        whole,
        target=target,
        risk=finite_estimate(value, error, "; ".join((note, *found.notes)), found.risk.cost),
        extrapolated=finite_estimate(
            corrected, error, f"the risk of a learner on all {n} points, extrapolated", found.risk.cost
        ),
    )


def _split(found: Resampled, fold: Tensor, first: int, pairs: list[tuple[int, int]], folds: int) -> NestedSplit:
    """One partition's losses, from the rows of its trainings."""
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


def _partition(n: int, folds: int, seed: int) -> Int[Tensor, "n"]:
    fold = torch.empty(n, dtype=torch.long)
    fold[torch.randperm(n, generator=torch.Generator().manual_seed(seed))] = torch.arange(n) % folds
    return fold


def _positions(indices: Sequence[int] | Tensor, n: int) -> Tensor:
    index = torch.as_tensor(indices, dtype=torch.long).reshape(-1).to("cpu")
    if not len(index) or int(index.min()) < 0 or int(index.max()) >= n or len(index.unique()) != len(index):
        raise DataError(f"indices must be different examples of 0 … {n - 1}, at least one, got {index.tolist()}")
    return index
