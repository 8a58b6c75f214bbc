"""The paper's closed forms: filters of a frozen kernel, signal directions, bounds on the path of a run."""

from typing import Any

from poprisk import _moved
from poprisk.theory.directions import SignalDirections, signal_directions
from poprisk.theory.frozen import FrozenProblem, frozen_problem
from poprisk.theory.groups import ExampleGroups, example_groups
from poprisk.theory.path_bounds import window_bounds

# isort: split
# For the rooms above: not public, and not in __all__.
from poprisk.theory.metrics import euclidean_metric
from poprisk.theory.random_features import random_feature_task

__all__ = [
    "ExampleGroups", "FrozenProblem", "SignalDirections", "example_groups", "frozen_problem", "signal_directions",
    "window_bounds",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return _moved.facade_attribute(__name__, name)
