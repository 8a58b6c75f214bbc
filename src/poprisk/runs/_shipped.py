"""A run that is sent to other processes: as the path of its directory and the recipe of its problem."""

from pathlib import Path
from typing import Any

import torch

from poprisk._core.store import Importable, located, remember
from poprisk.errors import JobError
from poprisk.runs._problem import Problem
from poprisk.runs._run import Run

_MOST_BYTES = 2**26
"""Size of examples up to which a problem that cannot be rebuilt is sent by value."""


class ShippedRun:
    """A run with its problem, for tasks in this process and in others.

    Other processes open the run's directory and call the function that was passed to :meth:`Problem.build`; a small
    problem made otherwise is sent as it is. The directory's own description of the problem is not used there.

    Args:
        run: A run with its problem; to be sent, it must be in a directory that all processes see.
    """

    def __init__(self, run: Run) -> None:
        self._run: Run | None = run
        self._recipe: tuple[str, Any] | None = None

    def open(self, device: torch.device | str = "cpu") -> Run:
        """The run, opened anew, with its examples on a device."""
        if self._run is None:
            assert self._recipe is not None
            path, problem = self._recipe
            if not isinstance(problem, Problem):
                source = problem["source"]  # the process that sent it has made the call, and vouches for it here
                remember(Importable(source["path"], source["arguments"], folder=source.get("folder")), lasting=False)
                problem = Problem.from_description(problem)
            self._run = Run.load(path, problem=problem)
        return Run(self._run._storage, problem=self._run.problem.to(device), tolerate=self._run._tolerate)

    def packed(self) -> "ShippedRun":
        """The same, ready to be sent.

        Raises:
            JobError: the run is only in memory, or its problem is large and cannot be rebuilt.
        """
        if self._recipe is None:
            assert self._run is not None
            self._recipe = (_path(self._run), _recipe(self._run.problem))
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"_run": None, "_recipe": self.packed()._recipe}


def _path(run: Run) -> str:
    if run.path is None:
        raise JobError("other processes must find the run, but it is only in memory: call run.save(folder) first")
    return str(Path(run.path).resolve())


def _recipe(problem: Problem) -> Any:
    """The description of a problem made by ``Problem.build``; any other problem itself."""
    description = problem.description
    if description["source"] is not None and description["source"]["path"] is not None:
        return {**description, "source": located(description["source"], None, None)}
    tensors = [problem.inputs, problem.targets, *(problem.test or ())]
    size = sum(x.nbytes for part in tensors for x in (part if isinstance(part, tuple) else (part,)))
    if size > _MOST_BYTES:
        raise JobError(
            f"problem {problem.name!r} has {size / 2**20:.0f} MiB of examples and no function that other processes "
            "could import: make it with Problem.build and an importable function"
        )
    return problem.to("cpu")
