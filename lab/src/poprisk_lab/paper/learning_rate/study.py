"""Which learning rate PopRiskAdamW wants, given AdamW's: transformers' Trainer on noisy and on clean data."""

import argparse
import math
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poprisk._core.progress_faces import write_line
from poprisk._core.statistics import mean_over_seeds
from poprisk.errors import ClosedGateWarning, MissingExtraError
from poprisk.optim import PopRiskAdamW, join_gate
from poprisk_lab.data.char_lm import CharText, help_topics
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.run_ledger import Ledger
from poprisk_lab.paper.learning_rate.task import (
    DigitsConfig,
    LanguageModelConfig,
    Task,
    digits_task,
    evaluating,
    language_model_task,
    memorized_share,
)

KIND = "learning_rate_guide"
ADAMW = "AdamW"
DEFAULT = "default"
SETTINGS: dict[str, dict[str, Any]] = {
    "soft": {"gate": "soft", "strength": 1.0},
    "calibrated": {"gate": "soft", "strength": 1.0, "alpha": "calibrated"},
    "snr": {"gate": "snr", "strength": 1.0},
    DEFAULT: {},
}
"""Options of PopRiskAdamW beside its learning rate, for literal gates (``normalize=False``). ``soft`` is Algorithm 1;
``default``, of strength 100, has the weight decay 5e-3, every other setting that of the Trainer."""
STRICT = "soft"
LANGUAGE_MODEL = "clean text"
_DEFAULT_LRS = (
    (1e-3, 3e-3, 6e-3, 1e-2, 3e-2, 6e-2),
    (1e-2, 3e-2, 6e-2, 1e-1, 3e-1),
    (3e-2, 1e-1, 3e-1, 6e-1, 1.0),
)
Cell = tuple[str, str, float]
"""Task, optimizer, learning rate."""


@dataclass(frozen=True)
class TrainerConfig:
    """What every training shares: the Trainer's defaults, with the usual warm-up."""

    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    schedule: str = "linear"
    warmup_share: float = 0.1
    gate_every: int = 10
    """Number of steps between readings of the mean gate."""


@dataclass(frozen=True)
class Sweep:
    """A task, and the learning rates tried on it."""

    noise: float | None
    """Share of wrong training labels of the digits; None is the language model."""
    adamw_lrs: tuple[float, ...]
    poprisk_lrs: tuple[float, ...]
    strict_lrs: tuple[float, ...] = ()
    """More of them for Algorithm 1's strict gate, which may want a higher one."""
    default_lrs: tuple[float, ...] = ()
    """Those of the default, whose strong gate wants a much higher one."""

    @property
    def task(self) -> str:
        """What the task is called in the result."""
        if self.noise is None:
            return LANGUAGE_MODEL
        return f"digits, {self.noise:.0%} of labels wrong" if self.noise else "digits, clean labels"

    def lrs(self, optimizer: str) -> tuple[float, ...]:
        """The learning rates of an optimizer."""
        if optimizer == ADAMW:
            return self.adamw_lrs
        if optimizer == DEFAULT:
            return self.default_lrs
        return self.poprisk_lrs + (self.strict_lrs if optimizer == STRICT else ())


@dataclass(frozen=True)
class GuideConfig:
    """Which optimizers at which learning rates on which data, how often."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    digits: DigitsConfig = field(default_factory=DigitsConfig)
    language_model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    sweeps: tuple[Sweep, ...] = (
        Sweep(0.4, (3e-5, 1e-4, 3e-4, 1e-3, 3e-3), (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), (3e-2, 1e-1), _DEFAULT_LRS[0]),
        Sweep(0.0, (1e-4, 3e-4, 1e-3, 3e-3), (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), (1e-1,), _DEFAULT_LRS[1]),
        Sweep(None, (1e-3, 3e-3, 1e-2, 3e-2), (3e-3, 1e-2, 3e-2, 1e-1, 3e-1), (1.0,), _DEFAULT_LRS[2]),
    )
    """Grids that reach from AdamW's best learning rate to 30 times it, to 100 times for the strict gate, and for the
    default from 10 times it or less to 100 times or more."""
    seeds: int = 3
    default_seeds: int = 2
    """For the default, the first of those seeds."""
    settings: tuple[str, ...] = tuple(SETTINGS)

    def cells(self) -> list[Cell]:
        """Every task with every optimizer and every learning rate of its grid."""
        return [(s.task, name, lr) for s in self.sweeps for name in (ADAMW, *self.settings) for lr in s.lrs(name)]

    def seeds_of(self, optimizer: str) -> int:
        """How often an optimizer is trained at each learning rate."""
        return min(self.default_seeds, self.seeds) if optimizer == DEFAULT else self.seeds


SMOKE = GuideConfig(
    trainer=TrainerConfig(gate_every=2),
    digits=DigitsConfig(train_size=40, width=8, heads=2, layers=1, batch_size=10, steps=4, evaluations=2),
    language_model=LanguageModelConfig(
        width=8, heads=2, key_value_heads=1, layers=1, context=64, batch_size=2, steps=4
    ),
    sweeps=(Sweep(0.4, (1e-3,), (1e-3, 1e-2)), Sweep(None, (1e-3,), (1e-3, 1e-2))),
    seeds=1,
    settings=("soft",),
)


@dataclass(frozen=True)
class GuideRun:
    """One training: the metric at its last step and its best, and what could be seen without test data."""

    last: float
    best: float
    train_loss: float
    """Mean over the last tenth of the steps, as the Trainer logs it."""
    memorized: float | None
    """Share of the wrong training labels that the model reproduces."""
    mean_gate: float | None
    late_gate: float | None
    """The mean gate over the second half of the steps."""


def run(config: GuideConfig, output: Path) -> dict[str, Any]:
    """Train whatever the output file does not hold yet, writing after each run; then summarize.

    More seeds, tasks or learning rates may be asked for later: only what is missing is trained.

    Returns:
        The summary, one entry for each task, optimizer and learning rate.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    _import_transformers()
    text = help_topics()
    ledger = Ledger(output, KIND, sizes(config) | {"text_sha256": text.sha256})
    cells = config.cells()
    keys = [
        {"task": task, "optimizer": name, "lr": lr, "seed": seed}
        for seed in range(config.seeds)
        for task, name, lr in cells
        if seed < config.seeds_of(name)
    ]
    missing = [key for key in keys if not ledger.select(**key)]
    tell = _time_left(len(missing))
    for key in missing:
        ledger.measure(key, partial(_measure, config, text, **key))
        tell()
    tasks = {sweep.task: make_task(config, text, sweep.task, seed=0) for sweep in config.sweeps}
    summary = [_summary_row(ledger, tasks[task], task, name, lr) for task, name, lr in cells]
    ledger.finish({"summary": summary})
    return {"summary": summary}


def sizes(config: GuideConfig) -> dict[str, Any]:
    """The part of a configuration that could change the outcome of a run, not only which runs there are."""
    return {name: asdict(getattr(config, name)) for name in ("trainer", "digits", "language_model")}


def make_task(config: GuideConfig, text: CharText, name: str, seed: int) -> Task:
    """The task of this name with the seed's data and weights."""
    sweep = next(sweep for sweep in config.sweeps if sweep.task == name)
    if sweep.noise is None:
        return language_model_task(config.language_model, text, seed)
    return digits_task(config.digits, sweep.noise, seed)


def train(task: Task, config: TrainerConfig, optimizer: str, lr: float, seed: int) -> GuideRun:
    """One training by ``transformers.Trainer`` on the CPU, from the seed's weights in the seed's order of batches.

    Args:
        task: What to learn.
        config: Schedule, clipping and decay.
        optimizer: ``AdamW`` (the Trainer's own) or a key of :data:`SETTINGS`.
        lr: Peak learning rate.
        seed: The same seed gives the same weights and batches to every optimizer.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    transformers = _import_transformers()
    with _generators_kept(), tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(seed)
        model = task.model()
        observer = _observer(transformers, task, config.gate_every)
        options: dict[str, Any] = {}
        if optimizer != ADAMW:
            chosen = {"lr": lr, "fused": True, **join_gate({"normalize_gate": False, **SETTINGS[optimizer]})}
            options["optimizer_cls_and_kwargs"] = (PopRiskAdamW, chosen)
        if optimizer == DEFAULT:  # the Trainer sets its own in every group
            config = replace(config, weight_decay=ARMS["defaults"].fixed["weight_decay"])
        trainer = transformers.Trainer(
            model=model,
            args=_arguments(transformers, task, config, lr, seed, scratch),
            train_dataset=_Rows(task.columns),
            data_collator=_as_it_is,
            callbacks=[observer],
            **options,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    pick = min if task.metric == "loss" else max
    gates = observer.gates
    return GuideRun(
        last=observer.scores[-1],
        best=pick(observer.scores),
        train_loss=float(logged[-1]),
        memorized=memorized_share(model, task),
        mean_gate=math.fsum(gates) / len(gates) if gates else None,
        late_gate=math.fsum(gates[len(gates) // 2 :]) / len(gates[len(gates) // 2 :]) if gates else None,
    )


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Examples in memory, a whole batch taken at once."""

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        return {name: column[indices] for name, column in self.columns.items()}


def _as_it_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


def _arguments(transformers: Any, task: Task, config: TrainerConfig, lr: float, seed: int, scratch: str) -> Any:
    """On the CPU, silent, with nothing saved and nothing reported."""
    return transformers.TrainingArguments(
        output_dir=scratch,
        max_steps=task.steps,
        per_device_train_batch_size=task.batch_size,
        learning_rate=lr,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        lr_scheduler_type=config.schedule,
        warmup_steps=config.warmup_share,
        optim="adamw_torch",
        seed=seed,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        logging_strategy="steps",
        logging_steps=max(1, task.steps // 10),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
    )


def _observer(transformers: Any, task: Task, gate_every: int) -> Any:
    """A callback that scores the model on held-out data and reads the gate at regular intervals."""

    class Observer(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.scores: list[float] = []
            self.gates: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **seen: Any) -> None:
            optimizer = getattr(seen["optimizer"], "optimizer", seen["optimizer"])  # accelerate wraps it
            if isinstance(optimizer, PopRiskAdamW) and state.global_step % gate_every == 0:
                self.gates.append(optimizer.overall_diagnostics().mean_gate.item())
            if state.global_step % task.evaluate_every == 0 or state.global_step == task.steps:
                with evaluating(seen["model"]) as model:
                    self.scores.append(task.evaluate(model))

    return Observer()


@contextmanager
def _generators_kept() -> Iterator[None]:
    """The Trainer seeds the generators of Python, NumPy and torch: leave them as they were found."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the one it seeds)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def _time_left(total: int) -> Callable[[], None]:
    """What to call after each run: says how many are left, and how long they will take."""
    start, done = time.perf_counter(), 0

    def tell() -> None:
        nonlocal done
        done += 1
        left = (time.perf_counter() - start) / done * (total - done)
        write_line(f"{done} of {total}, about {left / 60:.0f} min left")

    return tell


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "hf", "the learning-rate guide's experiment") from None
    return transformers


def _measure(config: GuideConfig, text: CharText, task: str, optimizer: str, lr: float, seed: int) -> dict[str, Any]:
    outcome = asdict(train(make_task(config, text, task, seed), config.trainer, optimizer, lr, seed))
    return {name: None if value is None else round(value, 6) for name, value in outcome.items()}


def _summary_row(ledger: Ledger, about: Task, task: str, name: str, lr: float) -> dict[str, Any]:
    runs = ledger.select(task=task, optimizer=name, lr=lr)
    row: dict[str, Any] = {"task": task, "metric": about.metric, "untrained": about.untrained}
    row |= {"optimizer": name, "lr": lr}
    for quantity in GuideRun.__dataclass_fields__:
        values = [r[quantity] for r in runs if r[quantity] is not None]
        row[quantity] = asdict(mean_over_seeds(values)) if values else None
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m poprisk_lab.paper.learning_rate.study --output results/learning_rate_guide.json``."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.paper.learning_rate.study", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("results/learning_rate_guide.json"))
    parser.add_argument("--seeds", type=int, default=GuideConfig().seeds, help="how many paired repetitions")
    parser.add_argument("--smoke", action="store_true", help="a few seconds at a tiny size")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", ClosedGateWarning)  # the mean gate is among the results
    config = SMOKE if options.smoke else replace(GuideConfig(), seeds=options.seeds)
    for row in run(config, options.output)["summary"]:
        gate = "" if row["mean_gate"] is None else f", mean gate {row['mean_gate']['value']:.4f}"
        error = row["last"]["standard_error"]
        margin = "" if error is None else f" ± {error:.3f}"
        print(f"{row['task']}, {row['optimizer']:<10} lr {row['lr']:g}: {row['last']['value']:.3f}{margin}{gate}")
    print(f"Wrote {options.output}")


if __name__ == "__main__":
    main()
