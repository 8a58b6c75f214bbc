r"""The change of an example's outputs had it been absent from a training, in the space of outputs.

Between two recorded steps the outputs u of m examples follow :math:`\dot u = -\frac{c}{n} K\, r(u)`, with the tangent
kernel K of a step, the residuals :math:`r = \nabla_u \ell`, and c = n/m examples for each of those used. The difference
:math:`\Delta^{(i)}` of a training without example i, or a group i of examples with equal inputs, from the recorded one
follows, with :math:`\Lambda = \nabla_u^2 \ell` along the recorded outputs,

.. math:: \dot\Delta^{(i)} = -\tfrac{c}{n} K_{:,-i} \Lambda_{-i} \Delta^{(i)}_{-i} + \tfrac1n K_{:,i}\, r_i

The curvature of the network itself is left out: what is left contracts, so that no step is chaotic. Momentum β gives
:math:`\dot\Delta` an inertia of β/(1 - β) steps. Every step is implicit.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.autodiff import ExampleLoss, loss_gradients, loss_hessians
from poprisk.risk._leverage.tangents import Tangent

_PARTS = 2
"""Implicit steps between two moments."""


class Absence:
    """Carries the change of all outputs without each group of examples from one moment to the next.

    Args:
        loss: The problem's loss.
        targets: Targets of the m examples.
        shape: Shape of one example's outputs.
        n: Number of training examples that they stand for.
        groups: The group of each example, from 0 on; those of one group are left out together.
    """

    def __init__(
        self,
        loss: str | ExampleLoss,
        targets: Tensor,
        shape: tuple[int, ...],
        n: int,
        groups: Int[Tensor, "m"],
    ) -> None:
        self.loss, self.targets, self.shape, self.n, self.groups = loss, targets, shape, n, groups
        self.share = n / len(targets)

    @cached_property
    def _together(self) -> list[tuple[Int[Tensor, "g"], Int[Tensor, "g k"]]]:
        """Groups of the same size k: their numbers and their examples."""
        sizes, order = torch.bincount(self.groups), self.groups.argsort(stable=True)
        first = sizes.cumsum(0) - sizes
        found = []
        for k in sizes.unique().tolist():
            of_size = (sizes == k).nonzero().squeeze(1)
            found.append((of_size, order[first[of_size, None] + torch.arange(k)]))
        return found

    def along(self, moments: Sequence[Tangent]) -> Iterator[tuple[Float[Tensor, "m p"], Float[Tensor, "m p"]]]:
        """At each moment after the first: the change of each example's own outputs, followed and by the last moment."""
        m, p = moments[0].outputs.shape
        change = torch.zeros(m * p, int(self.groups.max()) + 1, dtype=moments[0].kernel.dtype)
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
            # The whole path as one implicit step: approximate leave-one-out by the leverages of the last moment.
            yield self._own(change), self._own(self._advance(torch.zeros_like(change), path, after.outputs))

    def _advance(self, change: Tensor, kernel: Tensor, outputs: Float[Tensor, "m p"]) -> Tensor:
        m, p = outputs.shape
        residuals, response, curvature = self._responses(kernel, outputs)
        solved = torch.linalg.solve(response, torch.cat([kernel, change], 1))
        reach, moved = solved[:, : m * p], solved[:, m * p :]
        own, absent = reach.view(m, p, m, p), torch.zeros(m, p, len(moved[0])).to(moved)
        for numbers, examples in self._together:
            count, k = examples.shape
            bend = curvature[examples]
            missing = residuals[examples] + (bend @ self._at(moved, examples, numbers)).squeeze(3)
            among = own[examples[:, :, None], :, examples[:, None, :]].transpose(2, 3)  # g k p k p
            among = (bend @ among.reshape(count, k, p, k * p)).reshape(count, k * p, k * p)
            missing = torch.linalg.solve(torch.eye(k * p).to(among) - among, missing.reshape(count, k * p))
            absent[examples, :, numbers[:, None]] = missing.view(count, k, p)
        return moved + reach @ absent.view(m * p, -1)

    def _responses(self, kernel: Tensor, outputs: Float[Tensor, "m p"]) -> tuple[Tensor, Tensor, Tensor]:
        """Residuals, I + c K Λ, and c Λ."""
        m, p = outputs.shape
        shaped = outputs.reshape(m, *self.shape)
        residuals = loss_gradients(self.loss, shaped, self.targets).reshape(m, p)
        curvature = self.share * loss_hessians(self.loss, shaped, self.targets)
        response = (kernel.view(-1, m, 1, p) @ curvature.to(kernel)).reshape(m * p, m * p)
        response.diagonal().add_(1)
        return residuals.to(kernel), response, curvature.to(kernel)

    def _at(self, change: Tensor, examples: Tensor, numbers: Tensor) -> Float[Tensor, "g k p 1"]:
        """The change of these examples' outputs without each of these groups."""
        return change.view(len(self.groups), -1, change.shape[1])[examples, :, numbers[:, None]].unsqueeze(3)

    def _own(self, change: Tensor) -> Float[Tensor, "m p"]:
        every = torch.arange(len(self.groups))
        return change.view(len(every), -1, change.shape[1])[every, :, self.groups].contiguous()
