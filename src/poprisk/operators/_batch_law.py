r"""How the batch of each step was drawn, and what follows for the mean and covariance of its gradient.

With the past :math:`\mathcal F_k` given, a batch is b examples out of a pool of m. The pool is the whole training set
where every step draws afresh, and what the epoch has left where batches are dealt out in epochs.

.. math::
   \mathbb E[\hat g_k \mid \mathcal F_k] = \frac cm \sum_{i \in pool} \nabla \ell_i, \qquad
   \operatorname{Cov}(\hat g_k \mid \mathcal F_k) = c^2\, \frac{m-b}{b(m-1)}\, \Sigma_{pool}
   \quad (\text{with replacement } c^2\, \Sigma_{pool} / b)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._trajectory import Trajectory
from poprisk.runs import AffineStep

Sampling = Literal["independent", "replacement", "epochs"]
"""b different examples of all n at every step, b draws with replacement, or a shuffled training set dealt out."""


@dataclass(frozen=True, eq=False)
class BatchLaw:
    """The law of one step's batch gradient, given all that happened before it."""

    pool: Int[Tensor, "m"]
    """The examples that could have been drawn."""
    size: int
    """How many were: b."""
    scale: float
    r"""c, the factor on the mean over the batch: 1 for a mean, b for a sum, and a clip factor inside."""
    replacement: bool = False

    @property
    def covariance_factor(self) -> float:
        r"""What :math:`\Sigma_{pool}` is multiplied with, Eq. ``finite_pop_cov``; 0 where the pool is the batch.

        >>> BatchLaw(torch.arange(5), size=2, scale=1.0).covariance_factor  # (5 - 2) / (2 * 4)
        0.375
        """
        m, b = len(self.pool), self.size
        if self.replacement:
            return self.scale**2 / b
        return self.scale**2 * (m - b) / (b * (m - 1)) if m > b else 0.0

    @property
    def covariance_ceiling(self) -> float:
        r"""The factor of the bound :math:`V_k / b`, which no way of drawing exceeds: :math:`c^2/b`."""
        return self.scale**2 / self.size


def batch_laws(
    trajectory: Trajectory, num_examples: int, *, start: int = 0, stop: int, sampling: Sampling = "independent"
) -> list[BatchLaw]:
    r"""The law of every batch of a window of a recorded run.

    For ``"epochs"`` the pools follow from the recorded batches: an epoch ends when fewer examples are left than the
    next batch takes (:func:`poprisk.runs.train`, and loaders with or without ``drop_last``). Examples that a run held
    back belong to no pool.

    A recorded clip factor enters as :math:`c`. It was computed from the batch, so that with clipping the mean is no
    conditional expectation but the full gradient times the factor that this step happened to have.

    Epochs are followed from step 0, whatever the window.

    Raises:
        HyperparameterError: an unknown way of sampling.
        DataError: examples with weights of their own (their mean is not known from the batch), an example twice in a
            batch drawn without replacement, or twice in an epoch.

    >>> from poprisk.operators._gradient_descent import RecordedSteps
    >>> batches = torch.tensor([[3, 0], [1, 2], [0, 1]])
    >>> steps = [AffineStep(batch, torch.full((2,), 2.0), torch.ones(1)) for batch in batches]
    >>> run = RecordedSteps([], steps, [])
    >>> [law.pool.tolist() for law in batch_laws(run, 4, stop=3, sampling="epochs")]
    [[0, 1, 2, 3], [1, 2], [0, 1, 2, 3]]
    """
    if sampling not in get_args(Sampling):
        raise HyperparameterError(f"sampling must be one of {', '.join(get_args(Sampling))}, got {sampling!r}")
    steps = [trajectory.step(k) for k in range(0 if sampling == "epochs" else start, stop)]
    kept = getattr(trajectory, "kept", None)
    trained = torch.ones(num_examples, dtype=torch.bool)
    if kept is not None:
        trained[kept.held] = False  # no step draws them
    everything = trained.nonzero().squeeze(1)
    pools = _epoch_pools(steps, trained) if sampling == "epochs" else [everything] * len(steps)
    laws = [
        _law(stop - len(steps) + j, step, pool, num_examples, sampling == "replacement")
        for j, (step, pool) in enumerate(zip(steps, pools, strict=True))
    ]
    return laws[len(laws) - (stop - start) :]


def remaining_examples(trajectory: Trajectory, num_examples: int, k: int) -> Int[Tensor, "m"]:
    """The examples that the epoch of step k has left just before it, for batches dealt out in epochs.

    In the first epoch nobody has trained on them: they are fresh.

    >>> from poprisk.operators._gradient_descent import RecordedSteps
    >>> steps = [AffineStep(torch.tensor(batch), torch.full((2,), 3.0), torch.ones(1)) for batch in ([3, 0], [1, 2])]
    >>> remaining_examples(RecordedSteps([], steps, []), 6, k=1)
    tensor([1, 2, 4, 5])
    """
    return batch_laws(trajectory, num_examples, start=k, stop=k + 1, sampling="epochs")[0].pool


def _epoch_pools(steps: Sequence[AffineStep], trained: Bool[Tensor, "n"]) -> list[Tensor]:
    left, pools = trained, []
    for k, step in enumerate(steps):
        batch = _indices(k, step, len(trained))
        if int(left.sum()) < len(batch):
            left = trained
        if not bool(left[batch].all()):
            again = batch[~left[batch]][0].item()
            raise DataError(
                f"step {k} drew example {again} a second time in one epoch: the batches were not dealt out in epochs, "
                'take sampling="independent" or "replacement"'
            )
        pools.append(left.nonzero().squeeze(1))
        left = left.clone()
        left[batch] = False
    return pools


def _law(k: int, step: AffineStep, pool: Tensor, n: int, replacement: bool) -> BatchLaw:
    batch = _indices(k, step, n)
    if not replacement and len(batch.unique()) != len(batch):
        raise DataError(f'step {k} has an example twice in its batch: take sampling="replacement"')
    weights = step.selection.to("cpu", torch.float64)
    mean = weights.mean()
    if bool(((weights - mean).abs() > 1e-6 * mean.abs()).any()):
        raise DataError(
            f"step {k} weighs its examples from {weights.min():.3g} to {weights.max():.3g}: the mean gradient over all "
            "examples is known only where a batch weighs them alike"
        )
    return BatchLaw(pool, len(batch), weights.sum().item() / n, replacement)


def _indices(k: int, step: AffineStep, n: int) -> Tensor:
    batch = step.batch.cpu()
    if not len(batch) or not 0 <= int(batch.min()) <= int(batch.max()) < n:
        shown = batch.tolist()[:8]
        raise DataError(f"step {k} used the examples {shown}, expected some of 0 … {n - 1}: pass all training inputs")
    return batch
