r"""Kinks along a step: where a piecewise linear activation of an example changes its piece, and averages between them.

On a network of ReLUs the Jacobian jumps wherever a unit of an example switches on or off, and Gauss–Legendre sums over
the whole step converge slowly. Between the jumps they are exact.
"""

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.autodiff.products import Inputs, take_examples
from poprisk._core.autodiff.quadrature import gauss_legendre

_ROUNDS = 100
_WIDTH = 2.0**-50
_NUMBERS = 2**23
"""Entries of the weight vectors, one for each example, that are worked on at a time."""
_AT_ZERO = ("relu", "leaky_relu", "_prelu_kernel", "abs", "threshold")
_BETWEEN = ("hardtanh", "clamp", "clamp_min", "clamp_max")


class _Pieces(TorchDispatchMode):
    """Notes on which piece every unit of every example is, and how far from the next: a change of sign is a kink."""

    def __init__(self, examples: int) -> None:
        super().__init__()
        self._examples = examples
        self.distances: list[Tensor] = []
        self.choices: list[Tensor] = []
        """What a maximum has chosen: it has no distance."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _AT_ZERO:
            self._note(self.distances, args[0] - (args[1] if name == "threshold" else 0.0))
        elif name in _BETWEEN:
            limits = [x for x in (*args[1:3], *(kwargs or {}).values()) if isinstance(x, int | float)]
            for limit in limits or ((-1.0, 1.0) if name == "hardtanh" else ()):
                self._note(self.distances, args[0] - limit)
        elif name in ("maximum", "minimum"):
            self._note(self.distances, args[0] - args[1])
        elif name.startswith("max_pool") and isinstance(out, tuple):
            self._note(self.choices, out[1])
        return out

    def _note(self, noted: list[Tensor], values: Tensor) -> None:
        if values.shape[:1] == (self._examples,):
            noted.append(values.reshape(self._examples, -1))


def _look(
    model: FlatModel, w: Tensor, step: Tensor, inputs: Inputs, index: Tensor, at: Tensor
) -> tuple[Tensor, Tensor]:
    """Distances of the units, and their pieces, of examples ``index`` at their own places on the segment."""
    distances, pieces = [], []
    for rows in torch.arange(len(index), device=w.device).split(max(1, _NUMBERS // len(w))):
        with torch.no_grad(), _Pieces(len(rows)) as seen:
            model.outputs(w + at[rows, None] * step, take_examples(inputs, index[rows]))
        none = w.new_zeros(len(rows), 0)
        far = torch.cat([none, *seen.distances], dim=1)
        distances.append(far)
        pieces.append(torch.cat([(far > 0).long(), none.long(), *seen.choices], dim=1))
    return torch.cat(distances), torch.cat(pieces)


def find_kinks(
    model: FlatModel,
    w: Float[Tensor, "d"],
    step: Float[Tensor, "d"],
    inputs: Inputs,
    examples: Int[Tensor, "m"],
    cells: int,
) -> dict[int, list[float]]:
    """The places θ on w + θ step at which an example changes its piece, for those that do.

    The segment is cut into ``cells``; a unit that switches there and back within one of them is not seen.
    """
    count = len(examples)
    grid = torch.linspace(0, 1, cells + 1, dtype=w.dtype, device=w.device)
    looks = [_look(model, w, step, inputs, examples, at.expand(count)) for at in grid]
    found: dict[int, list[float]] = {}
    parts = []  # index, interval, and distances and pieces at its two ends
    for k in range(cells):
        (far_a, a), (far_b, b) = looks[k], looks[k + 1]
        m = (a != b).any(1)
        ends = grid[k].expand(int(m.sum())), grid[k + 1].expand(int(m.sum()))
        parts.append((examples[m], *ends, far_a[m], far_b[m], a[m], b[m]))
    open_ = [torch.cat(each) for each in zip(*parts, strict=True)]
    for turn in range(_ROUNDS):
        index, a, b, far_a, far_b, at_a, at_b = open_
        if not len(index):
            break
        middle = _place(turn, a, b, far_a, far_b)
        far, here = _look(model, w, step, inputs, index, middle)
        near = (b - a <= _WIDTH) | _on_kink(far, far_a, far_b)
        for i, theta in zip(index[near].tolist(), middle[near].tolist(), strict=True):
            found.setdefault(i, []).append(theta)
        left = (here != at_a).any(1) & ~near  # a switch between a and here; a second one may be on the right
        right = (here != at_b).any(1) & ~near
        halves = [(index, a, middle, far_a, far, at_a, here), (index, middle, b, far, far_b, here, at_b)]
        open_ = [torch.cat([x[left], y[right]]) for x, y in zip(*halves, strict=True)]
    return {i: sorted(places) for i, places in found.items()}


def _place(turn: int, a: Tensor, b: Tensor, far_a: Tensor, far_b: Tensor) -> Tensor:
    """The middle of each interval; every other time the zero of the chord of a unit that switches."""
    middle = (a + b) / 2
    if turn % 2 == 0 or not far_a.shape[1]:
        return middle
    switches = (far_a > 0) != (far_b > 0)
    unit = switches.long().argmax(1, keepdim=True)
    x, y = far_a.gather(1, unit)[:, 0], far_b.gather(1, unit)[:, 0]
    chord = a + (b - a) * (x / (x - y))
    return torch.where(switches.sum(1) == 1, chord.clamp(a, b), middle).nan_to_num(nan=0.5)


def _on_kink(far: Tensor, far_a: Tensor, far_b: Tensor) -> Tensor:
    """Whether the only unit that switches is at its kink to rounding."""
    switches = (far_a > 0) != (far_b > 0)
    scale = torch.finfo(far.dtype).eps * far.abs().amax(1, keepdim=True) if far.shape[1] else far
    return (switches.sum(1) == 1) & ((far.abs() <= scale) & switches).any(1)


def average_between(
    model: FlatModel,
    w: Float[Tensor, "d"],
    step: Float[Tensor, "d"],
    inputs: Inputs,
    kinks: dict[int, list[float]],
    nodes: int,
) -> Float[Tensor, "m p d"]:
    """The mean Jacobian of each of these examples, by Gauss–Legendre sums between its kinks."""
    index, at, share = [], [], []
    for i, places in kinks.items():
        ends = [0.0, *places, 1.0]
        for a, b in pairwise(ends):
            for theta, weight in gauss_legendre(nodes):
                index.append(i)
                at.append(a + (b - a) * theta)
                share.append((b - a) * weight)
    place = {i: k for k, i in enumerate(kinks)}
    rows = torch.tensor([place[i] for i in index], device=w.device)
    where, shares = (torch.tensor(x, dtype=w.dtype, device=w.device) for x in (at, share))
    chosen, total = torch.tensor(index, device=w.device), None
    for part in torch.arange(len(index), device=w.device).split(max(1, _NUMBERS // len(w))):
        J = model.output_jacobian(w + where[part, None] * step, take_examples(inputs, chosen[part]))
        total = w.new_zeros(len(kinks), *J.shape[1:]) if total is None else total
        total.index_add_(0, rows[part], J * shares[part, None, None])
    assert total is not None
    return total
