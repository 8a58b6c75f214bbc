"""Products with torch tensors as a ``scipy.sparse.linalg.LinearOperator``, for SciPy's solvers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from poprisk.errors import DataError

# A product with a matrix of columns.
Product = Callable[[Tensor], Tensor]


def scipy_operator(
    product: Product, adjoint_product: Product, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Any:
    """The ``scipy.sparse.linalg.LinearOperator`` with these products.

    Raises:
        DataError: NumPy has no counterpart of the dtype.
    """
    import numpy as np
    from scipy.sparse.linalg import LinearOperator as ScipyOperator

    if dtype == torch.bfloat16:
        raise DataError("NumPy has no bfloat16: build the operator in float32 before exporting it")
    digits = torch.empty(0, dtype=dtype).numpy().dtype

    def through_torch(product: Product) -> Callable[[Any], Any]:
        def apply(x: Any) -> Any:
            # SciPy passes views with negative or zero strides, and read-only ones.
            X = torch.from_numpy(np.array(x, dtype=digits, order="C")).to(device)
            Z = product(X.reshape(X.shape[0], -1))
            return Z.detach().reshape(-1, *X.shape[1:]).cpu().numpy()

        return apply

    forward, backward = through_torch(product), through_torch(adjoint_product)
    make: Any = ScipyOperator  # SciPy picks the class from the arguments, which its annotations do not express
    return make(shape, matvec=forward, rmatvec=backward, matmat=forward, rmatmat=backward, dtype=digits)
