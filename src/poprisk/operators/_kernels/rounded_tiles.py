r"""Kernels from rounded rows, in tiles.

Of a kernel too large for memory one block of rows is held, and columns go past it a few at a time: with R rows held,
the features of the n' columns are made n/R times.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, take_examples
from poprisk.errors import HyperparameterError
from poprisk.operators._kernels.features import Recipe
from poprisk.operators._kernels.layers import find_structure
from poprisk.operators._kernels.method import check_request
from poprisk.operators._kernels.precision import Precision, checked_precision
from poprisk.operators._kernels.rounded import PanelLayout, RoundedRows
from poprisk.operators._kernels.rounded_features import (
    Pieces,
    RoundedFeatures,
    rounded_bytes,
    rounded_layout,
    rounded_recipe,
    whole_slices,
)
from poprisk.operators._kernels.tiles import Tile, chunk_bytes, features_work, free_memory
from poprisk.operators._kernels.validation import Diagonal, preconditioner_roots

# Rows held and columns that go past them, in outputs: with these a product of two panels fills one H200.
_HELD, _PASSING = 3840, 1024
# Examples of a chunk below which making it smaller costs time.
_FEW = 128


@dataclass(frozen=True)
class RoundedPlan:
    """How many examples are worked on."""

    held: int
    """Rows of a tile."""
    passing: int
    """Columns of a tile."""
    chunk: int
    """Differentiated at a time."""
    bytes: int
    """Peak of memory in use, as estimated."""


@dataclass(frozen=True, eq=False)
class RoundedJob:
    """A kernel to make: all that its tiles need."""

    maker: RoundedFeatures
    inputs: Inputs
    others: Inputs | None
    counts: tuple[int, int | None]
    plan: RoundedPlan

    @property
    def recipe(self) -> Recipe:
        """How features are made."""
        return self.maker.recipe

    @property
    def precision(self) -> Precision:
        """Of rows and products."""
        return self.maker.precision

    @property
    def pieces(self) -> Callable[..., Pieces]:
        """The features of a chunk, given as the parts of its inputs; overwritten by the next ones."""
        return self.maker.pieces

    @property
    def rows(self) -> int:
        """Outputs of the kernel's rows."""
        return self.counts[0] * self.recipe.structure.p

    @property
    def columns(self) -> int:
        """Outputs of its columns."""
        return (self.counts[1] or self.counts[0]) * self.recipe.structure.p

    @property
    def bound(self) -> float:
        """On the error of every entry."""
        return self.maker.bound

    def tiles(self) -> Iterator[Tile]:
        """One block of rows after the other, past which all columns go."""
        n, m = self.counts
        for first in whole_slices(n, self.plan.held):
            left = self.features(self.inputs, first)
            if m is None:
                yield self._tile(first, first, self.maker.block(left, left))
            columns, start = (self.inputs, first.stop) if self.others is None else (self.others, 0)
            for begin in range(start, m or n, self.plan.passing):
                second = slice(begin, min(begin + self.plan.passing, m or n))
                yield self._tile(first, second, self.maker.block(left, self.features(columns, second)))
            del left

    def _tile(self, first: slice, second: slice, block: Tensor) -> Tile:
        p = self.recipe.structure.p
        places = [slice(part.start * p, part.stop * p) for part in (first, second)]
        return Tile(places[0], places[1], block, self.bound)

    def features(self, inputs: Inputs, part: slice) -> RoundedRows:
        """Of some examples."""
        return self.maker.side(take_examples(inputs, part))


def prepare_rounded(
    model: FlatModel,
    w: Tensor,
    inputs: Inputs,
    others: Inputs | None,
    precision: Precision | str,
    preconditioner: Diagonal | None,
    memory: int | None,
    *,
    held_result: bool,
    graphs: bool | None = None,
) -> RoundedJob:
    """Checks what is asked for, and plans it; chunks are replayed as CUDA graphs on a GPU, or where asked for."""
    precision = checked_precision(precision)
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory < 1):
        raise HyperparameterError(f"memory must be a positive number of bytes, got {memory!r}: try 2**30")
    n, m = check_request(model, w, inputs, others)
    w = w.detach()
    structure = find_structure(model, w, inputs)
    recipe = rounded_recipe(structure, preconditioner_roots(model, w, preconditioner), precision)
    result = 4 * n * (m or n) * structure.p**2 if held_result else 0
    limit = free_memory(w.device) if memory is None else memory
    plan = plan_rounded(recipe, rounded_layout(model, recipe), precision, (n, m), limit - result, w)
    maker = RoundedFeatures(model, w, recipe, precision, plan.chunk, graphs=graphs)
    return RoundedJob(maker, inputs, others, (n, m), plan)


def plan_rounded(
    recipe: Recipe, layout: PanelLayout, precision: Precision, counts: tuple[int, int | None], memory: int, w: Tensor
) -> RoundedPlan:
    """Tiles of the preferred size, smaller where memory is short, larger rows first.

    Raises:
        HyperparameterError: not even one example by one fits; the message says what would.
    """
    p, (n, m) = recipe.structure.p, counts
    feature = rounded_bytes(recipe, layout, precision, w.element_size())
    work = w.element_size() * features_work(recipe)
    wanted = chunk_bytes(w.device) // max(1, work)
    held, passing = min(n, ceil(_HELD / p)), min(m or n, ceil(_PASSING / p))
    chunk = _power_of_two(max(1, min(held, passing, wanted)))

    def total() -> int:
        return (held + passing) * feature + chunk * work + 2 * 4 * p * p * held * max(passing, 0 if m else held)

    while total() > memory and (held > 1 or passing > 1 or chunk > 1):
        if chunk > _FEW or (chunk * work > (held + passing) * feature and chunk > 1):
            chunk //= 2
        elif passing > 1 and 4 * passing >= held:
            passing = ceil(passing / 2)
        elif held > 1:
            held = ceil(held / 2)
        else:
            chunk //= 2
    if total() > memory:
        raise HyperparameterError(
            f"memory leaves {memory} bytes beside the result, too little: {total()} bytes are the smallest that work "
            "here; raise the limit, or use kernel_operator"
        )
    held, passing = held - held % chunk or held, passing - passing % chunk or passing  # chunks of one size
    return RoundedPlan(held, passing, chunk, total())


def _power_of_two(count: int) -> int:
    """The largest that is not above."""
    return 1 << (count.bit_length() - 1)
