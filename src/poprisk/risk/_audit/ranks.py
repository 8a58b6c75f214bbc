"""Scores on one scale: the rank among all examples, as a share."""

import torch
from jaxtyping import Float
from torch import Tensor


def rank_share(scores: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Ranks from 1/n (lowest score) to 1 (highest); equal scores share the mean of their ranks, NaN counts as highest.

    >>> rank_share(torch.tensor([3.0, 1.0, 3.0, 2.0]))
    tensor([0.8750, 0.2500, 0.8750, 0.5000], dtype=torch.float64)
    """
    values = scores.double().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    _, place, number = torch.unique(values, return_inverse=True, return_counts=True)
    last = number.cumsum(0).double()
    return ((last - (number - 1) / 2) / len(values))[place]
