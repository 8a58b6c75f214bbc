"""Language modelling, where the gate is known to be slow: clean, and with a fifth of the characters to predict wrong.

Two questions: how far behind is PopRiskAdamW where it takes over the learning rate of AdamW, and what is left of that
where every optimizer is tuned? The second text, with wrong answers, asks what the gate then gives back.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.package_setting import package_settings
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.study import Setting, Study
from poprisk_lab.paper.char_language.task import CharLanguageTask

KIND = "char_language"
ADAMW_INHERITED = "AdamW, lr 1e-3"
PAPER_INHERITED = "paper's rule at AdamW's lr"
DEFAULTS = "PopRiskAdamW, defaults"
SNR_INHERITED = "SNR gate, strength 1, at AdamW's lr"
CALIBRATED_INHERITED = "soft gate, calibrated α, at AdamW's lr"
_INHERITED = {"lr": 1e-3, "weight_decay": 0.01, "beta2": 0.999}
SETTINGS = (
    Setting(ADAMW_INHERITED, "adamw", _INHERITED),
    Setting(PAPER_INHERITED, "soft", _INHERITED | {"alpha": 1.0, "strength": 1.0, "rho": 0.99}),
    Setting(DEFAULTS, "defaults", {}),
    Setting(SNR_INHERITED, "snr", _INHERITED | {"strength": 1.0, "rho": 0.99}),
    Setting(CALIBRATED_INHERITED, "soft_calibrated", _INHERITED | {"strength": 1.0, "rho": 0.99}),
    *package_settings(_INHERITED),
)
"""What is reported without a search: torch's own values for AdamW, each gate in its place, and our defaults."""


@dataclass(frozen=True)
class CharLanguageConfig:
    """What is run: one text, with each share of wrong characters.

    Attributes:
        model: Network, length and what is measured; its ``noise`` is replaced by each of ``noises``.
        noises: Shares of the characters to predict that are replaced; 0 is the clean text.
        arms: Names of the optimizers that are tuned.
        trials: Number of trials of each of them.
        tuning_seeds: Seeds for the search.
        report_seeds: Seeds for the report, different from those of the search.

    Raises:
        HyperparameterError: nothing to run, or a seed both to tune and to report on.
    """

    model: CharLanguageTask = field(default_factory=CharLanguageTask)
    noises: tuple[float, ...] = (0.0, 0.2)
    arms: tuple[str, ...] = ("adamw", "adamw_cosine", "soft", "soft_calibrated", "snr", "gate_schedule")
    trials: int = 4
    tuning_seeds: tuple[int, ...] = (100,)
    report_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def __post_init__(self) -> None:
        if not (self.noises and self.tuning_seeds and self.report_seeds):
            raise HyperparameterError("noises, tuning_seeds and report_seeds need one entry each at least")
        if len({bool(noise) for noise in self.noises}) != len(self.noises):
            raise HyperparameterError(f"noises may hold 0 and one other share, got {self.noises}")
        if both := sorted(set(self.tuning_seeds) & set(self.report_seeds)):
            raise HyperparameterError(f"tuning and report seeds must not meet, got {both[0]} in both")


SMOKE = CharLanguageConfig(
    model=CharLanguageTask(
        width=8, heads=2, layers=1, context=8, batch_size=4, steps=10, evaluations=2, measured_windows=8, target=4.6
    ),
    trials=2,
    report_seeds=(0, 1),
)
"""A few seconds: all arms, both texts, a network that learns next to nothing."""


def studies(config: CharLanguageConfig) -> tuple[Study, ...]:
    """One study for each share of wrong characters."""
    return tuple(
        Study(
            task=replace(config.model, noise=noise),
            arms=config.arms,
            settings=SETTINGS,
            trials=config.trials,
            tuning_seeds=config.tuning_seeds,
            report_seeds=config.report_seeds,
            compiled=True,
        )
        for noise in config.noises
    )


def run(config: CharLanguageConfig, report: Progress, ledger: Path | None = None) -> ComparisonResult:
    """Tune and report every optimizer on both texts; see :mod:`poprisk_lab.engine.study`."""
    return run_comparison(KIND, config, studies(config), report, ledger)
