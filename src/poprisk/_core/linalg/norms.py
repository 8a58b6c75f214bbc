"""Euclidean norms that neither overflow nor underflow: a residual whose square is 0 must not read as converged."""

import torch
from jaxtyping import Float
from torch import Tensor


def column_norms(X: Float[Tensor, "n k"]) -> Float[Tensor, "k"]:
    """The norm of every column, scaled by its largest entry before squaring.

    >>> column_norms(torch.tensor([[3e-30, 0.0], [4e-30, 0.0]]))
    tensor([5.0000e-30, 0.0000e+00])
    """
    if X.shape[0] == 0:
        return X.new_zeros(X.shape[1])
    largest = X.abs().amax(dim=0)
    scale = torch.where(largest > 0, largest, 1.0)
    return scale * (X / scale).norm(dim=0)


def frobenius_norm(X: Float[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """The norm of all entries together.

    >>> frobenius_norm(torch.tensor([[3e30], [4e30]]))
    tensor(5.0000e+30)
    """
    return column_norms(X.reshape(-1, 1)).squeeze()
