r"""Tiles of a kernel that are each made by themselves, so that any process can make any of them to the same bits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, slices, take_examples
from poprisk.errors import HyperparameterError
from poprisk.operators._kernels.features import Features, Recipe, compute_features, contract, make_recipe
from poprisk.operators._kernels.layers import Structure, find_structure
from poprisk.operators._kernels.method import Method, choose_method, costs_of, product_numbers
from poprisk.operators._kernels.precision import Precision
from poprisk.operators._kernels.rounded import STRIP, PanelLayout, RoundedRows
from poprisk.operators._kernels.rounded_features import (
    RoundedFeatures,
    check_rounded_method,
    mirrored,
    rounded_bytes,
    rounded_layout,
    rounded_recipe,
)
from poprisk.operators._kernels.tiles import _peak, chunk_bytes, features_work
from poprisk.operators._kernels.validation import (
    Diagonal,
    check_weights,
    count_examples,
    preconditioner_diagonal,
    preconditioner_roots,
)

# Rows of a tile when memory is plentiful: enough for fast matrix products, few enough that a lost tile is no loss.
_TILE_ROWS = 512
# The same where a GPU multiplies rounded rows: so much faster that making the rows must serve more products.
_ROUNDED_GPU_ROWS = 2048
# Bytes of a number of a tile made of rounded rows.
_SINGLE = 4


@dataclass(frozen=True)
class SingleTilePlan:
    """How a kernel is cut into tiles that are made one by one."""

    method: Method
    """Never AUTO."""
    outputs: int
    """p."""
    side: int
    """Examples along one side of a tile."""
    chunk: int
    """Examples differentiated at a time: it may change the last bits, so it is part of the plan."""
    bytes: int
    """Peak of memory in use by the work on a tile, as estimated."""


# What a tile needs of the examples along one of its sides: their features, or the examples where there are none.
Side = Features | RoundedRows | Inputs


class TileMaker:
    r"""Makes tiles :math:`J M J'^\top` from pairs of sides; a side can serve many tiles.

    Args:
        model: The model and its loss; the loss is not used.
        w: Where the Jacobians are taken.
        inputs: Some example; only its shape matters.
        method: The algorithm, not ``AUTO``: tiles made by different ones differ in the last bits.
        chunk: Examples differentiated at a time.
        preconditioner: The diagonal of M: a number, or a vector like w.
        precision: Multiply rows in lower precision: tiles are float32, and ``bound`` holds for their error.

    Raises:
        DataError: weights, inputs or preconditioner that do not fit.
        HyperparameterError: the method is AUTO, or has no rows that could be rounded.

    >>> model = FlatModel(torch.nn.Linear(2, 1), "squared")
    >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    >>> maker = TileMaker(model, model.weights, x, Method.LAYER_FACTORS, chunk=2)
    >>> maker.block(maker.side(x[:1]), maker.side(x))
    tensor([[6., 3.]])
    """

    def __init__(
        self,
        model: FlatModel,
        w: Float[Tensor, "d"],
        inputs: Inputs,
        method: Method,
        chunk: int,
        preconditioner: Diagonal | None = None,
        precision: Precision | None = None,
    ) -> None:
        check_weights(model, w)
        if method is Method.AUTO:
            raise HyperparameterError(
                "a tile made by itself needs a method that is not auto: plan_single_tiles has one"
            )
        self._model, self._w, self._chunk = model, w.detach(), chunk
        self._M = preconditioner_diagonal(model, w, preconditioner)
        self._recipe: Recipe | None = None
        self._rounded: RoundedFeatures | None = None
        if method is not Method.VECTOR_PRODUCTS:
            structure = find_structure(model, self._w, inputs)
            self._recipe = _recipe(structure, model, w, method, preconditioner, precision)
        if precision is not None:
            check_rounded_method(method, precision)
            assert self._recipe is not None
            self._rounded = RoundedFeatures(model, self._w, self._recipe, precision, chunk)
            self._rounded.warm(inputs)

    @property
    def bound(self) -> float | None:
        r"""On :math:`|\Delta K_{ij}| / \sqrt{K_{ii} K_{jj}}` of every tile; None in full precision."""
        return None if self._rounded is None else self._rounded.bound

    def side(self, inputs: Inputs) -> Side:
        """What tiles need of some examples."""
        if self._recipe is None:
            return inputs
        if self._rounded is not None:
            return self._rounded.side(inputs)
        return compute_features(self._model, self._w, self._recipe, inputs, self._chunk)

    def block(self, rows: Side, columns: Side) -> Float[Tensor, "bp cp"]:
        """The tile between two sides; symmetric to the last bit where they are one and the same."""
        if isinstance(rows, RoundedRows) and isinstance(columns, RoundedRows):
            assert self._rounded is not None
            return self._rounded.block(rows, columns)
        if isinstance(rows, Features) and isinstance(columns, Features):
            block = contract(rows, columns)
        else:
            assert not isinstance(rows, Features | RoundedRows)
            assert not isinstance(columns, Features | RoundedRows)
            block = self._products(rows, columns)
        return mirrored(block) if rows is columns else block

    def _products(self, rows: Inputs, columns: Inputs) -> Tensor:
        """One column example at a time: its Jacobian, pushed through the row examples."""
        found = []
        for c in range(count_examples(columns)):
            J = self._model.output_jacobian(self._w, take_examples(columns, slice(c, c + 1))).squeeze(0)
            V = (J if self._M is None else self._M * J).T.contiguous()
            parts = (take_examples(rows, part) for part in slices(count_examples(rows), self._chunk))
            found.append(torch.cat([self._model.jvp(self._w, part, V) for part in parts]))
        return torch.cat(found, dim=1)


def plan_single_tiles(
    model: FlatModel,
    w: Float[Tensor, "d"],
    inputs: Inputs,
    other_inputs: Inputs | None = None,
    *,
    preconditioner: Diagonal | None = None,
    method: Method = Method.AUTO,
    precision: Precision | None = None,
    memory: int,
    side: int | None = None,
    copies: int = 0,
    device: torch.device | None = None,
) -> SingleTilePlan:
    """Method, side and chunk for tiles that are each made by themselves.

    Args:
        model: The model and its loss; the loss is not used.
        w: Where the Jacobians are taken.
        inputs: The examples of the rows.
        other_inputs: The examples of the columns; None for a symmetric kernel.
        preconditioner: The diagonal of M.
        method: The algorithm; AUTO takes the cheapest that fits.
        precision: Of rows and their products; None for the weights' own.
        memory: Limit in bytes for the work on a tile.
        side: Examples along a side, at most; default: 512 outputs, and 2048 of rounded rows on a GPU.
        copies: How many further copies of a tile are held, e.g. while it is written.
        device: Where tiles will be made; default: the CPU.

    Raises:
        DataError: weights, inputs or preconditioner that do not fit.
        HyperparameterError: not even a tile of one example by one fits (the message says what would), or a method
            without rows that could be rounded.

    >>> model = FlatModel(torch.nn.Linear(2, 2), "squared")
    >>> plan_single_tiles(model, model.weights, torch.zeros(900, 2), memory=2**24).side
    256
    """
    check_weights(model, w)
    n, others = count_examples(inputs), None if other_inputs is None else count_examples(other_inputs)
    structure, itemsize = find_structure(model, w, inputs), w.element_size()
    if precision is not None:
        check_rounded_method(method, precision)
        method = Method.LAYER_FACTORS
    elif method is Method.AUTO:
        scales = preconditioner_roots(model, w, preconditioner)
        method = choose_method(costs_of(structure, model, scales, (n, others), itemsize), memory)
    work = _Work(structure, model, itemsize, device or torch.device("cpu"), precision)
    if method is not Method.VECTOR_PRODUCTS:
        work.recipe = _recipe(structure, model, w, method, preconditioner, precision)
    tried = min(side or max(1, ceil(work.preferred_rows / structure.p)), max(n, others or 0))
    while True:
        held = copies * work.tile_itemsize * (structure.p * tried) ** 2
        needed = partial(work.bytes, tried)
        chunk = _largest_chunk(needed, min(tried, work.most_examples(tried)), memory - held)
        if chunk is not None:
            tried, chunk = work.even(tried, chunk)
            return SingleTilePlan(method, structure.p, tried, chunk, held + needed(chunk))
        if tried == 1:
            raise HyperparameterError(
                f"a memory limit of {memory} bytes is too little for one tile of one example by one: raise it, or take "
                "kernel_operator, which forms no kernel"
            )
        tried = (tried + 1) // 2


@dataclass
class _Work:
    """What the work on a tile holds."""

    structure: Structure
    model: FlatModel
    itemsize: int
    device: torch.device
    precision: Precision | None
    recipe: Recipe | None = None
    """None where there are no features."""

    @property
    def preferred_rows(self) -> int:
        """Of a tile, in outputs."""
        return _TILE_ROWS if self.precision is None or self.device.type == "cpu" else _ROUNDED_GPU_ROWS

    @property
    def tile_itemsize(self) -> int:
        """Bytes of a number of the tile."""
        return self.itemsize if self.precision is None else _SINGLE

    def most_examples(self, side: int) -> int:
        """Beyond which differentiating more at a time is no faster."""
        if self.recipe is None:
            return side
        return max(1, chunk_bytes(self.device) // max(1, self.itemsize * features_work(self.recipe)))

    def even(self, side: int, chunk: int) -> tuple[int, int]:
        """Where chunks of one size are replayed, a side has no others: it and the chunk become a little smaller."""
        if self.precision is None or self.device.type == "cpu":
            return side, chunk
        chunks = ceil(side / chunk)
        return side // chunks * chunks, side // chunks

    def bytes(self, side: int, chunk: int) -> int:
        """With so many examples along a side, and so many differentiated at a time."""
        outputs = self.structure.p * side
        if self.recipe is None:
            return self.itemsize * (product_numbers(self.structure, self.model.size, chunk) + 2 * outputs**2)
        if self.precision is None:
            return self.itemsize * _peak(self.recipe, 2 * side, side, chunk)
        return self._rounded_bytes(self.recipe, self.precision, rounded_layout(self.model, self.recipe), side, chunk)

    def _rounded_bytes(self, recipe: Recipe, precision: Precision, layout: PanelLayout, side: int, chunk: int) -> int:
        outputs = self.structure.p * side
        kept = rounded_bytes(recipe, layout, precision, self.itemsize) + self.itemsize * recipe.factor_length
        working = self.itemsize * _peak(recipe, 0, side, chunk) + _SINGLE * outputs**2
        if self.device.type == "cpu":
            # Short numbers are multiplied as float32, and the room of a side that is gone may lie where no other fits.
            return 3 * side * kept + working + _SINGLE * 2 * outputs * min(STRIP, layout.width)
        return 2 * side * kept + working + self.itemsize * chunk * features_work(recipe)  # a graph keeps its memory


def _largest_chunk(needed: Callable[[int], int], most: int, room: int) -> int | None:
    """By halving from the most there can be; None if not even one example fits."""
    chunk = most
    while needed(chunk) > room:
        if chunk == 1:
            return None
        chunk = (chunk + 1) // 2
    return chunk


def _recipe(
    structure: Structure,
    model: FlatModel,
    w: Tensor,
    method: Method,
    M: Diagonal | None,
    precision: Precision | None,
) -> Recipe:
    if method is Method.JACOBIAN_CONTRACTION:
        structure = structure.without_layers(model)
    scales = preconditioner_roots(model, w, M)
    return make_recipe(structure, scales) if precision is None else rounded_recipe(structure, scales, precision)
