r"""Population risk along a run, step by step: a curve to look at, and a step to stop at."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from poprisk._core.autodiff import resolve_loss
from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.risk._examples import choose_examples
from poprisk.risk._fold_error import FEWEST, inflated_error
from poprisk.risk._influence.exclusion_sweep import ExclusionSweep
from poprisk.risk._influence.holdout_weights import holdout_weights
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import Retrained, example_losses, member_outputs, retrain
from poprisk.risk._risk import FEWEST_FOLDS, FOLDS, MOST_EXAMPLES, RiskEstimate, exclusion_reading, with_price
from poprisk.risk._risk_error import unseen_mistake
from poprisk.runs import Run

_READINGS = 20


@dataclass(frozen=True, eq=False)
class Reading:
    """The risk at one moment of a run."""

    step: int
    """Before this step; ``run.num_steps`` is the end."""
    risk: RiskEstimate

    @property
    def training_loss(self) -> float:
        """The mean training loss at the same weights."""
        return self.risk.training_loss


class RiskMeter:
    """Follows population risk along a run, while it is recorded or afterwards.

    Exclusion is carried forward with the run: reading ten moments costs what reading the last one costs. Where it may
    no longer be believed, and the budget allows it, K-fold takes over, its members trained along with the run.

    Args:
        method: "auto", "exclusion" or "k_fold", as in :func:`~poprisk.risk.population_risk`.
        retrain_budget: How many trainings may be spent, for the whole curve; 0 trains nothing.
        examples: How many examples exclusion looks at; default: all up to 256.
        seed: Of their draw, and of the folds.

    Raises:
        HyperparameterError: an unknown method, or a budget too small for it.

    >>> from poprisk.runs import Problem
    >>> from poprisk.runs import train
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
            raise HyperparameterError(f"a meter's method must be auto, exclusion or k_fold, got {method!r}")
        if method == "k_fold" and retrain_budget < FEWEST_FOLDS:
            raise HyperparameterError(
                f"k_fold trains at least {FEWEST_FOLDS} times, retrain_budget={retrain_budget}: allow {FOLDS}"
            )
        self.method, self.retrain_budget, self.examples, self.seed = method, retrain_budget, examples, seed
        self.readings: list[Reading] = []
        self._sweep: ExclusionSweep | None = None
        self._lost = method == "k_fold"
        self._folds: FoldEnsemble | None = None
        self._first: tuple[Tensor, str] | None = None

    def read(self, run: Run, steps: int | Sequence[int] | None = None) -> "RiskMeter":
        """Add readings of a run as far as it has gone; what was read before is not done again.

        Call it with ``recorder.flush()`` every now and then during training, or once with a finished run.

        Args:
            run: With its problem; longer than, and otherwise the same as, the one read before.
            steps: Moments to read, or how many, spread evenly in the logarithm; default: 20, or during training the
                end so far.

        Raises:
            DataError: a step that lies before one that was read, or outside the run.
            RunError: another run, or one that allows no exact analysis.
        """
        if not run.num_steps:
            raise DataError("nothing of the run is written yet: recorder.flush() writes the steps so far")
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
                found = exclusion_reading(self._sweep.unrolled, self._sweep.outputs_at(k), k)
                if not found.valid and self.method == "auto" and self.retrain_budget >= FEWEST_FOLDS:
                    self._lost, found, self._sweep = True, None, None  # chaos does not go away again
                elif not found.valid:
                    found = with_price(found, run.num_examples)
            if found is None:
                waiting.append(k)
            else:
                self.readings.append(Reading(k, found))
        if waiting:
            self.readings += [Reading(k, risk) for k, risk in zip(waiting, self._by_folds(run, waiting), strict=True)]
        return self

    @property
    def best_step(self) -> int:
        """The step of the lowest estimated risk among those that may be believed: where to stop.

        Raises:
            DataError: nothing was read yet, or nothing that may be believed.
        """
        believed = [reading for reading in self.readings if reading.risk.valid]
        if not believed:
            raise DataError(
                "no reading may be believed yet: read more of the run, or allow K-fold with retrain_budget=10"
            )
        return min(believed, key=lambda reading: float(reading.risk.value)).step

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
                raise DataError(f"the next readings lie in {last + 1} … {run.num_steps}, got {list(steps)}")
            return moments
        if run.num_steps <= last:
            return []
        count = steps if steps is not None else (_READINGS if not self.readings else 1)
        if count < 1:
            raise DataError(f"a curve needs at least one reading, got {count}")
        ratio = math.log(run.num_steps / (last + 1))
        ends = [round(run.num_steps * math.exp(-ratio * j / max(count - 1, 1))) for j in range(count)]
        return sorted({min(max(k, last + 1), run.num_steps) for k in ends})

    def _check_same(self, run: Run) -> None:
        first = run.weights(0), run.problem.fingerprint
        if self._first is None:
            self._first = first
        elif not (torch.equal(self._first[0], first[0]) and self._first[1] == first[1]):
            raise RunError("the meter has read another run, with other first weights or examples: make one for each")


class FoldEnsemble:
    """K trainings along a run, each without one fold, that go on where they stopped when the run has.

    Args:
        run: What is recorded; it may grow.
        folds: K.
        seed: Of the partition.
    """

    def __init__(self, run: Run, folds: int, seed: int = 0) -> None:
        n = run.num_examples
        if not 2 <= folds <= n:
            raise DataError(f"folds must lie between 2 and the {n} examples, got {folds}")
        self.fold: Int[Tensor, "n"] = torch.empty(n, dtype=torch.long)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        self.fold[order] = torch.arange(n) % folds
        held = [(self.fold == f).nonzero().squeeze(1) for f in range(folds)]
        self.members = Members(torch.stack([holdout_weights(n, index) for index in held]))
        self.folds = folds
        self._trained: Retrained | None = None

    def advance(self, run: Run, steps: Sequence[int]) -> list[int]:
        """Train on to these steps, and keep the members there."""
        self._trained = retrain(run, self.members, keep=steps, stop=max(steps), resume=self._trained, progress=False)
        return list(steps)

    def reading(self, run: Run, k: int) -> RiskEstimate:
        """The mean held-out loss before step k."""
        if self._trained is None or k not in self._trained.kept:
            raise DataError(f"the members were not kept before step {k}: advance to it first")
        weights, problem, n = self._trained.kept[k], run.problem, run.num_examples
        everyone = member_outputs(run, torch.cat([weights, run.weights(k).to(weights)[None]]), problem.inputs)
        outputs, own = everyone[self.fold, torch.arange(n)], everyone[-1]
        targets = problem.targets
        targets = targets.to(outputs) if targets.is_floating_point() else targets
        held_out, trained = (example_losses(problem, u, targets).double() for u in (outputs, own))
        value, training = held_out.mean().item(), trained.mean().item()
        low = n - int(torch.bincount(self.fold).max())
        about = {
            "target": f"a learner on {low} of {n} points",
            "method": "k_fold",
            "training_loss": training,
            "cost": self.folds * k / run.num_steps,
        }
        error = inflated_error(held_out.cpu(), torch.arange(n), trained.cpu(), self.fold)
        error = math.hypot(error, unseen_mistake(resolve_loss(problem.loss), outputs, targets, n))
        if n < FEWEST:
            reason = f"{n} held-out examples are too few to tell a standard error, {FEWEST} are needed"
            return RiskEstimate(value, error, False, reason, **about)
        if not (math.isfinite(value) and math.isfinite(error)):
            return RiskEstimate(value, math.nan, False, "a training without a fold diverged", **about)
        reason = "; ".join((f"{self.folds}-fold", *self._trained.notes))
        return RiskEstimate(value, error, True, reason, **about)


def k_fold_curve(run: Run, steps: Sequence[int], folds: int = FOLDS, *, seed: int = 0) -> list[RiskEstimate]:
    """K-fold estimates at several moments of a run, for the price of one K-fold."""
    ensemble = FoldEnsemble(run, folds, seed)
    return [ensemble.reading(run, k) for k in ensemble.advance(run, steps)]
