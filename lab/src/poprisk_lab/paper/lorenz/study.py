r"""Does population-risk training learn chaotic dynamics from noisy states, and end below AdamW's best checkpoint?

The paper trains a one-step predictor of Lorenz '63 on noisy states, over several noise levels, and gives neither
network nor numbers. Here one study a level, no noise among them as the clean control, with everything shared (torch's
defaults for AdamW) and with equal tuning.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.arms import ALL_ARMS, ARMS
from poprisk_lab.engine.package_setting import package_settings
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.study import Setting, Study
from poprisk_lab.paper.lorenz.task import LorenzTask

KIND = "lorenz"
DEFAULTS = ARMS["defaults"].label
SHARED_ADAMW, PAPER_RULE, SNR = "AdamW, lr 1e-3", "paper's rule at AdamW's lr", "SNR gate, strength 1, at AdamW's lr"
_SHARED = {"lr": 1e-3, "weight_decay": 0.01, "beta2": 0.999}
SETTINGS = (
    Setting(DEFAULTS, "defaults"),
    Setting(SHARED_ADAMW, "adamw", _SHARED),
    Setting(PAPER_RULE, "soft", {**_SHARED, "strength": 1.0, "alpha": 1.0, "rho": 0.99}),
    Setting(SNR, "snr", {**_SHARED, "strength": 1.0, "rho": 0.99}),
    *package_settings(_SHARED),
)
"""Rows with nothing searched: the library's defaults, and what shares AdamW's usual hyper-parameters."""


@dataclass(frozen=True)
class LorenzConfig:
    """What the experiment runs: every noise level with every optimizer.

    Attributes:
        task: The problem; its noise is set by the levels.
        noises: Standard deviations of the sensor's noise, in those of each coordinate; 0 is the clean control.
        reference: The noise level whose curves, bars and roll-outs are shown.
        arms: Names of the optimizers that are tuned.
        trials: Number of trials of each of them.
        tuning_seeds: Seeds for the search.
        report_seeds: Seeds for the report, different from those of the search.
    """

    task: LorenzTask = field(default_factory=LorenzTask)
    noises: tuple[float, ...] = (0.0, 0.1, 0.4)
    reference: float = 0.1
    arms: tuple[str, ...] = ALL_ARMS
    trials: int = 16
    tuning_seeds: tuple[int, ...] = (100,)
    report_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def __post_init__(self) -> None:
        if self.reference not in self.noises or self.reference <= 0:
            raise HyperparameterError(f"reference must be a noise above 0 among {self.noises}, got {self.reference}")
        if "adamw" not in self.arms:
            raise HyperparameterError(f"arms must hold 'adamw', which all others are compared with, got {self.arms}")


SMOKE = LorenzConfig(
    task=LorenzTask(
        train_pairs=200,
        test_states=100,
        width=16,
        hidden_layers=2,
        batch_size=32,
        steps=30,
        evaluations=5,
        rollouts=4,
        horizon=0.5,
        portrait_steps=200,
    ),
    noises=(0.0, 0.1),
    trials=2,
    tuning_seeds=(100,),
    report_seeds=(0, 1),
)


def task_at(config: LorenzConfig, noise: float) -> LorenzTask:
    """The problem at one noise level.

    >>> task_at(SMOKE, 0.1).name
    'lorenz_noise0.1'
    """
    return replace(config.task, noise=noise)


def studies(config: LorenzConfig) -> tuple[Study, ...]:
    """One study a noise level."""
    return tuple(
        Study(
            task_at(config, noise),
            arms=config.arms,
            settings=SETTINGS,
            trials=config.trials,
            tuning_seeds=config.tuning_seeds,
            report_seeds=config.report_seeds,
            portraits=(DEFAULTS, SHARED_ADAMW, PAPER_RULE, "adamw") if noise == config.reference else (),
        )
        for noise in config.noises
    )


def run(config: LorenzConfig, report: Progress | None, ledger: Path | None = None) -> ComparisonResult:
    """Every noise level in turn; what the ledger's folder holds already is not computed again."""
    return run_comparison(KIND, config, studies(config), report, ledger)
