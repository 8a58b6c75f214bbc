"""Where operators come from: dense matrices, diagonals, pairs of functions, and stacks of other operators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg.operator import LinearOperator, SymmetricOperator, check_partners, require_real
from poprisk.errors import DataError

Product = Callable[[Tensor], Tensor]


def from_dense(matrix: Tensor, *, symmetric: bool | None = None) -> LinearOperator:
    """A dense matrix as an operator.

    Args:
        matrix: The matrix; kept, not copied.
        symmetric: Whether it is symmetric. If not given, it is when it equals its transpose to the last bit.

    >>> from_dense(torch.eye(2)).symmetric
    True
    """
    if matrix.dim() != 2:
        raise DataError(f"a dense operator needs a matrix, got {matrix.dim()} axes: reshape it to [rows, columns]")
    require_real(matrix.dtype, "the matrix")
    square = matrix.shape[0] == matrix.shape[1]
    if symmetric and not square:
        raise DataError(f"a symmetric matrix is square, got {list(matrix.shape)}: leave symmetric out")
    return _Dense(matrix, square and torch.equal(matrix, matrix.T) if symmetric is None else symmetric)


def diagonal(entries: Tensor) -> LinearOperator:
    """A diagonal matrix.

    >>> diagonal(torch.tensor([1.0, 3.0])) @ torch.ones(2)
    tensor([1., 3.])
    """
    if entries.dim() != 1:
        raise DataError(f"a diagonal is a vector, got shape {list(entries.shape)}: pass matrix.diag()")
    require_real(entries.dtype, "the diagonal")
    return _Diagonal(entries)


def identity(n: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LinearOperator:
    """The identity on n coordinates.

    >>> identity(2) @ torch.tensor([3.0, 4.0])
    tensor([3., 4.])
    """
    n = _checked_size(n)
    return _Identity((n, n), dtype, device)


def zeros(
    rows: int, columns: int | None = None, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> LinearOperator:
    """The zero matrix; square if ``columns`` is not given.

    >>> zeros(1, 2) @ torch.ones(2)
    tensor([0.])
    """
    rows = _checked_size(rows)
    return _Zeros((rows, rows if columns is None else _checked_size(columns)), dtype, device)


def from_functions(
    matmat: Product,
    rmatmat: Product | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    symmetric: bool = False,
) -> LinearOperator:
    r"""An operator from the functions :math:`X \mapsto A X` and :math:`Y \mapsto A^\top Y` on matrices of columns.

    ``adjoint_mismatch`` tells whether the two belong together.

    ``matmat`` takes [columns, k] to [rows, k] and ``rmatmat`` back; it is None for a symmetric operator.

    >>> A = from_functions(lambda X: X[:1], lambda Y: torch.cat([Y, 0 * Y]), (1, 2), torch.float32)
    >>> A.T @ torch.ones(1)
    tensor([1., 0.])
    """
    rows, columns = (_checked_size(size) for size in shape)
    if symmetric and rows != columns:
        raise DataError(f"a symmetric operator is square, got shape {[rows, columns]}: leave symmetric out")
    if symmetric != (rmatmat is None):
        raise DataError("pass either rmatmat, or symmetric=True and no rmatmat: an operator has one adjoint")
    return _Functions(matmat, rmatmat, (rows, columns), dtype, device)


def declare_symmetric(A: LinearOperator) -> LinearOperator:
    """The same operator, vouched to be symmetric where the algebra cannot see it.

    Raises:
        DataError: the operator is not square.

    >>> A = from_dense(torch.tensor([[1.0, 2.0], [2.000001, 1.0]]))
    >>> A.symmetric, declare_symmetric(A).symmetric
    (False, True)
    """
    if A.symmetric:
        return A
    return from_functions(A.matmat, None, A.shape, A.dtype, A.device, symmetric=True)


def vertical_stack(blocks: Sequence[LinearOperator]) -> LinearOperator:
    """Operators on the same columns, their rows one below the other.

    >>> vertical_stack([identity(2), 2 * identity(2)]) @ torch.ones(2)
    tensor([1., 1., 2., 2.])
    """
    if not blocks:
        raise DataError("a stack needs at least one operator, got none: pass a list of operators")
    for block in blocks[1:]:
        if block.shape[1] != blocks[0].shape[1]:
            raise DataError(f"stacked operators must share their columns, got {blocks[0]!r} and {block!r}")
        check_partners(blocks[0], block)
    return _Stack(tuple(blocks))


def horizontal_stack(blocks: Sequence[LinearOperator]) -> LinearOperator:
    """Operators with the same rows, their columns side by side.

    Raises:
        DataError: nothing to stack, or the numbers of rows or the dtypes differ.

    >>> horizontal_stack([identity(1), 2 * identity(1)]) @ torch.tensor([1.0, 10.0])
    tensor([21.])
    """
    return vertical_stack([block.adjoint() for block in blocks]).adjoint()


def _checked_size(size: int) -> int:
    if size < 0:
        raise DataError(f"sizes of an operator must not be negative, got {size}")
    return int(size)


@dataclass(frozen=True, eq=False, repr=False)
class _Dense(LinearOperator):
    matrix: Float[Tensor, "rows columns"]
    is_symmetric: bool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.matrix.shape
        return rows, columns

    @property
    def _like(self) -> Tensor:
        return self.matrix

    @property
    def symmetric(self) -> bool:
        return self.is_symmetric

    def _matmat(self, X: Tensor) -> Tensor:
        return self.matrix @ X

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self.matrix.T @ Y


@dataclass(frozen=True, eq=False, repr=False)
class _Diagonal(SymmetricOperator):
    entries: Float[Tensor, "n"]

    @property
    def _like(self) -> Tensor:
        return self.entries

    def _matmat(self, X: Tensor) -> Tensor:
        return self.entries.unsqueeze(1) * X


class _Placed(LinearOperator):
    """What holds no tensor and so has to be told where it lives."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str) -> None:
        require_real(dtype, "an operator")
        self._shape, self._empty = shape, torch.empty(0, dtype=dtype, device=device)

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def _like(self) -> Tensor:
        return self._empty


class _Identity(_Placed):
    SELF_ADJOINT = True

    def _matmat(self, X: Tensor) -> Tensor:
        return X.clone()


class _Zeros(_Placed):
    @property
    def symmetric(self) -> bool:
        return self.shape[0] == self.shape[1]

    def _matmat(self, X: Tensor) -> Tensor:
        return X.new_zeros(self.shape[0], X.shape[1])

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return Y.new_zeros(self.shape[1], Y.shape[1])


class _Functions(_Placed):
    def __init__(
        self,
        matmat: Product,
        rmatmat: Product | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(shape, dtype, device)
        self._forward, self._backward = matmat, rmatmat

    @property
    def symmetric(self) -> bool:
        return self._backward is None

    def _matmat(self, X: Tensor) -> Tensor:
        return self._forward(X)

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self._forward(Y) if self._backward is None else self._backward(Y)


@dataclass(frozen=True, eq=False, repr=False)
class _Stack(LinearOperator):
    blocks: tuple[LinearOperator, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(block.shape[0] for block in self.blocks), self.blocks[0].shape[1]

    @property
    def _like(self) -> LinearOperator:
        return self.blocks[0]

    def _matmat(self, X: Tensor) -> Tensor:
        return torch.cat([block.matmat(X) for block in self.blocks])

    def _rmatmat(self, Y: Tensor) -> Tensor:
        pieces = Y.split([block.shape[0] for block in self.blocks])
        total = self.blocks[0].adjoint().matmat(pieces[0])
        for block, piece in zip(self.blocks[1:], pieces[1:], strict=True):
            total = total + block.adjoint().matmat(piece)
        return total
