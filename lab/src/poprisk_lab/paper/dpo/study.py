"""Does population-risk training align better with preferences of which 30% are swapped? The paper's noisy DPO.

The paper fine-tunes Qwen2.5-0.5B-Instruct (QLoRA, rank 16, UltraFeedback, three seeds, hyper-parameters shared and not
given): ``examples/dpo_paper`` is that with TRL, for those who have the web and a GPU. Here it is any Llama in a local
folder, by default SmolLM2-135M-Instruct, with everything shared at a usual learning rate for DPO with LoRA and with
equal tuning, and a control without swaps.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from poprisk.errors import HyperparameterError
from poprisk.optim._learning_rate import FACTOR
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.package_setting import package_settings
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.study import Setting, Study
from poprisk_lab.paper.dpo.task import DpoTask, FineTuning

KIND = "dpo"
DEFAULTS = ARMS["defaults"].label
SHARED_ADAMW = "AdamW at the shared lr"
PAPER_RULE = "paper's rule at the shared lr"
THEORY_ALPHA = "paper's rule, α = b/(n - b)"
SNR = "SNR gate, strength 1, at the shared lr"
CALIBRATED = "calibrated α at the shared lr"
SUGGESTED = "PopRiskAdamW at the suggested lr"
PORTRAYED = (SHARED_ADAMW, PAPER_RULE, SUGGESTED, DEFAULTS, "adamw", "soft_calibrated", "snr")
"""Rows whose margins are kept pair by pair, for the first seed."""
_CLEAN = (SHARED_ADAMW, PAPER_RULE, DEFAULTS)


@dataclass(frozen=True)
class DpoConfig:
    """What the experiment runs: each share of swaps with every optimizer.

    Attributes:
        task: Model, pairs and sizes; its noise is set by ``noises``.
        noises: Shares of the training pairs that are swapped; 0 is the clean control.
        lr: Learning rate of the rows in which nothing is tuned.
        lr_range: Range of AdamW's learning rate in the search; that of the gates is ten times higher.
        arms: Names of the optimizers that are tuned where pairs are swapped.
        clean_arms: Names of those tuned where no pair is swapped; usually none, because the fixed rows are a control.
        trials: Number of trials of each of them.
        tuning_seeds: Seeds for the search.
        report_seeds: Seeds for everything that is reported.
        members_at_once: Number of trainings in one computation; 12 need about 35 GB at the full size.
    """

    task: DpoTask = field(default_factory=DpoTask)
    noises: tuple[float, ...] = (0.3,)
    lr: float = 5e-5
    lr_range: tuple[float, float] = (3e-6, 3e-3)
    arms: tuple[str, ...] = ("adamw", "soft_calibrated")
    clean_arms: tuple[str, ...] = ()
    trials: int = 12
    tuning_seeds: tuple[int, ...] = (100,)
    report_seeds: tuple[int, ...] = (0, 1, 2)
    members_at_once: int | None = 12

    def __post_init__(self) -> None:
        if not any(noise > 0 for noise in self.noises):
            raise HyperparameterError(f"noises must hold a share above 0, which figure and table show: {self.noises}")
        if "adamw" not in self.arms or (self.clean_arms and "adamw" not in self.clean_arms):
            raise HyperparameterError(f"arms must hold 'adamw', which all others are compared with, got {self.arms}")


SMOKE = DpoConfig(
    task=DpoTask(FineTuning(rank=2), batch=6, steps=12, evaluations=3),
    noises=(0.3, 0.0),
    lr=3e-3,
    lr_range=(1e-4, 1e-1),
    trials=2,
    report_seeds=(0, 1),
    members_at_once=None,
)
"""A tiny random Llama and made-up pairs: no files, a few seconds."""


def full_config(
    folder: str = "smollm2", data: tuple[str, ...] = ("smollm2/preferences.safetensors",), compiled: bool = False
) -> DpoConfig:
    """The experiment at full size.

    Args:
        folder: SmolLM2-135M-Instruct, or another Llama, as Hugging Face saves it.
        data: See :class:`poprisk_lab.paper.dpo.task.FineTuning`.
        compiled: See there.

    >>> full_config("model", ("pairs.jsonl",)).task.model.rank
    16
    """
    return DpoConfig(task=DpoTask(FineTuning(folder, data, compiled=compiled)))


def settings(config: DpoConfig, noise: float) -> tuple[Setting, ...]:
    """Rows with nothing searched: what shares AdamW's learning rate, and the library as it comes.

    The control without swaps has only those that are asked for there.
    """
    count, batch = config.task.streams["pairs"]
    shared = {"lr": config.lr}
    paper = {**shared, "strength": 1.0, "alpha": 1.0, "rho": 0.99}
    given = (
        Setting(SHARED_ADAMW, "adamw", shared),
        Setting(PAPER_RULE, "soft", paper),
        Setting(THEORY_ALPHA, "soft", {**paper, "alpha": batch / (count - batch)}),
        Setting(SNR, "snr", {**shared, "strength": 1.0, "rho": 0.99}),
        *package_settings(shared, " at the shared lr"),
        Setting(CALIBRATED, "soft_calibrated", {**shared, "strength": 1.0, "rho": 0.99}),
        Setting(SUGGESTED, "defaults", {"lr": FACTOR * config.lr}),
        Setting(DEFAULTS, "defaults"),
    )
    return tuple(each for each in given if noise or each.label in _CLEAN)


def studies(config: DpoConfig) -> tuple[Study, ...]:
    """One study for each share of swaps."""
    return tuple(
        Study(
            replace(config.task, noise=noise),
            arms=config.arms if noise else config.clean_arms,
            settings=settings(config, noise),
            trials=config.trials,
            tuning_seeds=config.tuning_seeds,
            report_seeds=config.report_seeds,
            portraits=PORTRAYED,
            lr_range=config.lr_range,
            members_at_once=config.members_at_once,
            oracles=("adamw",),
        )
        for noise in config.noises
    )


def run(config: DpoConfig, report: Progress | None, ledger: Path | None = None) -> ComparisonResult:
    """Every share in turn; what the ledger's folder holds already is not computed again."""
    return run_comparison(KIND, config, studies(config), report, ledger)
