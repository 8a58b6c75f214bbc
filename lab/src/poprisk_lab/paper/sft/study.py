"""Optimizers fine-tuning a language model on answers, clean and with 20% of the targets replaced."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from poprisk.errors import HyperparameterError
from poprisk.optim._learning_rate import FACTOR
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.package_setting import package_settings
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.study import Setting, Study
from poprisk_lab.paper.dpo.task import FineTuning
from poprisk_lab.paper.sft.task import SftTask

KIND = "sft"
DEFAULTS = ARMS["defaults"].label
SHARED_ADAMW, PAPER_RULE = "AdamW at the shared lr", "paper's rule at the shared lr"
CALIBRATED, SNR = "calibrated α at the shared lr", "SNR gate, strength 1, at the shared lr"
SUGGESTED = "PopRiskAdamW at the suggested lr"


@dataclass(frozen=True)
class SftConfig:
    """What the experiment runs: clean and replaced targets with every optimizer.

    Attributes:
        task: Model, text and sizes; its noise is set by ``noises``.
        noises: Shares of replaced targets; 0 is clean.
        lr: Learning rate of the rows in which nothing is tuned.
        lr_range: Range of AdamW's learning rate in the search; that of the gates is ten times higher.
        arms: Names of the optimizers that are tuned.
        trials: Number of trials of each of them.
        tuning_seeds: Seeds for the search.
        report_seeds: Seeds for the report, different from those of the search.
        members_at_once: Number of trainings in one computation.
    """

    task: SftTask = field(default_factory=SftTask)
    noises: tuple[float, ...] = (0.0, 0.2)
    lr: float = 2e-4
    lr_range: tuple[float, float] = (3e-6, 3e-3)
    arms: tuple[str, ...] = ("adamw", "soft_calibrated")
    trials: int = 4
    tuning_seeds: tuple[int, ...] = (100,)
    report_seeds: tuple[int, ...] = (0, 1, 2)
    members_at_once: int | None = 24

    def __post_init__(self) -> None:
        if "adamw" not in self.arms:
            raise HyperparameterError(f"arms must hold 'adamw', which all others are compared with, got {self.arms}")


SMOKE = SftConfig(
    task=SftTask(FineTuning(rank=2), batch=6, steps=9, evaluations=3),
    lr=3e-3,
    lr_range=(1e-4, 1e-1),
    trials=2,
    report_seeds=(0, 1),
    members_at_once=None,
)
"""A tiny random Llama and made-up text: no files, a few seconds."""


def full_config(
    folder: str = "smollm2", data: tuple[str, ...] = ("smollm2/preferences.safetensors",), compiled: bool = False
) -> SftConfig:
    """The experiment at full size, with the files of the DPO experiment.

    >>> full_config("model", ("pairs.jsonl",)).task.steps
    150
    """
    return SftConfig(task=SftTask(FineTuning(folder, data, compiled=compiled)))


def settings(config: SftConfig) -> tuple[Setting, ...]:
    """Rows with nothing searched: what inherits AdamW's learning rate, and the library as it comes."""
    shared = {"lr": config.lr}
    gate = {**shared, "strength": 1.0, "rho": 0.99}
    return (
        Setting(SHARED_ADAMW, "adamw", shared),
        Setting(PAPER_RULE, "soft", {**gate, "alpha": 1.0}),
        Setting(CALIBRATED, "soft_calibrated", gate),
        Setting(SNR, "snr", gate),
        *package_settings(shared, " at the shared lr"),
        Setting(SUGGESTED, "defaults", {"lr": FACTOR * config.lr}),
        Setting(DEFAULTS, "defaults"),
    )


def studies(config: SftConfig) -> tuple[Study, ...]:
    """One study for each share of replaced targets."""
    return tuple(
        Study(
            replace(config.task, noise=noise),
            arms=config.arms,
            settings=settings(config),
            trials=config.trials,
            tuning_seeds=config.tuning_seeds,
            report_seeds=config.report_seeds,
            lr_range=config.lr_range,
            members_at_once=config.members_at_once,
        )
        for noise in config.noises
    )


def run(config: SftConfig, report: Progress | None, ledger: Path | None = None) -> ComparisonResult:
    """Every share in turn; what the ledger's folder holds already is not computed again."""
    return run_comparison(KIND, config, studies(config), report, ledger)
