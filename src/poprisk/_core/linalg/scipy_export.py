"""A torch operator as one of ``scipy.sparse.linalg``, for the solvers that live there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from poprisk._core.linalg.operator import LinearOperator
from poprisk.errors import DataError


def to_scipy(A: LinearOperator) -> Any:
    """The ``scipy.sparse.linalg.LinearOperator`` with the same products.

    Raises:
        DataError: NumPy has no counterpart of the dtype.
    """
    import numpy as np
    from scipy.sparse.linalg import LinearOperator as ScipyOperator

    if A.dtype == torch.bfloat16:
        raise DataError("NumPy has no bfloat16: build the operator in float32 before exporting it")
    dtype = torch.empty(0, dtype=A.dtype).numpy().dtype

    def through_torch(product: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
        def apply(x: Any) -> Any:
            # SciPy hands over views with negative or zero strides, and read-only ones.
            X = torch.from_numpy(np.array(x, dtype=dtype, order="C")).to(A.device)
            Z = product(X.reshape(X.shape[0], -1))
            return Z.detach().reshape(-1, *X.shape[1:]).cpu().numpy()

        return apply

    forward, backward = through_torch(A.matmat), through_torch(A.adjoint().matmat)
    make: Any = ScipyOperator  # SciPy picks the class from the arguments, which its annotations do not tell
    return make(A.shape, matvec=forward, rmatvec=backward, matmat=forward, rmatmat=backward, dtype=dtype)
