r"""Linear operators known by their products, and their algebra: sum, difference, multiple, chain, adjoint.

An operator is real, of one dtype, on one device, and acts on flat vectors. Whoever writes one gives ``shape``,
``_like`` (or ``dtype`` and ``device``) and the hooks ``_matmat`` and ``_rmatmat``; all checks at the door are here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Union, overload

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.html import card
from poprisk.errors import DataError, DeviceError

# Numbers in one block of the identity that `to_dense` holds: 128 MiB in float64.
_DENSE_BLOCK = 2**24


class LinearOperator(ABC):
    r"""A real matrix known by its products :math:`A X` and :math:`A^\top Y`.

    Operators of one dtype and device are combined with ``A @ B``, ``A + B``, ``A - B``, ``c * A``, ``A / c``, ``-A``
    and ``A.T``; nothing is computed until a tensor is multiplied, by ``A @ X`` or ``X @ A``.

    >>> from poprisk._core.linalg import diagonal, from_dense
    >>> A = from_dense(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> B = 2 * A @ A.T - diagonal(torch.tensor([10.0, 2.0]))
    >>> B @ torch.tensor([1.0, 1.0])
    tensor([4., 4.])
    >>> B.to_dense()
    tensor([[0., 4.],
            [4., 0.]])
    """

    SELF_ADJOINT: ClassVar[bool] = False
    """True for kinds of operator that are symmetric by construction."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    def dtype(self) -> torch.dtype:
        """The one dtype that goes in and comes out."""
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        """Where the vectors live."""
        return self._like.device

    @property
    def _like(self) -> Any:
        """A tensor or an operator of the same dtype, on the same device."""
        raise NotImplementedError(f"{type(self).__name__} defines neither _like, nor dtype and device")

    @abstractmethod
    def _matmat(self, X: Tensor) -> Tensor:
        """A X; the input has been checked."""

    def _rmatmat(self, Y: Tensor) -> Tensor:
        """The adjoint's product; needed unless the operator is symmetric."""
        if self.symmetric:
            return self._matmat(Y)
        raise NotImplementedError(f"{type(self).__name__} is not symmetric and defines no _rmatmat")

    @property
    def symmetric(self) -> bool:
        """Whether the operator is known to be symmetric: by its kind, by how it was made, or because it was declared.

        Sums and multiples of symmetric operators are, and so are chains that read the same from both ends, such as
        ``A @ B @ A.T`` with symmetric B. ``declare_symmetric`` speaks for the others.
        """
        return self.SELF_ADJOINT

    def matmat(self, X: Float[Tensor, "columns k"]) -> Float[Tensor, "rows k"]:
        """A X.

        Raises:
            DataError: X is no matrix with as many rows as A has columns, or its dtype is not the operator's.
            DeviceError: X lies on another device.
        """
        check_block(X, self.shape[1], self)
        Z = self._matmat(X)
        if Z.shape != (self.shape[0], X.shape[1]) or Z.dtype != self.dtype:
            raise DataError(
                f"the product of {self!r} with a matrix {list(X.shape)} should be {[self.shape[0], X.shape[1]]} in "
                f"{self.dtype}, got {list(Z.shape)} in {Z.dtype}: mend the function behind the operator"
            )
        return Z

    def matvec(self, v: Float[Tensor, "columns"]) -> Float[Tensor, "rows"]:
        """A v, for one vector."""
        return self.matmat(v.unsqueeze(1)).squeeze(1)

    def adjoint(self) -> "LinearOperator":
        r""":math:`A^\top`; the operator itself where it is symmetric."""
        return self if self.symmetric else _Adjoint((self,))

    @property
    def T(self) -> "LinearOperator":
        """Short for ``adjoint()``."""
        return self.adjoint()

    def to_dense(self, block_size: int | None = None) -> Float[Tensor, "rows columns"]:
        """The matrix itself, from products with blocks of columns of the identity.

        Args:
            block_size: Columns taken at a time; chosen so that a block stays below 128 MiB if not given.
        """
        rows, columns = self.shape
        size = block_size or max(1, _DENSE_BLOCK // max(rows, columns, 1))
        dense = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        for start in range(0, columns, size):
            width = min(size, columns - start)
            block = torch.zeros(columns, width, dtype=self.dtype, device=self.device)
            block[start : start + width].fill_diagonal_(1)
            dense[:, start : start + width] = self.matmat(block).detach()
        return dense

    def to_scipy(self) -> Any:
        """The same operator for ``scipy.sparse.linalg``: NumPy vectors in and out, products where the operator lives.

        Raises:
            DataError: NumPy has no counterpart of the dtype (bfloat16).

        >>> from poprisk._core.linalg import identity
        >>> (2 * identity(3)).to_scipy().matvec([1.0, 2.0, 3.0])
        array([2., 4., 6.], dtype=float32)
        """
        import numpy as np
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        if self.dtype == torch.bfloat16:
            raise DataError("NumPy has no bfloat16: build the operator in float32 before exporting it")
        digits = torch.empty(0, dtype=self.dtype).numpy().dtype

        def through_torch(product: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
            def apply(x: Any) -> Any:
                # SciPy passes views with negative or zero strides, and read-only ones.
                X = torch.from_numpy(np.array(x, dtype=digits, order="C")).to(self.device)
                Z = product(X.reshape(X.shape[0], -1))
                return Z.detach().reshape(-1, *X.shape[1:]).cpu().numpy()

            return apply

        forward, backward = through_torch(self.matmat), through_torch(self.adjoint().matmat)
        make: Any = ScipyOperator  # SciPy picks the class from the arguments, which its annotations do not express
        return make(self.shape, matvec=forward, rmatvec=backward, matmat=forward, rmatmat=backward, dtype=digits)

    @overload
    def __matmul__(self, other: "LinearOperator") -> "LinearOperator": ...
    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    def __matmul__(self, other: Any) -> Union["LinearOperator", Tensor]:
        if isinstance(other, LinearOperator):
            return _chain(self, other)
        if not isinstance(other, Tensor):
            return NotImplemented
        if other.dim() == 1:
            return self.matmat(_real(other).unsqueeze(1)).squeeze(1)
        if other.dim() == 2:
            return self.matmat(_real(other))
        raise DataError(
            f"an operator multiplies a vector or a matrix, got {other.dim()} axes: reshape to [{self.shape[1]}, k]"
        )

    def __rmatmul__(self, other: Any) -> Tensor:
        if not isinstance(other, Tensor):
            return NotImplemented
        return (self.adjoint() @ other.mT).mT if other.dim() == 2 else self.adjoint() @ other

    def __add__(self, other: Any) -> "LinearOperator":
        return _sum(self, other) if isinstance(other, LinearOperator) else NotImplemented

    def __sub__(self, other: Any) -> "LinearOperator":
        return _sum(self, -other) if isinstance(other, LinearOperator) else NotImplemented

    def __mul__(self, factor: Any) -> "LinearOperator":
        number = _as_number(factor)
        return NotImplemented if number is None else _scaled(number, self)

    def __rmul__(self, factor: Any) -> "LinearOperator":
        return self.__mul__(factor)

    def __truediv__(self, factor: Any) -> "LinearOperator":
        number = _as_number(factor)
        return NotImplemented if number is None else _scaled(1 / number, self)

    def __neg__(self) -> "LinearOperator":
        return _scaled(-1.0, self)

    def __repr__(self) -> str:
        rows, columns = self.shape
        name = type(self).__name__.lstrip("_")
        return f"<{name} {rows}x{columns} {str(self.dtype).removeprefix('torch.')} on {self.device}>"

    def _repr_html_(self) -> str:
        rows, columns = self.shape
        about = {
            "shape": f"{rows} × {columns}",
            "numbers": f"{str(self.dtype).removeprefix('torch.')} on {self.device}",
            "symmetric": "yes" if self.symmetric else "not known to be",
            "made of": self._made_of(),
        }
        return card(type(self).__name__.lstrip("_"), about, notes=["known by its products: A @ X, X @ A, to_dense()"])

    def _made_of(self) -> str:
        """The operators behind this one, for looking at."""
        return ""


class SymmetricOperator(LinearOperator):
    """Symmetric by construction, and made of a tensor that has a row for each of its own."""

    SELF_ADJOINT: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, int]:
        """Square."""
        n = self._like.shape[0]
        return n, n


def require_real(dtype: torch.dtype, what: str) -> None:
    """Refuses what the algebra does not cover."""
    if dtype.is_complex:
        raise DataError(f"{what} must be real, got {dtype}: split it with torch.view_as_real or take .real")
    if not dtype.is_floating_point:
        raise DataError(f"{what} must have a floating-point dtype, got {dtype}: convert it with .float() or .double()")


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two names mean one device: "cuda" is the current one, whatever its number.

    >>> same_device(torch.device("cpu"), torch.device("cpu:0")), same_device(torch.device("cpu"), torch.device("meta"))
    (True, False)
    """
    return one == other or (one.type == other.type and _number(one) == _number(other))


def _number(device: torch.device) -> int:
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if device.type == "cuda" else 0


def check_block(X: Tensor, rows: int, A: LinearOperator) -> None:
    """The door of every product: a matrix with this many rows, of the operator's dtype, on its device."""
    if X.dim() != 2 or X.shape[0] != rows:
        raise DataError(f"{A!r} multiplies matrices of shape [{rows}, k], got {list(X.shape)}: check the order")
    if X.dtype != A.dtype:
        require_real(X.dtype, "the matrix")
        raise DataError(f"{A!r} multiplies {A.dtype}, got {X.dtype}: convert with .to({A.dtype})")
    if not same_device(X.device, A.device):
        raise DeviceError(f"{A!r} multiplies tensors on {A.device}, got one on {X.device}: move it with .to(...)")


def check_partners(A: LinearOperator, B: LinearOperator) -> None:
    """Two operators can be combined when dtype and device agree."""
    if A.dtype != B.dtype:
        raise DataError(f"operators must share one dtype, got {A!r} and {B!r}: build both in {A.dtype}")
    if not same_device(A.device, B.device):
        raise DeviceError(f"operators must share one device, got {A!r} and {B!r}: build both on {A.device}")


def _real(X: Tensor) -> Tensor:
    require_real(X.dtype, "the matrix")
    return X


def _as_number(factor: Any) -> float | None:
    if isinstance(factor, Tensor):
        if factor.dim():
            raise DataError(
                f"an operator is multiplied by one number, got a tensor {list(factor.shape)}: use diagonal(...) @ A"
            )
        factor = factor.item()
    if isinstance(factor, complex):
        raise DataError(f"the factor must be real, got {factor}: the algebra covers real operators only")
    return float(factor) if isinstance(factor, int | float) else None


@dataclass(frozen=True, eq=False, repr=False)
class _Compound(LinearOperator):
    """Made of operators of one dtype on one device."""

    parts: tuple[LinearOperator, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.parts[0].shape

    @property
    def _like(self) -> LinearOperator:
        return self.parts[0]

    def _rmatmat(self, Y: Tensor) -> Tensor:
        return self.adjoint()._matmat(Y)


class _Adjoint(_Compound):
    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.parts[0].shape
        return columns, rows

    def _made_of(self) -> str:
        return f"adjoint of {self.parts[0]!r}"

    def _matmat(self, X: Tensor) -> Tensor:
        return self.parts[0]._rmatmat(X)

    def adjoint(self) -> LinearOperator:
        return self.parts[0]


@dataclass(frozen=True, eq=False, repr=False)
class _Scaled(_Compound):
    factor: float

    @property
    def symmetric(self) -> bool:
        return self.parts[0].symmetric

    def _made_of(self) -> str:
        return f"{self.factor:g} · {self.parts[0]!r}"

    def _matmat(self, X: Tensor) -> Tensor:
        return self.factor * self.parts[0].matmat(X)

    def adjoint(self) -> LinearOperator:
        return self if self.symmetric else _Scaled((self.parts[0].adjoint(),), self.factor)


class _Sum(_Compound):
    @property
    def symmetric(self) -> bool:
        return all(part.symmetric for part in self.parts)

    def _made_of(self) -> str:
        return " + ".join(map(repr, self.parts))

    def _matmat(self, X: Tensor) -> Tensor:
        total = self.parts[0].matmat(X)
        for part in self.parts[1:]:
            total = total + part.matmat(X)
        return total

    def adjoint(self) -> LinearOperator:
        return self if self.symmetric else _Sum(tuple(part.adjoint() for part in self.parts))


class _Chain(_Compound):
    @property
    def shape(self) -> tuple[int, int]:
        return self.parts[0].shape[0], self.parts[-1].shape[1]

    @property
    def symmetric(self) -> bool:
        half = (len(self.parts) + 1) // 2
        pairs = zip(self.parts[:half], reversed(self.parts), strict=False)
        return all(left.adjoint() is right or right.adjoint() is left for left, right in pairs)

    def _made_of(self) -> str:
        return " · ".join(map(repr, self.parts))

    def _matmat(self, X: Tensor) -> Tensor:
        for part in reversed(self.parts):
            X = part.matmat(X)
        return X

    def adjoint(self) -> LinearOperator:
        return self if self.symmetric else _Chain(tuple(part.adjoint() for part in reversed(self.parts)))


def _scaled(factor: float, A: LinearOperator) -> LinearOperator:
    return _Scaled(A.parts, factor * A.factor) if isinstance(A, _Scaled) else _Scaled((A,), factor)


def _sum(A: LinearOperator, B: LinearOperator) -> LinearOperator:
    if A.shape != B.shape:
        raise DataError(f"summands must have one shape, got {A!r} and {B!r}: check which one should be transposed")
    check_partners(A, B)
    parts = (each.parts if isinstance(each, _Sum) else (each,) for each in (A, B))
    return _Sum(tuple(part for group in parts for part in group))


def _chain(A: LinearOperator, B: LinearOperator) -> LinearOperator:
    if A.shape[1] != B.shape[0]:
        raise DataError(
            f"in A @ B the columns of A must be the rows of B, got {A!r} and {B!r}: check which one to transpose"
        )
    check_partners(A, B)
    parts = (each.parts if isinstance(each, _Chain) else (each,) for each in (A, B))
    return _Chain(tuple(part for group in parts for part in group))
