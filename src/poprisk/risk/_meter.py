r"""Population risk along a run: a curve to look at, and the step to stop at."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from poprisk._core.autodiff import slices
from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.risk._controls import Deletions
from poprisk.risk._exclusion import (
    MOST_EXAMPLES,
    check_budget,
    check_controls,
    choose_examples,
    controlled,
    deletions_of,
    excluded_together,
    exclusion_at,
)
from poprisk.risk._influence.exclusion_sweep import ExclusionSweep, joined
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._k_fold import FoldEnsemble, most_folds
from poprisk.risk._leverage.controlled import LeverageControls
from poprisk.risk._risk import ROADS, Question, first_valid, leverage_controls
from poprisk.risk._verdict import FEWEST_FOLDS, FOLDS, RiskEstimate
from poprisk.runs import Run, as_run

_READINGS = 20


@dataclass(frozen=True, eq=False)
class Reading:
    """The risk at one step of a run."""

    step: int
    """The risk is that of the weights before this step; ``run.num_steps`` is the end."""
    risk: RiskEstimate

    @property
    def training_loss(self) -> float:
        """The mean training loss at the same weights."""
        return self.risk.training_loss


class RiskMeter:
    """Follows population risk along a run, while it is recorded or afterwards.

    Exclusion and its controls are carried forward with the run: reading ten steps costs what reading the last one
    costs. Where the budget allows K-fold, its members are trained along with the run. A reading at the end of a run is
    the same estimate as ``population_risk(run, weights="last")``.

    Args:
        method: "auto" or one of the methods of :func:`~poprisk.risk.population_risk`, other than "first_order".
        retrain_budget: Number of trainings allowed for K-fold, for the whole curve; 0 uses no folds.
        examples: Number of examples used by exclusion, drawn at random; default: all, up to 256.
        controls: Number of single deletions trained as a check of exclusion, as in
            :func:`~poprisk.risk.population_risk`; each reading uses as many as it needs.
        seed: Seed for the random draw and for the folds.
        without: Methods that "auto" leaves out, for instance because they would take too long.

    Raises:
        HyperparameterError: an unknown method, or a budget too small for it.

    >>> from poprisk import Problem, train
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(40, 3, generator=generator)
    >>> y = x[:, :1] + 0.5 * torch.randn(40, 1, generator=generator)
    >>> problem = Problem(torch.nn.Linear, "squared", x, y, arguments={"in_features": 3, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.2), steps=30, progress=False)
    >>> meter = RiskMeter().read(run, [5, 10, 30])
    >>> [reading.step for reading in meter.readings], meter.best_step
    ([5, 10, 30], 30)
    """

    def __init__(
        self,
        method: str = "auto",
        *,
        retrain_budget: int = 0,
        examples: int | None = None,
        controls: int | None = None,
        seed: int = 0,
        without: Sequence[str] = (),
    ) -> None:
        own = {"exclusion": self._by_exclusion, "leverage": self._by_leverage, "k_fold": self._by_folds}
        roads = [replace(r, estimate=own.get(r.method, r.estimate)) for r in ROADS if r.in_auto and "last" in r.of]
        names = [road.method for road in roads]
        if method not in ("auto", *names) or not set(without) <= set(names):
            raise HyperparameterError(f"method must be one of auto, {', '.join(names)}, got {method!r}")
        self._roads = [r for r in roads if method == r.method or (method == "auto" and r.method not in without)]
        if method != "auto" and retrain_budget < self._roads[0].trainings:
            raise HyperparameterError(
                f"{method} trains at least {FEWEST_FOLDS} times, got retrain_budget={retrain_budget}: allow {FOLDS}"
            )
        check_controls(controls)
        check_budget(retrain_budget)
        self.method, self.retrain_budget, self.examples, self.seed = method, retrain_budget, examples, seed
        self.controls = controls
        self.readings: list[Reading] = []
        self._sweeps: list[ExclusionSweep] = []
        self._unrolled: Unrolled | None = None
        self._pending: list[int] = []
        self._deletions: Deletions | None = None
        self._leverage: LeverageControls | None = None
        self._folds: FoldEnsemble | None = None
        self._first: tuple[Tensor, str] | None = None

    def read(self, run: Run | str | Path, steps: int | Sequence[int] | None = None) -> "RiskMeter":
        """Add readings of a run as far as it has gone; earlier readings are kept.

        Call it with ``recorder.flush()`` from time to time during training, or once with a finished run.

        Args:
            run: A run with its problem, the same as in earlier calls, but longer.
            steps: Steps to read, or a number of steps evenly spaced in the logarithm; default: 20 in the first call,
                and the end of the run in later ones.

        Raises:
            DataError: a step is outside the run, or before one that was read.
            RunError: the run is not the one read before, or none of the methods is possible for it.
        """
        run = as_run(run)
        if not run.num_steps:
            raise DataError("the run has no steps yet: call recorder.flush() to write the steps so far")
        moments = self._moments(run, steps)
        self._check_same(run)
        self._unrolled, self._pending = None, moments
        for k in moments:
            question = Question(run, "last", self.retrain_budget, self.examples, self.seed, k, self.controls)
            self.readings.append(Reading(k, first_valid(question, self._roads)))
        return self

    @property
    def best_step(self) -> int:
        """The step of the lowest estimated risk among the valid readings: where to stop.

        Raises:
            DataError: there is no valid reading yet.
        """
        valid = [reading for reading in self.readings if reading.risk.valid]
        if not valid:
            raise DataError("there is no valid reading yet: call read, or allow K-fold with retrain_budget=10")
        return min(valid, key=lambda reading: float(reading.risk.value)).step

    def curve(self) -> dict[str, list[float]]:
        """The readings as columns: step, risk, standard_error, valid, training_loss, method."""
        rows = self.readings
        return {
            "step": [r.step for r in rows],
            "risk": [float(r.risk.value) for r in rows],
            "standard_error": [float(r.risk.standard_error) for r in rows],
            "valid": [r.risk.valid for r in rows],
            "training_loss": [r.training_loss for r in rows],
            "method": [r.risk.method for r in rows],  # pyright: ignore[reportReturnType]
        }

    def _by_exclusion(self, question: Question) -> RiskEstimate:
        unrolled, deletions, k = *self._followed(question.run), question.stop
        predicted = exclusion_at(unrolled, joined([sweep.outputs_at(k) for sweep in self._sweeps]), k)
        if self.controls == 0:
            return predicted.risk
        return controlled(unrolled, predicted, deletions, k, self.controls, self.seed).risk

    def _followed(self, run: Run) -> tuple[Unrolled, Deletions]:
        """The run up to the last step to read; exclusion and its controls are taken along to it."""
        if self._unrolled is not None and self._deletions is not None:
            return self._unrolled, self._deletions
        self._unrolled = unrolled = Unrolled(run, stop=self._pending[-1])
        for sweep in self._sweeps:
            sweep.extend(unrolled)
        if self._deletions is None:
            chosen = choose_examples(unrolled.num_examples, self.examples, self.seed, most=MOST_EXAMPLES)
            groups, at_once = excluded_together(unrolled.groups), slices(len(chosen), unrolled.columns_at_a_time())
            self._sweeps = [ExclusionSweep(unrolled, chosen[rows], groups=groups) for rows in at_once]
            self._deletions = deletions_of(unrolled, chosen, groups, self.seed)
        self._deletions.follow(run, self._pending)
        return unrolled, self._deletions

    def _by_leverage(self, question: Question) -> RiskEstimate:
        if self._leverage is None:
            self._leverage = LeverageControls(leverage_controls(question), self.seed)
        later = [k for k in self._pending if k > question.stop]
        return self._leverage.at(question.run, question.stop, question.examples, later).risk

    def _by_folds(self, question: Question) -> RiskEstimate:
        run, k = question.run, question.stop
        if self._folds is None:
            self._folds = FoldEnsemble(run, min(FOLDS, self.retrain_budget, most_folds(run)), self.seed)
        self._folds.advance(run, [k])
        return self._folds.reading(run, k)

    def _moments(self, run: Run, steps: int | Sequence[int] | None) -> list[int]:
        last = self.readings[-1].step if self.readings else 0
        if isinstance(steps, Sequence):
            moments = sorted(set(steps))
            if any(not last < k <= run.num_steps for k in moments):
                raise DataError(f"steps must lie in {last + 1} … {run.num_steps}, got {list(steps)}")
            return moments
        if run.num_steps <= last:
            return []
        count = min(steps, run.num_steps) if steps is not None else (_READINGS if not self.readings else 1)
        if count < 1:
            raise DataError(f"steps must be at least 1, got {count}")
        ratio = math.log(run.num_steps / (last + 1))
        ends = [round(run.num_steps * math.exp(-ratio * j / max(count - 1, 1))) for j in range(count)]
        return sorted({min(max(k, last + 1), run.num_steps) for k in ends})

    def _check_same(self, run: Run) -> None:
        first = run.weights(0), run.problem.fingerprint
        if self._first is None:
            self._first = first
        elif not (torch.equal(self._first[0], first[0]) and self._first[1] == first[1]):
            raise RunError(
                "the meter has read another run, with other first weights or examples: use one meter per run"
            )
