r"""How a kernel is cut into tiles so that the work on them stays within a memory limit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, slices
from poprisk.errors import HyperparameterError
from poprisk.operators._kernels.features import Recipe, make_recipe
from poprisk.operators._kernels.layers import Structure, find_structure
from poprisk.operators._kernels.memory import Footprint, checked_memory
from poprisk.operators._kernels.method import Method, check_request, choose_method, costs_of
from poprisk.operators._kernels.precision import Precision
from poprisk.operators._kernels.validation import Diagonal, preconditioner_roots

# Rows of a tile when memory is plentiful: enough for fast matrix products, few enough to skip most mirrored tiles.
_TILE_ROWS = 512
# The same for rounded rows on a GPU, where products are so fast that each row must serve more of them.
_ROUNDED_GPU_ROWS = 2048
# Rounded rows that are held and columns that go past them in a stream of tiles: products of this size fill one H200.
_HELD, _PASSING = 3840, 1024
# Products with rounded rows of several positions run one example at a time, at about half the speed.
_LOOPS = 2.0
# A chunk may shrink by this factor before tiles become smaller.
_SHRINK = 4


@dataclass(frozen=True)
class TilePlan:
    """How a kernel is cut into tiles."""

    method: Method
    """Never AUTO."""
    outputs: int
    """p, the outputs of one example."""
    rows: int
    """Examples along the rows of a tile, at most."""
    columns: int
    """Examples along the columns of a tile, at most."""
    chunk: int
    """Examples differentiated at a time; it may change the last bits of a tile."""
    keep: bool
    """Whether the features of all examples are kept, so that each is computed once."""
    bytes: int
    """Estimated peak memory of the work and the result."""
    recipe: Recipe | None = field(repr=False, compare=False)
    """How features are made; None for vector products."""


def plan_tiles(
    model: FlatModel,
    w: Float[Tensor, "d"],
    inputs: Inputs,
    other_inputs: Inputs | None = None,
    *,
    preconditioner: Diagonal | None = None,
    method: Method = Method.AUTO,
    precision: Precision | None = None,
    memory: int | None = None,
    holds_result: bool = False,
    separate: bool = False,
    side: int | None = None,
    copies: int = 0,
    device: torch.device | None = None,
) -> TilePlan:
    """Choose the method, the shape of tiles and the chunk size for a kernel.

    Args:
        model: The model and its loss; the loss is not used.
        w: Weights at which the Jacobians are taken.
        inputs: Examples along the rows.
        other_inputs: Examples along the columns; None for a symmetric kernel.
        preconditioner: The diagonal of M.
        method: The algorithm; AUTO takes the cheapest that fits.
        precision: Precision of rows and their products; None for that of the weights.
        memory: Memory limit in bytes; default: half of what is free.
        holds_result: Whether the whole kernel is held in memory as well.
        separate: Whether each tile is made on its own, by any process, rather than in one pass over all tiles.
        side: Largest number of examples along a side of a separate tile; default: 512 outputs; of rounded rows
            on a GPU 2048, or for a kernel of two sets of examples 3840 rows by 1024 columns.
        copies: Number of further copies of a tile that are held, e.g. while it is written.
        device: Device that makes the tiles; default: that of the weights.

    Raises:
        DataError: weights, inputs or preconditioner do not fit the model.
        HyperparameterError: not even a tile of one example by one example fits (the message says what would), or the
            method has no rows to round.

    >>> model = FlatModel(torch.nn.Linear(2, 2), "squared")
    >>> plan_tiles(model, model.weights, torch.zeros(900, 2), memory=2**24, separate=True).rows
    256
    """
    n, others = check_request(model, w, inputs, other_inputs)
    structure, itemsize, device = find_structure(model, w, inputs), w.element_size(), device or w.device
    memory, p = checked_memory(memory, device), structure.p
    if precision is not None:
        check_rounded_method(method, precision)
        method = Method.LAYER_FACTORS
    result = (itemsize if precision is None else 4) * n * (others or n) * p**2 if holds_result else 0
    if method is Method.AUTO:
        scales = preconditioner_roots(model, w, preconditioner)
        method = choose_method(costs_of(structure, model, scales, (n, others), itemsize), memory - result)
    recipe = recipe_of(structure, model, w, method, preconditioner, precision)
    work = Footprint(model, structure, recipe, itemsize, precision, device)
    needed = 0
    for rows, columns, keep in _shapes(work, n, others, separate, side):
        kept = n + (others or 0) if keep else None
        widest = max(rows, columns) if others is None else columns  # a tile on the diagonal is square
        held = result + copies * work.tile_itemsize * p**2 * rows * widest
        chunk = most = work.chunk_limit(min(rows, columns) if work.recipe else columns)
        while chunk >= max(1, most // _SHRINK):
            needed = held + work.bytes(rows, widest, chunk, rows + columns if kept is None else kept)
            if needed <= memory:
                return TilePlan(method, p, *_whole_chunks(work, rows, columns, chunk), keep, needed, recipe)
            chunk = ceil(chunk / 2) if chunk > 1 else 0
    raise HyperparameterError(
        f"memory={memory} bytes is too little: {needed} bytes are the smallest limit that works here, {result} of them "
        "for the result; raise the limit, or use kernel_tiles (which holds no result) or kernel_operator (which forms "
        "no kernel)"
    )


def _shapes(
    work: Footprint, n: int, others: int | None, separate: bool, side: int | None
) -> Iterator[tuple[int, int, bool]]:
    """Rows and columns of a tile, and whether all features are kept, from the most efficient to the smallest."""
    p, longest = work.structure.p, max(n, others or 0)
    if separate:
        if work.replays and others is not None and side is None:  # processes keep the side of a row of tiles
            yield min(n, ceil(_HELD / p)), min(others, ceil(_PASSING / p)), False
        preferred = _ROUNDED_GPU_ROWS if work.replays else _TILE_ROWS
        for each in _halved(min(side or ceil(preferred / p), longest)):
            yield each, each, False
    elif work.recipe is None:
        for columns in _halved(others or n):  # the Jacobian of one example, multiplied with those of the others
            yield 1, columns, False
    elif work.precision is None:
        for largest, keep in ((ceil(_TILE_ROWS / p), True), (longest, False)):
            for each in _halved(min(largest, longest)):
                yield each, each, keep
    else:
        rows, columns = min(n, ceil(_HELD / p)), min(others or n, ceil(_PASSING / p))
        yield rows, columns, False
        while rows > 1 or columns > 1:
            if columns > 1 and 4 * columns >= rows:
                columns = ceil(columns / 2)
            else:
                rows = ceil(rows / 2)
            yield rows, columns, False


def _halved(size: int) -> Iterator[int]:
    while size > 1:
        yield size
        size = ceil(size / 2)
    yield 1


def _whole_chunks(work: Footprint, rows: int, columns: int, chunk: int) -> tuple[int, int, int]:
    """Where CUDA graphs are replayed: a tile of whole chunks, of a power of two where there are several."""
    if not work.replays:
        return rows, columns, chunk
    if chunk < min(rows, columns):
        chunk = 1 << (chunk.bit_length() - 1)
    return rows - rows % chunk, columns - columns % chunk, chunk


def recipe_of(
    structure: Structure,
    model: FlatModel,
    w: Tensor,
    method: Method,
    preconditioner: Diagonal | None,
    precision: Precision | None,
) -> Recipe | None:
    """How a method makes features; None for vector products, which make none."""
    if method is Method.VECTOR_PRODUCTS:
        return None
    if method is Method.JACOBIAN_CONTRACTION:
        structure = structure.without_layers(model)
    speed = 1.0 if precision is None else _LOOPS * precision.speed
    return make_recipe(structure, preconditioner_roots(model, w, preconditioner), row_speed=speed)


def check_rounded_method(method: Method, precision: Precision) -> None:
    """Refuses methods that multiply no rows."""
    if method not in (Method.AUTO, Method.LAYER_FACTORS):
        raise HyperparameterError(
            f"precision={precision.value!r} rounds Jacobian rows and needs method 'auto' or 'layer factors', got "
            f"{method.value!r}: take one of them, or leave precision out"
        )


def cut(total: int, size: int, precision: Precision | None, start: int = 0) -> Iterator[slice]:
    """Consecutive slices of examples: of nearly equal length, or, for rounded rows, of one length but for the last.

    CUDA graphs, which make rounded rows on a GPU, are replayed for one length only.

    >>> list(cut(5, 4, None)), list(cut(5, 4, Precision.FLOAT16))
    ([slice(0, 3, None), slice(3, 5, None)], [slice(0, 4, None), slice(4, 5, None)])
    """
    if precision is None:
        return (slice(start + part.start, start + part.stop) for part in slices(total - start, size))
    return (slice(begin, min(begin + size, total)) for begin in range(start, total, size))
