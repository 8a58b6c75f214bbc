r"""One step of a run, linearized in everything: weights, gradient, optimizer state, and the gradient's clipping."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk.risk._influence.batch_derivatives import BatchDerivatives
from poprisk.risk._influence.rule_jacobian import Blocks, RuleJacobian


@dataclass(frozen=True)
class StepJacobian:
    r"""What step k does to small changes; blocks have one row per direction."""

    number: int
    examples: Int[Tensor, "b"]
    """Which training examples; one drawn twice is there twice."""
    batch: BatchDerivatives
    rule: RuleJacobian
    clip: Float[Tensor, "d"] | None
    r""":math:`c` with :math:`P = I - c c^\top` the derivative of clipping; None where nothing was clipped or the factor
    is held."""

    def push(self, blocks: Blocks, source: Float[Tensor, "q b p"] | None = None) -> tuple[Blocks, Tensor]:
        """Changes before the step to changes after it, with a source in the examples' residuals; and their outputs'."""
        dg, du = self.batch.push(blocks[0], source)
        return self.rule.push(blocks, self.clipped(dg)), du

    def pull(self, blocks: Blocks) -> tuple[Blocks, Float[Tensor, "q d"], Float[Tensor, "q b p"]]:
        """Covectors after the step to those before it, to that of the gradient, and J_i times that one."""
        before, a = self.rule.pull(blocks)
        a = self.clipped(a)
        Ha, du = self.batch.push(a)
        before[0] += Ha
        return before, a, du

    def clipped(self, dg: Float[Tensor, "q d"]) -> Float[Tensor, "q d"]:
        """The change of the clipped gradient; the map is symmetric, so it is its own transpose."""
        return dg if self.clip is None else torch.addr(dg, dg @ self.clip, self.clip, alpha=-1)


def clip_direction(g: Float[Tensor, "d"], limit: float) -> Float[Tensor, "d"] | None:
    r"""The c of :class:`StepJacobian` for the gradient g after clipping to a norm.

    With :math:`g = \hat g\, c_{max} / (\|\hat g\| + 10^{-6})` a change of the factor takes out of :math:`\dot g` its
    part :math:`g \langle g, \dot g \rangle / (c_{max} \|g\|)`.

    >>> clip_direction(torch.tensor([0.0, 2.0]), 2.0)
    tensor([0., 1.])
    """
    norm = float(g.norm())
    return g / (limit * norm) ** 0.5 if norm > 0 else None
