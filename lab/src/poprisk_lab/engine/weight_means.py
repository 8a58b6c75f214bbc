"""Means of the weights along a stacked training, several at once, each moved after every step."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

WEIGHTS = "weights"
"""Name of the weights themselves among the means."""


class WeightMeans:
    r"""Polynomial-decay means and exponential means of a matrix of weights.

    After step t a mean moves toward the weights by a share of the distance: :math:`c / (t + c - 1)` with
    :math:`c = 1/\text{tail}` (:class:`poprisk.optim.TailAverage`), and :math:`(1-\beta)/(1-\beta^t)` for an exponential
    mean with decay β, which is then free of bias.

    Args:
        weights: The weights before the first step; the means have their shape.
        tails: Shares of the steps so far that the polynomial-decay means cover.
        decays: Decay rates of the exponential means.

    Attributes:
        names: ``weights`` for the weights themselves, then the means.
        values: The means.
    """

    def __init__(
        self, weights: Float[Tensor, "members d"], tails: Sequence[float] = (), decays: Sequence[float] = ()
    ) -> None:
        self.names = (WEIGHTS, *(f"tail {tail:g}" for tail in tails), *(f"ema {decay:g}" for decay in decays))
        self.values = weights.detach().expand(len(tails) + len(decays), *weights.shape).clone()
        precise = {"dtype": torch.float64, "device": weights.device}
        self._inverse = torch.tensor([1 / tail for tail in tails], **precise)
        self._decays = torch.tensor(list(decays), **precise)

    @torch.no_grad()
    def advance(self, weights: Float[Tensor, "members d"], t: Float[Tensor, ""]) -> None:
        """Move every mean after step t, which starts at 1; nothing waits for the device."""
        if not len(self.values):
            return
        polynomial = self._inverse / (t + self._inverse - 1)
        exponential = (1 - self._decays) / (1 - self._decays**t)
        rates = torch.cat([polynomial, exponential]).to(weights.dtype)
        self.values.lerp_(weights.detach(), rates[:, None, None])
