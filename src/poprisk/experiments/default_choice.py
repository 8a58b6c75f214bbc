"""Which gate, threshold, strength and learning rate PopRiskAdamW should have by default: candidates on many tasks.

Every candidate is trained on every task with the tuning seeds, noisy tasks and clean ones, beside AdamW over its own
grid of learning rates. A candidate's *score* on a noisy task is the share it gains of the way from the usual AdamW
(lr 1e-3) to the best AdamW checkpoint of any learning rate, both with the test set in hand: 0 is no help, 1 is as good
as an oracle that tunes and stops AdamW; one task counts from -1 to 1.5 at most. Its *cost* on a clean task is what it
loses there against the best last step of AdamW, as a share. The rule takes the candidate with the highest mean score of
those that cost at most a point of accuracy on every clean classification task. What it costs on other clean tasks,
where a gate is known to be slow (a language model, a noise-free regression), is reported and does not decide.

The study ranks candidates; it does not set the defaults, which are in :mod:`poprisk.optim.defaults`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

from poprisk.experiments.char_language import CharLanguageConfig
from poprisk.experiments.comparison import reading
from poprisk.experiments.comparison.run import ComparisonResult, Progress, run_comparison
from poprisk.experiments.comparison.study import Setting, Study
from poprisk.experiments.comparison.task import Task
from poprisk.experiments.inr import InrConfig
from poprisk.experiments.label_tasks import DIGITS, FASHION
from poprisk.experiments.labels import SMOKE as LABELS_SMOKE
from poprisk.experiments.labels import LabelsConfig
from poprisk.experiments.lorenz import SMOKE as LORENZ_SMOKE
from poprisk.experiments.lorenz import LorenzConfig, task_at
from poprisk.experiments.statistics import mean_over_seeds
from poprisk.experiments.teacher import SMOKE as TEACHER_SMOKE
from poprisk.experiments.teacher import TeacherConfig

KIND = "default_choice"
ADAMW_RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
USUAL_RATE = 1e-3
ALLOWED_COST = 0.01
SCORES = (-1.0, 1.5)
GATE_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
GRID: dict[str, tuple[dict[str, float], ...]] = {
    "soft": tuple({"alpha": a, "strength": s} for a, s in product((0.25, 1.0), (0.1, 1.0, 10.0))),
    "hard": tuple({"alpha": a} for a in (0.25, 1.0)),
    "soft_calibrated": tuple({"strength": s} for s in (0.1, 1.0, 10.0, 30.0)),
    "hard_calibrated": ({},),
    "snr": tuple({"strength": s} for s in (0.3, 1.0, 3.0, 10.0, 30.0)),
}
"""What each gate is tried with, at every learning rate of :data:`GATE_RATES`; weight decay, β and ρ are the usual."""
STRONG_GATES = ("soft_calibrated", "snr")
STRENGTHS = (100.0, 300.0, 1000.0)
RATES_PER_STRENGTH = (3e-4, 6e-4, 1e-3)
"""Strong gates pass about signal/(strength · noise), so their learning rates grow with the strength."""


@dataclass(frozen=True)
class DefaultChoiceConfig:
    """Tasks and seeds.

    Attributes:
        teacher: Sizes of the tasks with a teacher's labels.
        labels: Sizes of the tasks on images.
        lorenz: Size of the dynamics.
        inr: Size of the photographs; None leaves them out.
        language: Size of the language model, a clean task; None leaves it out.
        data: Which images.
        label_noises: Shares of wrong labels, 0 among them.
        lorenz_noises: Noise of the sensor, 0 among them.
        grid: Which candidates: those of :data:`GRID`, or fewer.
        gate_rates: Learning rates of each of them.
        strengths: Tried with the gates that stay open under noise, at learning rates in proportion.
        seeds: Those that hyper-parameters are chosen on everywhere.
    """

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    labels: LabelsConfig = field(default_factory=LabelsConfig)
    lorenz: LorenzConfig = field(default_factory=LorenzConfig)
    inr: InrConfig | None = field(default_factory=InrConfig)
    language: CharLanguageConfig | None = None
    data: tuple[str, ...] = (DIGITS, FASHION)
    label_noises: tuple[float, ...] = (0.0, 0.2, 0.4)
    lorenz_noises: tuple[float, ...] = (0.0, 0.1, 0.4)
    grid: Mapping[str, tuple[dict[str, float], ...]] = field(default_factory=lambda: dict(GRID))
    gate_rates: tuple[float, ...] = GATE_RATES
    strengths: tuple[float, ...] = STRENGTHS
    seeds: tuple[int, ...] = (100, 101)


SMOKE = DefaultChoiceConfig(
    teacher=TEACHER_SMOKE,
    labels=LABELS_SMOKE,
    lorenz=LORENZ_SMOKE,
    inr=None,
    language=None,
    data=(DIGITS,),
    label_noises=(0.0, 0.4),
    lorenz_noises=(0.0, 0.1),
    grid={"soft": ({"alpha": 1.0, "strength": 1.0},), "snr": ({"strength": 1.0},)},
    gate_rates=(1e-2,),
    strengths=(),
    seeds=(100,),
)


@dataclass(frozen=True)
class Candidate:
    """One setting and how it did.

    Attributes:
        label: Its words.
        arm: Its rule.
        hyper: What it was given.
        scores: Of each noisy task.
        costs: Of each clean task, as a share.
        classified: Which clean tasks are measured by an accuracy.
    """

    label: str
    arm: str
    hyper: Mapping[str, float]
    scores: Mapping[str, float]
    costs: Mapping[str, float]
    classified: frozenset[str]

    @property
    def score(self) -> float:
        """Mean over the noisy tasks."""
        return sum(self.scores.values()) / len(self.scores)

    @property
    def cost(self) -> float:
        """At the worst of the clean classification tasks."""
        return max(value for name, value in self.costs.items() if name in self.classified)


def candidates(config: DefaultChoiceConfig) -> tuple[Setting, ...]:
    """Every candidate, and AdamW over its grid.

    >>> [setting.label for setting in candidates(SMOKE)][-2:]
    ['soft α=1 strength=1 lr=0.01', 'snr strength=1 lr=0.01']
    """
    adamw = [Setting(f"adamw lr={lr:g}", "adamw", {"lr": lr}) for lr in ADAMW_RATES]
    gated = [
        Setting(_words(arm, {**given, "lr": lr}), arm, {**given, "lr": lr})
        for arm, settings in config.grid.items()
        for given in settings
        for lr in config.gate_rates
    ]
    strong = [
        Setting(_words(arm, given), arm, given)
        for arm in STRONG_GATES
        for strength in config.strengths
        for rate in RATES_PER_STRENGTH
        for given in ({"strength": strength, "lr": round(strength * rate, 9)},)
    ]
    return (*adamw, *gated, *strong)


def studies(config: DefaultChoiceConfig) -> tuple[Study, ...]:
    """One study a task, all candidates in each; nothing is searched."""
    tasks: list[Task] = [replace(config.teacher.student, noise=noise) for noise in config.label_noises]
    tasks += [config.labels.task(data, noise) for data in config.data for noise in config.label_noises]
    tasks += [task_at(config.lorenz, noise) for noise in config.lorenz_noises]
    if config.inr is not None:
        tasks += [config.inr.task, replace(config.inr.task, noise=0.0)]
    if config.language is not None:
        tasks += [replace(config.language.model, noise=0.0)]
    settings = candidates(config)
    return tuple(Study(task, settings=settings, report_seeds=config.seeds, tuning_seeds=()) for task in tasks)


def run(config: DefaultChoiceConfig, report: Progress | None = None, ledger: Path | None = None) -> ComparisonResult:
    """All tasks in turn; what the ledger's folder holds already is not computed again."""
    return run_comparison(KIND, config, studies(config), report, ledger)


def rank(stored: Mapping[str, Any]) -> list[Candidate]:
    """The candidates of a stored result, the one to choose first.

    Args:
        stored: The studies of a saved result, by name.
    """
    noisy = {name: study for name, study in stored.items() if is_noisy(study)}
    clean = {name: study for name, study in stored.items() if not is_noisy(study)}
    first = next(iter(stored.values()))
    found = [
        Candidate(
            row["label"],
            row["arm"],
            row["hyper"],
            {name: score(study, row["label"]) for name, study in noisy.items()},
            {name: cost(study, row["label"]) for name, study in clean.items()},
            frozenset(name for name, study in clean.items() if is_accuracy(study)),
        )
        for row in first["rows"]
        if row["arm"] not in ("adamw", "defaults")
    ]
    return sorted(found, key=lambda candidate: (candidate.cost > ALLOWED_COST, -candidate.score))


def is_noisy(study: Mapping[str, Any]) -> bool:
    """Whether the task's data are noisy.

    >>> is_noisy({"task": {"config": {"noise": 0.2}}})
    True
    """
    return study["task"]["config"]["noise"] > 0


def is_accuracy(study: Mapping[str, Any]) -> bool:
    """Whether the task is a classification."""
    return reading.primary(study)["name"].endswith("accuracy")


def score(study: Mapping[str, Any], label: str) -> float:
    """The share of the way from the usual AdamW's last step to the best AdamW checkpoint of any learning rate."""
    start, goal = _last(study, f"adamw lr={USUAL_RATE:g}"), _oracle(study)
    share = (_last(study, label) - start) / (goal - start) if goal > start else 0.0
    return min(max(share, SCORES[0]), SCORES[1])


def cost(study: Mapping[str, Any], label: str) -> float:
    """How much worse the last step is than AdamW's best last step: a share of its value, or of 1 for an accuracy."""
    best = max(_last(study, f"adamw lr={lr:g}") for lr in ADAMW_RATES)
    lost = best - _last(study, label)
    return lost if is_accuracy(study) else lost / abs(best)


def _last(study: Mapping[str, Any], label: str) -> float:
    """Mean last value, its sign such that higher is better; the worst number there is where a member diverged."""
    metric = reading.primary(study)
    sign = 1.0 if metric["higher_is_better"] else -1.0
    value = mean_over_seeds(reading.final(reading.row(study, label), metric["name"])).value
    return sign * value if isfinite(value) else float("-inf")


def _oracle(study: Mapping[str, Any]) -> float:
    metric = reading.primary(study)
    higher = metric["higher_is_better"]
    sign = 1.0 if higher else -1.0
    rows = [reading.row(study, f"adamw lr={lr:g}") for lr in ADAMW_RATES]
    return max(sign * mean_over_seeds(reading.best(row, metric["name"], higher)).value for row in rows)


def _words(arm: str, given: Mapping[str, float]) -> str:
    return " ".join([arm, *(f"{'α' if name == 'alpha' else name}={value:g}" for name, value in given.items())])
