r"""The derivative of one step of a run (batch, clipping, optimizer rule) by weights, gradient and optimizer state.

The derivative of an elementwise rule (SGD, Adam, the population rule with element gates) is a small table of diagonals
:math:`\partial\,\mathrm{out}/\partial\,\mathrm{in}`, so that carrying many directions takes only multiplications and
additions. A gate in AdamW's units adds means over each tensor at the end of the step, which are a linear map. A gate
pooled over rows or tensors couples coordinates; such a step is differentiated as a whole.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import jvp, vjp, vmap

from poprisk._core.autodiff import load_forward_mode
from poprisk.errors import RunError
from poprisk.risk._influence.batch_derivatives import BatchDerivatives
from poprisk.runs import FlatRule

GateMode = Literal["differentiated", "frozen"]
Blocks = list[Tensor]
"""Weights and then each state: one row per direction, [q, d] each."""
Entry = float | Tensor | None


class RuleJacobian(Protocol):
    """The derivative of an optimizer rule at one step."""

    def push(self, blocks: Blocks, dg: Float[Tensor, "q d"]) -> Blocks:
        """Directions of weights, states and gradient before the step to those of weights and states after it."""
        ...

    def pull(self, blocks: Blocks) -> tuple[Blocks, Float[Tensor, "q d"]]:
        """The transpose: covectors after the step to covectors of weights and states, and of the gradient, before."""
        ...


@dataclass(frozen=True)
class StepJacobian:
    r"""The effect of step k on small changes; blocks have one row per direction."""

    number: int
    examples: Int[Tensor, "b"]
    """Indices of the batch's training examples; one drawn twice appears twice."""
    batch: BatchDerivatives
    rule: RuleJacobian
    clip: Float[Tensor, "d"] | None
    r""":math:`c` with :math:`P = I - c c^\top` the derivative of clipping; None where nothing was clipped or the factor
    is held."""

    def push(self, blocks: Blocks, source: Float[Tensor, "q b p"] | None = None) -> tuple[Blocks, Tensor]:
        """From changes before the step and a source in the residuals: changes after it, and those of the outputs."""
        dg, du = self.batch.push(blocks[0], source)
        return self.rule.push(blocks, self.clipped(dg)), du

    def pull(self, blocks: Blocks) -> tuple[Blocks, Float[Tensor, "q d"], Float[Tensor, "q b p"]]:
        """From covectors after the step: those before it, that of the gradient, and J_i times the latter."""
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

    With :math:`g = \hat g\, c_{max} / (\|\hat g\| + 10^{-6})`, the change of the factor removes the part
    :math:`g \langle g, \dot g \rangle / (c_{max} \|g\|)` from :math:`\dot g`.

    >>> clip_direction(torch.tensor([0.0, 2.0]), 2.0)
    tensor([0., 1.])
    """
    norm = float(g.norm())
    return g / (limit * norm) ** 0.5 if norm > 0 else None


def rule_jacobian(
    rule: FlatRule,
    k: int,
    w: Float[Tensor, "d"],
    g: Float[Tensor, "d"],
    state: tuple[Tensor, ...],
    *,
    gate: GateMode = "differentiated",
) -> RuleJacobian:
    r"""The derivative of step k at the recorded weights, gradient and state.

    For a coordinate that never had a gradient, Adam's square root is not differentiable. The derivative by v is then 0
    (the coordinate does not move) and the one by g its limit :math:`-\eta/\epsilon`; neither is ever NaN. The same
    holds for a row of such coordinates (a dead unit), for which a gate pooled over the row is 0/0.

    Raises:
        RunError: the derivative is not finite at a coordinate that had gradients.
    """
    load_forward_mode()
    held = rule.gate(k, w, g, state).detach() if gate == "frozen" else None
    if rule.elementwise:
        return DiagonalJacobian(rule, k, w, g, _off_the_corner(rule, state), held)
    never = torch.stack([x.detach() == 0 for x in (g, *_moments(rule, state))]).all(0)
    return WholeJacobian(rule, k, w, g, _off_the_ratio(rule, state), held, never)


class DiagonalJacobian:
    """A table of diagonals: ``table[out][in]`` with inputs w, g and the states, outputs w and the states.

    What the rule averages over each tensor is in the table weight by weight; the averaging follows it.
    """

    def __init__(
        self, rule: FlatRule, k: int, w: Tensor, g: Tensor, state: tuple[Tensor, ...], gate: Tensor | None
    ) -> None:
        # Every output depends only on its own coordinate, so that the gradient of its sum is the diagonal. Forward mode
        # gives the same, but handles the zero tangents of numbers like ϵ in Python, which is much slower for small d.
        self._average = rule.average if rule.averaged else None
        with torch.enable_grad():
            point = [x.detach().requires_grad_() for x in (w, g, *state)]
            moved, after = rule.step(k, point[0], point[1], tuple(point[2:]), gate=gate, averages=False)
            moments = [point[1], *_moments(rule, point[2:])]
            self._table: list[list[Entry]] = [
                [None if entry is None else _cleaned(entry, moments, k) for entry in _diagonals(out, point)]
                for out in (moved, *after)
            ]

    def entries(self) -> list[Entry]:
        """The table, row by row."""
        return [entry for row in self._table for entry in row]

    def on(self, entries: Sequence[Entry]) -> "DiagonalJacobian":
        """A copy with other entries, in the order of :meth:`entries`."""
        made, width = copy.copy(self), len(self._table[0])
        made._table = [list(entries[i : i + width]) for i in range(0, len(entries), width)]
        return made

    def push(self, blocks: Blocks, dg: Float[Tensor, "q d"]) -> Blocks:
        """See :class:`RuleJacobian`."""
        ins = [blocks[0], dg, *blocks[1:]]
        w, *state = (_combined(row, ins) for row in self._table)
        return [w, *(state if self._average is None else self._average(state))]

    def pull(self, blocks: Blocks) -> tuple[Blocks, Float[Tensor, "q d"]]:
        """See :class:`RuleJacobian`."""
        if self._average is not None:
            blocks = [blocks[0], *self._average(blocks[1:])]
        w, g, *state = (_combined(list(column), blocks) for column in zip(*self._table, strict=True))
        return [w, *state], g


class WholeJacobian:
    """The derivative of any rule, by automatic differentiation; ``never`` marks coordinates without gradients."""

    def __init__(
        self,
        rule: FlatRule,
        k: int,
        w: Tensor,
        g: Tensor,
        state: tuple[Tensor, ...],
        gate: Tensor | None,
        never: Bool[Tensor, "d"],
    ) -> None:
        self._point, self._number, self._never = (w, g, *state), k, never

        def step(*x: Tensor) -> tuple[Tensor, ...]:
            moved, after = rule.step(k, x[0], x[1], tuple(x[2:]), gate=gate)
            return (moved, *after)

        self._step = step

    def push(self, blocks: Blocks, dg: Float[Tensor, "q d"]) -> Blocks:
        """See :class:`RuleJacobian`."""
        ins = (blocks[0], dg, *blocks[1:])
        return self._settled(vmap(lambda *v: jvp(self._step, self._point, v)[1])(*ins), ins)

    def pull(self, blocks: Blocks) -> tuple[Blocks, Float[Tensor, "q d"]]:
        """See :class:`RuleJacobian`."""
        pullback = vjp(self._step, *self._point)[1]
        w, g, *state = self._settled(vmap(lambda *c: pullback(c))(*blocks), blocks)
        return [w, *state], g

    def _settled(self, found: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        """Values that are not finite become 0 where a coordinate never moved, and are refused elsewhere."""
        if all(bool(x.isfinite().all()) for x in found):
            return list(found)
        clean = [torch.where(self._never & ~x.isfinite(), 0.0, x) for x in found]
        # Directions that have grown without bound are due to the chaos of the run, not to this step.
        room = torch.finfo(clean[0].dtype).max ** 0.5
        ordinary = torch.stack([(x.abs() < room).all(1) for x in given]).all(0)
        for x in clean:
            bad = (~x.isfinite() & ordinary[:, None]).any(0)
            if bool(bad.any()):
                raise RunError(_not_finite(self._number, int(bad.nonzero()[0])))
        return clean


def _diagonals(out: Tensor, point: list[Tensor]) -> Sequence[Tensor | None]:
    """The derivative of every entry of ``out`` by the same entry of each input; None where it does not depend on it."""
    if not out.requires_grad:
        return [None] * len(point)
    return torch.autograd.grad(out.sum(), point, retain_graph=True, allow_unused=True)


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
    """The diagonal, 0 where it is not finite and the coordinate never moved; None if all 0, a float if all equal."""
    low, high = (float(x) for x in entry.aminmax())
    if not math.isfinite(low + high):
        never = torch.stack([x.detach().abs() < _corner(x.dtype) * 2 for x in moments]).all(0)
        entry = torch.where(never & ~entry.isfinite(), 0.0, entry)
        low, high = (float(x) for x in entry.aminmax())
    if not math.isfinite(low + high):
        worst = int((~entry.isfinite()).nonzero()[0])
        raise RunError(_not_finite(k, worst))
    if low == high:
        return None if low == 0 else low
    return entry


def _not_finite(k: int, weight: int) -> str:
    return (
        f"the derivative of step {k} is not finite at weight {weight}, whose moments are too small for this dtype: use "
        "dtype=torch.float64"
    )


def _corner(dtype: torch.dtype) -> float:
    """A second moment small enough not to change any step, and large enough for 1/√v to be finite."""
    return 1e4 * torch.finfo(dtype).tiny


def _moments(rule: FlatRule, state: Sequence[Tensor]) -> list[Tensor]:
    """The states that are 0 for a coordinate that never had a gradient: not the means over its tensor."""
    return [x for name, x in zip(rule.state_names, state, strict=True) if name not in rule.averaged]


def _off_the_corner(rule: FlatRule, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Replace second moments of exactly 0 by a tiny number, so that derivatives are those of the limit."""
    named = zip(rule.state_names, state, strict=True)
    return tuple(torch.where(x == 0, _corner(x.dtype), x) if name == "v" else x for name, x in named)


def _off_the_ratio(rule: FlatRule, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Replace moments of exactly 0 by tiny numbers, so that a pooled gate is not 0/0 and stays closed."""
    corner = _corner(state[0].dtype)
    noise = corner / torch.finfo(state[0].dtype).eps
    tiny = {"m": corner**0.5, "v": noise, "s": noise}
    named = zip(rule.state_names, state, strict=True)
    return tuple(torch.where(x == 0, tiny[name], x) if name in tiny else x for name, x in named)
