r"""The change of an example's outputs had it been absent from a training, in the space of outputs.

Between two recorded steps the outputs u of m examples follow :math:`\dot u = -\frac{c}{n} K\, r(u)`, with the tangent
kernel K of a step, the residuals :math:`r = \nabla_u \ell`, and c = n/m examples for each of those used. The difference
:math:`\Delta^{(i)}` of a training without example i from the recorded one follows, with :math:`\Lambda = \nabla_u^2
\ell` along the recorded outputs,

.. math:: \dot\Delta^{(i)} = -\tfrac{c}{n} K_{:,-i} \Lambda_{-i} \Delta^{(i)}_{-i} + \tfrac1n K_{:,i}\, r_i

The curvature of the network itself is left out: what is left contracts, so that no step is chaotic. Momentum β gives
:math:`\dot\Delta` an inertia of β/(1 - β) steps. Every step is implicit.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import ExampleLoss, loss_gradients, loss_hessians
from poprisk.risk._leverage.tangents import Tangent

_PARTS = 2
"""Implicit steps between two moments."""


class Absence:
    """Carries the change of all outputs without each example from one moment to the next.

    Args:
        loss: The problem's loss.
        targets: Targets of the m examples.
        shape: Shape of one example's outputs.
        n: Number of training examples that they stand for.
    """

    def __init__(self, loss: str | ExampleLoss, targets: Tensor, shape: tuple[int, ...], n: int) -> None:
        self.loss, self.targets, self.shape, self.n = loss, targets, shape, n
        self.share = n / len(targets)

    def along(self, moments: Sequence[Tangent]) -> Iterator[tuple[Float[Tensor, "m p"], Float[Tensor, "m p"]]]:
        """At each moment after the first: the change of each example's own outputs, followed and by the last moment."""
        m, p = moments[0].outputs.shape
        change = torch.zeros(m * p, m, dtype=moments[0].kernel.dtype)
        velocity, path = torch.zeros_like(change), torch.zeros_like(moments[0].kernel)
        for before, after in pairwise(moments):
            kernel = (before.kernel + after.kernel) / 2
            steps = after.step - before.step
            path += kernel * (steps / self.n)
            length, inertia = steps / _PARTS, (before.inertia + after.inertia) / 2
            for part in range(_PARTS):
                outputs = torch.lerp(before.outputs, after.outputs, (part + 0.5) / _PARTS)
                fresh = length / (length + inertia)  # share of the velocity that is new
                start = change + (1 - fresh) * length * velocity
                moved = self._advance(start, kernel * (fresh * length / self.n), outputs)
                velocity, change = (moved - change) / length, moved
                change = change * (1 - (before.decay + after.decay) / 2) ** length
            yield self._own(change, m), self._at_once(path, after.outputs)

    def _advance(self, change: Tensor, kernel: Tensor, outputs: Float[Tensor, "m p"]) -> Tensor:
        m, p = outputs.shape
        residuals, response, curvature = self._responses(kernel, outputs)
        solved = torch.linalg.solve(response, torch.cat([kernel, change], 1))
        reach, changed = solved[:, : m * p], solved[:, m * p :]
        own = self._blocks(reach, m)
        missing = residuals + (curvature @ self._own(changed, m).unsqueeze(2)).squeeze(2)
        missing = torch.linalg.solve(torch.eye(p).to(own) - curvature @ own, missing)
        return changed + torch.einsum("xip,ip->xi", reach.view(m * p, m, p), missing)

    def _at_once(self, path: Tensor, outputs: Float[Tensor, "m p"]) -> Float[Tensor, "m p"]:
        """The whole path as one implicit step: approximate leave-one-out by the leverages of the last moment."""
        return self._own(self._advance(torch.zeros_like(path[:, : len(outputs)]), path, outputs), len(outputs))

    def _responses(self, kernel: Tensor, outputs: Float[Tensor, "m p"]) -> tuple[Tensor, Tensor, Tensor]:
        """Residuals, I + c K Λ, and c Λ."""
        m, p = outputs.shape
        shaped = outputs.reshape(m, *self.shape)
        residuals = loss_gradients(self.loss, shaped, self.targets).reshape(m, p)
        curvature = self.share * loss_hessians(self.loss, shaped, self.targets)
        response = (kernel.view(-1, m, 1, p) @ curvature.to(kernel)).reshape(m * p, m * p)
        response.diagonal().add_(1)
        return residuals.to(kernel), response, curvature.to(kernel)

    @staticmethod
    def _own(change: Tensor, m: int) -> Float[Tensor, "m p"]:
        return change.view(m, -1, m).diagonal(dim1=0, dim2=2).T.contiguous()

    @staticmethod
    def _blocks(matrix: Tensor, m: int) -> Float[Tensor, "m p p"]:
        return matrix.view(m, -1, m, matrix.shape[1] // m).diagonal(dim1=0, dim2=2).movedim(2, 0).contiguous()
