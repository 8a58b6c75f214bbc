r"""A kernel to explore: the built-in one, or the user's own from a file.

The page explores the filter over the first r singular directions of the kernel

.. math:: M_j = 1[j \le r]\, \frac{\sigma_j^2}{\sigma_j^2 + n\eta} \bigl(1 - e^{-(\sigma_j^2 + n\eta)\, t/n}\bigr)

with capacity r, ridge η and time t; :math:`r = \operatorname{rank}, \eta = 0, t = \infty` interpolates the targets.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError
from poprisk.theory import FrozenProblem, frozen_problem, random_feature_task

MOST_DIRECTIONS = 512
"""Maximum rank of the kernel; a larger one would make the page slow and its file large."""
_NEEDED, _OPTIONAL = ("K_SS", "K_QS", "signal"), ("truth",)


@dataclass(frozen=True, eq=False)
class ExplorableKernel:
    """A frozen problem with its clean targets and, if known, the true values at the test inputs."""

    name: str
    problem: FrozenProblem
    signal: Float[Tensor, "N"]
    truth: Float[Tensor, "M"] | None = None


def builtin_kernel() -> ExplorableKernel:
    """Random cosine features of inputs with six entries, and a smooth true function.

    >>> builtin_kernel().problem.rank
    40
    """
    task = random_feature_task(7, examples=40, tests=100, dimension=6, widest=80)
    return ExplorableKernel("80 random cosine features", task.problem(80), task.signal, task.truth)


def kernel_from_file(path: str | Path) -> ExplorableKernel:
    """Load a kernel from a NumPy archive with ``K_SS`` [N, N], ``K_QS`` [M, N], ``signal`` [N], maybe ``truth`` [M].

    Raises:
        DataError: The file is not such an archive, arrays are missing, not finite or of the wrong size, or the kernel
            has too many directions.
        OSError: The file cannot be read.
    """
    arrays = _arrays(Path(path))
    problem = frozen_problem(arrays["K_SS"], arrays["K_QS"])
    if problem.rank > MOST_DIRECTIONS:
        raise DataError(
            f"the page holds at most {MOST_DIRECTIONS} directions, got a kernel of rank {problem.rank}: use a subset "
            "of the training examples"
        )
    for name, size in (("signal", len(problem.start_train)), ("truth", len(problem.start_test))):
        if name in arrays and tuple(arrays[name].shape) != (size,):
            raise DataError(f"{name} must be a vector of {size} numbers, got shape {list(arrays[name].shape)}")
    return ExplorableKernel(Path(path).name, problem, arrays["signal"], arrays.get("truth"))


def _arrays(path: Path) -> dict[str, Tensor]:
    try:
        archive: Any = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} is not a NumPy archive ({error}): write one with numpy.savez(file, K_SS=…, K_QS=…, signal=…)"
        ) from None
    if not hasattr(archive, "files"):
        raise DataError(
            f"{path} holds a single array: write an archive with numpy.savez(file, K_SS=…, K_QS=…, signal=…)"
        )
    with archive:
        missing = [name for name in _NEEDED if name not in archive.files]
        if missing:
            raise DataError(f"{path} must contain {', '.join(_NEEDED)}; missing: {', '.join(missing)}")
        found = {name: archive[name] for name in (*_NEEDED, *_OPTIONAL) if name in archive.files}
    for name, array in found.items():
        if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
            raise DataError(f"{name} in {path} must contain finite real numbers, got {array.dtype}")
    return {name: torch.from_numpy(array.astype(np.float64)) for name, array in found.items()}
