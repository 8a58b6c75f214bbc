"""K-fold for weights that were chosen on held-back examples: fold models, averaged up to the same moment."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.costs import working_memory
from poprisk.errors import DataError, RunError
from poprisk.risk._k_fold import FOLDS, held_by_fold, most_folds
from poprisk.risk._resampled import Trained, held_out_result, members_without
from poprisk.risk._retraining.members import Buffers
from poprisk.risk._retraining.retrain import Retrained, retrain
from poprisk.risk._verdict import RiskEstimate, trained_on
from poprisk.runs import Run

MOST_POINTS, FEWEST_POINTS = 16, 4
"""Number of moments whose mean stands for an average over all steps, if memory allows as many."""


def kept_k_fold_risk(run: Run, folds: int = FOLDS, seed: int = 0) -> RiskEstimate:
    """The risk of the kept weights by K trainings without a fold, each averaged as they are, up to the same step.

    The moment was chosen on the held-back examples, which are in no fold and in no training, so that it was not chosen
    by what the folds are evaluated on.

    Raises:
        RunError: the run kept no weights, or cannot be trained again.
        DataError: there are fewer examples to train on than folds.
    """
    kept = run.kept
    if kept is None:
        raise RunError("the run kept no weights: train with hold_back=0.05, or estimate the risk of the last ones")
    points = averaged_steps(kept.risk.step, kept.risk.tail, _points(run, folds))
    held = kept_folds(run, min(folds, most_folds(run)), seed)
    found = retrain(run, members_without(run.num_examples, held), keep=points, stop=points[-1])
    weights = torch.stack([found.kept[k] for k in points]).mean(0)
    trained = Trained(weights, _own(run).to(weights), found.notes, found.trainings, _buffers(run, found, points))
    n, sizes = run.num_examples, [len(index) for index in held]
    rest = n - len(kept.held)
    target = f"the kept weights, step {kept.risk.step} of {run.num_steps}, of "
    target += trained_on((rest - max(sizes), rest - min(sizes)), n)
    return held_out_result(run, f"{len(held)}-fold", held, trained, target=target, partition=True).risk


def averaged_steps(step: int, tail: float | None, points: int = MOST_POINTS) -> list[int]:
    """Steps whose mean is close to the average that :class:`~poprisk.TailAverage` has after ``step`` steps.

    That one gives step k a weight close to (k / step)^(1 / tail - 1); these are its quantiles.

    >>> averaged_steps(100, 1.0, 4), averaged_steps(100, 0.2, 4), averaged_steps(100, None)
    ([12, 38, 62, 88], [66, 82, 91, 97], [100])
    """
    if tail is None:
        return [step]
    shares = [((j + 0.5) / points) ** tail for j in range(points)]
    return sorted({min(max(round(step * share), 1), step) for share in shares})


def _points(run: Run, folds: int) -> int:
    """How many moments of all fold models fit into a quarter of the working memory."""
    each = folds * run.num_weights * run.layout.dtype.itemsize
    return min(max(working_memory(2**32) // 4 // each, FEWEST_POINTS), MOST_POINTS)


def kept_folds(run: Run, folds: int, seed: int) -> list[Int[Tensor, "fold"]]:
    """The folds, without the examples that were held back."""
    trained = run.trained
    found = [fold[trained[fold]] for fold in held_by_fold(run, folds, seed)]
    if not all(len(fold) for fold in found):
        raise DataError(f"{int(trained.sum())} training examples are too few for {folds} folds: use fewer folds")
    return found


def _own(run: Run) -> Float[Tensor, "d"]:
    assert run.kept is not None
    state = run.kept.weights
    if missing := [name for name in run.layout.names if name not in state]:
        raise RunError(f"the kept weights have no {missing[0]!r}: they are of another model than the run")
    return run.layout.flatten([state[name] for name in run.layout.names])


def _buffers(run: Run, found: Retrained, points: list[int]) -> Buffers | None:
    """Each model's buffers, averaged as the weights are, and those of the kept weights; None without changing ones."""
    if not all(found.buffers.get(k) for k in points):
        return None
    assert run.kept is not None
    state, members = run.kept.weights, list(zip(*(found.buffers[k] for k in points), strict=True))
    own = {name: state[name] for name in members[0][-1] if name in state}
    return (*(_mean_buffers(each) for each in members), own)


def _mean_buffers(moments: tuple[dict[str, Tensor], ...]) -> dict[str, Tensor]:
    """The mean of buffers of floating point; of others the last."""
    return {
        name: torch.stack([each[name] for each in moments]).mean(0) if last.is_floating_point() else last
        for name, last in moments[-1].items()
    }
