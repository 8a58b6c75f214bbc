"""Train every optimizer of the study of recipes on every task, once, and measure all means of its weights on the way.

``python -m poprisk_lab.recipes.study --output FILE`` writes, for each task and row, the curves of the first test metric
and of what the held-back examples show, for the weights and for each mean of them. Which recipe these curves recommend
is decided afterwards (``RULE.md``). A run that was interrupted continues: rows in the file are not repeated.
"""

import argparse
import gzip
import json
import math
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poprisk._core.store import environment, write_bytes
from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.held_block import HALF, HELD_ERROR, HELD_LOSS
from poprisk_lab.engine.stack import Curves, Member, Stack
from poprisk_lab.engine.study import describe
from poprisk_lab.recipes.study_rows import COSTLY, DECAYS, MAIN, PEERS, TAILS, StudyRow
from poprisk_lab.recipes.study_tasks import FAMILIES, StudyTask, study_tasks

KIND = "recipe_study"
_HELD = {
    "held_loss": HELD_LOSS,
    "held_error": HELD_ERROR,
    "half_held_loss": HALF + HELD_LOSS,
    "half_held_error": HALF + HELD_ERROR,
}


def train_stack(
    one: StudyTask, rows: Sequence[StudyRow], seeds: Sequence[int], device: torch.device
) -> tuple[list[int], list[dict[str, Any]]]:
    """Train rows together.

    Args:
        one: The task.
        rows: Rows of one stack; if a control is among them, ``literal`` with the same share is added if missing.
        seeds: Seeds of every row.
        device: Device to compute on.

    Returns:
        The steps of the evaluations, and each row as it is stored.
    """
    present = {(row.name, row.share) for row in rows}
    followed = {row.share for row in rows if row.arm.control and ("literal", row.share) not in present}
    padded = [*rows, *(StudyRow("literal", {}, share) for share in sorted(followed))]
    order = sorted(padded, key=lambda row: list(ARMS).index(row.arm.name))  # controls need the defaults first
    members = [Member(row.arm, row.hyper, seed, row.share) for row in order for seed in seeds]
    stack = Stack(one.task, members, device, one.compiled, tails=TAILS, decays=DECAYS, first_only=True)
    curves = stack.train()
    first = {id(row): k * len(seeds) for k, row in enumerate(order)}
    metric = one.task.metrics[0].name
    return curves.steps, [_stored(row, seeds, curves, first[id(row)], metric) for row in rows]


def _stored(row: StudyRow, seeds: Sequence[int], curves: Curves, first: int, metric: str) -> dict[str, Any]:
    own = slice(first, first + len(seeds))
    averages = [name for name in curves.averages if name in row.averages or not row.averages]
    places = [curves.averages.index(name) for name in averages]
    found: dict[str, Any] = _key(row, seeds) | {
        "averages": averages,
        "curves": {metric: _rounded(curves.every[metric][own][:, places])},
    }
    for key, name in _HELD.items():
        if row.share and name in curves.every:
            found[key] = _rounded(curves.every[name][own][:, places])
    return found


_FORMS = {"relative": "half_open"}
"""Names in stored results of arms whose rule has changed: ``relative`` there is an earlier form."""


def _key(row: StudyRow, seeds: Sequence[int]) -> dict[str, Any]:
    return {"arm": _FORMS.get(row.name, row.name), "hyper": row.shown, "share": row.share, "seeds": list(seeds)}


def _rounded(values: Tensor) -> Any:
    """Nested lists with five digits; ``None`` for values that are not finite."""
    if values.dim():
        return [_rounded(each) for each in values]
    value = values.item()
    return float(f"{value:.5g}") if math.isfinite(value) else None


def run_rows(
    one: StudyTask, stack: str, before: Mapping[str, Any], seeds: Sequence[int], device: torch.device
) -> dict[str, Any]:
    """Train the rows of a task that belong to a stack and are not stored yet.

    Args:
        one: The task.
        stack: Name of the stack.
        before: The task as it is stored, or an empty mapping.
        seeds: Seeds to use; the task takes as many of the first as it needs.
        device: Device to compute on.

    Returns:
        The task as it is to be stored.
    """
    seeds, stored = seeds[: one.seeds], list(before.get("rows", ()))
    keys = [{name: row[name] for name in ("arm", "hyper", "share", "seeds")} for row in stored]
    steps, seconds = before.get("evaluation_steps", []), dict(before.get("seconds", {}))
    rows = [row for row in one.chosen_rows() if row.stack == stack and _key(row, seeds) not in keys]
    if rows:
        began = time.perf_counter()
        steps, found = train_stack(one, rows, seeds, device)
        stored += found
        seconds[stack] = round(time.perf_counter() - began, 1)
        print(f"{one.task.name}, {stack}: {len(rows)} rows in {seconds[stack]:.0f} s", flush=True)
    metric, described = one.task.metrics[0], describe(one.task)
    described["config"].pop("folder", None)
    return {
        "metric": metric.name,
        "higher_is_better": metric.higher_is_better,
        "clean": one.clean,
        "task": described,
        "evaluation_steps": steps,
        "seconds": seconds,
        "rows": stored,
    }


def run_study(tasks: Sequence[StudyTask], seeds: Sequence[int], device: torch.device, output: str | Path) -> None:
    """Train everything that is not in the output yet, and store it after every stack.

    The main stacks of all tasks come first. A stack that fails is reported and left out.
    """
    stored = load(output)["tasks"] if Path(output).exists() else {}
    for stack in (MAIN, PEERS, COSTLY):
        for one in tasks:
            try:
                stored[one.task.name] = run_rows(one, stack, stored.get(one.task.name, {}), seeds, device)
            except (RuntimeError, AssertionError, ValueError, IndexError):
                traceback.print_exc()
                print(f"{one.task.name}: the rows of the stack {stack!r} are missing", flush=True)
            else:
                save(output, stored)


def save(path: str | Path, tasks: Mapping[str, Any]) -> Path:
    """Write a result atomically, compressed if its name ends in ``.gz``."""
    facts = environment()
    envelope = {"kind": KIND, "commit": facts["commit"], "versions": facts, "tails": TAILS, "tasks": tasks}
    content = json.dumps(envelope, separators=(",", ":")).encode()
    return write_bytes(path, gzip.compress(content, mtime=0) if Path(path).suffix == ".gz" else content)


def load(path: str | Path) -> dict[str, Any]:
    """Read a stored result.

    Raises:
        DataError: the file is of another kind.
    """
    content = Path(path).read_bytes()
    found = json.loads(gzip.decompress(content) if Path(path).suffix == ".gz" else content)
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise DataError(f"{path} should be a result of kind {KIND!r}: create it with python -m {__spec__.name}")
    return found


def chosen_tasks(names: Iterable[str], data: str, small: bool = False) -> list[StudyTask]:
    """The tasks of these families or names, in the order of the study.

    Raises:
        HyperparameterError: a name is unknown.
    """
    families, wanted = study_tasks(data, small), list(names)
    known = {*families, *(one.task.name for own in families.values() for one in own)}
    if unknown := [name for name in wanted if name not in known]:
        raise HyperparameterError(f"there is no task {unknown[0]!r}; choose among {', '.join(sorted(known))}")
    return [one for family, own in families.items() for one in own if {family, one.task.name} & set(wanted)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study, or merge the files of several runs."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.recipes.study", description=__doc__)
    parser.add_argument("--tasks", nargs="+", help=f"names of tasks, or of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="seeds (default: 0 to 4)")
    parser.add_argument("--arms", nargs="+", help="train these arms only, at lr 1e-3 if it is AdamW's unit")
    parser.add_argument("--device", help="device (default: a GPU if there is one)")
    parser.add_argument("--data", default="data", help="folder with fashion and cifar10 (default: data)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no files, two seeds")
    parser.add_argument("--merge", nargs="+", default=[], help="result files to write as one, without training")
    parser.add_argument("--output", required=True, help="file to write, .json or .json.gz; continued if it exists")
    given = parser.parse_args(arguments)
    if given.merge:
        save(given.output, {name: task for path in given.merge for name, task in load(path)["tasks"].items()})
        return
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    wanted = given.tasks or list(study_tasks(given.data, given.smoke))
    tasks = [replace(one, arms=tuple(given.arms or ())) for one in chosen_tasks(wanted, given.data, given.smoke)]
    run_study(tasks, given.seeds, device, given.output)


if __name__ == "__main__":
    main()
