"""Does population-risk training remove early stopping when a coordinate network is fitted to a noisy photograph?

"Shared" rows have AdamW's learning rate, as in the paper, which changes nothing but the update; the gate's own numbers
are Algorithm 1's. One more row gives it ten times the rate, because a closed gate makes a small step smaller.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.engine.arms import ALL_ARMS
from poprisk_lab.engine.package_setting import package_settings
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.study import DEFAULTS, Setting, Study
from poprisk_lab.paper.inr.task import InrTask

KIND = "inr"
ADAMW, SHARED = "AdamW, lr 1e-3", "Paper's rule at AdamW's lr"
SHARED_SNR, FASTER = "SNR gate at AdamW's lr", "Paper's rule, lr 1e-2"
SETTINGS = (
    DEFAULTS,
    Setting(ADAMW, "adamw", {"lr": 1e-3}),
    Setting(SHARED, "soft", {"lr": 1e-3, "alpha": 1.0, "strength": 1.0, "rho": 0.99}),
    Setting(SHARED_SNR, "snr", {"lr": 1e-3, "strength": 1.0}),
    Setting(FASTER, "soft", {"lr": 1e-2, "alpha": 1.0, "strength": 1.0, "rho": 0.99}),
    *package_settings({"lr": 1e-3}),
)
"""The rows that are given; weight decay (.01) and β2 (.999) are those of torch's AdamW in all but the defaults."""
PICTURED = (ADAMW, SHARED, DEFAULTS.label, "adamw")


@dataclass(frozen=True)
class InrConfig:
    """Noisy photographs, and the first of them without noise.

    Attributes:
        task: Sizes and noise; its image is replaced by each of the following.
        images: The first is the one whose curves and spectra are shown, with all arms; the others have fewer.
        arms: Searched on the first image.
        other_arms: Searched on the other images and without noise.
        trials: Number of trials of each arm.
        tuning_seeds: Seeds for the search.
        report_seeds: Seeds for the report, different from those of the search.
    """

    task: InrTask = field(default_factory=InrTask)
    images: tuple[str, ...] = ("astronaut", "coffee")
    arms: tuple[str, ...] = ALL_ARMS
    other_arms: tuple[str, ...] = ("adamw", "adamw_cosine", "soft", "snr", "soft_calibrated")
    trials: int = 12
    tuning_seeds: tuple[int, ...] = (100,)
    report_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def __post_init__(self) -> None:
        if not self.images:
            raise DataError("images must name at least one photograph, got none")
        if not self.task.noise > 0:
            raise HyperparameterError(f"the noisy photographs need noise above 0, got {self.task.noise}")


SMOKE = InrConfig(
    task=InrTask(size=16, frequencies=8, width=16, layers=2, batch=64, steps=24, evaluations=6),
    images=("astronaut", "coffee"),
    trials=2,
    report_seeds=(0, 1),
)


def studies(config: InrConfig) -> tuple[Study, ...]:
    """One for each photograph, and one for the first without noise."""
    tasks = [replace(config.task, image=image) for image in config.images]
    clean = replace(tasks[0], noise=0.0)
    arms = [config.arms, *(config.other_arms for _ in config.images)]
    return tuple(
        Study(
            task,
            arms=searched,
            settings=SETTINGS,
            trials=config.trials,
            tuning_seeds=config.tuning_seeds,
            report_seeds=config.report_seeds,
            portraits=PICTURED if task.noise else (),
            compiled=True,
        )
        for task, searched in zip([*tasks, clean], arms, strict=True)
    )


def run(config: InrConfig, report: Progress | None = None, ledger: Path | None = None) -> ComparisonResult:
    """Search, choose and report, photograph by photograph."""
    return run_comparison(KIND, config, studies(config), report, ledger)
