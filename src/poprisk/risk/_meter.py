r"""Population risk along a run: a curve to look at, and the step to stop at."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.risk._exclusion import MOST_EXAMPLES, choose_examples, exclusion_at
from poprisk.risk._influence.exclusion_sweep import ExclusionSweep
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._k_fold import FoldEnsemble
from poprisk.risk._verdict import FEWEST_FOLDS, FOLDS, RiskEstimate
from poprisk.runs import Run

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

    Exclusion is carried forward with the run: reading ten steps costs what reading the last one costs. Where it is no
    longer valid, and the budget allows it, K-fold takes over, its members trained along with the run.

    Args:
        method: "auto", "exclusion" or "k_fold", as in :func:`~poprisk.risk.population_risk`.
        retrain_budget: Number of trainings allowed for the whole curve; 0 trains nothing.
        examples: Number of examples used by exclusion, drawn at random; default: all, up to 256.
        seed: Seed for the random draw and for the folds.

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
        self, method: str = "auto", *, retrain_budget: int = 0, examples: int | None = None, seed: int = 0
    ) -> None:
        if method not in ("auto", "exclusion", "k_fold"):
            raise HyperparameterError(f'method must be "auto", "exclusion" or "k_fold", got {method!r}')
        if method == "k_fold" and retrain_budget < FEWEST_FOLDS:
            raise HyperparameterError(
                f"k_fold trains at least {FEWEST_FOLDS} times, got retrain_budget={retrain_budget}: allow {FOLDS}"
            )
        self.method, self.retrain_budget, self.examples, self.seed = method, retrain_budget, examples, seed
        self.readings: list[Reading] = []
        self._sweep: ExclusionSweep | None = None
        self._lost = method == "k_fold"
        self._folds: FoldEnsemble | None = None
        self._first: tuple[Tensor, str] | None = None

    def read(self, run: Run, steps: int | Sequence[int] | None = None) -> "RiskMeter":
        """Add readings of a run as far as it has gone; earlier readings are kept.

        Call it with ``recorder.flush()`` from time to time during training, or once with a finished run.

        Args:
            run: A run with its problem, the same as in earlier calls, but longer.
            steps: Steps to read, or a number of steps evenly spaced in the logarithm; default: 20 in the first call,
                and the end of the run in later ones.

        Raises:
            DataError: a step is outside the run, or before one that was read.
            RunError: the run is not the one read before, or allows no exact analysis.
        """
        if not run.num_steps:
            raise DataError("the run has no steps yet: call recorder.flush() to write the steps so far")
        moments = self._moments(run, steps)
        self._check_same(run)
        if moments and not self._lost:
            unrolled = Unrolled(run, stop=moments[-1])
            if self._sweep is None:
                most = min(MOST_EXAMPLES, unrolled.columns_at_a_time())  # they are carried along all at once
                chosen = choose_examples(unrolled.num_examples, self.examples, self.seed, most=most)
                self._sweep = ExclusionSweep(unrolled, chosen)
            else:
                self._sweep.extend(unrolled)
        waiting: list[int] = []
        for k in moments:
            found = None
            if not self._lost and self._sweep is not None:
                found = exclusion_at(self._sweep.unrolled, self._sweep.outputs_at(k), k).risk
                if not found.valid and self.method == "auto" and self.retrain_budget >= FEWEST_FOLDS:
                    self._lost, found, self._sweep = True, None, None  # chaos does not go away again
            if found is None:
                waiting.append(k)
            else:
                self.readings.append(Reading(k, found))
        if waiting:
            self.readings += [Reading(k, risk) for k, risk in zip(waiting, self._by_folds(run, waiting), strict=True)]
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

    def _by_folds(self, run: Run, steps: list[int]) -> list[RiskEstimate]:
        folds = min(FOLDS, max(self.retrain_budget, FEWEST_FOLDS), run.num_examples)
        if self._folds is None:
            self._folds = FoldEnsemble(run, folds, self.seed)
        return [self._folds.reading(run, k) for k in self._folds.advance(run, steps)]

    def _moments(self, run: Run, steps: int | Sequence[int] | None) -> list[int]:
        last = self.readings[-1].step if self.readings else 0
        if isinstance(steps, Sequence):
            moments = sorted(set(steps))
            if any(not last < k <= run.num_steps for k in moments):
                raise DataError(f"steps must lie in {last + 1} … {run.num_steps}, got {list(steps)}")
            return moments
        if run.num_steps <= last:
            return []
        count = steps if steps is not None else (_READINGS if not self.readings else 1)
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
