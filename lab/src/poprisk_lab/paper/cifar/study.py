"""Wrong labels as people give them: optimizers on CIFAR-10 with the labels of CIFAR-10N, and the true ones as control.

Not in the paper. The same questions as in :mod:`poprisk_lab.paper.labels.study`, with a convolutional network and
mistakes that are not drawn at random: a cat is called a dog more often than a truck.
"""

from dataclasses import dataclass
from pathlib import Path

from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.data.cifar import HUMAN_LABELS
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.study import Study
from poprisk_lab.paper.cifar.task import CifarTask
from poprisk_lab.paper.labels.study import SETTINGS

KIND = "cifar"


@dataclass(frozen=True)
class CifarConfig:
    """What is run: one study for each set of labels.

    Attributes:
        labels: Sets of labels: ``clean`` (the control), ``aggre`` (9% wrong), ``random1`` (17%), ``worse`` (40%).
        arms: Names of the optimizers that are tuned.
        trials: Number of trials of each of them.
        tuning_seeds: Seeds for the search.
        report_seeds: Seeds for the report, different from those of the search.
        folder: Folder of data sets, with a folder ``cifar10``; ``None`` for synthetic images, for a quick test.
        width: Number of channels after the first convolution.
        batch_size: Number of examples per step.
        epochs: Number of passes over the images.
        evaluations: Number of measurements.
        flips: Whether mirrored images are added to the examples.
        convolution: ``im2col`` or ``grouped``, which give the same result at different speeds.
        train_size: Number of training images; the first ones are used.
        members_at_once: Maximum number of trainings in one computation, which memory limits.

    Raises:
        DataError: an unknown set of labels.
        HyperparameterError: nothing to run.
    """

    labels: tuple[str, ...] = ("clean", "random1", "worse")
    arms: tuple[str, ...] = ("adamw", "adamw_cosine", "gate_schedule")
    trials: int = 12
    tuning_seeds: tuple[int, ...] = (100,)
    report_seeds: tuple[int, ...] = (0, 1, 2)
    folder: str | None = "data"
    width: int = 32
    batch_size: int = 128
    epochs: int = 30
    evaluations: int = 20
    flips: bool = True
    convolution: str = "im2col"
    train_size: int = 20_000
    members_at_once: int | None = 100

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.labels) - set(HUMAN_LABELS)):
            raise DataError(f"labels must be of {', '.join(HUMAN_LABELS)}, got {unknown[0]!r}")
        if not (self.labels and self.arms and self.tuning_seeds and self.report_seeds):
            raise HyperparameterError("labels, arms and seeds need one entry each at least, got an empty one")

    def task(self, labels: str) -> CifarTask:
        """The images with one set of labels."""
        return CifarTask(
            folder=None if self.folder is None else f"{self.folder}/cifar10",
            labels=labels,
            width=self.width,
            batch_size=self.batch_size,
            epochs=self.epochs,
            evaluations=self.evaluations,
            flips=self.flips,
            convolution=self.convolution,
            train_size=self.train_size,
        )


SMOKE = CifarConfig(
    labels=("clean", "worse"),
    trials=2,
    report_seeds=(0, 1),
    folder=None,
    width=2,
    batch_size=16,
    epochs=2,
    evaluations=4,
    train_size=160,
)
"""Small synthetic images made by code in place of CIFAR-10, which no test has: all arms, a tiny network."""


def studies(config: CifarConfig) -> tuple[Study, ...]:
    """One study for each set of labels.

    Raises:
        DataError: images or labels are missing; the message says what to fetch and where to put it.
    """
    tasks = [config.task(labels) for labels in config.labels]
    tasks[0].require_data()
    return tuple(
        Study(
            task=task,
            arms=config.arms,
            settings=SETTINGS,
            trials=config.trials,
            tuning_seeds=config.tuning_seeds,
            report_seeds=config.report_seeds,
            members_at_once=config.members_at_once,
            oracles=("adamw",),
            compiled=True,
        )
        for task in tasks
    )


def run(config: CifarConfig, report: Progress | None = None, ledger: Path | None = None) -> ComparisonResult:
    """Tune and report every optimizer on every set of labels."""
    return run_comparison(KIND, config, studies(config), report, ledger)
