r"""Classes of a problem: labels from its targets, scores and probabilities from its outputs."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk.runs import Problem


@dataclass(frozen=True)
class ClassView:
    """The classes of a problem, and how its outputs become scores and probabilities."""

    labels: Int[Tensor, "n"]
    num_classes: int
    loss: str
    target_shape: torch.Size
    target_dtype: torch.dtype

    def scores(self, outputs: Tensor) -> Float[Tensor, "n classes"]:
        """Logits (for the squared loss: the outputs themselves); one logit u of a binary problem becomes (0, u)."""
        flat = outputs.reshape(len(outputs), -1)
        return torch.cat([torch.zeros_like(flat), flat], 1) if self.loss == "logistic" else flat

    def probabilities(self, scores: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        """Softmax of the scores; for the squared loss the scores, clamped at 0 and divided by their sum."""
        if self.loss != "squared":
            return scores.softmax(-1)
        positive = scores.clamp_min(0)
        total = positive.sum(-1, keepdim=True)
        return torch.where(total > 0, positive / total.clamp_min(1e-30), 1 / self.num_classes)

    def as_targets(self, labels: Int[Tensor, "n"]) -> Tensor:
        """Labels in the form of the problem's targets."""
        if self.loss == "squared":
            return torch.nn.functional.one_hot(labels, self.num_classes).to(self.target_dtype)
        return labels.reshape(self.target_shape).to(self.target_dtype)


def class_view(problem: Problem, outputs: Tensor) -> ClassView | None:
    """The classes of a problem, or None where targets are not one class per example."""
    targets, n = problem.targets.cpu(), len(problem)
    width = outputs.reshape(n, -1).shape[1]
    about = (targets.shape, targets.dtype)
    whole = not targets.is_floating_point() and targets.dtype != torch.bool
    if problem.loss == "logistic" and width == 1 and bool(((targets == 0) | (targets == 1)).all()):
        return ClassView(targets.reshape(n).long(), 2, "logistic", *about)
    if problem.loss == "squared" and targets.shape == (n, width) and width > 1 and _one_hot(targets):
        return ClassView(targets.argmax(1), width, "squared", *about)
    if whole and outputs.dim() == 2 and targets.shape == (n,) and 0 <= int(targets.min()) <= int(targets.max()) < width:
        return ClassView(targets.long(), width, "softmax", *about)
    return None


def own_and_other(
    values: Float[Tensor, "n classes"], labels: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"], Int[Tensor, "n"]]:
    """The value of each example's own label, the largest value of the other classes, and the class that has it.

    >>> own_and_other(torch.tensor([[1.0, 5.0, 2.0]]), torch.tensor([2]))
    (tensor([2.]), tensor([5.]), tensor([1]))
    """
    column = labels[:, None]
    other = values.scatter(1, column, -torch.inf).max(1)
    return values.gather(1, column)[:, 0], other.values, other.indices


def _one_hot(targets: Tensor) -> bool:
    return bool(((targets == 0) | (targets == 1)).all()) and bool((targets.sum(1) == 1).all())
