"""What the operators need of a run, and which runs they refuse."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError, RunError
from poprisk.runs import AffineStep, Run


@runtime_checkable
class Trajectory(Protocol):
    """What a window needs of a run; :class:`poprisk.runs.Run` is one."""

    @property
    def num_steps(self) -> int:
        """Steps taken."""
        ...

    def weights(self, k: int) -> Float[Tensor, "d"]:
        """Flat weights before step k, or after the last one."""
        ...

    def step(self, k: int) -> AffineStep:
        """What step k did."""
        ...

    def buffer(self, k: int) -> Float[Tensor, "d"]:
        """The momentum carried into step k."""
        ...


def check_run(trajectory: Trajectory, targets: Tensor, stop: int | None = None) -> None:
    """Refuses what is known to be wrong before step ``stop``; a trajectory that says nothing is taken at its word."""
    obstacles = getattr(trajectory, "obstacles", ())
    if isinstance(trajectory, Run):
        trajectory.require_exact(stop)
    elif obstacles:
        raise RunError(f"no exact analysis of this run is possible: {obstacles[0]}")
    if getattr(trajectory, "augmented", False):
        raise RunError(
            "the run's inputs were augmented, so no step saw the training examples as they are: Window.of_run analyzes "
            "its evaluation form; or record a run over a data set that holds the augmented examples"
        )
    count = getattr(trajectory, "num_examples", len(targets))
    if count != len(targets):
        raise DataError(
            f"the run is over {count} examples, the window was given {len(targets)}: pass all training inputs in the "
            "order that was recorded"
        )
