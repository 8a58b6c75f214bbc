"""A fair comparison on one task: every arm is searched with the same budget, its choices run again on new paired seeds.

1. *Tuning.* Every arm has the same number of trials, quasi-random over its published ranges and the same for every
   task. Each trial is trained with the tuning seeds.
2. *Choice.* By the mean of the primary metric over the tuning seeds: at the last step, at the best step of each run
   (an oracle for early stopping), and by the number of steps to the target if there is one.
3. *Report.* The chosen trials and the fixed settings are trained with the report seeds: the same data, initial weights
   and batches for every arm.

The metrics are measured on test data, also during tuning: every arm, including AdamW, is chosen on the test set.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from poprisk._core.cluster import COMPUTING, current_cluster, run_tasks
from poprisk.cli._demonstration.training import evaluation_steps
from poprisk.errors import HyperparameterError
from poprisk_lab.engine.arms import ARMS, Arm, require_arm
from poprisk_lab.engine.ledger import RowLedger
from poprisk_lab.engine.search import Range
from poprisk_lab.engine.search import trials as draw_trials
from poprisk_lab.engine.stack import Curves, Member, Stack
from poprisk_lab.engine.task import Portrayed, StackedTask, TaskMetric

Look = Callable[[str], None]
"""Called after each measurement of a stack, with a description of what is being trained."""


@dataclass(frozen=True)
class Setting:
    """A row of the report without a search: the paper's conditions, or the library's defaults.

    Attributes:
        label: Name in the report; must differ from those of all arms.
        arm: Name of the arm whose rule is used.
        hyper: Hyper-parameters that differ from the usual ones (:data:`~poprisk_lab.engine.arms.USUAL`).
    """

    label: str
    arm: str
    hyper: Mapping[str, float] = field(default_factory=dict)


DEFAULTS = Setting(ARMS["defaults"].label, "defaults")
"""PopRiskAdamW with its defaults; part of every study, because the controls follow it."""


@dataclass(frozen=True)
class Study:
    """What is compared on one task.

    Attributes:
        task: The task, at one size and noise.
        arms: Names of the arms that are searched.
        settings: Fixed settings; the library's defaults are added if missing.
        trials: Number of trials of each arm.
        tuning_seeds: Seeds for the search.
        report_seeds: Seeds for the report; must not contain a tuning seed.
        portraits: Labels of the rows of which a picture is stored, for the first report seed, if the task supports it.
        lr_range: Replaces the range of AdamW's learning rate; the ranges of other arms are scaled by the same factor.
        members_at_once: Maximum number of members in a stack; ``None`` for no limit.
        oracles: Arms for which the trial with the best single step is also reported, besides the best last step.
        compiled: Whether the losses are compiled on a GPU; worthwhile for long runs of many small operations.
    """

    task: StackedTask
    arms: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    trials: int = 24
    tuning_seeds: tuple[int, ...] = (100, 101)
    report_seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    portraits: tuple[str, ...] = ()
    lr_range: tuple[float, float] | None = None
    members_at_once: int | None = None
    oracles: tuple[str, ...] = ("adamw", "adamw_cosine")
    compiled: bool = False

    def __post_init__(self) -> None:
        for name in (*self.arms, *(setting.arm for setting in self.settings)):
            require_arm(name)
        if fixed := [name for name in self.arms if not ARMS[name].searched]:
            raise HyperparameterError(f"{fixed[0]!r} has nothing to search: give it as a setting, not as an arm")
        if not self.report_seeds or (self.arms and (not self.tuning_seeds or self.trials < 1)):
            raise HyperparameterError("a study needs report seeds and, to search, tuning seeds and trials; got none")
        shared = sorted(set(self.tuning_seeds) & set(self.report_seeds))
        if shared and self.arms:
            raise HyperparameterError(f"seeds {shared} are used for tuning and for the report: choose fresh ones")
        labels = [setting.label for setting in self.settings]
        if len(set(labels)) != len(labels):
            raise HyperparameterError(f"settings need labels of their own, got {labels}")
        if DEFAULTS.label not in labels:
            object.__setattr__(self, "settings", (*self.settings, DEFAULTS))

    @property
    def primary(self) -> TaskMetric:
        """The metric by which trials are chosen."""
        return self.task.metrics[0]

    def ranges(self, arm: Arm) -> dict[str, Range]:
        """The ranges searched for this arm in this study."""
        ranges = dict(arm.searched)
        if self.lr_range is not None and "lr" in ranges:
            usual = ARMS["adamw"].searched["lr"]
            scale = ranges["lr"].low / usual.low
            ranges["lr"] = Range(self.lr_range[0] * scale, self.lr_range[1] * scale)
        return ranges

    def measurements(self) -> int:
        """Maximum number of measurements, for a progress bar."""
        looks = len(evaluation_steps(self.task.steps, self.task.evaluations))
        tuning = len(self.arms) * self.trials * len(self.tuning_seeds)
        choices = 2 * len(self.arms) + len(self.oracles)
        report = (choices + len(self.settings)) * len(self.report_seeds)
        return looks * sum(math.ceil(count / (self.members_at_once or count)) for count in (tuning, report) if count)


@dataclass(frozen=True)
class _Row:
    """One configuration with its seeds."""

    label: str
    arm: Arm
    hyper: Mapping[str, float]
    seeds: tuple[int, ...]
    portrayed: bool = False


def run_study(study: Study, device: torch.device, look: Look, ledger: RowLedger) -> dict[str, Any]:
    """Tune, choose and report. Rows that are already in the ledger are not computed again.

    Within ``with poprisk.cluster(…)`` each stack is a task, with one thread: the bits of any number of workers.

    Returns:
        The study as it is stored: task, evaluation steps, arms with their trials and choices, rows and portraits.
    """
    arms = {name: require_arm(name) for name in study.arms}
    given = {name: draw_trials(study.ranges(arm), study.trials) for name, arm in arms.items()}
    tuning = [
        _Row(f"{name} {k}", arm, arm.hyper(trial), study.tuning_seeds)
        for name, arm in arms.items()
        for k, trial in enumerate(given[name])
    ]
    tuned = _train(study, tuning, device, look, ledger, "tuning")
    searched: dict[str, Any] = {}
    for i, (name, arm) in enumerate(arms.items()):
        outcomes = tuned["rows"][i * study.trials : (i + 1) * study.trials]
        curves = [outcome["curves"][study.primary.name] for outcome in outcomes]
        searched[name] = {
            "label": arm.label,
            "search": {knob: [r.low, r.high] for knob, r in study.ranges(arm).items()},
            "trials": [{"hyper": o["hyper"], "curve": c} for o, c in zip(outcomes, curves, strict=True)],
            "chosen": choose(study.primary, curves, tuned["evaluation_steps"]),
        }
    report, reasons = _report_rows(study, arms, searched)
    reported = _train(study, report, device, look, ledger, "report")
    rows = [outcome | {"chosen_for": reason} for outcome, reason in zip(reported["rows"], reasons, strict=True)]
    return {
        "task": describe(study.task),
        "evaluation_steps": reported["evaluation_steps"],
        "arms": searched,
        "rows": rows,
        "portraits": reported["portraits"],
        "seconds": round(tuned["seconds"] + reported["seconds"], 1),
    }


def choose(
    metric: TaskMetric, curves: Sequence[Sequence[Sequence[float | None]]], steps: Sequence[int]
) -> dict[str, Any]:
    """The best trial by each criterion; ``None`` if no trial qualifies.

    Args:
        metric: The primary metric.
        curves: Values as [trial][seed][evaluation]; ``None`` where a value was not finite.
        steps: Steps of the evaluations.

    >>> choose(TaskMetric("loss", False, 0.5), [[[0.9, 0.6]], [[0.4, 0.7]], [[0.3, None]]], [10, 20])
    {'last': 0, 'best': 2, 'target': 2}
    """
    sign = -1.0 if metric.higher_is_better else 1.0

    def last(trial: Sequence[Sequence[float | None]]) -> float:
        return math.fsum(math.inf if c[-1] is None else sign * c[-1] for c in trial) / len(trial)

    def best(trial: Sequence[Sequence[float | None]]) -> float:
        return math.fsum(min((sign * x for x in c if x is not None), default=math.inf) for c in trial) / len(trial)

    def wait(trial: Sequence[Sequence[float | None]]) -> float:
        assert metric.target is not None
        first = [
            next(
                (s for s, x in zip(steps, c, strict=True) if x is not None and sign * x <= sign * metric.target),
                math.inf,
            )
            for c in trial
        ]
        return math.fsum(first) / len(first)

    def least(score: Callable[[Sequence[Sequence[float | None]]], float]) -> int | None:
        scores = [(score(trial), best(trial), k) for k, trial in enumerate(curves)]
        value, _, k = min(scores, default=(math.inf, math.inf, -1))
        return k if math.isfinite(value) else None

    return {"last": least(last), "best": least(best), "target": None if metric.target is None else least(wait)}


def describe(task: StackedTask) -> dict[str, Any]:
    """A task as it is stored."""
    return {
        "name": task.name,
        "description": task.description,
        "steps": task.steps,
        "streams": {name: list(sizes) for name, sizes in task.streams.items()},
        "metrics": [asdict(metric) for metric in task.metrics],
        "config": {"task": type(task).__name__, **asdict(task)},  # type: ignore[call-overload]  # tasks are dataclasses
    }


def _report_rows(
    study: Study, arms: Mapping[str, Arm], searched: Mapping[str, Any]
) -> tuple[list[_Row], list[list[str]]]:
    rows, reasons = [], []
    for setting in study.settings:
        arm = require_arm(setting.arm)
        rows.append(
            _Row(setting.label, arm, arm.hyper(setting.hyper), study.report_seeds, setting.label in study.portraits)
        )
        reasons.append([])
    for name, arm in arms.items():
        chosen = {q: k for q, k in searched[name]["chosen"].items() if q != "best" or name in study.oracles}
        for k in sorted({k for k in chosen.values() if k is not None}):
            why = [question for question, choice in chosen.items() if choice == k]
            pictured = "last" in why and bool({name, arm.label} & set(study.portraits))
            hyper = arm.hyper(searched[name]["trials"][k]["hyper"])
            rows.append(_Row(arm.label, arm, hyper, study.report_seeds, pictured))
            reasons.append(why)
    return rows, reasons


def _train(
    study: Study, rows: Sequence[_Row], device: torch.device, look: Look, ledger: RowLedger, stage: str
) -> dict[str, Any]:
    """Train all rows in stacks of limited size, and store the rows of a stack as soon as it is done."""
    began = time.perf_counter()
    asked = [_asked(study.task, row, device) for row in rows]
    missing = [i for i in _distinct(rows, asked) if not _is_whole(ledger.find(asked[i]), rows[i])]
    parts = [[missing[k] for k in part] for part in _parts([rows[i] for i in missing], study.members_at_once)]
    words = [f"{study.task.name}, {stage}, {sum(len(rows[i].seeds) for i in numbers)} members" for numbers in parts]
    looks = [lambda words=each: look(words) for each in words]
    for place, outcomes in _trained(study, [[rows[i] for i in numbers] for numbers in parts], device, looks):
        numbers = parts[place]
        stack = {"task": describe(study.task), "stage": stage, "rows": [_plain(rows[i]) for i in numbers]}
        ledger.add(stack, [(asked[i], outcome) for i, outcome in zip(numbers, outcomes, strict=True)])
    found = [outcome for key in asked if (outcome := ledger.find(key)) is not None]
    return {
        "rows": [_plain(row) | outcome["row"] for row, outcome in zip(rows, found, strict=True)],
        "portraits": {
            r.label: o["portrait"] for r, o in zip(rows, found, strict=True) if r.portrayed and o["portrait"]
        },
        "seconds": time.perf_counter() - began,
        "evaluation_steps": evaluation_steps(study.task.steps, study.task.evaluations),
    }


def _trained(
    study: Study, stacks: Sequence[Sequence[_Row]], device: torch.device, looks: Sequence[Callable[[], None]]
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The position of each stack and its outcomes, as they come: in turn, or from tasks of the enclosing cluster."""
    if current_cluster() is None:
        for place, rows in enumerate(stacks):
            yield place, _train_part(study, rows, device, looks[place])
        return
    shared = (study, device, torch.get_float32_matmul_precision())
    for place, outcomes in run_tasks(_train_task, [(shared, rows) for rows in stacks]):
        if isinstance(outcomes, BaseException):
            raise outcomes
        for _ in evaluation_steps(study.task.steps, study.task.evaluations):
            looks[place]()
        yield place, outcomes


def _train_task(shared: tuple[Study, torch.device, str], rows: Sequence[_Row]) -> list[dict[str, Any]]:
    study, device, precision = shared
    with COMPUTING:
        before = torch.get_num_threads(), torch.get_float32_matmul_precision()
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision(precision)
        try:
            return _train_part(study, rows, device, lambda: None)
        finally:
            torch.set_num_threads(before[0])
            torch.set_float32_matmul_precision(before[1])


def _asked(task: StackedTask, row: _Row, device: torch.device) -> dict[str, Any]:
    """Everything that the outcome of a row depends on."""
    plain = {key: value for key, value in _plain(row).items() if key in ("hyper", "seeds")}  # not names
    library = require_arm("defaults")
    followed = {"rule": library.definition(), "hyper": library.hyper({})} if row.arm.control else None
    return {"task": describe(task), **plain, "rule": row.arm.definition(), "device": device.type, "followed": followed}


def _distinct(rows: Sequence[_Row], asked: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of the distinct rows; of two equal rows, the one with a portrait is kept."""
    chosen: dict[str, int] = {}
    for i, key in enumerate(asked):
        text = json.dumps(key, sort_keys=True)
        if text not in chosen or (rows[i].portrayed and not rows[chosen[text]].portrayed):
            chosen[text] = i
    return sorted(chosen.values())


def _is_whole(outcome: Mapping[str, Any] | None, row: _Row) -> bool:
    """Whether a stored outcome is complete: a row may have been stored without its portrait."""
    return outcome is not None and (not row.portrayed or outcome["portrait"] is not None)


def _parts(rows: Sequence[_Row], members_at_once: int | None) -> list[list[int]]:
    """Indices of the rows of each stack: as many complete rows as fit."""
    limit = members_at_once or math.inf
    parts: list[list[int]] = []
    size = 0
    for i, row in enumerate(rows):
        if not parts or size + len(row.seeds) > limit:
            parts.append([])
            size = 0
        parts[-1].append(i)
        size += len(row.seeds)
    return parts


def _train_part(
    study: Study, rows: Sequence[_Row], device: torch.device, look: Callable[[], None]
) -> list[dict[str, Any]]:
    """The curves of each row and, if requested, the portrait of its first seed."""
    padded = list(rows)
    library = require_arm("defaults")
    there = any(row.arm.name == "defaults" and row.hyper == library.hyper({}) for row in rows)
    if any(row.arm.control for row in rows) and not there:
        seeds = tuple(sorted({seed for row in rows for seed in row.seeds}))
        padded.append(_Row(library.label, library, library.hyper({}), seeds))
    rank = list(ARMS).index  # controls need the defaults first
    order = sorted(range(len(padded)), key=lambda i: (rank(padded[i].arm.name), i))
    members = [Member(padded[i].arm, padded[i].hyper, seed) for i in order for seed in padded[i].seeds]
    curves = Stack(study.task, members, device, study.compiled).train(lambda _: look())
    first = dict(zip(order, _starts([len(padded[i].seeds) for i in order]), strict=True))
    return [_outcome(study, row, curves, first[i]) for i, row in enumerate(rows)]


def _outcome(study: Study, row: _Row, curves: Curves, first: int) -> dict[str, Any]:
    where = slice(first, first + len(row.seeds))
    values = {name: _listed(table[where]) for name, table in curves.metrics.items()}
    found = {
        "curves": values,
        "gate": _listed(curves.gate[where]) if row.arm.gated else None,
        "failures": sum(curve[-1] is None for curve in values[study.primary.name]),
    }
    if not (row.portrayed and isinstance(study.task, Portrayed)):
        return {"row": found, "portrait": {} if row.portrayed else None}
    weights = {name: tensor.cpu() for name, tensor in curves.layout.member(curves.weights[first]).items()}
    return {"row": found, "portrait": dict(study.task.portrait(weights, row.seeds[0]))}


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def _plain(row: _Row) -> dict[str, Any]:
    return {"label": row.label, "arm": row.arm.name, "hyper": _compact(row.arm, row.hyper), "seeds": list(row.seeds)}


def _compact(arm: Arm, hyper: Mapping[str, float]) -> dict[str, float]:
    """Only the hyper-parameters that the rule uses: AdamW has no α."""
    unused = set() if arm.gated else {"alpha", "strength", "rho", "gate_warmup"}
    unused |= {"alpha"} if arm.calibrated or arm.rule == "snr" else set()
    unused |= {"strength"} if arm.rule == "hard" else set()
    unused |= set() if arm.rule == "grokfast" else {"lamb", "alpha_ema"}
    unused |= {"beta2"} if arm.rule == "msvag" else set()
    unused |= {name for name in ("lr_warmup", "gate_warmup") if not hyper[name]}
    return {name: value for name, value in hyper.items() if name not in unused}


def _listed(table: Tensor) -> list[list[float | None]]:
    """Rows of numbers with six digits; ``None`` for values that are not finite."""
    return [[float(f"{x:.6g}") if math.isfinite(x) else None for x in row] for row in table.tolist()]
