"""Matrices in a store, which may be larger than memory: products read them tile by tile."""

from collections.abc import Iterator

import torch
from torch import Tensor

from poprisk._core.linalg.operator import LinearOperator
from poprisk._core.store import Cell, TiledArray


class StoredMatrix(LinearOperator):
    r"""A matrix in a store as a linear operator: :math:`K X` and :math:`K^\top Y` hold one tile at a time.

    ``zarr.open(store)[f"{K.path}/values"]`` is the same matrix for any program that reads Zarr 3.
    """

    def __init__(self, group: TiledArray, cells: list[Cell], device: torch.device | str = "cpu") -> None:
        self._group, self._cells, self._device, self._array = group, cells, torch.device(device), group.array()
        self.store, self.path = group.store, group.path
        self.bound: float | None = group.where.get("bound")
        r"""Bound on :math:`|\Delta K_{ij}| / \sqrt{K_{ii} K_{jj}}`, for a kernel in lower precision."""
        regions = [group.region(cell) for cell in cells]
        self._shape = (max(rows.stop for rows, _ in regions), max(columns.stop for _, columns in regions))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return getattr(torch, self._group.where["dtype"])

    @property
    def device(self) -> torch.device:
        """Device of the products."""
        return self._device

    @property
    def symmetric(self) -> bool:
        """Whether the matrix is known to be symmetric."""
        known = self._group.where["symmetric"] or self._group.where.get("known_symmetric", False)
        return known and self._shape[0] == self._shape[1]

    def tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Rows, columns and numbers of each tile, whose checksums are verified.

        Raises:
            DataError: a tile is damaged; compute it again with ``run_jobs(store, verify=True)``.
        """
        for cell in self._cells:
            yield *self._group.region(cell), self._group.tile(cell, self._array).to(self._device)

    def _matmat(self, X: Tensor) -> Tensor:
        found = X.new_zeros(self._shape[0], X.shape[1])
        for rows, columns, tile in self.tiles():
            found[rows] += tile @ X[columns]
        return found

    def _rmatmat(self, Y: Tensor) -> Tensor:
        if self.symmetric:
            return self._matmat(Y)
        found = Y.new_zeros(self._shape[1], Y.shape[1])
        for rows, columns, tile in self.tiles():
            found[columns] += tile.T @ Y[rows]
        return found

    def to_dense(self, block_size: int | None = None) -> Tensor:
        """The matrix in memory; ``block_size`` is ignored."""
        found = torch.empty(self._shape, dtype=self.dtype, device=self._device)
        for rows, columns, tile in self.tiles():
            found[rows, columns] = tile
        return found
