"""Every variant of the gate on noisy and clean tasks, beside AdamW and the strict gate, at shared learning rates.

Nothing is searched. On noisy tasks every rule is trained at AdamW's usual rate and at 3 and 10 times it, because a gate
makes a small step smaller; on clean tasks at AdamW's rate alone, because there the question is what it costs to leave
the gate switched on at an unchanged rate. All else is shared. What is asked of a variant is in
:mod:`poprisk_lab.gates.verdict`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.run import ComparisonResult, Progress, run_comparison
from poprisk_lab.engine.study import Setting, Study
from poprisk_lab.engine.task import StackedTask
from poprisk_lab.gates.arms import IDEAS
from poprisk_lab.gates.halves import HalvesTask
from poprisk_lab.paper.char_language.task import CharLanguageTask
from poprisk_lab.paper.grokking.task import GrokkingTask
from poprisk_lab.paper.inr.task import InrTask
from poprisk_lab.paper.labels.task import FASHION, LabelTask
from poprisk_lab.paper.lorenz.task import LorenzTask
from poprisk_lab.paper.pinn.task import PinnTask
from poprisk_lab.paper.teacher.study import TeacherTask

KIND = "gate_variants"
ADAMW, STRICT = "AdamW", "strict gate"
KNOWN: dict[str, tuple[str, dict[str, float]]] = {
    ADAMW: ("adamw", {}),
    STRICT: ("soft", {"alpha": 1.0, "strength": 1.0}),
    "AdamW, cosine decay": ("adamw_cosine", {}),
    "calibrated soft gate": ("soft_calibrated", {"strength": 1.0}),
    "SNR gate, strength 1": ("snr", {"strength": 1.0}),
    "SNR gate, strength 30": ("snr", {"strength": 30.0}),
}
"""What the variants are measured against: label, arm, and what the rule itself is given. ρ and ε are the usual."""


@dataclass(frozen=True)
class Bench:
    """A task with what all rules share on it.

    Attributes:
        task: At one size.
        noisy: Whether its data are noisy; else it is one of the clean ones.
        rates: Learning rates; the first is AdamW's usual one.
        shared: Other hyper-parameters.
        seeds: Paired repetitions.
        compiled: Whether its losses are compiled on a GPU.
    """

    task: StackedTask
    noisy: bool
    rates: tuple[float, ...]
    shared: Mapping[str, float]
    seeds: tuple[int, ...]
    compiled: bool = False

    @property
    def pass_steps(self) -> float:
        """Steps in a pass over the examples of the first stream."""
        examples, batch = next(iter(self.task.streams.values()))
        return float(examples // batch)


@dataclass(frozen=True)
class GateVariantsConfig:
    """Sizes, seeds and which variants.

    Attributes:
        digits: With wrong labels; its clean control stops after ``clean_digits_steps``.
        fashion: The same on Fashion-MNIST; None leaves it out.
        teacher: A random network's labels, some of them wrong; its clean control stops after ``clean_teacher_steps``.
        lorenz: Chaotic dynamics through a noisy sensor.
        inr: A noisy photograph; None leaves it out.
        language: A clean character language model.
        grokking: Modular division, clean, at ``grokking_rate``, weight decay 1 and β2 .98; of a size at which AdamW
            generalizes within the run on every seed that was tried (modulo 97 from a quarter of the table it does not).
        pinn: A differential equation from clean sensors.
        rate: AdamW's usual learning rate, on all tasks but grokking.
        factors: Multiples of it that are tried on noisy tasks.
        seeds: Paired repetitions. None of the usual seeds was used while variants were designed or sizes chosen;
            that was done on others (0 to 2, and for grokking's size 10 to 12 as well).
        variants: Which are run, by name.
        only: Names of tasks to which the run is restricted, so that several processes can share the work; empty: all.

    Raises:
        HyperparameterError: an unknown variant or task, no clean or no noisy task, or a noise that does not fit.
    """

    digits: LabelTask = field(default_factory=lambda: LabelTask(noise=0.4, steps=1200, evaluations=12))
    fashion: LabelTask | None = field(
        default_factory=lambda: LabelTask(
            FASHION, f"data/{FASHION}", 0.4, train_size=4000, width=256, batch_size=128, steps=1500, evaluations=10
        )
    )
    teacher: TeacherTask = field(default_factory=lambda: TeacherTask(noise=0.4, steps=1600, evaluations=16))
    lorenz: LorenzTask = field(
        default_factory=lambda: LorenzTask(noise=0.4, train_pairs=1000, steps=2500, evaluations=10, rollouts=4)
    )
    inr: InrTask | None = field(
        default_factory=lambda: InrTask(size=64, noise=0.2, batch=512, steps=1500, evaluations=15)
    )
    language: CharLanguageTask = field(
        default_factory=lambda: CharLanguageTask(steps=1200, evaluations=48, measured_windows=256)
    )
    grokking: GrokkingTask = field(
        default_factory=lambda: GrokkingTask(modulus=59, train_share=0.5, layers=1, steps=3000, evaluations=60)
    )
    pinn: PinnTask = field(default_factory=lambda: PinnTask(noise=0.0, steps=1200, evaluations=40))
    clean_digits_steps: int = 300
    clean_teacher_steps: int = 800
    clean_evaluations: int = 100
    rate: float = 1e-3
    grokking_rate: float = 3e-3
    factors: tuple[float, ...] = (1.0, 3.0, 10.0)
    seeds: tuple[int, ...] = (20, 21, 22, 23, 24)
    variants: tuple[str, ...] = tuple(idea.arm for idea in IDEAS)
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = {idea.arm for idea in IDEAS}
        if unknown := sorted(set(self.variants) - known):
            raise HyperparameterError(f"no variant is called {unknown[0]!r}; known: {', '.join(sorted(known))}")
        if not (self.factors and self.factors[0] == 1):
            raise HyperparameterError(f"factors must begin with 1, AdamW's own rate, got {self.factors}")
        noisy = [self.digits, self.fashion, self.teacher, self.lorenz, self.inr]
        if quiet := [task.name for task in noisy if task is not None and not task.noise > 0]:
            raise HyperparameterError(f"the noisy tasks need noise above 0, got none in {quiet[0]}")
        if self.pinn.noise or self.language.noise or self.grokking.wrong_share:
            raise HyperparameterError("language, grokking and pinn are clean tasks: give them no noise")
        names = [bench.task.name for bench in self._all()]
        if strange := sorted(set(self.only) - set(names)):
            raise HyperparameterError(f"no task is called {strange[0]!r}; known: {', '.join(names)}")

    def benches(self) -> tuple[Bench, ...]:
        """The tasks of this run, noisy ones first.

        >>> [bench.task.name for bench in SMOKE.benches()]  # doctest: +NORMALIZE_WHITESPACE
        ['digits-40', 'teacher_40', 'lorenz_noise0.4', 'inr_astronaut', 'digits-0', 'teacher_clean', 'char_clean',
         'grokking', 'pinn_clean']
        """
        return tuple(bench for bench in self._all() if not self.only or bench.task.name in self.only)

    def _all(self) -> tuple[Bench, ...]:
        rates = tuple(round(self.rate * factor, 9) for factor in self.factors)
        noisy = [task for task in (self.digits, self.fashion, self.teacher, self.lorenz, self.inr) if task is not None]
        looks = self.clean_evaluations
        clean: list[StackedTask] = [
            replace(self.digits, noise=0.0, steps=self.clean_digits_steps, evaluations=looks),
            replace(self.teacher, noise=0.0, steps=self.clean_teacher_steps, evaluations=looks),
        ]
        grokking = {"weight_decay": 1.0, "beta2": 0.98, "lr_warmup": 10.0}
        return (
            *(Bench(task, True, rates, {}, self.seeds) for task in noisy),
            *(Bench(task, False, (self.rate,), {}, self.seeds) for task in clean),
            Bench(self.language, False, (self.rate,), {}, self.seeds, compiled=True),
            Bench(self.grokking, False, (self.grokking_rate,), grokking, self.seeds, compiled=True),
            Bench(self.pinn, False, (self.rate,), {}, self.seeds, compiled=True),
        )


SMOKE = GateVariantsConfig(
    digits=LabelTask(noise=0.4, train_size=120, width=16, batch_size=20, steps=18, evaluations=3),
    fashion=None,
    teacher=TeacherTask(
        noise=0.4, dimension=8, train_size=80, test_size=100, width=16, batch_size=10, steps=12, evaluations=2
    ),
    lorenz=LorenzTask(
        noise=0.4,
        train_pairs=100,
        test_states=50,
        width=8,
        hidden_layers=2,
        batch_size=16,
        steps=10,
        evaluations=2,
        rollouts=2,
        horizon=0.3,
    ),
    inr=InrTask(size=8, frequencies=4, width=8, layers=2, batch=16, steps=8, evaluations=2),
    language=CharLanguageTask(
        width=8, heads=2, layers=1, context=8, batch_size=4, steps=6, evaluations=3, measured_windows=4, target=4.6
    ),
    grokking=GrokkingTask(modulus=7, width=8, heads=2, hidden=8, batch_size=4, steps=6, evaluations=3),
    pinn=PinnTask(
        noise=0.0,
        width=8,
        layers=2,
        interior=32,
        interior_batch=8,
        sensors=16,
        sensor_batch=4,
        boundary=8,
        boundary_batch=4,
        grid=5,
        steps=6,
        evaluations=3,
    ),
    clean_digits_steps=12,
    clean_teacher_steps=10,
    clean_evaluations=5,
    factors=(1.0,),
    seeds=(0, 1),
)
"""Every variant on every task that needs no file, a few steps each."""


def images_in(config: GateVariantsConfig, folder: str) -> GateVariantsConfig:
    """The configuration with Fashion-MNIST in this folder of data sets.

    >>> images_in(GateVariantsConfig(), "elsewhere").fashion.folder
    'elsewhere/fashion'
    """
    if config.fashion is None:
        return config
    return replace(config, fashion=replace(config.fashion, folder=f"{folder}/{config.fashion.data}"))


def row_label(label: str, rate: float) -> str:
    """The row of a rule at a learning rate.

    >>> row_label("strict gate", 0.01)
    'strict gate, lr 0.01'
    """
    return f"{label}, lr {rate:g}"


def studies(config: GateVariantsConfig) -> tuple[Study, ...]:
    """Two studies a task: the rules that see a batch's gradient, and those that see its halves'.

    Raises:
        DataError: Fashion-MNIST's files are missing; the message says what to fetch and where to put it.
    """
    found: list[Study] = []
    for bench in config.benches():
        if isinstance(bench.task, LabelTask):
            bench.task.require_data()
        ideas = [idea for idea in IDEAS if idea.arm in config.variants]
        plain = {idea.label: (idea.arm, _length(bench)) for idea in ideas if not idea.needs_halves}
        apart = {idea.label: (idea.arm, _length(bench)) for idea in ideas if idea.needs_halves}
        found.append(_study(bench, bench.task, KNOWN | plain))
        if apart:
            found.append(_study(bench, HalvesTask(bench.task), apart))
    return tuple(found)


def run(
    config: GateVariantsConfig,
    report: Progress | None = None,
    ledger: Path | None = None,
    device: torch.device | None = None,
) -> ComparisonResult:
    """All tasks in turn; what the ledger's folder holds already for this kind of device is not computed again."""
    return run_comparison(KIND, config, studies(config), report, ledger, device)


def _length(bench: Bench) -> dict[str, float]:
    """The knob by which rules learn how long a pass is; it follows from the task."""
    return {"gate_warmup": bench.pass_steps}


def _study(bench: Bench, task: StackedTask, rules: Mapping[str, tuple[str, Mapping[str, float]]]) -> Study:
    settings: Iterable[Setting] = (
        Setting(row_label(label, rate), arm, {**bench.shared, **given, "lr": rate})
        for label, (arm, given) in rules.items()
        for rate in bench.rates
    )
    return Study(
        task, settings=tuple(settings), report_seeds=bench.seeds, tuning_seeds=(), oracles=(), compiled=bench.compiled
    )
