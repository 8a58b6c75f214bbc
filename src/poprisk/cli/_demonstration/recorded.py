"""The demo's first seed, recorded for a report: the same digits, wrong labels and initial weights."""

import math
import shutil
from functools import partial
from pathlib import Path

from torch import nn
from torch.optim import AdamW

from poprisk._core.seeds import stream
from poprisk._core.store import read_json
from poprisk.cli._demonstration.networks import MLPShape, plain_network
from poprisk.cli._demonstration.study import HELD, USUAL_LR, DemoConfig, demo_data
from poprisk.errors import DataError, RunError
from poprisk.runs import MANIFEST, NUM_CLASSES, NUM_PIXELS, Problem, Run, train

NAME = "digits with wrong labels"
REPORT_TRAININGS = 5
"""Number of trainings that the demo's report may spend on the risk."""
_BUDGET_PER_STEP = 0.03
_CHECKPOINTS = 10


def first_network(width: int, depth: int) -> nn.Sequential:
    """The network of the demo's first seed, with its initial weights.

    >>> sum(p.numel() for p in first_network(8, 1).parameters())
    610
    """
    return plain_network(MLPShape(NUM_PIXELS, width, depth, NUM_CLASSES), stream(0, "weights"))


def first_problem(noise: float, train_size: int, width: int, depth: int) -> Problem:
    """The problem of the demo's first seed: training labels partly wrong, test labels correct.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    data = demo_data(DemoConfig(seeds=1, noise=noise, train_size=train_size, width=width, depth=depth))
    return Problem(
        first_network,
        "cross_entropy",
        data.inputs[0],
        data.labels[0],
        name=NAME,
        arguments={"width": width, "depth": depth},
        test=(data.test_inputs[0], data.test_labels[0]),
    )


def report_budget(config: DemoConfig) -> float:
    """Time budget per section of the report: not enough to linearize the run for each example.

    >>> report_budget(DemoConfig())
    15.0
    """
    return max(0.1, round(_BUDGET_PER_STEP * config.steps, 6))


def check_place(path: Path) -> None:
    """Check that a directory is new, or contains the run of an earlier demo.

    Raises:
        RunError: The directory contains something else.
    """
    if path.exists() and not _is_demo(path):
        raise RunError(f"{path} does not contain a run of the demo: choose another --output, or use --no-report")


def record_demo(config: DemoConfig, path: Path) -> Run:
    """Train the first seed's problem with AdamW and KeepBest, and record it; replaces the run of an earlier demo.

    Args:
        config: Settings of the demo.
        path: Directory for the run.

    Raises:
        RunError: The directory contains something else.
    """
    check_place(path)
    shutil.rmtree(path, ignore_errors=True)
    arguments = {"noise": config.noise, "train_size": config.train_size, "width": config.width, "depth": config.depth}
    problem = Problem.build(first_problem, **arguments)
    size, every = min(config.examples_per_step, config.train_size - 1), math.ceil(config.steps / _CHECKPOINTS)
    options = {"batch_size": size, "every": every, "hold_back": HELD, "progress": False}
    return train(problem, partial(AdamW, lr=USUAL_LR), config.steps, path=path, **options)


def _is_demo(path: Path) -> bool:
    try:
        return read_json(path / MANIFEST)["problem"]["name"] == NAME
    except (OSError, DataError, KeyError, TypeError):
        return False
