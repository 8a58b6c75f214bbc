r"""Averages of each example's outputs over the training, in memory that does not grow with the number of evaluations.

Each evaluation is weighted by the number of steps since the one before, so that early evaluations, which lie close
together, do not count for more.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.risk._classes import ClassView, own_and_other


class ClassHistory:
    r"""Margins, probabilities and forgetting events of examples with one label each.

    With time averages :math:`\langle\cdot\rangle`, scores :math:`u`, probabilities :math:`p`, given label y:
    AUM :math:`\langle u_y - \max_{j \ne y} u_j \rangle` (Pleiss et al., 2020), confidence :math:`\langle p_y \rangle`
    and variability :math:`\sqrt{\langle p_y^2 \rangle - \langle p_y \rangle^2}` (Swayamdipta et al., 2020). A
    forgetting event (Toneva et al., 2019) is a right prediction at one evaluation and a wrong one at the next.
    """

    def __init__(self, view: ClassView) -> None:
        self.view = view
        n = len(view.labels)
        self.total = 0.0
        self.probabilities = torch.zeros(n, view.num_classes)
        self.predictions: list[Tensor] = []
        """The predicted class of every example, at each step."""
        self.margin, self.prediction = torch.zeros(n), view.labels
        self._margins, self._own, self._own_squared, self._right = (torch.zeros(n, dtype=torch.float64) for _ in "muor")
        self._was_right = torch.zeros(n, dtype=torch.bool)
        self.forgotten = torch.zeros(n, dtype=torch.long)

    def add(self, outputs: Tensor, share: float) -> None:
        """Add the outputs at one more step, weighted by a share of the training."""
        scores = self.view.scores(outputs).float()
        p = self.view.probabilities(scores)
        own_score, other_score, _ = own_and_other(scores, self.view.labels)
        own = p.gather(1, self.view.labels[:, None])[:, 0].double()
        self.margin, self.prediction = own_score - other_score, scores.argmax(1)
        right = self.prediction == self.view.labels
        self._margins += share * self.margin.double()
        self._own += share * own
        self._own_squared += share * own.square()
        self._right += share * right
        self.forgotten += self._was_right & ~right
        self._was_right = right
        self.probabilities += share * p
        self.total += share
        self.predictions.append(self.prediction.to(torch.int32))

    @property
    def mean_probabilities(self) -> Float[Tensor, "n classes"]:
        """Probabilities averaged over the training so far."""
        return self.probabilities / self.total

    @property
    def columns(self) -> dict[str, Tensor]:
        """Columns of the table by name."""
        confidence = self._own / self.total
        return {
            "predicted_label": self.prediction,
            "margin": self.margin,
            "aum": self._margins / self.total,
            "confidence": confidence,
            "variability": (self._own_squared / self.total - confidence.square()).clamp_min(0).sqrt(),
            "correctness": self._right / self.total,
            "forgetting_events": self.forgotten,
        }


class ResidualHistory:
    """Residuals and mean predictions of a regression."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets.reshape(len(targets), -1).double()
        self.total = 0.0
        self.residual = torch.zeros(len(targets), dtype=torch.float64)
        self._residuals, self._predictions = torch.zeros_like(self.residual), torch.zeros_like(self.targets)

    def add(self, outputs: Tensor, share: float) -> None:
        """Add the outputs at one more step, weighted by a share of the training."""
        predictions = outputs.reshape(len(outputs), -1).double()
        self.residual = (predictions - self.targets).norm(dim=1)
        self._residuals += share * self.residual
        self._predictions += share * predictions
        self.total += share

    @property
    def mean_predictions(self) -> Float[Tensor, "n outputs"]:
        """Predictions averaged over the training."""
        return self._predictions / self.total

    @property
    def columns(self) -> dict[str, Tensor]:
        """Columns of the table by name."""
        mean = self._residuals / self.total
        return {"residual": self.residual, "mean_residual": mean, "residual_z": robust_z(mean)}


def robust_z(values: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    r"""Distance above the median in robust standard deviations, :math:`1.4826 \operatorname{median}|v - \tilde v|`.

    >>> robust_z(torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0]))[-1] > 60
    tensor(True)
    """
    centre = values.median()
    deviation = 1.4826 * (values - centre).abs().median()
    return (values - centre) / deviation.clamp_min(torch.finfo(values.dtype).tiny)


def rank_share(scores: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Ranks from 1/n (lowest score) to 1 (highest); equal scores share the mean of their ranks, NaN counts as highest.

    >>> rank_share(torch.tensor([3.0, 1.0, 3.0, 2.0]))
    tensor([0.8750, 0.2500, 0.8750, 0.5000], dtype=torch.float64)
    """
    values = scores.double().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    _, place, number = torch.unique(values, return_inverse=True, return_counts=True)
    last = number.cumsum(0).double()
    return ((last - (number - 1) / 2) / len(values))[place]
