r"""Two limits that no gate can pass, as small exact computations.

*Time.* A coordinate whose batch gradient has mean :math:`r\sigma` and noise σ cannot be told from one of mean 0, with
at most δ of either error, in fewer than :math:`(2/(k r^2)) \log(1/(4\delta))` independent Gaussian batches, where k
coordinates are judged together. (Bretagnolle and Huber: the two errors of any test sum to at least
:math:`\tfrac12 e^{-KL}`, and t batches of k coordinates have :math:`KL = k t r^2/2`.)

*Worlds.* All that a training rule ever sees is gradients of the training examples. Two populations that may have drawn
the same examples give it the same stream for ever, whatever it does; where their best answers differ by the labels'
noise, it pays in one of them.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import HyperparameterError


def detection_steps(ratio: float, error: float, coordinates: int = 1) -> float:
    r"""Fewest batches by which any test tells a mean of ``ratio`` standard deviations from 0.

    Args:
        ratio: r, the mean of a batch's gradient in standard deviations of it.
        error: δ, the largest probability of either error.
        coordinates: k, how many coordinates of this ratio are judged together.

    Raises:
        HyperparameterError: a number out of range.

    >>> round(detection_steps(0.1, 0.01)), round(detection_steps(0.1, 0.01, coordinates=64), 1)
    (644, 10.1)
    """
    if not (ratio > 0 and 0 < error <= 0.25 and coordinates >= 1):
        raise HyperparameterError(
            f"need ratio > 0, 0 < error <= 1/4 and coordinates >= 1, got {ratio}, {error} and {coordinates}"
        )
    return 2 / (coordinates * ratio**2) * math.log(1 / (4 * error))


def smallest_error(ratio: float, steps: float, coordinates: int = 1) -> float:
    r"""Each error of the best test of the two means (Neyman and Pearson): :math:`\Phi(-r\sqrt{kt}/2)`.

    >>> round(smallest_error(0.1, 400), 4)
    0.1587
    """
    return 0.5 * math.erfc(ratio * math.sqrt(coordinates * steps) / 2 / math.sqrt(2))


@dataclass(frozen=True)
class TwoWorlds:
    r"""A data set and two populations that may have drawn it.

    The inputs are n orthonormal vectors, the model is linear, the loss is squared: weight i is the prediction at input
    i. In the *clean* world the labels given are right. In the *noisy* one the right answers are ``truth`` and the
    labels carry noise. A training sees the same in both.

    Attributes:
        labels: What is trained on.
        truth: What is right in the noisy world.
    """

    labels: Float[Tensor, "examples"]
    truth: Float[Tensor, "examples"]

    def gradient(self, w: Float[Tensor, "examples"], batch: Tensor) -> Float[Tensor, "examples"]:
        """Gradient of half the mean squared error on a batch; it depends on the labels, not on the population."""
        g = torch.zeros_like(w)
        g[batch] = (w - self.labels)[batch] / len(batch)
        return g

    def excess(self, w: Float[Tensor, "examples"]) -> tuple[float, float]:
        """Mean squared error above the best possible, in the clean and in the noisy world.

        >>> worlds = TwoWorlds(torch.tensor([1.0, -1.0]), torch.zeros(2))
        >>> worlds.excess(torch.zeros(2)), worlds.excess(torch.tensor([1.0, -1.0])), worlds.price
        ((1.0, 0.0), (0.0, 1.0), 0.25)
        """
        return (w - self.labels).square().mean().item(), (w - self.truth).square().mean().item()

    @property
    def price(self) -> float:
        r"""What every w pays in one of the worlds at least: :math:`\|y - f\|^2/(4n)`.

        :math:`\|w-y\|^2 + \|w-f\|^2 \ge \|y-f\|^2/2`, with equality half-way between the two.
        """
        return (self.labels - self.truth).square().mean().item() / 4
