r"""A kernel to play with: the built-in one, or one's own from a file, checked at the door.

What is explored is the filter that joins the room's axes, over the first r singular directions of the kernel:

.. math:: M_j = 1[j \le r]\, \frac{\sigma_j^2}{\sigma_j^2 + n\eta} \bigl(1 - e^{-(\sigma_j^2 + n\eta)\, t/n}\bigr)

with capacity r, ridge η and time t; :math:`r = \operatorname{rank}, \eta = 0, t = \infty` interpolates.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError
from poprisk.theory import FrozenProblem, decayed_flow_filter, frozen_problem, random_feature_task

MOST_DIRECTIONS = 512
"""More would make the page slow and its file large."""
_NEEDED, _OPTIONAL = ("K_SS", "K_QS", "signal"), ("truth",)


@dataclass(frozen=True, eq=False)
class ExplorableKernel:
    """A frozen problem with its clean targets and, where known, the truth at the test inputs."""

    name: str
    problem: FrozenProblem
    signal: Float[Tensor, "N"]
    truth: Float[Tensor, "M"] | None = None


def explored_filter(problem: FrozenProblem, rank: int, eta: float, t: float) -> Float[Tensor, "r"]:
    """The filter of this module, as its diagonal.

    Raises:
        HyperparameterError: a rank outside of 0 to the problem's, or a negative penalty or time.

    >>> problem = frozen_problem(torch.diag(torch.tensor([4.0, 1.0])), torch.ones(1, 2))
    >>> explored_filter(problem, rank=1, eta=0.0, t=float("inf"))
    tensor([1., 0.])
    """
    if not 0 <= rank <= problem.rank:
        raise HyperparameterError(f"rank must lie between 0 and {problem.rank}, got {rank}")
    kept = torch.arange(problem.rank, device=problem.roots.device) < rank
    return decayed_flow_filter(problem, eta, t) * kept


def builtin_kernel() -> ExplorableKernel:
    """Random cosine features of inputs with six entries, and a smooth truth.

    >>> builtin_kernel().problem.rank
    40
    """
    task = random_feature_task(7, examples=40, tests=100, dimension=6, widest=80)
    return ExplorableKernel("80 random cosine features", task.problem(80), task.signal, task.truth)


def kernel_from_file(path: str | Path) -> ExplorableKernel:
    """One's own kernel: a NumPy archive with ``K_SS`` [N, N], ``K_QS`` [M, N], ``signal`` [N], perhaps ``truth`` [M].

    Raises:
        DataError: no such archive, arrays missing, not finite or of sizes that do not fit, no kernel, or one with more
            directions than a page can hold.
        OSError: the file cannot be read.
    """
    arrays = _arrays(Path(path))
    problem = frozen_problem(arrays["K_SS"], arrays["K_QS"])
    if problem.rank > MOST_DIRECTIONS:
        raise DataError(
            f"the page holds at most {MOST_DIRECTIONS} directions, got a kernel of rank {problem.rank}: take a part of "
            "the training examples"
        )
    for name, size in (("signal", len(problem.start_train)), ("truth", len(problem.start_test))):
        if name in arrays and tuple(arrays[name].shape) != (size,):
            raise DataError(f"{name} must be a vector of {size} numbers, got shape {list(arrays[name].shape)}")
    return ExplorableKernel(Path(path).name, problem, arrays["signal"], arrays.get("truth"))


def _arrays(path: Path) -> dict[str, Tensor]:
    try:
        archive: Any = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is no NumPy archive: numpy.savez(file, K_SS=…, K_QS=…, signal=…) ({error})") from None
    if not hasattr(archive, "files"):
        raise DataError(f"{path} holds one array, expected an archive: numpy.savez(file, K_SS=…, K_QS=…, signal=…)")
    with archive:
        missing = [name for name in _NEEDED if name not in archive.files]
        if missing:
            raise DataError(f"{path} must hold {', '.join(_NEEDED)}, missing: {', '.join(missing)}")
        found = {name: archive[name] for name in (*_NEEDED, *_OPTIONAL) if name in archive.files}
    for name, array in found.items():
        if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
            raise DataError(f"{name} in {path} must hold finite real numbers, got {array.dtype}")
    return {name: torch.from_numpy(array.astype(np.float64)) for name, array in found.items()}
