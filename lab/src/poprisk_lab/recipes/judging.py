"""The rule of ``RULE.md`` for all stored tasks: what each recipe gains over AdamW, and which recipe wins."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean

from poprisk._core.statistics import Difference, paired_difference
from poprisk_lab.recipes.stored_tasks import ANY, MOMENTS, SeedValues, StoredRow, StoredTask

RELATIVE = ("relative", "relative_3")
"""Gates at AdamW's learning rate, in earlier forms; trainings with the present form are stored as ``half_open``."""
CONTROLS = {"mean opening": "gate_schedule", "shuffled": "shuffled_gate", "random mask": "random_mask"}
_TIE = 0.1
_MOST = 100.0


@dataclass(frozen=True)
class Recipe:
    """How final weights are made: an optimizer at its usual settings, a mean of its weights, and a moment."""

    arm: str
    average: str = "weights"
    moment: str = "last"

    def values(self, task: StoredTask) -> dict[int, float] | None:
        """The test metric of the final weights for each seed; None if the task lacks what the recipe needs."""
        row = task.row(self.arm, 0.05)
        if self.moment == "last":
            row = task.row(self.arm, 0.0) or row
        return None if row is None else row.values(self.average, self.moment)

    @property
    def complexity(self) -> tuple[bool, bool, bool, bool]:
        """What makes it less simple, in the order of the rule for ties."""
        return self.arm != "adamw", self.moment != "last", self.average == ANY, self.moment.startswith("half")


@dataclass(frozen=True)
class TaskGain:
    """What a recipe gains on one task, in points or percent.

    Attributes:
        task: The task.
        values: Test metric of the recipe for each seed.
    """

    task: StoredTask
    values: SeedValues

    @cached_property
    def value(self) -> float:
        """Mean test metric."""
        return mean(self.values.values())

    @cached_property
    def oracle(self) -> Difference:
        """Gain over tuned AdamW's best checkpoint."""
        return gain_over(self.task, self.values, self.task.tuned_best)

    @cached_property
    def last(self) -> Difference:
        """Gain over tuned AdamW's last step."""
        return gain_over(self.task, self.values, self.task.tuned_last)

    @cached_property
    def usual(self) -> Difference | None:
        """Gain over the better of AdamW and AdamW with cosine at the usual settings, last step; None if missing."""
        usual = self.task.usual_last
        return gain_over(self.task, self.values, usual) if usual else None

    @property
    def regret(self) -> float:
        """Mean loss to the oracle, limited to ±100."""
        return max(-_MOST, min(_MOST, -mean(seed_gains(self.task, self.values, self.task.tuned_best))))

    @property
    def at_oracle(self) -> bool:
        """Whether the interval excludes a loss over the limit to the best checkpoint."""
        return self.oracle.low is not None and self.oracle.low >= -self.task.limit

    @property
    def above_last(self) -> bool:
        """Whether the mean is above tuned AdamW's last step."""
        return self.last.value > 0

    @property
    def within_bar(self) -> bool:
        """Whether the mean loss to tuned AdamW's last step is within the limit."""
        return self.last.value >= -self.task.limit

    @property
    def qualifies(self) -> bool:
        """Whether the mean loss to AdamW at the usual settings is within the limit."""
        usual = self.task.usual_last
        return not usual or mean(seed_gains(self.task, self.values, usual)) >= -self.task.limit


@dataclass(frozen=True)
class Judged:
    """A recipe on all tasks that have it."""

    recipe: Recipe
    gains: Mapping[str, TaskGain]

    @property
    def noisy(self) -> list[TaskGain]:
        """The noisy tasks, those outside the ranking included."""
        return [gain for gain in self.gains.values() if not gain.task.clean]

    @property
    def clean(self) -> list[TaskGain]:
        """The clean tasks, those outside the ranking included."""
        return [gain for gain in self.gains.values() if gain.task.clean]

    @property
    def regret(self) -> float:
        """Mean loss to the oracle over the ranked noisy tasks, each limited to ±100."""
        return self.regret_on(self.gains)

    def regret_on(self, names: Iterable[str]) -> float:
        """The same over some of the tasks."""
        chosen = [self.gains[name] for name in names]
        ranked = [gain for gain in chosen if gain.task.ranked and not gain.task.clean]
        return mean(gain.regret for gain in ranked) if ranked else float("nan")

    @property
    def clean_losses(self) -> int:
        """Number of ranked clean tasks on which it loses more than the limit to AdamW at the usual settings."""
        return sum(not gain.qualifies for gain in self.clean if gain.task.ranked)


def judge(recipe: Recipe, tasks: Sequence[StoredTask]) -> Judged:
    """The recipe on every task that has it."""
    found = ((task, recipe.values(task)) for task in tasks)
    return Judged(recipe, {task.name: TaskGain(task, values) for task, values in found if values is not None})


def gain_over(task: StoredTask, values: SeedValues, base: SeedValues) -> Difference:
    """Mean gain over a baseline, seed by seed, with its interval; a seed that the baseline lacks is given its mean."""
    gains = seed_gains(task, values, base)
    return paired_difference(gains, [0.0] * len(gains))


def seed_gains(task: StoredTask, values: SeedValues, base: SeedValues) -> list[float]:
    """The gain of each seed over a baseline."""
    typical = mean(base.values())
    return [task.gain(value, base.get(seed, typical)) for seed, value in values.items()]


def recipes(tasks: Sequence[StoredTask]) -> list[Recipe]:
    """Every combination of an arm, a mean and a moment that some task has."""
    arms = dict.fromkeys(row.arm for task in tasks for row in task.rows)
    averages = dict.fromkeys(name for task in tasks for row in task.rows for name in row.averages)
    return [Recipe(arm, average, moment) for arm in arms for average in (*averages, ANY) for moment in MOMENTS]


def judge_all(tasks: Sequence[StoredTask]) -> tuple[list[Judged], list[Judged]]:
    """The recipes that every ranked task has, best first by the rule, and the others that some task has."""
    judged = [judge(recipe, tasks) for recipe in recipes(tasks)]
    wanted = {task.name for task in tasks if task.ranked}
    whole = [each for each in judged if wanted <= set(each.gains)]
    others = [each for each in judged if each.gains and not wanted <= set(each.gains)]
    whole.sort(key=lambda each: (each.clean_losses, each.regret))
    return _ties_settled(whole), others


def swap_test(tasks: Sequence[StoredTask]) -> list[tuple[StoredTask, float, Difference]]:
    """Gain of the gate over AdamW at the same learning rate, last step, for each task and rate that has both."""
    found = []
    for task in tasks:
        for row in task.rows:
            other = task.row("adamw", row.share, row.lr) if row.arm in RELATIVE else None
            if other is not None:
                found.append((task, row.lr, gain_over(task, _last(row), _last(other))))
    return found


def controls(tasks: Sequence[StoredTask], average: str = "weights") -> list[tuple[StoredTask, dict[str, Difference]]]:
    """Gain of the gate over each of its controls, last step, for each task that has one."""
    found = []
    for task in tasks:
        gate, gains = task.row("literal", 0.05), {}
        if gate is None or average not in gate.averages:
            continue
        for label, arm in CONTROLS.items():
            row = task.row(arm, 0.05)
            if row is not None and average in row.averages:
                own, base = _last(gate, average), _last(row, average)
                gains[label] = gain_over(task, {seed: own[seed] for seed in own if seed in base}, base)
        if gains:
            found.append((task, gains))
    return found


def _last(row: StoredRow, average: str = "weights") -> dict[int, float]:
    return row.values(average, "last") or {}


def _ties_settled(ordered: list[Judged]) -> list[Judged]:
    """The simplest of the recipes that tie with the first comes first."""
    if not ordered:
        return ordered
    first = ordered[0]
    tied = [e for e in ordered if e.clean_losses == first.clean_losses and e.regret <= first.regret + _TIE]
    winner = min(tied, key=lambda each: (each.recipe.complexity, each.regret))
    return [winner, *(each for each in ordered if each is not winner)]
