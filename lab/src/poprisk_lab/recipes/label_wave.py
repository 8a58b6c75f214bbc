"""Label Wave on AdamW's own run: a stopping rule that needs no held-back examples (Yuan et al. 2024, arXiv 2502.07551).

``python -m poprisk_lab.recipes.label_wave OUTPUT --folder DATA``, with Fashion-MNIST in ``DATA/fashion``, trains AdamW
at its usual settings on the label and teacher tasks and stores, for every epoch, the test accuracy and the number of
training examples whose predicted class changed. Without ``--folder`` only tasks that need no file are trained.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.store import write_json
from poprisk_lab.engine.arms import require_arm
from poprisk_lab.engine.stack import Member, Stack
from poprisk_lab.engine.task import StackedWeights
from poprisk_lab.paper.labels.study import LabelsConfig
from poprisk_lab.paper.labels.task import LabelTask, label_data
from poprisk_lab.paper.teacher.task import TeacherTask

WINDOW = 3
"""Number of epochs in the moving average; our choice."""


def chosen_epoch(changed: Sequence[float], window: int = WINDOW) -> int:
    """Index of the first local minimum of the moving average of the changes; the last epoch if there is none.

    Args:
        changed: Number of predictions that changed in each epoch; the first entry has no epoch before it.
        window: Length of the moving average, fewer at the beginning.

    >>> chosen_epoch([10, 9, 5, 3, 4, 8, 2], window=1)
    3
    """
    smooth = []
    for i in range(1, len(changed)):
        part = changed[max(1, i - window + 1) : i + 1]
        smooth.append(sum(part) / len(part))
    for i, (now, following) in enumerate(pairwise(smooth)):
        if now < following:
            return i + 1
    return len(changed) - 1


def training_inputs(task: LabelTask | TeacherTask, seeds: Sequence[int]) -> Float[Tensor, "seeds examples inputs"]:
    """The training inputs of each seed."""
    if isinstance(task, TeacherTask):
        return torch.stack([task.data(seed).inputs for seed in seeds])
    data = label_data(task, seeds)
    return data.train_pool[data.train_rows]


def predicted(weights: StackedWeights, inputs: Tensor, depth: int) -> Int[Tensor, "members examples"]:
    """Predicted classes of a ReLU network with ``depth`` hidden layers."""
    hidden = inputs
    for i in range(1, depth + 2):
        bias = weights[f"layer{i}.bias"].unsqueeze(1)
        hidden = torch.baddbmm(bias, hidden if i == 1 else hidden.relu(), weights[f"layer{i}.weight"].mT)
    return hidden.argmax(-1)


def watch(task: LabelTask | TeacherTask, seeds: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Train AdamW at its usual settings and measure it after every epoch."""
    ((count, batch),) = task.streams.values()
    task = replace(task, evaluations=max(1, task.steps * batch // count))
    arm = require_arm("adamw")
    stack = Stack(task, [Member(arm, arm.hyper({}), seed) for seed in seeds], device)
    inputs, before, changed = training_inputs(task, seeds).to(device), None, []

    def look(_: int) -> None:
        nonlocal before
        with torch.no_grad():
            now = predicted(stack.layout.views(stack.weights.detach()), inputs, task.depth)
        changed.append([0] * len(seeds) if before is None else (now != before).sum(1).tolist())
        before = now

    curves = stack.train(look)
    name = task.metrics[0].name
    return {
        "seeds": list(seeds),
        "evaluation_steps": curves.steps,
        "changed": [list(row) for row in zip(*changed, strict=True)],
        name: curves.metrics[name].tolist(),
    }


def tasks(folder: str | None) -> list[LabelTask | TeacherTask]:
    """The label and teacher tasks of the study; without a folder those that need no file."""
    config = LabelsConfig(folder=folder or "")
    labels = [config.task(data, noise) for data in config.data if data == "digits" or folder for noise in config.noises]
    return [*labels, *(TeacherTask(noise=noise) for noise in (0.0, 0.2, 0.4))]


def outcome(stored: Mapping[str, Any]) -> dict[int, float]:
    """The test accuracy at the epoch that Label Wave chooses, by seed."""
    pairs = zip(stored["seeds"], stored["changed"], stored["test accuracy"], strict=True)
    return {seed: curve[chosen_epoch(changed)] for seed, changed, curve in pairs}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description="Label Wave on AdamW's run: label and teacher tasks.")
    parser.add_argument("output", help="JSON file to write")
    parser.add_argument("--folder", help="folder with the data; without it, only tasks that need no file")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {}
    for task in tasks(given.folder):
        found[task.name] = watch(task, range(given.seeds), device)
        write_json(given.output, {"window": WINDOW, "tasks": found})
        print(task.name, {seed: round(value, 4) for seed, value in outcome(found[task.name]).items()}, flush=True)


if __name__ == "__main__":
    main()
