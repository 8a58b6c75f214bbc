r"""Does ``population_risk`` know when it is valid? Trainings from underfit to interpolation, compared with the truth.

A setting is a task, a seed and a moment of training. In each, every estimator gives its value, its standard error and
its verdict, and a large test set gives the truth. The baselines that others use stand beside them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.store import load_result, save_result
from poprisk.errors import DataError
from poprisk.risk import RiskEstimate, Unrolled, retrain
from poprisk.risk._exclusion import choose_examples, controlled, deletions_of, excluded_together, exclusion_at
from poprisk.risk._first_order import first_order_of
from poprisk.risk._influence.exclusion_sweep import ExclusionSweep
from poprisk.risk._k_fold import FoldEnsemble
from poprisk.risk._resampled import holdout_weights
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import example_losses, member_outputs
from poprisk.runs import Problem, Run, train
from poprisk_lab.paper.risk_honesty.baselines import (
    evidence_criterion,
    gradient_disparity,
    kernel_gcv_risk,
    takeuchi_risk,
)
from poprisk_lab.paper.risk_honesty.task import SMOKE, HonestyConfig, Task, task_problem

__all__ = [
    "HonestyConfig",
    "KIND",
    "SINGLE_RUN",
    "SMOKE",
    "Task",
    "auto",
    "run",
    "run_setting",
    "setting_rows",
    "summarize",
    "task_problem",
    "trainings",
]

KIND = "risk honesty"
SINGLE_RUN = ("exclusion", "first_order", "kernel_gcv", "takeuchi")
"""Estimators that train nothing."""
_HOLDOUT = 0.2


def run_setting(task: Task, config: HonestyConfig, seed: int) -> list[dict[str, Any]]:
    """One training with all its moments: for each, the truth and what every estimator says."""
    problem = task_problem(task, config, seed)
    makers: Mapping[str, Callable[..., Any]] = {
        "sgd": partial(torch.optim.SGD, lr=task.lr, momentum=0.9),
        "adam": partial(torch.optim.Adam, lr=task.lr),
    }
    steps = config.steps
    run = train(
        problem,
        makers[task.optimizer],
        steps[-1],
        batch_size=config.batch_size,
        seed=seed,
        dtype=torch.float64,
        progress=False,
    )
    folds = FoldEnsemble(run, config.folds, seed)
    folds.advance(run, steps)
    held_out = _holdout(run, steps, seed)
    unrolled = Unrolled(run, stop=steps[0])
    chosen, groups = choose_examples(len(problem), config.examples, seed), excluded_together(unrolled)
    sweep, deletions = ExclusionSweep(unrolled, chosen, groups=groups), deletions_of(unrolled, chosen, groups, seed)
    deletions.follow(run, steps)
    rows = []
    for k in steps:
        unrolled = Unrolled(run, stop=k)
        sweep.extend(unrolled)
        predicted = exclusion_at(unrolled, sweep.outputs_at(k), k)
        exclusion = controlled(unrolled, predicted, deletions, k, None, seed)
        found = {
            "exclusion": exclusion.risk,
            "first_order": first_order_of(unrolled, exclusion),
            "k_fold": folds.reading(run, k),
            "holdout": held_out[k],
            **_baselines(problem, run, k),
        }
        about = {"task": task.name, "seed": seed, "step": k}
        measured = {**_truth(problem, run.weights(k)), **_signals(problem, run, k)}
        rows.append({**about, **measured, "estimates": {name: _plain(e) for name, e in found.items()}})
    return rows


def _truth(problem: Problem, w: Float[Tensor, "d"]) -> dict[str, float]:
    assert problem.test is not None
    model = problem.model(torch.float64)
    test, own = (model.per_example_losses(w, *data) for data in (problem.test, (problem.inputs, problem.targets)))
    return {
        "truth": test.mean().item(),
        "truth_error": test.std().item() / math.sqrt(len(test)),
        "training_loss": own.mean().item(),
    }


def _signals(problem: Problem, run: Run, k: int) -> dict[str, float]:
    model, w = problem.model(torch.float64), run.weights(k)
    data = (problem.inputs, problem.targets)
    return {"evidence": evidence_criterion(model, w, *data), "disparity": gradient_disparity(model, w, *data)}


def _baselines(problem: Problem, run: Run, k: int) -> dict[str, float]:
    model, w = problem.model(torch.float64), run.weights(k)
    found = {"takeuchi": takeuchi_risk(model, w, problem.inputs, problem.targets)}
    if problem.loss == "squared":
        found["kernel_gcv"] = kernel_gcv_risk(model, w, run.weights(0), problem.inputs, problem.targets)
    return found


def _holdout(run: Run, steps: Sequence[int], seed: int) -> dict[int, RiskEstimate]:
    """A fifth of the examples kept aside, one training on the others: what most people do."""
    n = run.num_examples
    held = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: round(_HOLDOUT * n)]
    weights = retrain(run, Members(holdout_weights(n, held)[None]), keep=steps, progress=False).kept
    readings = {}
    for k in steps:
        outputs = member_outputs(run, weights[k], run.problem.inputs[held])[0]
        losses = example_losses(run.problem, outputs, run.problem.targets[held])
        error = losses.std().item() / math.sqrt(len(held))
        target = f"a model trained on {n - len(held)} of the {n} examples"
        readings[k] = RiskEstimate(losses.mean().item(), error, cost=1.0, target=target, method="holdout")
    return readings


def _plain(estimate: RiskEstimate | float) -> dict[str, Any]:
    if isinstance(estimate, RiskEstimate):
        kept = ("value", "standard_error", "valid", "reason")
        return {key: value for key, value in estimate.to_dict().items() if key in kept}
    return {"value": estimate if math.isfinite(estimate) else None}


def run(config: HonestyConfig, folder: str | Path, progress: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Every setting; each training's rows are stored in ``folder`` when it is done, and read where it was done before.

    Raises:
        DataError: the folder holds results of another configuration.
    """
    rows: list[dict[str, Any]] = []
    total = len(config.tasks) * len(config.seeds)
    for i, (task, seed) in enumerate(trainings(config)):
        rows += setting_rows(config, task, seed, folder)
        progress(f"{i + 1} of {total} trainings: {task.name}, seed {seed}")
    return rows


def setting_rows(config: HonestyConfig, task: Task, seed: int, folder: str | Path) -> list[dict[str, Any]]:
    """The rows of one training, computed or read."""
    name = "".join(c if c.isalnum() else "-" for c in task.name)
    path = Path(folder) / f"{name}-{seed}.json"
    described = {**asdict(config), "task": asdict(task), "seed": seed, "tasks": None, "seeds": None}
    if path.exists():
        stored = load_result(path, KIND)
        if stored["config"] != _json_like(described):
            raise DataError(f"{path} was made with another configuration: give another folder, or remove it")
        return stored["result"]["rows"]
    rows = run_setting(task, config, seed)
    save_result(path, KIND, described, {"rows": rows})
    return rows


def auto(row: Mapping[str, Any], *, budget: bool) -> dict[str, Any]:
    """What ``population_risk`` returns in this setting: exclusion if valid, else K-fold if training is allowed."""
    found = row["estimates"]
    return found["exclusion"] if found["exclusion"]["valid"] or not budget else found["k_fold"]


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Coverage, flags and accuracy over all settings."""
    named: dict[str, list[tuple[Mapping[str, Any], float]]] = {}
    for row in rows:
        answers = {**row["estimates"], "auto": auto(row, budget=False), "auto, 10 trainings": auto(row, budget=True)}
        for name, found in answers.items():
            named.setdefault(name, []).append((found, row["truth"]))
    columns = {name: _column(found) for name, found in named.items()}
    return {
        "settings": len(rows),
        "columns": columns,
        "stopping": _stopping(rows),
    }


def _column(found: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, Any]:
    known = [(e, truth) for e, truth in found if e["value"] is not None]
    off = [abs(e["value"] - truth) / truth for e, truth in known]
    valid = [(e, truth) for e, truth in known if e.get("valid", True)]
    with_error = [(e, truth) for e, truth in valid if e.get("standard_error") is not None]
    covered = [abs(e["value"] - t) <= 2 * e["standard_error"] + 0.05 * t for e, t in with_error]
    wrong_but_valid = sum(abs(e["value"] - t) / t > 0.2 for e, t in valid)
    return {
        "settings": len(found),
        "valid": len(valid),
        "covered": sum(covered),
        "coverage": sum(covered) / len(covered) if covered else None,
        "off by more than 20%, believed": wrong_but_valid,
        "off by more than 20%": sum(o > 0.2 for o in off),
        "median error, all": _median(off),
        "median error, valid": _median([abs(e["value"] - t) / t for e, t in valid]),
    }


def _stopping(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean excess of the true risk, over the best moment's, at the moment that each signal would stop at."""
    runs: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        runs.setdefault((row["task"], row["seed"]), []).append(row)
    rules: dict[str, Callable[[list[Mapping[str, Any]]], Mapping[str, Any]]] = {
        "never": lambda moments: moments[-1],
        "evidence": lambda moments: next((m for m in moments if m["evidence"] > 0), moments[-1]),
        "disparity": lambda moments: next(
            (a for a, b in pairwise(moments) if b["disparity"] > a["disparity"]), moments[-1]
        ),
        "holdout": lambda moments: min(moments, key=lambda m: m["estimates"]["holdout"]["value"]),
        "k_fold": lambda moments: min(moments, key=lambda m: m["estimates"]["k_fold"]["value"]),
        "exclusion": lambda moments: min(
            (m for m in moments if m["estimates"]["exclusion"]["valid"]),
            key=lambda m: m["estimates"]["exclusion"]["value"],
            default=moments[0],
        ),
    }
    excess: dict[str, float] = {}
    for name, rule in rules.items():
        values = [rule(moments)["truth"] / min(m["truth"] for m in moments) - 1 for moments in runs.values()]
        excess[name] = sum(values) / len(values)
    return excess


def _median(values: list[float]) -> float | None:
    return float(torch.tensor(values, dtype=torch.float64).median()) if values else None


def _json_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_like(each) for key, each in value.items()}
    return [_json_like(each) for each in value] if isinstance(value, tuple | list) else value


def trainings(config: HonestyConfig) -> Iterator[tuple[Task, int]]:
    """Every training there is."""
    return ((task, seed) for task in config.tasks for seed in config.seeds)
