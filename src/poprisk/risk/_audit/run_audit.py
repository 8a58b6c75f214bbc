"""Find training examples that are mislabelled, hard or memorized, from one recorded run."""

import math
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vmap

from poprisk._core.autodiff import resolve_loss
from poprisk._core.estimate import Estimate
from poprisk._core.progress import limits, training_progress
from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.risk._audit.count import agreement, count_wrong
from poprisk.risk._audit.exact import exact_columns, exact_obstacle
from poprisk.risk._audit.histories import ClassHistory, ResidualHistory, rank_share
from poprisk.risk._audit.kept import kept_audit
from poprisk.risk._audit.table import AuditTable
from poprisk.risk._audit.unseen import Unseen, unseen
from poprisk.risk._classes import ClassView, class_view, own_and_other
from poprisk.risk._moments import choose_moments, evaluate, has_changing_buffers
from poprisk.risk._under_training import under_training
from poprisk.risk._verdict import FEWEST_FOLDS, FOLDS, judge_count, no_count
from poprisk.runs import Problem, Run, as_run

Tier = Literal["auto", "any", "exact"]
_KEPT = "the other columns once the exact ones have begun"
_OUTLIER = 3.5
"""Robust standard deviations beyond which a residual is suspect: Iglewicz and Hoaglin's rule."""


def audit(
    run: Run | str | Path,
    *,
    tier: Tier = "auto",
    moments: int = 20,
    out_of_fold: Float[Tensor, "n classes"] | None = None,
    retrain_budget: int = 0,
    batch_size: int = 1024,
    budget: float | None = None,
    memory: int | str | None = None,
    progress: bool = True,
) -> AuditTable:
    r"""Find the training labels that are probably wrong, from one recorded run.

    **Any run** (also with batch normalization, augmentation, dropout or mixed precision): the recorded network is
    evaluated at some steps of its training on all n examples, without augmentation, in evaluation mode. That gives
    losses, margins (AUM), forgetting, and probabilities averaged over training. A network is overconfident in the
    labels of its own training examples, the more so the longer it trains. Therefore each example is also predicted by
    a model that has not seen it: a kernel regression without the example, on the inputs or on the features that the
    network had before its first step (:mod:`poprisk.risk._audit.unseen`), which trains nothing; with
    ``retrain_budget`` the networks of K folds if they predict better; or ``out_of_fold``.

    **Suspicion** of a label y is a mean of ranks among all examples, from near 0 to 1: of the loss averaged over
    training, of :math:`-(\bar p_y - \max_{j \ne y} \bar p_j)` with the averaged probabilities :math:`\bar p`, and,
    for as much as both, of the same with the out-of-sample probabilities. For a regression it is the rank of the loss
    averaged over training.

    **Count.** ``wrong_labels`` is the number of wrong labels; value ± 2 standard errors holds what the out-of-sample
    predictions allow, from the rate of contradicted labels among the most certain predictions to all contradicted
    labels (:mod:`poprisk.risk._audit.count`). It is not valid, and says why, where wrong labels cannot be told from
    ambiguous examples or from mistakes of the model.

    **Suspects** are the most suspicious examples, as many as labels are estimated to be wrong; where the count is not
    valid, all whose label the probabilities contradict; in a regression those whose mean residual lies 3.5 robust
    standard deviations above the median.

    **Exact tier**, for networks that map each example by itself with a fixed function of the weights (no active
    dropout, no batch statistics), float32 or float64, not augmented, recorded with their problem: what the label did
    through the recorded training. Columns ``self_influence`` (first order), ``loo_loss`` with ``loo_margin`` or
    ``loo_residual`` (the run without the example, each step linearized; ``loo_doubtful`` where that is not
    reliable), and ``displacement`` on the first 100 test examples if the problem has a test set and the run is small.

    Args:
        run: A recorded run whose problem is known, or the path of its directory; or a run with which an audit was kept,
            by the callback of a trainer or by :func:`~poprisk.report.analyze`: it is the one that you get.
        tier: ``"any"`` for the columns that every run has; ``"exact"`` to require the exact columns too; ``"auto"`` to
            add them if the run allows them and they are cheap, with a note otherwise.
        moments: Number of evenly spaced steps to evaluate at, in addition to a few early ones. If not every step was
            recorded, only checkpoints are used.
        out_of_fold: Class probabilities of each example by networks trained without it, if you have them.
        retrain_budget: Number of trainings allowed for out-of-sample probabilities: 0, or at least 3 folds.
        batch_size: Number of examples evaluated at a time.
        budget: Seconds that the call may take; exact columns that would take longer are left out, with a note. None
            leaves them out from about 10 s, unless they are required.
        memory: Bytes that the process may use, or "2 GB": work is done in smaller pieces. None sets no limit.
        progress: Whether to show progress on stderr.

    Returns:
        The table. Its ``notes`` say what is approximate.

    Raises:
        RunError: the run has no steps, its problem is not known, or ``tier="exact"`` is not possible for it.
        DataError: fewer than 3 examples, or ``out_of_fold`` of the wrong shape or with numbers that are not
            probabilities.
        HyperparameterError: an unknown tier, or no moments.

    >>> from functools import partial
    >>> from poprisk import Problem, train
    >>> inputs = torch.eye(4).repeat(10, 1)
    >>> labels = torch.arange(4).repeat(10)
    >>> labels[7] = 0  # really a 3
    >>> problem = Problem(torch.nn.Linear, "cross_entropy", inputs, labels,
    ...                   arguments={"in_features": 4, "out_features": 4})
    >>> run = train(problem, partial(torch.optim.SGD, lr=1.0), 30, progress=False)
    >>> row = audit(run, progress=False).worst(1)[0]
    >>> row["example"], row["given_label"], row["suggested_label"]
    (7, 0, 3)
    """
    if batch_size < 1:
        raise HyperparameterError(f"batch_size must be at least 1, got {batch_size}: use 1024")
    if retrain_budget and not retrain_budget >= FEWEST_FOLDS:
        raise HyperparameterError(f"retrain_budget must be 0 or at least {FEWEST_FOLDS}, got {retrain_budget!r}")
    with limits("audit", budget=budget, memory=memory, progress=progress, keeps=_KEPT, lower="moments or batch_size"):
        run = as_run(run)
        kept = kept_audit(run) if out_of_fold is None and not retrain_budget else None
        if kept is not None and (tier != "exact" or "self_influence" in kept.columns):
            return kept
        return _audited(run, tier, moments, out_of_fold, retrain_budget, batch_size, progress)


def _audited(
    run: Run,
    tier: Tier,
    moments: int,
    out_of_fold: Tensor | None,
    retrain_budget: int,
    batch_size: int,
    progress: bool,
) -> AuditTable:
    if run.num_examples < 3:
        raise DataError(f"an audit needs at least 3 training examples, got {run.num_examples}")
    obstacle = exact_obstacle(run)
    if tier == "exact" and obstacle is not None:
        raise RunError(f"the exact tier is not possible for this run: {obstacle}")
    looked = _Look(run, choose_moments(run, moments), batch_size, progress)
    table = looked.table(_unseen(looked, out_of_fold, retrain_budget, batch_size))
    if tier == "any":
        return table
    return exact_columns(run, table, obstacle, demanded=tier == "exact")


def _unseen(looked: "_Look", out_of_fold: Tensor | None, retrain_budget: int, batch_size: int) -> Unseen | None:
    """The out-of-sample probabilities to use: those given, or the best of those that the run allows."""
    view = looked.view
    if out_of_fold is not None:
        _check_probabilities(out_of_fold, view, len(looked.problem))
        return Unseen(out_of_fold.detach().cpu().float(), "the probabilities given", math.nan)
    if view is None:
        return None
    folds = min(retrain_budget, FOLDS, len(looked.problem))
    return unseen(looked.run, view, folds, batch_size=batch_size)


class _Look:
    """One pass over the chosen steps of a run."""

    def __init__(self, run: Run, moments: list[int], batch_size: int, progress: bool) -> None:
        self.run, self.problem = run, run.problem
        self.targets = self.problem.targets.cpu()
        self.view: ClassView | None = None
        self.history: ClassHistory | ResidualHistory | None = None
        self.skipped = 0
        self.steps: list[int] = []
        self.shares: list[float] = []
        self.losses: list[Tensor] = []
        self.odd = torch.zeros(len(self.problem), dtype=torch.bool)
        with training_progress("audit", 0, len(moments), shown=progress) as report:
            for number, moment in enumerate(evaluate(run, moments, batch_size=batch_size), 1):
                loss = self._add(moment.step, moment.share, moment.outputs)
                report(number, loss)
        if not self.losses:
            raise RunError("the outputs are not finite at any step, as the training diverged: use a lower lr")

    def _add(self, step: int, share: float, outputs: Tensor) -> Tensor:
        losses = example_losses(self.problem, outputs)
        odd = ~(losses.isfinite() & outputs.reshape(len(outputs), -1).isfinite().all(1))
        if int(odd.sum()) * 2 > len(odd):
            self.skipped += 1
            return losses.mean()
        if not self.losses:
            self._begin(outputs)
        self.odd |= odd
        if self.history is not None:
            self.history.add(outputs.masked_fill(odd.reshape(-1, *[1] * (outputs.dim() - 1)), 0.0), share)
        self.losses.append(losses.masked_fill(odd, torch.inf))
        self.steps.append(step)
        self.shares.append(share)
        return losses[~odd].mean()

    def _begin(self, outputs: Tensor) -> None:
        self.view = class_view(self.problem, outputs)
        if self.view is not None:
            self.history = ClassHistory(self.view)
        elif self.problem.loss == "squared" and self.targets.is_floating_point():
            self.history = ResidualHistory(self.targets)

    def table(self, found: Unseen | None) -> AuditTable:
        losses = torch.stack(self.losses)
        weights = torch.tensor(self.shares, dtype=torch.float64)
        mean_loss = (weights[:, None] * losses).sum(0) / weights.sum()
        basic = {"loss": losses[-1], "mean_loss": mean_loss}
        if isinstance(self.history, ClassHistory):
            return self._classes(self.history, basic, losses, found)
        n = len(mean_loss)
        columns = {"example": torch.arange(n), "suspicion": rank_share(mean_loss)}
        suggested = None
        if isinstance(self.history, ResidualHistory):
            residuals = self.history.columns
            suspect = (residuals["residual_z"] > _OUTLIER) | self.odd
            reason = f"residuals beyond {_OUTLIER} robust deviations are counted, also those of heavy-tailed noise"
            wrong = Estimate(float(suspect.sum()), math.nan, valid=False, reason=reason)
            suggested = self.history.mean_predictions.reshape(self.targets.shape).to(self.targets.dtype)
            extra: dict[str, Tensor] = {"is_suspect": suspect}
            if suggested[0].numel() == 1:
                extra |= {"given_target": self.targets.reshape(n), "suggested_target": suggested.reshape(n)}
            columns |= extra | basic | residuals
        else:
            wrong = Estimate(math.nan, math.nan, valid=False, reason="the targets are neither classes nor numbers")
            columns |= {"is_suspect": torch.zeros(n, dtype=torch.bool)} | basic
        kind = "loss" if self.history is None else "regression"
        return AuditTable(columns, kind, wrong, tuple(self.steps), losses, self.targets, suggested, None, self._notes())

    def _classes(
        self, history: ClassHistory, basic: dict[str, Tensor], losses: Tensor, found: Unseen | None
    ) -> AuditTable:
        view, n = history.view, len(self.targets)
        mean = history.mean_probabilities
        own, other, suggested = own_and_other(mean if found is None else (mean + found.probabilities) / 2, view.labels)
        quality = (1 + own - other) / 2
        suspicion = self._suspicion(mean, found, view.labels, basic["mean_loss"])
        if found is None:
            wrong = no_count()
        else:
            agreed = agreement(found.probabilities, history.predictions if found.check is None else [found.check])
            wrong = judge_count(count_wrong(found.probabilities, view.labels), agreed, n, found.source)
        suspect = (quality < 0.5) | self.odd
        if wrong.valid:
            suspect = torch.zeros(n, dtype=torch.bool)
            suspect[suspicion.argsort(descending=True, stable=True)[: round(float(wrong.value))]] = True
        columns = {"example": torch.arange(n), "suspicion": suspicion, "is_suspect": suspect}
        columns |= {"given_label": view.labels, "suggested_label": suggested, "label_quality": quality}
        columns |= basic | history.columns
        p = mean if found is None else found.probabilities
        targets = view.as_targets(suggested)
        about = (tuple(self.steps), losses, self.targets, targets, p, self._notes())
        return AuditTable(columns, "classes", wrong, *about)

    def _suspicion(self, mean: Tensor, found: Unseen | None, labels: Tensor, mean_loss: Tensor) -> Tensor:
        """Mean rank of the loss, of the averaged contradiction and, for as much again, of the out-of-sample one."""

        def contradiction(p: Tensor) -> Tensor:
            own, other, _ = own_and_other(p, labels)
            return rank_share((other - own).masked_fill(self.odd, torch.inf))

        seen = (rank_share(mean_loss) + contradiction(mean)) / 2
        return seen if found is None else (seen + contradiction(found.probabilities)) / 2

    def _notes(self) -> tuple[str, ...]:
        found = [note] if (note := under_training(self.run)) else []
        if self.run.augmented:
            found.append("the run was augmented: examples are evaluated without augmentation")
        if has_changing_buffers(self.run):
            between = sum(k not in self.run.checkpoints for k in self.steps)
            if between:
                found.append(
                    f"batch statistics were recorded at checkpoints only: at {between} of {len(self.steps)} steps they "
                    "are estimated from the training examples"
                )
        changed = self.run.unexplained
        for obstacle in self.run.obstacles[:1]:
            mode = "evaluated in evaluation mode, unlike the training: "
            found.append(obstacle if changed and obstacle == changed.reason else f"{mode}{obstacle}")
        if len(self.steps) < 8:
            found.append(f"only {len(self.steps)} steps were recorded, so that averages over training are coarse")
        if self.skipped:
            found.append(f"{self.skipped} steps were left out because most outputs were not finite there")
        if bool(self.odd.any()):
            found.append(f"{int(self.odd.sum())} examples with non-finite outputs are ranked first")
        return tuple(found)


def example_losses(problem: Problem, outputs: Tensor) -> Float[Tensor, "n"]:
    """Each training example's loss under these outputs, in float64, on the CPU."""
    targets = problem.targets.cpu()
    wide = outputs.double()
    wanted = targets.double() if targets.is_floating_point() else targets
    return vmap(resolve_loss(problem.loss))(wide, wanted)


def _check_probabilities(given: Tensor, view: ClassView | None, n: int) -> None:
    if view is None:
        raise DataError("out_of_fold needs targets that are classes: leave it out")
    if given.shape != (n, view.num_classes) or not given.is_floating_point():
        got = f"{given.dtype} {list(given.shape)}"
        raise DataError(
            f"out_of_fold must be a tensor of probabilities of shape {[n, view.num_classes]}, got {got}: pass one"
        )
    low, sums = float(given.min()), given.double().sum(1)
    if not low >= 0 or not bool(((sums - 1).abs() < 1e-3).all()):
        raise DataError(
            f"out_of_fold must be probabilities, each row not negative with sum 1, got a smallest entry {low:.3g} and "
            f"sums from {float(sums.min()):.4g} to {float(sums.max()):.4g}"
        )
