"""The paper's closed forms: filters of a frozen kernel, linear models, signal directions, path and Sobolev bounds."""

from poprisk.theory.directions import SignalDirections, signal_directions
from poprisk.theory.frozen import FrozenProblem, frozen_problem
from poprisk.theory.groups import ExampleGroups, example_groups
from poprisk.theory.linear_model import linear_operators
from poprisk.theory.path_bounds import window_bounds

# isort: split
# For the rooms above: not public, and not in __all__.
from poprisk.theory.filters import decayed_flow_filter
from poprisk.theory.metrics import euclidean_metric
from poprisk.theory.random_features import random_feature_task

__all__ = [
    "ExampleGroups",
    "FrozenProblem",
    "SignalDirections",
    "example_groups",
    "frozen_problem",
    "linear_operators",
    "signal_directions",
    "window_bounds",
]
