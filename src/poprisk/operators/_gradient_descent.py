"""The plainest run there is, full-batch gradient descent, as a trajectory: for examples, tests and small studies."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs
from poprisk.runs import AffineStep


@dataclass(frozen=True, eq=False)
class RecordedSteps:
    """A trajectory held in memory: weights before and after every step, the steps, and the momentum carried in."""

    all_weights: list[Float[Tensor, "d"]]
    all_steps: list[AffineStep]
    buffers: list[Float[Tensor, "d"]]

    @property
    def num_steps(self) -> int:
        return len(self.all_steps)

    def weights(self, k: int) -> Float[Tensor, "d"]:
        return self.all_weights[k]

    def step(self, k: int) -> AffineStep:
        return self.all_steps[k]

    def buffer(self, k: int) -> Float[Tensor, "d"]:
        return self.buffers[k]


def gradient_descent(model: FlatModel, inputs: Inputs, targets: Tensor, *, lr: float, steps: int) -> RecordedSteps:
    r"""Train from the module's weights by :math:`w_{k+1} = w_k - \eta \nabla L_S(w_k)` and keep every step.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False), "squared")
    >>> run = gradient_descent(model, torch.ones(1, 1), torch.zeros(1, 1), lr=0.5, steps=2)
    >>> torch.allclose(run.weights(2), run.weights(0) / 4)
    True
    """
    w = model.weights
    count = targets.shape[0]
    step = AffineStep(
        batch=torch.arange(count, device=w.device),
        selection=torch.ones(count, dtype=w.dtype, device=w.device),
        preconditioner=torch.full_like(w, lr),
    )
    weights = [w]
    for _ in range(steps):
        w = w - lr * model.per_example_gradients(w, inputs, targets).mean(0)
        weights.append(w)
    return RecordedSteps(weights, [step] * steps, [torch.zeros_like(w)] * (steps + 1))
