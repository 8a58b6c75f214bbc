r"""Rows of a Jacobian divided by their norms, rounded, and laid out in panels that multiply fast.

A panel holds some thousand columns of all rows, contiguous in memory: products of two panels read contiguous memory,
and their sums are short enough to keep their digits although tensor cores truncate sums. Factors of layers stay in full
precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel
from poprisk.operators._kernels.features import Factors, Features, Recipe, contract, joined
from poprisk.operators._kernels.precision import Precision, float32_products, whole_sums

# Columns of a panel: longer ones lose digits in their sums, shorter ones time in writing them down.
PANEL = 16384
# Widths are multiples of this, as tensor cores like them.
_ALIGN = 16
# Columns of short numbers that a CPU multiplies at a time, as float32.
STRIP = 1024
# Pieces narrower than this are put together.
_NARROW = 4096


@dataclass(frozen=True)
class PanelLayout:
    """How pieces of given sizes, side by side, are cut into panels."""

    sizes: tuple[int, ...]
    """Columns of each stretch: pieces put together, or one wide piece."""
    groups: tuple[tuple[int, ...], ...]
    """Which pieces make each stretch."""

    def shape(self, stretch: int) -> tuple[int, int]:
        """Number of panels of a stretch, and their width."""
        size = self.sizes[stretch]
        panels = max(1, -(-size // PANEL))
        width = -(-max(1, -(-size // panels)) // _ALIGN) * _ALIGN
        return panels, width

    @property
    def columns(self) -> int:
        """Number of stored columns, including padding."""
        shapes = [self.shape(i) for i in range(len(self.sizes))]
        return sum(panels * width for panels, width in shapes)

    @property
    def width(self) -> int:
        """Width of the widest panel."""
        return max((self.shape(i)[1] for i in range(len(self.sizes))), default=1)


def panel_layout(pieces: Sequence[int]) -> PanelLayout:
    """Puts wide pieces into panels of their own and narrow ones together.

    >>> layout = panel_layout([64, 40000, 64])
    >>> layout.groups, layout.sizes, [layout.shape(i) for i in range(2)]
    (((1,), (0, 2)), (40000, 128), [(3, 13344), (1, 128)])
    """
    groups = [(i,) for i, size in enumerate(pieces) if size >= _NARROW]
    narrow = tuple(i for i, size in enumerate(pieces) if 0 < size < _NARROW)
    groups += [narrow] if narrow else []
    return PanelLayout(tuple(sum(pieces[i] for i in group) for group in groups), tuple(groups))


def row_layout(model: FlatModel, recipe: Recipe) -> PanelLayout:
    """The panels of a model's rows."""
    sizes = [model.parameters[name].numel() for name in recipe.structure.plain]  # in the order of feature_pieces
    for layer in recipe.unfolded:
        sizes += [layer.inputs * layer.outputs, *([layer.outputs] if layer.bias else [])]
    return panel_layout(sizes or [0])


@dataclass(frozen=True, eq=False)
class RoundedRows:
    """The features of b examples with rounded rows; created empty, filled a few examples at a time."""

    precision: Precision
    layout: PanelLayout
    panels: tuple[tuple[Tensor, ...], ...]
    """The parts of each stretch (one, or hi and lo), each [panels, b p, width]."""
    norms: Float[Tensor, "bp"]
    rest: list[Features]
    """Factors, in the order in which they were filled in."""

    @staticmethod
    def empty(precision: Precision, layout: PanelLayout, rows: int, device: torch.device) -> "RoundedRows":
        """Allocates space for a number of rows."""
        stretches = []
        for stretch, size in enumerate(layout.sizes):
            panels, width = layout.shape(stretch)
            parts = []
            for _ in range(precision.parts):
                room = torch.empty(panels, rows, width, dtype=precision.dtype, device=device)
                if panels * width > size:
                    room[-1].zero_()
                parts.append(room)
            stretches.append(tuple(parts))
        return RoundedRows(precision, layout, tuple(stretches), torch.empty(rows, device=device), [])

    def fill(self, start: int, pieces: Sequence[Float[Tensor, "b p _"]], factors: tuple[Factors, ...]) -> None:
        """Rounds the rows of some examples into place; ``start`` counts rows."""
        b, p = pieces[0].shape[:2]
        flat = [piece.reshape(b * p, -1) for piece in pieces]
        squares = torch.stack([torch.linalg.vector_norm(piece, dim=1).square() for piece in flat])
        norms = squares.sum(0).sqrt()
        factor = torch.where(norms > 0, self.precision.norm / norms, 0.0)[:, None]
        at = slice(start, start + b * p)
        self.norms[at] = norms
        for group, parts, stretch in zip(self.layout.groups, self.panels, range(len(self.panels)), strict=True):
            piece = flat[group[0]] if len(group) == 1 else torch.cat([flat[i] for i in group], dim=1)
            self._round(piece, factor, [part[:, at] for part in parts], self.layout.shape(stretch)[1])
        kept = tuple(Factors.joined((each,)) for each in factors)  # copies: the originals may be overwritten
        self.rest.append(Features(pieces[0].new_empty(b, p, 0), kept))

    def _round(self, piece: Tensor, factor: Tensor, parts: list[Tensor], width: int) -> None:
        whole = piece.shape[1] // width
        left = piece.shape[1] - whole * width
        if whole:
            source = piece[:, : whole * width].view(len(piece), whole, width)
            _store(source, factor[:, :, None], [part[:whole].transpose(0, 1) for part in parts])
        if left:
            _store(piece[:, whole * width :], factor, [part[whole, :, :left] for part in parts])


def _store(source: Tensor, scale: Tensor, parts: list[Tensor]) -> None:
    if len(parts) == 1 and source.dtype == torch.float32:
        torch.mul(source, scale, out=parts[0])  # one pass over memory, rounding included
        return
    scaled = source * scale
    parts[0].copy_(scaled)
    if len(parts) == 2:
        parts[1].copy_(scaled - parts[0])


def contract_rounded(left: RoundedRows, right: RoundedRows) -> Float[Tensor, "bp cp"]:
    """The kernel block of two sets of examples, in float32."""
    K = torch.zeros(len(left.norms), len(right.norms), device=left.norms.device)
    with float32_products("tf32" if left.precision is Precision.TF32 else "ieee"), whole_sums():
        for ours, theirs in zip(left.panels, right.panels, strict=True):
            for i in range(ours[0].shape[0]):
                _add_products(K, [part[i] for part in ours], [part[i] for part in theirs])
    K *= (left.norms / left.precision.norm)[:, None]
    K *= right.norms / right.precision.norm
    first, second = joined(left.rest), joined(right.rest)
    if first.factors:
        K += contract(first, second)
    return K


def _add_products(K: Tensor, ours: list[Tensor], theirs: list[Tensor]) -> None:
    """One product; for rows in two parts, the three products that matter."""
    pairs = [(ours[0], theirs[0])] if len(ours) == 1 else [(ours[0], theirs[1]), (ours[1], theirs[0])]
    if len(ours) == 2:
        pairs.append((ours[0], theirs[0]))
    for a, b in pairs:
        _add_product(K, a, b)


def _add_product(K: Tensor, a: Tensor, b: Tensor) -> None:
    """K + a bᵀ with sums in float32, into K."""
    if a.dtype == torch.float32:
        K.addmm_(a, b.T)
    elif not a.is_cuda:
        for part in range(0, a.shape[1], STRIP):
            columns = slice(part, part + STRIP)
            K.addmm_(a[:, columns].float(), b[:, columns].float().T)
    elif adds_in_place(a.dtype, a.device):
        torch.ops.aten.addmm.dtype_out(K, a, b.T, torch.float32, out=K)
    else:
        K += torch.mm(a, b.T, out_dtype=torch.float32)


@cache
def adds_in_place(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this version of PyTorch adds a product of short numbers to a float32 matrix in one operation."""
    ones, K = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(K, ones, ones.T, torch.float32, out=K)
    except (AttributeError, RuntimeError):
        return False
    return bool((K == 17).all())
