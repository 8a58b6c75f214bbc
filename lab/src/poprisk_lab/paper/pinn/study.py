"""Does population-risk training solve an equation from noisy sensors in fewer iterations than a tuned AdamW?

The paper's table gives learning rates for AdamW and none of the gate's numbers, so its rows are read here as follows:
everything is shared with AdamW at its best rate (1e-4), the gate is Algorithm 1's (soft, α = 1, strength 1, ρ = .99),
and "warm-up" is a number of first steps without the gate. Weight decay is torch's default for AdamW, .01, in every
given row. Because this reading is ours, other gates and rates stand beside it, with and without warm-up.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.package_setting import package_settings
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.study import DEFAULTS, Setting, Study
from poprisk_lab.paper.pinn.task import PinnTask

KIND = "pinn"
FULL, NO_WARMUP = "Pop. risk training (full)", "Pop. risk training (no warm-up)"
ADAMW_RATES = (1e-3, 1e-4, 5e-5, 1.5e-5)
"""Those of the paper's table."""


@dataclass(frozen=True)
class PinnConfig:
    """The noisy equation and its clean control.

    Attributes:
        task: The noisy problem; its control has no noise and is otherwise the same.
        arms: Names of the optimizers that are tuned on the noisy problem.
        trials: Number of trials of each arm.
        tuning_seeds: Seeds for the search.
        report_seeds: Seeds for the report, different from those of the search.
        warmup: Number of initial steps without gating, in the rows that have a warm-up.
    """

    task: PinnTask = field(default_factory=PinnTask)
    arms: tuple[str, ...] = (
        "adamw",
        "adamw_cosine",
        "soft",
        "soft_calibrated",
        "snr",
        "hard_calibrated",
    )
    trials: int = 6
    tuning_seeds: tuple[int, ...] = (100,)
    report_seeds: tuple[int, ...] = (0, 1, 2)
    warmup: int = 500

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise HyperparameterError(f"warmup must be 0 or more steps, got {self.warmup}")
        if not self.task.noise > 0:
            raise HyperparameterError(f"the noisy problem needs noise above 0, got {self.task.noise}")


SMOKE = PinnConfig(
    task=PinnTask(
        width=16,
        layers=2,
        interior=64,
        interior_batch=32,
        sensors=32,
        sensor_batch=16,
        boundary=16,
        boundary_batch=8,
        grid=21,
        steps=40,
        evaluations=8,
    ),
    trials=2,
    report_seeds=(0, 1),
    warmup=5,
)


def studies(config: PinnConfig) -> tuple[Study, ...]:
    """The paper's rows, other readings of them and the searched arms on noisy sensors; fewer rows on clean ones."""
    noisy = Study(
        config.task,
        arms=config.arms,
        settings=noisy_settings(config.warmup),
        trials=config.trials,
        tuning_seeds=config.tuning_seeds,
        report_seeds=config.report_seeds,
        portraits=(adamw_label(1e-4), FULL, DEFAULTS.label),
        oracles=config.arms,
        compiled=True,
    )
    clean = Study(
        replace(config.task, noise=0.0), settings=clean_settings(), report_seeds=config.report_seeds, compiled=True
    )
    return noisy, clean


def noisy_settings(warmup: int) -> tuple[Setting, ...]:
    """The paper's six rows, the library's defaults, then gates and rates the paper might have meant.

    >>> [setting.label for setting in noisy_settings(500)[:3]]
    ['Pop. risk training (full)', 'Pop. risk training (no warm-up)', 'AdamW (lr 1e-3)']
    """
    shared = {"lr": 1e-4}  # the rest of Algorithm 1 is what an arm has unless told otherwise
    return (
        Setting(FULL, "soft", {**shared, "gate_warmup": warmup}),
        Setting(NO_WARMUP, "soft", shared),
        *(Setting(adamw_label(lr), "adamw", {"lr": lr}) for lr in ADAMW_RATES),
        DEFAULTS,
        *_readings("soft", "Soft gate, α = 1", (1e-3,), warmup),
        *_readings("snr", "SNR gate, strength 1", (1e-4, 1e-3), warmup),
        *_readings("soft_calibrated", "Soft gate, calibrated", (1e-4, 1e-3), warmup),
        *(each for lr in (1e-4, 1e-3) for each in package_settings({"lr": lr}, f", lr {_rate(lr)}")),
    )


def clean_settings() -> tuple[Setting, ...]:
    """What the gate costs where there is no noise to keep out."""
    return (
        *(Setting(adamw_label(lr), "adamw", {"lr": lr}) for lr in (1e-4, 1e-3)),
        DEFAULTS,
        *(Setting(f"Soft gate, calibrated, lr {_rate(lr)}", "soft_calibrated", {"lr": lr}) for lr in (1e-4, 1e-3)),
    )


def adamw_label(lr: float) -> str:
    """The name of a row of the paper's table.

    >>> adamw_label(1.5e-5)
    'AdamW (lr 1.5e-5)'
    """
    return f"AdamW (lr {_rate(lr)})"


def run(config: PinnConfig, report: Progress | None = None, ledger: Path | None = None) -> ComparisonResult:
    """Search, choose and report on noisy sensors; the control on clean ones."""
    return run_comparison(KIND, config, studies(config), report, ledger)


def _readings(arm: str, words: str, rates: tuple[float, ...], warmup: int) -> list[Setting]:
    """A gate at some learning rates, each with and without first steps that are not gated."""
    starts = ((", warm-up", {"gate_warmup": warmup}), ("", {}))
    return [
        Setting(f"{words}, lr {_rate(lr)}{ending}", arm, {"lr": lr, **start})
        for lr in rates
        for ending, start in starts
    ]


def _rate(lr: float) -> str:
    mantissa, exponent = f"{lr:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"
