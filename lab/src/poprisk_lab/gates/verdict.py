r"""What is asked of a variant, computed from a stored result.

*Noise.* On a noisy task each rule has the last step of its best learning rate (of those that all rules were tried at).
A variant holds the task if it ends no more than one standard error under the strict gate; the standard error is that of
the paired difference over seeds.

*Speed.* On a clean task, at AdamW's own learning rate, each seed has a target: the task's own where AdamW reaches it
on this seed, else the value at which AdamW has made 95% of its way from the first look to its best. Times between two
looks are interpolated. The *slowdown* is the geometric mean over seeds of the steps to the target in AdamW's; a seed
that never gets there counts with the length of the run, and the slowdown is then a lower bound. A variant holds the
task if every seed gets there and the slowdown is at most 1.1.

Both are asked of every task. One setting for both sides is the harder question: *unchanged rate* takes the noisy tasks,
too, at AdamW's own learning rate (the strict gate still at its best).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poprisk._core.statistics import mean_over_seeds
from poprisk.errors import DataError
from poprisk_lab.engine import reading
from poprisk_lab.gates.arms import IDEAS
from poprisk_lab.gates.plan import ADAMW, KNOWN, STRICT, row_label

ALLOWED_SLOWDOWN = 1.1
SHARE_OF_WAY = 0.95
HALVES = "_halves"
Studies = Mapping[str, Any]


@dataclass(frozen=True)
class Noisy:
    """A rule's last step on a noisy task.

    Attributes:
        value: Mean over seeds at the best learning rate.
        rate: That rate.
        lead: How much better than the strict gate's, paired; in the metric's units, positive is better.
        error: Standard error of it; 0 for the strict gate itself.
        gain: The lead as a share of the strict gate's own over AdamW, both at their best rates; NaN where it has none.
    """

    value: float
    rate: float
    lead: float
    error: float
    gain: float

    @property
    def holds(self) -> bool:
        """Whether it ends within one standard error of the strict gate, or above it."""
        return self.lead >= -self.error  # NaN holds nothing


@dataclass(frozen=True)
class Clean:
    """A rule's time to AdamW's target on a clean task.

    Attributes:
        slowdown: In AdamW's time; a lower bound where not every seed gets there.
        reached: How many seeds get there.
        seeds: Of how many.
        value: Mean of the last step.
    """

    slowdown: float
    reached: int
    seeds: int
    value: float

    @property
    def holds(self) -> bool:
        """Whether every seed gets there in at most 1.1 of AdamW's time."""
        return self.reached == self.seeds and self.slowdown <= ALLOWED_SLOWDOWN


@dataclass(frozen=True)
class Outcome:
    """A rule on all tasks.

    Attributes:
        label: Its words.
        noisy: By the name of the task, at the best rate.
        unchanged: The same at AdamW's own rate.
        clean: By the name of the task.
    """

    label: str
    noisy: Mapping[str, Noisy]
    unchanged: Mapping[str, Noisy]
    clean: Mapping[str, Clean]

    @property
    def lost_noisy(self) -> list[str]:
        """Noisy tasks on which it falls behind the strict gate."""
        return [name for name, found in self.noisy.items() if not found.holds]

    @property
    def lost_unchanged(self) -> list[str]:
        """The same at AdamW's own rate."""
        return [name for name, found in self.unchanged.items() if not found.holds]

    @property
    def lost_clean(self) -> list[str]:
        """Clean tasks on which it is too slow."""
        return [name for name, found in self.clean.items() if not found.holds]

    @property
    def meets_both(self) -> bool:
        """Whether nothing is lost, each noisy task at its best rate."""
        return not (self.lost_noisy or self.lost_clean)

    @property
    def slowdown(self) -> float:
        """Geometric mean over clean tasks."""
        return math.exp(math.fsum(math.log(found.slowdown) for found in self.clean.values()) / len(self.clean))

    @property
    def score(self) -> float:
        """Mean over noisy tasks of where it ends between AdamW (0) and the strict gate (1), each from -1 to 2."""
        scores = [min(max(1 + found.gain, -1.0), 2.0) for found in self.noisy.values() if not math.isnan(found.gain)]
        return math.fsum(scores) / len(scores) if scores else math.nan


def outcomes(stored: Studies) -> list[Outcome]:
    """Every rule of a stored result: the known ones first, then the variants.

    Args:
        stored: The studies of a saved result, by name.

    Raises:
        DataError: there is no noisy or no clean task in it.
    """
    noisy, clean = task_names(stored)
    if not noisy or not clean:
        raise DataError(f"a verdict needs noisy and clean tasks, got noisy {noisy} and clean {clean}")
    labels = [*KNOWN, *(idea.label for idea in IDEAS)]
    return [
        Outcome(
            label,
            {name: judge_noisy(stored, name, label) for name in noisy},
            {name: judge_noisy(stored, name, label, unchanged=True) for name in noisy},
            {name: judge_clean(stored, name, label) for name in clean},
        )
        for label in labels
        if all(rates_of(stored, name, label) for name in (*noisy, *clean))
    ]


def task_names(stored: Studies) -> tuple[list[str], list[str]]:
    """Noisy and clean tasks; those whose rules see halves of batches belong to the task itself."""
    names = [name for name in stored if not name.endswith(HALVES)]
    noisy = [name for name in names if is_noisy(stored[name])]
    return noisy, [name for name in names if name not in noisy]


def is_noisy(study: Mapping[str, Any]) -> bool:
    """Whether the task's data are noisy.

    >>> is_noisy({"task": {"config": {"noise": 0.4}}}), is_noisy({"task": {"config": {"wrong_share": 0.0}}})
    (True, False)
    """
    config = study["task"]["config"]
    return config.get("noise", config.get("wrong_share", 0.0)) > 0


def rates_of(stored: Studies, name: str, label: str) -> list[float]:
    """The learning rates at which a rule was tried on a task, the first of them AdamW's own."""
    rates = [row["hyper"]["lr"] for row in stored[name]["rows"] if row["label"].startswith(f"{ADAMW}, lr ")]
    return [rate for rate in rates if _find(stored, name, label, rate) is not None]


def row_of(stored: Studies, name: str, label: str, rate: float) -> Mapping[str, Any]:
    """A rule's row on a task at a learning rate, wherever it was trained.

    Raises:
        DataError: there is none.
    """
    found = _find(stored, name, label, rate)
    if found is None:
        raise DataError(f"no row {row_label(label, rate)!r} on the task {name!r}")
    return found


def judge_noisy(stored: Studies, name: str, label: str, unchanged: bool = False) -> Noisy:
    """A rule's last step beside the strict gate's at its best rate.

    Args:
        stored: The studies by name.
        name: The task.
        label: The rule.
        unchanged: Whether the rule is held to AdamW's own rate.
    """
    rate = rates_of(stored, name, label)[0] if unchanged else best_rate(stored, name, label)
    ends = _ends(stored, name, label, rate)
    strict = _ends(stored, name, STRICT, best_rate(stored, name, STRICT))
    adamw = _ends(stored, name, ADAMW, best_rate(stored, name, ADAMW))
    sign = _sign(stored[name])
    lead, error = _paired(ends, strict)
    own = _mean(strict) - _mean(adamw)
    return Noisy(sign * _mean(ends), rate, lead, error, lead / own if own > 0 else math.nan)


def best_rate(stored: Studies, name: str, label: str) -> float:
    """The rate with the best last step; AdamW's own where all diverge."""
    rates = rates_of(stored, name, label)
    means = {rate: _mean(_ends(stored, name, label, rate)) for rate in rates}
    return max(rates, key=lambda rate: means[rate] if math.isfinite(means[rate]) else -math.inf)


def judge_clean(stored: Studies, name: str, label: str) -> Clean:
    """A rule's time to AdamW's target at AdamW's own rate."""
    study, rate = stored[name], rates_of(stored, name, ADAMW)[0]
    metric, steps = reading.primary(study), study["evaluation_steps"]
    adamw = reading.curve(row_of(stored, name, ADAMW, rate), metric["name"])
    own = reading.curve(row_of(stored, name, label, rate), metric["name"])
    ratios, reached = [], 0
    for theirs, ours in zip(adamw, own, strict=True):
        goal = target(theirs, metric)
        base, time = (first_step(steps, values, goal, metric["higher_is_better"]) for values in (theirs, ours))
        if base is None:  # AdamW diverged on this seed: there is nothing to compare with
            raise DataError(f"AdamW has no finite value on {name!r}: a smaller learning rate is needed")
        reached += time is not None
        ratios.append((steps[-1] if time is None else time) / base)
    slowdown = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    return Clean(slowdown, reached, len(ratios), _mean([values[-1] for values in own]))


def target(adamw: Sequence[float], metric: Mapping[str, Any]) -> float:
    """AdamW's target on one seed: the task's own if AdamW reaches it, else 95% of its way.

    >>> target([0.0, 0.5, 1.0], {"higher_is_better": True, "target": 0.4})
    0.4
    >>> target([0.0, 0.5, 1.0], {"higher_is_better": True, "target": None})
    0.95
    """
    pick = max if metric["higher_is_better"] else min
    finite = [value for value in adamw if math.isfinite(value)]
    if not finite:
        return math.nan
    best, own = pick(finite), metric["target"]
    if own is not None and pick(best, own) == best:
        return own
    return finite[0] + SHARE_OF_WAY * (best - finite[0])


def first_step(steps: Sequence[int], values: Sequence[float], goal: float, higher: bool) -> float | None:
    """When a curve first reaches a value, interpolated between looks; None if it never does.

    >>> first_step([10, 20, 30], [0.0, 0.5, 1.0], 0.75, higher=True), first_step([10], [0.0], 0.5, higher=True)
    (25.0, None)
    """
    sign = 1.0 if higher else -1.0
    for i, value in enumerate(values):
        if sign * value >= sign * goal:
            if i == 0 or not math.isfinite(values[i - 1]):
                return float(steps[i])
            return steps[i - 1] + (steps[i] - steps[i - 1]) * (goal - values[i - 1]) / (value - values[i - 1])
    return None


def _find(stored: Studies, name: str, label: str, rate: float) -> Mapping[str, Any] | None:
    rows = [row for study in (name, name + HALVES) if study in stored for row in stored[study]["rows"]]
    return next((row for row in rows if row["label"] == row_label(label, rate)), None)


def _ends(stored: Studies, name: str, label: str, rate: float) -> list[float]:
    """Last values of the seeds, their sign such that higher is better."""
    study = stored[name]
    ends = reading.final(row_of(stored, name, label, rate), reading.primary(study)["name"])
    return [_sign(study) * value for value in ends]


def _sign(study: Mapping[str, Any]) -> float:
    return 1.0 if reading.primary(study)["higher_is_better"] else -1.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    if list(ours) == list(theirs):
        return 0.0, 0.0
    if not all(map(math.isfinite, ours)):
        return -math.inf, 0.0
    found = mean_over_seeds([a - b for a, b in zip(ours, theirs, strict=True)])
    return found.value, found.standard_error or 0.0
