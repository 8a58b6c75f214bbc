"""Wrong labels on real images: every optimizer on digits and Fashion-MNIST, 0 to 60% of the labels replaced.

Not in the paper; the case that most users have. The question: is the *last* step of PopRiskAdamW at its defaults as
good as the best checkpoint of a tuned AdamW, picked with the test set in hand, and what does it cost on clean labels?
"""

from dataclasses import dataclass
from pathlib import Path

from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.engine.arms import ALL_ARMS
from poprisk_lab.engine.package_setting import package_settings
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.study import DEFAULTS, Setting, Study
from poprisk_lab.paper.labels.task import DIGITS, FASHION, TITLES, LabelTask

KIND = "labels"
SHARED: dict[str, float] = {"lr": 1e-3, "weight_decay": 0.01, "beta2": 0.999}
"""torch's defaults for AdamW; the paper's rule is given them unchanged."""
SETTINGS: tuple[Setting, ...] = (
    DEFAULTS,
    Setting("AdamW, defaults lr 1e-3", "adamw", SHARED),
    Setting("paper's rule at AdamW's lr", "soft", {**SHARED, "strength": 1.0, "alpha": 1.0, "rho": 0.99}),
    *package_settings(SHARED),
)
"""Rows that are given, not tuned, in every study: both optimizers as they come, and the paper's rule swapped in."""


@dataclass(frozen=True)
class LabelSize:
    """Examples, network and length of a training."""

    train_size: int
    width: int
    batch_size: int
    steps: int
    evaluations: int = 30
    depth: int = 2


@dataclass(frozen=True)
class LabelsConfig:
    """What is run: every data set with every share of wrong labels.

    Attributes:
        data: Names of data sets, of ``digits``, ``mnist``, ``fashion``.
        noises: Shares of replaced training labels; 0 is the clean control.
        arms: Names of the optimizers that are tuned.
        trials: Number of trials of each of them.
        tuning_seeds: Seeds for the search.
        report_seeds: Seeds for the report, different from those of the search.
        folder: Folder of data sets, with the folders ``mnist`` and ``fashion`` of idx files.
        digits: Size of the trainings on digits.
        images: Size of the trainings on MNIST and Fashion-MNIST.

    Raises:
        DataError: an unknown data set.
        HyperparameterError: nothing to run, or a seed both to tune and to report on.
    """

    data: tuple[str, ...] = (DIGITS, FASHION)
    noises: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6)
    arms: tuple[str, ...] = ALL_ARMS
    trials: int = 16
    tuning_seeds: tuple[int, ...] = (100,)
    report_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    folder: str = "data"
    digits: LabelSize = LabelSize(train_size=1000, width=512, batch_size=100, steps=1500)
    images: LabelSize = LabelSize(train_size=10_000, width=256, batch_size=128, steps=3000)

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.data) - set(TITLES)):
            raise DataError(f"data must be of {', '.join(TITLES)}, got {unknown[0]!r}")
        if not (self.data and self.noises and self.arms and self.tuning_seeds and self.report_seeds):
            raise HyperparameterError("data, noises, arms and seeds need one entry each at least, got an empty one")
        if both := sorted(set(self.tuning_seeds) & set(self.report_seeds)):
            raise HyperparameterError(f"tuning and report seeds must not meet, got {both[0]} in both")

    def task(self, data: str, noise: float) -> LabelTask:
        """One data set with one share of wrong labels."""
        size = self.digits if data == DIGITS else self.images
        folder = None if data == DIGITS else f"{self.folder}/{data}"
        return LabelTask(data, folder, noise, **vars(size))


SMOKE = LabelsConfig(
    data=(DIGITS,),
    noises=(0.0, 0.4),
    trials=2,
    tuning_seeds=(100,),
    report_seeds=(0, 1),
    digits=LabelSize(train_size=120, width=16, batch_size=20, steps=30, evaluations=3),
)
"""Digits only, since they need no file: clean and 40% wrong, a tiny network, all arms."""


def studies(config: LabelsConfig) -> tuple[Study, ...]:
    """One study for each data set and share of wrong labels.

    Raises:
        DataError: a data set's files are missing; the message says what to fetch and where to put it.
    """
    tasks = [config.task(data, noise) for data in config.data for noise in config.noises]
    for task in tasks:
        task.require_data()
    return tuple(
        Study(
            task=task,
            arms=config.arms,
            settings=SETTINGS,
            trials=config.trials,
            tuning_seeds=config.tuning_seeds,
            report_seeds=config.report_seeds,
        )
        for task in tasks
    )


def run(config: LabelsConfig, report: Progress | None = None, ledger: Path | None = None) -> ComparisonResult:
    """Tune and report every optimizer on every task; see :mod:`poprisk_lab.engine.study`."""
    return run_comparison(KIND, config, studies(config), report, ledger)
