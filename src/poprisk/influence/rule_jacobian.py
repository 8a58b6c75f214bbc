r"""The derivative of one optimizer step: how new weights and states respond to old weights, gradient and old states.

Rules that treat every coordinate alone (SGD, Adam, the population rule with element gates) have diagonals only, a
small table of vectors :math:`\partial\,\mathrm{out}/\partial\,\mathrm{in}`, and carrying many directions is
multiplying and adding. A gate pooled over rows or tensors couples coordinates; those steps are differentiated whole.
"""

import math
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp, vjp, vmap

from poprisk.autodiff.ways import load_forward_mode
from poprisk.errors import RunError
from poprisk.runs.flat_rule import FlatRule

GateMode = Literal["differentiated", "frozen"]
Blocks = list[Tensor]
"""Weights and then each state: one row per direction, [q, d] each."""
Entry = float | Tensor | None


class RuleJacobian(Protocol):
    """What is needed of a step's derivative."""

    def push(self, blocks: Blocks, dg: Float[Tensor, "q d"]) -> Blocks:
        """Directions of weights, states and gradient before the step to those of weights and states after it."""
        ...

    def pull(self, blocks: Blocks) -> tuple[Blocks, Float[Tensor, "q d"]]:
        """The transpose: covectors after the step to covectors of weights and states, and of the gradient, before."""
        ...


def rule_jacobian(
    rule: FlatRule,
    k: int,
    w: Float[Tensor, "d"],
    g: Float[Tensor, "d"],
    state: tuple[Tensor, ...],
    *,
    gate: GateMode = "differentiated",
) -> RuleJacobian:
    r"""The derivative of step k at the numbers it was taken with.

    A coordinate that never had a gradient stands at the corner of Adam's square root. There the derivative by v has
    no meaning and is 0 (the coordinate does not move), and the one by g is the limit :math:`-\eta/\epsilon`; neither
    is ever NaN.

    Raises:
        RunError: the derivative is not finite at a coordinate that had gradients.
    """
    load_forward_mode()
    held = rule.gate(k, w, g, state).detach() if gate == "frozen" else None
    lifted = _off_the_corner(rule, state)
    if rule.elementwise:
        return DiagonalJacobian(rule, k, w, g, lifted, held)
    return WholeJacobian(rule, k, w, g, lifted, held)


class DiagonalJacobian:
    """A table of diagonals: ``table[out][in]`` with inputs w, g and the states, outputs w and the states."""

    def __init__(
        self, rule: FlatRule, k: int, w: Tensor, g: Tensor, state: tuple[Tensor, ...], gate: Tensor | None
    ) -> None:
        point = [x.detach() for x in (w, g, *state)]
        count = len(point)
        # Every output depends on its own coordinate alone: one member per input, moved by ones in that input.
        with forward_ad.dual_level():
            duals = []
            for i, x in enumerate(point):
                tangent = x.new_zeros(count, len(x))
                tangent[i] = 1.0
                duals.append(forward_ad.make_dual(x.repeat(count, 1), tangent))
            held = None if gate is None else gate.expand(count, -1)
            moved, after = rule.step(k, duals[0], duals[1], tuple(duals[2:]), gate=held)
            slopes = [forward_ad.unpack_dual(out).tangent for out in (moved, *after)]
        self._table: list[list[Entry]] = [
            [None] * count if slope is None else [_cleaned(entry, point[1:], k) for entry in slope] for slope in slopes
        ]

    def push(self, blocks: Blocks, dg: Float[Tensor, "q d"]) -> Blocks:
        """See :class:`RuleJacobian`."""
        ins = [blocks[0], dg, *blocks[1:]]
        return [_combined(row, ins) for row in self._table]

    def pull(self, blocks: Blocks) -> tuple[Blocks, Float[Tensor, "q d"]]:
        """See :class:`RuleJacobian`."""
        w, g, *state = (_combined(list(column), blocks) for column in zip(*self._table, strict=True))
        return [w, *state], g


class WholeJacobian:
    """Any rule, by forward and reverse mode through the step as it is."""

    def __init__(
        self, rule: FlatRule, k: int, w: Tensor, g: Tensor, state: tuple[Tensor, ...], gate: Tensor | None
    ) -> None:
        self._point = (w, g, *state)

        def step(*x: Tensor) -> tuple[Tensor, ...]:
            moved, after = rule.step(k, x[0], x[1], tuple(x[2:]), gate=gate)
            return (moved, *after)

        self._step = step

    def push(self, blocks: Blocks, dg: Float[Tensor, "q d"]) -> Blocks:
        """See :class:`RuleJacobian`."""
        ins = (blocks[0], dg, *blocks[1:])
        return list(vmap(lambda *v: jvp(self._step, self._point, v)[1])(*ins))

    def pull(self, blocks: Blocks) -> tuple[Blocks, Float[Tensor, "q d"]]:
        """See :class:`RuleJacobian`."""
        pullback = vjp(self._step, *self._point)[1]
        w, g, *state = vmap(lambda *c: pullback(c))(*blocks)
        return [w, *state], g


def _combined(entries: list[Entry], blocks: Blocks) -> Tensor:
    """Σ entry · block; every row of a block is multiplied by the same diagonal."""
    out: Tensor | None = None
    for entry, block in zip(entries, blocks, strict=True):
        if entry is None:
            continue
        if out is None:
            out = block * entry
        elif isinstance(entry, Tensor):
            out.addcmul_(block, entry)
        else:
            out.add_(block, alpha=entry)
    return torch.zeros_like(blocks[0]) if out is None else out


def _cleaned(entry: Tensor, moments: list[Tensor], k: int) -> Entry:
    """The diagonal, 0 where a coordinate never moved and it is not finite; None if all are 0, a float if all equal."""
    low, high = (float(x) for x in entry.aminmax())
    if not math.isfinite(low + high):
        never = torch.stack([x.detach().abs() < _corner(x.dtype) * 2 for x in moments]).all(0)
        entry = torch.where(never & ~entry.isfinite(), 0.0, entry)
        low, high = (float(x) for x in entry.aminmax())
    if not math.isfinite(low + high):
        worst = int((~entry.isfinite()).nonzero()[0])
        raise RunError(
            f"the derivative of step {k} by the numbers it was taken with is not finite at weight {worst}: its second "
            "moment is too small for this dtype; use dtype=torch.float64"
        )
    if low == high:
        return None if low == 0 else low
    return entry


def _corner(dtype: torch.dtype) -> float:
    """A second moment so small that it changes no step, and large enough that 1/√v is a number."""
    return 1e4 * torch.finfo(dtype).tiny


def _off_the_corner(rule: FlatRule, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Second moments that are exactly 0 become tiny: derivatives are then those of the limit."""
    named = zip(rule.state_names, state, strict=True)
    return tuple(torch.where(x == 0, _corner(x.dtype), x) if name == "v" else x for name, x in named)
