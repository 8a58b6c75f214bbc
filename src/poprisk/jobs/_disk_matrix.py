r"""A matrix in a file that may be larger than memory: products read it panel by panel."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poprisk._core.linalg import LinearOperator
from poprisk.errors import DataError

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class DiskMatrix(LinearOperator):
    r"""A ``.npy`` file as a linear operator: :math:`K X` and :math:`K^\top Y` stream over panels of rows.

    Args:
        path: The file, as :func:`~poprisk.jobs.assemble_matrix` or ``numpy.save`` wrote it.
        symmetric: Whether the matrix is known to be symmetric.
        memory_limit: Largest number of bytes of the matrix in memory at a time.
        device: Device for products; panels are copied to it.
        bound: Bound on :math:`|\Delta K_{ij}| / \sqrt{K_{ii} K_{jj}}`, for a kernel in lower precision.

    Raises:
        DataError: the file does not contain a matrix of float32 or float64.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/K.npy", np.array([[2.0, 1.0], [1.0, 3.0]]))
    ...     K = DiskMatrix(f"{folder}/K.npy", symmetric=True)
    ...     K @ torch.tensor([1.0, 1.0], dtype=torch.float64)
    tensor([3., 4.], dtype=torch.float64)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        symmetric: bool = False,
        memory_limit: int = 2**30,
        device: torch.device | str = "cpu",
        bound: float | None = None,
    ) -> None:
        self.path, self.memory_limit, self.bound = Path(path), memory_limit, bound
        self._symmetric, self._device = symmetric, torch.device(device)
        try:
            mapped = np.load(self.path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a matrix that can be memory-mapped ({error}): assemble it again") from None
        if mapped.ndim != 2 or str(mapped.dtype) not in _DTYPES or not mapped.flags.c_contiguous:
            raise DataError(
                f"{path} must be a matrix of float32 or float64, row by row, got {mapped.dtype} {list(mapped.shape)}"
            )
        self._shape, self._dtype, self._offset = tuple(mapped.shape), mapped.dtype, mapped.offset

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return _DTYPES[str(self._dtype)]

    @property
    def device(self) -> torch.device:
        """Device of the products."""
        return self._device

    @property
    def symmetric(self) -> bool:
        """Whether the matrix is known to be symmetric."""
        return self._symmetric

    def mapped(self) -> Tensor:
        """The whole matrix as a tensor over the memory-mapped file, for functions that take a dense matrix.

        Pages are read on access and dropped by the system when memory is short. Changes to the tensor stay in memory
        and are not written to the file.
        """
        return torch.from_numpy(np.load(self.path, mmap_mode="c"))

    def panels(self) -> Iterator[tuple[slice, Tensor]]:
        """Consecutive blocks of rows within the memory limit; each is unmapped when the next is requested."""
        rows, columns = self._shape
        width = columns * self._dtype.itemsize
        height = max(1, min(rows, self.memory_limit // (2 * max(1, width))))
        for start in range(0, rows, height):
            stop = min(start + height, rows)
            place: dict[str, Any] = {"mode": "c", "offset": self._offset + start * width}
            panel = np.memmap(self.path, self._dtype, shape=(stop - start, columns), **place)
            yield slice(start, stop), torch.from_numpy(panel).to(self._device)
            del panel

    def _matmat(self, X: Tensor) -> Tensor:
        found = X.new_empty(self._shape[0], X.shape[1])
        for rows, panel in self.panels():
            found[rows] = panel @ X
        return found

    def _rmatmat(self, Y: Tensor) -> Tensor:
        if self._symmetric:
            return self._matmat(Y)
        found = Y.new_zeros(self._shape[1], Y.shape[1])
        for rows, panel in self.panels():
            found += panel.T @ Y[rows]
        return found

    def to_dense(self, block_size: int | None = None) -> Tensor:
        """The matrix in memory; ``block_size`` is ignored."""
        found = torch.empty(self._shape, dtype=self.dtype, device=self._device)
        for rows, panel in self.panels():
            found[rows] = panel
        return found
