"""Optimizers on the labels of a random teacher network, clean and with some of them replaced."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.arms import ALL_ARMS
from poprisk_lab.engine.package_setting import package_settings
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.study import Setting, Study
from poprisk_lab.paper.teacher.task import TeacherTask

KIND = "teacher"
_INHERITED = {"lr": 1e-3, "weight_decay": 0.01, "beta2": 0.999}
SETTINGS = (
    Setting("AdamW, lr 1e-3", "adamw", _INHERITED),
    Setting("paper's rule at AdamW's lr", "soft", _INHERITED | {"alpha": 1.0, "strength": 1.0, "rho": 0.99}),
    Setting("PopRiskAdamW, defaults", "defaults", {}),
    Setting("SNR gate, strength 1, at AdamW's lr", "snr", _INHERITED | {"strength": 1.0, "rho": 0.99}),
    Setting("soft gate, calibrated α, at AdamW's lr", "soft_calibrated", _INHERITED | {"strength": 1.0, "rho": 0.99}),
    *package_settings(_INHERITED),
)
"""What is reported without a search: torch's own values for AdamW, each gate in its place, and our defaults."""


@dataclass(frozen=True)
class TeacherConfig:
    """What is run: one student, with each share of wrong labels.

    Attributes:
        student: Data, network and length; its ``noise`` is replaced by each of ``noises``.
        noises: Shares of replaced training labels; 0 is the clean control.
        arms: Names of the optimizers that are tuned.
        trials: Number of trials of each of them.
        tuning_seeds: Seeds for the search.
        report_seeds: Seeds for the report, different from those of the search.

    Raises:
        HyperparameterError: nothing to run, or a seed both to tune and to report on.
    """

    student: TeacherTask = field(default_factory=TeacherTask)
    noises: tuple[float, ...] = (0.0, 0.2, 0.4)
    arms: tuple[str, ...] = ALL_ARMS
    trials: int = 16
    tuning_seeds: tuple[int, ...] = (100,)
    report_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def __post_init__(self) -> None:
        if not (self.noises and self.tuning_seeds and self.report_seeds):
            raise HyperparameterError("noises, tuning_seeds and report_seeds need one entry each at least")
        if both := sorted(set(self.tuning_seeds) & set(self.report_seeds)):
            raise HyperparameterError(f"tuning and report seeds must not meet, got {both[0]} in both")


SMOKE = TeacherConfig(
    student=TeacherTask(dimension=8, train_size=80, test_size=100, width=16, batch_size=10, steps=20, evaluations=2),
    noises=(0.0, 0.4),
    trials=2,
    tuning_seeds=(100,),
    report_seeds=(0, 1),
)
"""A few seconds: all arms, clean labels and 40% wrong ones, a tiny student."""


def studies(config: TeacherConfig) -> tuple[Study, ...]:
    """One study for each share of wrong labels."""
    return tuple(
        Study(
            task=replace(config.student, noise=noise),
            arms=config.arms,
            settings=SETTINGS,
            trials=config.trials,
            tuning_seeds=config.tuning_seeds,
            report_seeds=config.report_seeds,
        )
        for noise in config.noises
    )


def run(config: TeacherConfig, report: Progress, ledger: Path | None = None) -> ComparisonResult:
    """Tune and report every optimizer on every share; see :mod:`poprisk_lab.engine.study`."""
    return run_comparison(KIND, config, studies(config), report, ledger)
