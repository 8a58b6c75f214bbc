r"""Does population-risk training generalize in fewer steps on modular division, 4.9 times fewer as the paper says?

The paper gives the task (:math:`a \cdot b^{-1} \bmod 97`, 25% of the table, a transformer of two layers) and that
everything but the update was shared; it gives no learning rate, weight decay, β2, batch size or warm-up. Two questions
are therefore asked:

- *shared*: the published numbers of the public suites (lr 1e-3, β2 .98, ten steps of warm-up, batches of 512) with two
  weight decays, .2 and 1, the same for AdamW and the gates. Weight decay alone moves the time to generalize by a
  factor of ten, so that one of the two must not decide.
- *tuned*: every optimizer with the same number of trials over its own learning rate, weight decay and β2.

Labels are clean: this is its own clean control. ``noisy`` adds a study with a share of wrong training labels.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.study import Setting, Study
from poprisk_lab.paper.grokking.task import GrokkingTask

KIND = "grokking"
SHARED, TUNED, NOISY = "grokking_shared", "grokking_tuned", "grokking_noisy"
"""Names of the studies."""

ADAMW, PAPER_RULE = "AdamW", "paper's rule"
_PAPER = {"alpha": 1.0, "strength": 1.0, "rho": 0.99}
RULES: dict[str, tuple[str, dict[str, float]]] = {
    ADAMW: ("adamw", {}),
    PAPER_RULE: ("soft", _PAPER),
    "SNR gate, strength 1": ("snr", {"strength": 1.0, "rho": 0.99}),
    "soft gate, calibrated α": ("soft_calibrated", {"strength": 1.0, "rho": 0.99}),
}
"""What is compared under shared hyper-parameters: words, arm, and what the rule itself is given."""


ARMS = (
    "adamw",
    "adamw_cosine",
    "soft",
    "snr",
    "soft_calibrated",
    "hard_calibrated",
    "cautious",
    "grokfast",
    "cubed",
)
"""What is tuned: the gates, and the controls that claim something about delayed generalization."""


@dataclass(frozen=True)
class GrokkingConfig:
    """What the experiment runs.

    Attributes:
        task: The problem; its lengths are set by the two below.
        shared_steps: Of a training with shared hyper-parameters.
        shared_evaluations: Measurements of it.
        tuned_steps: Of a training with tuned ones.
        tuned_evaluations: Measurements of it.
        lr: The shared learning rate.
        beta2: The shared β2.
        weight_decays: Each is shared in turn.
        lr_warmup: Steps in which the shared learning rate rises from zero.
        arms: Which optimizers are tuned.
        trials: For each of them.
        tuning_seeds: For the search.
        report_seeds: For everything tuned that is reported.
        shared_seeds: For the long runs with shared hyper-parameters.
        noisy: Whether a share of wrong training labels is studied as well, tuned.
        wrong_share: That share.
    """

    task: GrokkingTask = field(default_factory=GrokkingTask)
    shared_steps: int = 30_000
    shared_evaluations: int = 300
    tuned_steps: int = 6_000
    tuned_evaluations: int = 120
    lr: float = 1e-3
    beta2: float = 0.98
    weight_decays: tuple[float, ...] = (0.2, 1.0)
    lr_warmup: int = 10
    arms: tuple[str, ...] = ARMS
    trials: int = 8
    tuning_seeds: tuple[int, ...] = (100,)
    report_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    shared_seeds: tuple[int, ...] = (0, 1, 2)
    noisy: bool = False
    wrong_share: float = 0.05

    def __post_init__(self) -> None:
        if not self.weight_decays:
            raise HyperparameterError("weight_decays needs at least one value to share, got none")
        if "adamw" not in self.arms:
            raise HyperparameterError(f"arms must hold 'adamw', which all others are compared with, got {self.arms}")
        if not 0 < self.wrong_share < 1:
            raise HyperparameterError(f"wrong_share must lie between 0 and 1, got {self.wrong_share}")


SMOKE = GrokkingConfig(
    task=GrokkingTask(modulus=13, width=16, heads=2, hidden=32, batch_size=16),
    shared_steps=40,
    shared_evaluations=8,
    tuned_steps=20,
    tuned_evaluations=4,
    trials=2,
    report_seeds=(0, 1),
    shared_seeds=(0, 1),
)


def shared_label(rule: str, weight_decay: float) -> str:
    """The row of a rule at a shared weight decay.

    >>> shared_label("AdamW", 0.2)
    'AdamW, weight decay 0.2'
    """
    return f"{rule}, weight decay {weight_decay:g}"


def shared_settings(config: GrokkingConfig) -> tuple[Setting, ...]:
    """Every rule at every shared weight decay.

    >>> [setting.label for setting in shared_settings(SMOKE)][:2]
    ['AdamW, weight decay 0.2', "paper's rule, weight decay 0.2"]
    """
    shared = {"lr": config.lr, "beta2": config.beta2, "lr_warmup": float(config.lr_warmup)}
    return tuple(
        Setting(shared_label(rule, decay), arm, {**shared, "weight_decay": decay, **hyper})
        for decay in config.weight_decays
        for rule, (arm, hyper) in RULES.items()
    )


def studies(config: GrokkingConfig) -> tuple[Study, ...]:
    """Shared hyper-parameters, equal tuning and, if asked for, equal tuning under wrong labels."""
    shared = replace(config.task, name=SHARED, steps=config.shared_steps, evaluations=config.shared_evaluations)
    tuned = replace(config.task, name=TUNED, steps=config.tuned_steps, evaluations=config.tuned_evaluations)
    noisy = replace(tuned, name=NOISY, wrong_share=config.wrong_share)
    searched = {"arms": config.arms, "trials": config.trials, "tuning_seeds": config.tuning_seeds, "compiled": True}
    found = [
        Study(shared, settings=shared_settings(config), report_seeds=config.shared_seeds, compiled=True),
        Study(tuned, report_seeds=config.report_seeds, **searched),
    ]
    if config.noisy:
        found.append(Study(noisy, report_seeds=config.report_seeds, **searched))
    return tuple(found)


def run(config: GrokkingConfig, report: Progress | None, ledger: Path | None = None) -> ComparisonResult:
    """Every study in turn; what the ledger's folder holds already is not computed again."""
    return run_comparison(KIND, config, studies(config), report, ledger)
