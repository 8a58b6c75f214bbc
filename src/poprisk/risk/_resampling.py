r"""Risks from real trainings without some of the examples: leave-one-out, holdouts, subsets and replace-one.

Every training repeats the recorded one (first weights, batches, learning rates) with other example weights: those left
out have weight 0 and keep their places in the batches, the others n/(n-k). By Theorem ``thm:cv_family`` the expected
held-out loss is the risk of a model trained on n - k examples, which each estimate names as its target. All trainings
of a call are one stacked computation.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from jaxtyping import Bool
from torch import Tensor

from poprisk._core.seeds import generator_for
from poprisk.errors import DataError
from poprisk.risk._k_fold import MOST_TRAININGS, k_fold
from poprisk.risk._resampled import Resampled, RetrainOptions, resample
from poprisk.risk._verdict import RiskEstimate
from poprisk.runs import Run


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

    It takes one training for each example.

    Args:
        run: What was recorded.
        indices: The examples to leave out, each alone; default: all of them.
        renormalize: Give the other examples weight n/(n-1), as the paper does. False leaves them at 1, so that only the
            gradient of the one example is missing from each batch.
        options: ``dtype``, ``memory`` and ``progress`` of :func:`poprisk.risk.retrain`.

    Raises:
        DataError: fewer than three examples, or an index that does not exist or comes twice.
        RunError: the run cannot be trained again.

    >>> from poprisk import Problem, train
    >>> y = torch.tensor([[0.0], [0.0], [3.0]])
    >>> problem = Problem(torch.nn.Linear, "squared", torch.ones(3, 1), y,
    ...                   arguments={"in_features": 1, "out_features": 1, "bias": False})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.5), steps=60, progress=False)
    >>> leave_one_out(run).outputs.squeeze(1).round(decimals=3).abs()  # the mean of the two others
    tensor([1.5000, 1.5000, 0.0000])
    """
    n = run.num_examples
    if n < 3:
        raise DataError(f"leaving one out needs at least 3 examples, got {n}: use more training data")
    index = torch.arange(n) if indices is None else _positions(indices, n)
    return resample(run, "leave-one-out", [index[j : j + 1] for j in range(len(index))], renormalize, options)


def cross_validation_risk(run: Run, k: int, *, seed: int = 0, **options: Unpack[RetrainOptions]) -> RiskEstimate:
    r"""The paper's :math:`\mathcal L_k` (``eq:k_face_risk``): risk of a model trained on n - k examples, by retraining.

    For k = 1 this is leave-one-out, with n trainings. For k that divides n it is K-fold over a random partition, with
    K = n/k trainings: an unbiased sample of the average over all subsets of size k.

    Args:
        run: What was recorded.
        k: Number of examples left out at a time; a divisor of n.
        seed: Seed for the partition.
        options: ``dtype``, ``memory`` and ``progress`` of :func:`poprisk.risk.retrain`.

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

    It takes ``count`` trainings.

    Raises:
        DataError: k is not between 1 and n - 2, or there is no holdout.
        RunError: the run cannot be trained again.
    """
    n = run.num_examples
    if not 1 <= k <= n - 2 or not 1 <= count <= MOST_TRAININGS:
        told = f"holdouts need 1 … {n - 2} of the {n} examples and a count from 1 to {MOST_TRAININGS}"
        raise DataError(f"{told}, got {k} and {count}")
    generator = generator_for(seed, "holdouts")
    held = [torch.randperm(n, generator=generator)[:k].sort().values for _ in range(count)]
    return resample(run, f"holdouts of {k}", held, renormalize, options)


def subsets(
    run: Run, masks: Bool[Tensor, "members n"], *, renormalize: bool = True, **options: Unpack[RetrainOptions]
) -> Resampled:
    """Train on subsets of the examples, given as masks of those kept, and evaluate each model on those it left out.

    ``member_losses`` of the result evaluates every model on other examples, as datamodels and the linear datamodeling
    score need it.

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
    return resample(run, "subsets", held, renormalize, options)


def _positions(indices: Sequence[int] | Tensor, n: int) -> Tensor:
    index = torch.as_tensor(indices, dtype=torch.long).reshape(-1).to("cpu")
    if not len(index) or int(index.min()) < 0 or int(index.max()) >= n or len(index.unique()) != len(index):
        raise DataError(f"indices must be different examples of 0 … {n - 1}, at least one, got {index.tolist()}")
    return index
