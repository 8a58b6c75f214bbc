"""Which gate, threshold, strength and learning rate PopRiskAdamW should have by default: candidates on many tasks.

Every candidate is trained on every task with the tuning seeds, noisy tasks and clean ones, beside AdamW over its own
grid of learning rates. A candidate's *score* on a noisy task is the share it gains of the way from the usual AdamW
(lr 1e-3) to the best AdamW checkpoint of any learning rate, both with the test set in hand: 0 is no help, 1 is as good
as an oracle that tunes and stops AdamW; one task counts from -1 to 1.5 at most. Its *cost* on a clean task is what it
loses there against the best last step of AdamW, as a share. The rule takes the candidate with the highest mean score of
those that cost at most a point of accuracy on every clean classification task. What it costs on other clean tasks,
where a gate is known to be slow (a language model, a noise-free regression), is reported and does not decide.

All candidates meet on small tasks; the first of that ranking, *finalists*, go on to a convolutional network on CIFAR-10
with human labels, whose worst set counts as one more noisy task. Thirty epochs are short for that network, and gates
are behind AdamW on its clean labels: that cost is reported, and does not decide either.

This was not fixed beforehand. At first the cost on clean CIFAR-10 counted, and the rule then took the SNR gate with
strength 10 and lr 0.03, which has little more than half of the score; it was left out, and the candidates of
:data:`BETWEEN` were added, after that had been seen. What the defaults gain is thus an upper bound on tasks of these
kinds.

The study ranks candidates; it does not set the defaults, which are in :mod:`poprisk.optim._defaults`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any

from poprisk._core.statistics import mean_over_seeds
from poprisk_lab.engine import reading
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.study import Setting, Study
from poprisk_lab.engine.task import StackedTask
from poprisk_lab.paper.char_language.study import CharLanguageConfig
from poprisk_lab.paper.cifar.study import SMOKE as CIFAR_SMOKE
from poprisk_lab.paper.cifar.study import CifarConfig
from poprisk_lab.paper.inr.study import InrConfig
from poprisk_lab.paper.labels.study import SMOKE as LABELS_SMOKE
from poprisk_lab.paper.labels.study import LabelsConfig
from poprisk_lab.paper.labels.task import DIGITS, FASHION
from poprisk_lab.paper.lorenz.study import SMOKE as LORENZ_SMOKE
from poprisk_lab.paper.lorenz.study import LorenzConfig, task_at
from poprisk_lab.paper.teacher.study import SMOKE as TEACHER_SMOKE
from poprisk_lab.paper.teacher.study import TeacherConfig

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
STRENGTHS = (10.0, 30.0, 100.0, 300.0)
RATES_PER_STRENGTH = (2e-4, 4e-4, 6e-4, 1e-3)
"""Strong gates pass about signal/(strength · noise), so their learning rates grow with the strength."""
ADAMW_DECAY = 1e-5
"""Weight decay per step of the usual AdamW, lr · weight decay: strong gates are tried with it too, not only with the
usual weight decay times their own learning rate."""
BETWEEN = {30.0: ((0.02, 0.03, 0.06, 0.1), (2e-3, 5e-3, 1e-2)), 100.0: ((0.06, 0.1, 0.2, 0.3), (1e-3, 2e-3, 5e-3))}
"""Of the strong SNR gate, learning rates and weight decays by strength, for what lies between these two decays."""


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
        cifar: Size of the convolutional network for the finalists; None leaves it out.
        finalists: How many go on to it.
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
    cifar: CifarConfig | None = field(default_factory=lambda: CifarConfig(labels=("clean", "worse")))
    finalists: int = 8


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
    cifar=CIFAR_SMOKE,
    finalists=1,
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
        classified: Which clean tasks decide: the small ones that are measured by an accuracy.
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
    def tasks(self) -> int:
        """On how many tasks it was tried."""
        return len(self.scores) + len(self.costs)

    @property
    def cost(self) -> float:
        """At the worst of the small clean classification tasks."""
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
        for given in _decays(strength, round(strength * rate, 9))
    ]
    between = [
        Setting(_words("snr", given), "snr", given)
        for strength, (rates, decays) in BETWEEN.items()
        for given in ({"strength": strength, "lr": lr, "weight_decay": decay} for lr in rates for decay in decays)
        if strength in config.strengths
    ]
    unlike = {setting.label: setting for setting in (*adamw, *gated, *strong, *between)}  # grids meet
    return tuple(unlike.values())


def _decays(strength: float, lr: float) -> tuple[dict[str, float], ...]:
    """With the usual weight decay, and with the one that shrinks weights as the usual AdamW does."""
    given = {"strength": strength, "lr": lr}
    return given, {**given, "weight_decay": round(ADAMW_DECAY / lr, 9)}


def finals(config: DefaultChoiceConfig, finalists: tuple[str, ...]) -> tuple[Study, ...]:
    """One study for each set of CIFAR-10's labels, with AdamW's grid and the finalists, by their labels."""
    if config.cifar is None:
        return ()
    settings = tuple(each for each in candidates(config) if each.arm == "adamw" or each.label in finalists)
    cifar, seeds = config.cifar, config.cifar.tuning_seeds
    return tuple(
        Study(cifar.task(labels), settings=settings, report_seeds=seeds, tuning_seeds=(), compiled=True)
        for labels in cifar.labels
    )


def studies(config: DefaultChoiceConfig) -> tuple[Study, ...]:
    """One study for each small task, all candidates in each; nothing is searched."""
    tasks: list[StackedTask] = [replace(config.teacher.student, noise=noise) for noise in config.label_noises]
    tasks += [config.labels.task(data, noise) for data in config.data for noise in config.label_noises]
    tasks += [task_at(config.lorenz, noise) for noise in config.lorenz_noises]
    if config.inr is not None:
        tasks += [config.inr.task, replace(config.inr.task, noise=0.0)]
    if config.language is not None:
        tasks += [replace(config.language.model, noise=0.0)]
    settings = candidates(config)
    return tuple(Study(task, settings=settings, report_seeds=config.seeds, tuning_seeds=()) for task in tasks)


def run(config: DefaultChoiceConfig, report: Progress | None = None, ledger: Path | None = None) -> ComparisonResult:
    """All tasks in turn, then the finals; what the ledger's folder holds already is not computed again."""
    first = run_comparison(KIND, config, studies(config), report, ledger)
    best = tuple(candidate.label for candidate in rank(first.studies)[: config.finalists])
    last = finals(config, best)
    ended = run_comparison(KIND, config, last, report, ledger).studies if last else {}
    kept = {name: what_decides(study) for name, study in {**first.studies, **ended}.items()}
    return ComparisonResult(KIND, first.config, kept)


def what_decides(study: Mapping[str, Any]) -> dict[str, Any]:
    """A study with no more than the ranking reads: AdamW's curves of the primary metric, everybody's last value.

    >>> rows = [{"arm": "snr", "gate": [[0.5]], "curves": {"loss": [[3.0, 2.0]], "other": [[1.0, 1.0]]}}]
    >>> what_decides({"task": {"metrics": [{"name": "loss"}]}, "rows": rows})["rows"]
    [{'arm': 'snr', 'gate': None, 'curves': {'loss': [[2.0]]}}]
    """
    name = reading.primary(study)["name"]

    def kept(row: Mapping[str, Any]) -> dict[str, Any]:
        curves = row["curves"][name]
        return {**row, "gate": None, "curves": {name: curves if row["arm"] == "adamw" else [c[-1:] for c in curves]}}

    return {**study, "rows": [kept(row) for row in study["rows"]]}


def rank(stored: Mapping[str, Any]) -> list[Candidate]:
    """The candidates of a stored result, the one to choose first; those that went through all tasks before others.

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
            {name: score(study, row["label"]) for name, study in noisy.items() if _has(study, row["label"])},
            {name: cost(study, row["label"]) for name, study in clean.items() if _has(study, row["label"])},
            frozenset(name for name, study in clean.items() if is_accuracy(study) and "noise" in _config(study)),
        )
        for row in first["rows"]
        if row["arm"] not in ("adamw", "defaults")
    ]
    tasks = len(stored)
    return sorted(found, key=lambda each: (each.tasks < tasks, each.cost > ALLOWED_COST, -each.score))


def _has(study: Mapping[str, Any], label: str) -> bool:
    return any(row["label"] == label for row in study["rows"])


def is_noisy(study: Mapping[str, Any]) -> bool:
    """Whether the task's data are noisy: a share of noise, or other people's labels.

    >>> is_noisy({"task": {"config": {"noise": 0.2}}}), is_noisy({"task": {"config": {"labels": "clean"}}})
    (True, False)
    """
    config = _config(study)
    return config["noise"] > 0 if "noise" in config else config["labels"] != "clean"


def _config(study: Mapping[str, Any]) -> Mapping[str, Any]:
    return study["task"]["config"]


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
