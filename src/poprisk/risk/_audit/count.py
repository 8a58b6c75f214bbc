r"""Count wrong labels by out-of-sample predictions: between which numbers it lies, and why no single one can be had.

An example is *contradicted* if the prediction of a model that has not seen it differs from its label. Contradictions
are wrong labels and mistakes of the model. Among examples predicted as one class, mistakes become rarer as the margin
between the two most probable classes grows, and wrong labels that do not depend on the input do not. A straight line
through the contradictions, by rank of the margin, therefore gives at the largest margin the rate of such wrong labels:
the lower end. The upper end is the number of contradictions, as if all mistakes were wrong labels: ambiguous
examples, which truly lie near another class, cannot be told from labels that were changed to that class.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk.risk._verdict import Counted


def count_wrong(probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, "n"]) -> Counted:
    """Count contradicted labels, class by predicted class.

    >>> p = torch.tensor([[0.9, 0.1]]).repeat(20, 1)
    >>> found = count_wrong(p, (torch.arange(20) % 5 == 0).long())  # 4 of 20 are labelled 1
    >>> found.high, found.tied_share
    (4, 0.0)
    """
    top = probabilities.topk(2, 1)
    predicted, margin = top.indices[:, 0], top.values[:, 0] - top.values[:, 1]
    low = variance = tied = tied_number = 0.0
    for j in predicted.unique().tolist():
        rows = (predicted == j).nonzero().squeeze(1)
        rows = rows[margin[rows].argsort(descending=True, stable=True)]
        contradicted = (labels[rows] != j).double()
        n, number = len(rows), float(contradicted.sum())
        low += number - n * _rise(contradicted) / 2
        smooth = (number + 0.5) / (n + 1)
        variance += n * smooth * (1 - smooth)
        lead, spread = _lead(labels[rows], j, probabilities.shape[1])
        if lead <= 2 * spread:
            tied, tied_number = tied + max(lead, 0), tied_number + n
    high = int((predicted != labels).sum())
    return Counted(min(max(low, 0.0), high), high, math.sqrt(variance), tied, tied_number / len(labels))


def agreement(probabilities: Float[Tensor, "n classes"], predictions: Sequence[Int[Tensor, "n"]]) -> float:
    """Share of examples predicted alike by these probabilities and other predictions, at most over several of them."""
    predicted = probabilities.argmax(1)
    return max(float((predicted == other).double().mean()) for other in predictions)


def _rise(contradicted: Float[Tensor, "n"]) -> float:
    """Rise of the rate of contradictions from the largest to the smallest margin, by least squares; not negative."""
    n = len(contradicted)
    rank = (torch.arange(n, dtype=torch.float64) + 0.5) / n - 0.5
    return max(float(rank @ contradicted / rank.square().sum()), 0.0) if n > 3 else 0.0


def _lead(given: Int[Tensor, "n"], predicted: int, classes: int) -> tuple[float, float]:
    """By how many the predicted class leads the most frequent other label, and the deviation of that by chance."""
    number = torch.bincount(given, minlength=classes).tolist()
    own = number.pop(predicted)
    rival = max(number, default=0)
    return own - rival, math.sqrt(own + rival)
