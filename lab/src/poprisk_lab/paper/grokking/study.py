r"""Does population-risk training generalize in fewer steps on modular division, 4.9 times fewer as the paper says?

The paper gives the task (:math:`a \cdot b^{-1} \bmod 97`, 25% of the table, a transformer of two layers) and that
everything but the update was shared; it gives no learning rate, weight decay, β2, batch size or warm-up. Two questions
are therefore asked:

- *shared*: the published numbers of the public suites (lr 1e-3, β2 .98, ten steps of warm-up, batches of 512) with two
  weight decays, .2 and 1, the same for AdamW and the gates. Weight decay alone moves the time to generalize by a
  factor of ten, so that one of the two must not decide.
- *tuned*: every optimizer with the same number of trials over its own learning rate, weight decay and β2. The ranges
  contain what generalizes quickly with AdamW (lr 1e-2, weight decay 1, β2 .98: 95% after about 1,100 steps), and more:
  learning rates up to 3e-2, ten times that for the gates, and weight decays up to 10.

Labels are clean: this is its own clean control. ``noisy`` adds a study with a share of wrong training labels.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.arms import Arm
from poprisk_lab.engine.package_setting import PACKAGE_ARMS, PACKAGE_RULE
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.search import Range
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
    **{words: (arm, PACKAGE_RULE) for words, arm in PACKAGE_ARMS.items()},
}
"""What is compared under shared hyper-parameters: words, arm, and what the rule itself is given."""


ARMS = ("adamw", "soft", "snr", "grokfast")
"""What is tuned: AdamW, the paper's gate, the library's gate, and a peer made for delayed generalization."""


@dataclass(frozen=True)
class GrokkingConfig:
    """What the experiment runs.

    Attributes:
        task: The problem; its lengths are set by the two below.
        shared_steps: Number of steps with shared hyper-parameters.
        shared_evaluations: Number of measurements with shared hyper-parameters.
        tuned_steps: Number of steps with tuned hyper-parameters.
        tuned_evaluations: Number of measurements with tuned hyper-parameters.
        lr: The shared learning rate.
        beta2: The shared β2.
        weight_decays: The weight decays, each shared in turn.
        lr_warmup: Number of steps in which the shared learning rate rises from zero.
        lr_range: Range of AdamW's learning rate in the search; that of the gates is ten times higher.
        decay_range: Range of the weight decay in the search, for all optimizers.
        arms: Names of the optimizers that are tuned.
        trials: Number of trials of each of them.
        tuning_seeds: Seeds for the search.
        report_seeds: Seeds for the report of the tuned optimizers.
        shared_seeds: Seeds for the long runs with shared hyper-parameters.
        noisy: Whether to study wrong training labels as well, with tuning.
        wrong_share: Share of wrong training labels in that study.
    """

    task: GrokkingTask = field(default_factory=GrokkingTask)
    shared_steps: int = 30_000
    shared_evaluations: int = 300
    tuned_steps: int = 4_000
    tuned_evaluations: int = 80
    lr: float = 1e-3
    beta2: float = 0.98
    weight_decays: tuple[float, ...] = (0.2, 1.0)
    lr_warmup: int = 10
    lr_range: tuple[float, float] = (1e-4, 3e-2)
    decay_range: tuple[float, float] = (1e-2, 10.0)
    arms: tuple[str, ...] = ARMS
    trials: int = 24
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


@dataclass(frozen=True)
class DecayStudy(Study):
    """A study with a range of weight decays of its own.

    Attributes:
        decay_range: Replaces the range of the weight decay of every arm.
    """

    decay_range: tuple[float, float] = (1e-3, 2.0)

    def ranges(self, arm: Arm) -> dict[str, Range]:
        """The ranges searched for this arm in this study."""
        return super().ranges(arm) | {"weight_decay": Range(*self.decay_range)}


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
    searched = {
        "arms": config.arms,
        "trials": config.trials,
        "tuning_seeds": config.tuning_seeds,
        "report_seeds": config.report_seeds,
        "lr_range": config.lr_range,
        "decay_range": config.decay_range,
        "compiled": True,
    }
    found = [
        Study(shared, settings=shared_settings(config), report_seeds=config.shared_seeds, compiled=True),
        DecayStudy(tuned, **searched),
    ]
    if config.noisy:
        found.append(DecayStudy(noisy, **searched))
    return tuple(found)


def run(config: GrokkingConfig, report: Progress | None, ledger: Path | None = None) -> ComparisonResult:
    """Every study in turn; what the ledger's folder holds already is not computed again."""
    return run_comparison(KIND, config, studies(config), report, ledger)
