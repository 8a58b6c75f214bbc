r"""The rule by which the guide's evidence becomes a factor on AdamW's learning rate."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk.errors import DataError

ADAMW = "AdamW"
FACTORS = (1, 3, 10, 30, 60, 100)
"""Half a decade apart, like the grids, and the one that the defaults have at AdamW's usual learning rate."""
CONSTANT_LR = "clean text, constant lr"
Rows = Sequence[Mapping[str, Any]]
"""One row for each task, optimizer and learning rate, as in the summary of a ``learning_rate_guide`` result."""


def evidence(guide: Mapping[str, Any], clean_lm: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The guide's own rows, and those of the earlier ``clean_lm`` result as one more task.

    The Trainer lowers the learning rate to zero by a schedule, which forgives a high one; ``clean_lm`` kept it constant
    and did not clip, so that the two together cover both habits.

    Args:
        guide: What ``poprisk._core.store.load_result(path, "learning_rate_guide")`` gives.
        clean_lm: Likewise for ``"clean_lm"``; on the same text.

    Raises:
        DataError: the two results are about different texts.
    """
    if guide["config"]["text_sha256"] != clean_lm["config"]["text_sha256"]:
        raise DataError("the two results must be of one text, got two: make both again with the same version of Python")
    rows = list(guide["result"]["summary"])
    untrained = next(row["untrained"] for row in rows if row["metric"] == "loss")
    for row in clean_lm["result"]["summary"]:
        about = {"task": CONSTANT_LR, "metric": "loss", "untrained": untrained, "last": row["loss"]}
        rows.append({**about, **{name: row[name] for name in ("optimizer", "lr", "mean_gate")}})
    return rows


def tasks_of(rows: Rows) -> list[str]:
    """The tasks, in the order of the rows."""
    return list(dict.fromkeys(row["task"] for row in rows))


def cells_of(rows: Rows, task: str, optimizer: str) -> dict[float, Mapping[str, Any]]:
    """The rows of an optimizer on a task by their learning rates, in rising order."""
    found = {row["lr"]: row for row in rows if row["task"] == task and row["optimizer"] == optimizer}
    return dict(sorted(found.items()))


def reference_lr(rows: Rows, task: str) -> float:
    """The learning rate of AdamW's best mean last step on a task: the one that a person who tuned AdamW comes with."""
    cells = cells_of(rows, task, ADAMW)
    return max(cells, key=lambda lr: abs(cells[lr]["last"]["value"] - cells[lr]["untrained"]))


def cell_at(rows: Rows, task: str, optimizer: str, factor: float) -> Mapping[str, Any] | None:
    """The row at this factor times AdamW's best learning rate, or None where it was not measured."""
    wanted = factor * reference_lr(rows, task)
    near = (row for lr, row in cells_of(rows, task, optimizer).items() if abs(math.log10(lr / wanted)) < 0.1)
    return next(near, None)


def progress(rows: Rows, row: Mapping[str, Any]) -> float:
    r"""How far a training came on its task by its last step, as a share of the way that AdamW came at its best.

    .. math:: p = \frac{x - x_0}{x_{AdamW} - x_0}

    with x the mean metric at the last step and x_0 that of a model that has learned nothing: one of ten digits right,
    or :math:`\ln V` nats over V characters. This puts accuracy and loss on one scale.
    """
    best = cells_of(rows, row["task"], ADAMW)[reference_lr(rows, row["task"])]
    return (row["last"]["value"] - row["untrained"]) / (best["last"]["value"] - row["untrained"])


def regret(rows: Rows, task: str, optimizer: str, factor: float) -> float | None:
    """Progress lost by this factor against the optimizer's own best learning rate on the task; None if not measured."""
    row = cell_at(rows, task, optimizer, factor)
    if row is None:
        return None
    best = max(progress(rows, other) for other in cells_of(rows, task, optimizer).values())
    return best - progress(rows, row)


def mean_regrets(rows: Rows, optimizer: str) -> dict[int, float]:
    """The regret averaged over the tasks of the optimizer, of each factor that was measured on all of them."""
    tasks = [task for task in tasks_of(rows) if cells_of(rows, task, optimizer)]
    found = {f: [regret(rows, task, optimizer, f) for task in tasks] for f in FACTORS if tasks}
    return {f: math.fsum(r for r in each if r is not None) / len(each) for f, each in found.items() if None not in each}


def recommended_factor(rows: Rows, optimizer: str) -> int:
    """The factor with the smallest mean regret.

    Two tasks on which AdamW learns best at 1e-3: on one the gate loses nothing at ten times that, on the other at three
    times, and a factor of ten costs less than a factor of three.

    >>> def row(task, optimizer, lr, accuracy):
    ...     last = {"value": accuracy}
    ...     return {"task": task, "optimizer": optimizer, "lr": lr, "last": last, "untrained": 0.1}
    >>> rows = [row(task, ADAMW, 1e-3, 0.9) for task in "ab"]
    >>> rows += [row("a", "soft", 3e-3, 0.6), row("a", "soft", 1e-2, 0.9)]
    >>> rows += [row("b", "soft", 3e-3, 0.9), row("b", "soft", 1e-2, 0.8)]
    >>> recommended_factor(rows, "soft")
    10
    """
    regrets = mean_regrets(rows, optimizer)
    if not regrets:
        raise DataError(f"no factor of {FACTORS} was measured for {optimizer!r} on every task: lengthen its grids")
    return min(regrets, key=lambda f: regrets[f])
