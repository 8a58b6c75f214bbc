r"""Tiles of a kernel that are each made by themselves, so that any process can make any of them to the same bits."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.autodiff import FlatModel
from poprisk.autodiff.blocks import slices
from poprisk.autodiff.flat import Inputs, take_examples
from poprisk.errors import HyperparameterError
from poprisk.kernels.features import Features, Recipe, compute_features, contract, make_recipe
from poprisk.kernels.layers import Structure, find_structure
from poprisk.kernels.method import Method, choose_method, costs_of, product_numbers
from poprisk.kernels.tiles import _peak, chunk_bytes, features_work
from poprisk.kernels.validation import (
    Diagonal,
    check_weights,
    count_examples,
    preconditioner_diagonal,
    preconditioner_roots,
)

# Rows of a tile when memory is plentiful: enough for fast matrix products, few enough that a lost tile is no loss.
_TILE_ROWS = 512


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
Side = Features | Inputs


class TileMaker:
    r"""Makes tiles :math:`J M J'^\top` from pairs of sides; a side can serve many tiles.

    Args:
        model: The model and its loss; the loss is not used.
        w: Where the Jacobians are taken.
        inputs: Some example; only its shape matters.
        method: The algorithm, not ``AUTO``: tiles made by different ones differ in the last bits.
        chunk: Examples differentiated at a time.
        preconditioner: The diagonal of M: a number, or a vector like w.

    Raises:
        DataError: weights, inputs or preconditioner that do not fit.
        HyperparameterError: the method is AUTO.

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
    ) -> None:
        check_weights(model, w)
        if method is Method.AUTO:
            raise HyperparameterError(
                "a tile made by itself needs a method that is not auto: plan_single_tiles has one"
            )
        self._model, self._w, self._chunk = model, w.detach(), chunk
        self._M = preconditioner_diagonal(model, w, preconditioner)
        self._recipe: Recipe | None = None
        if method is not Method.VECTOR_PRODUCTS:
            structure = find_structure(model, self._w, inputs)
            self._recipe = _recipe(structure, model, w, method, preconditioner)

    def side(self, inputs: Inputs) -> Side:
        """What tiles need of some examples."""
        if self._recipe is None:
            return inputs
        return compute_features(self._model, self._w, self._recipe, inputs, self._chunk)

    def block(self, rows: Side, columns: Side) -> Float[Tensor, "bp cp"]:
        """The tile between two sides; symmetric to the last bit where they are one and the same."""
        if isinstance(rows, Features) and isinstance(columns, Features):
            block = contract(rows, columns)
        else:
            assert not isinstance(rows, Features)
            assert not isinstance(columns, Features)
            block = self._products(rows, columns)
        return block.triu() + block.triu(1).T if rows is columns else block

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
        memory: Limit in bytes for the work on a tile.
        side: Examples along a side, at most; default: 512 outputs.
        copies: How many further copies of a tile are held, e.g. while it is written.
        device: Where tiles will be made; default: the CPU.

    Raises:
        DataError: weights, inputs or preconditioner that do not fit.
        HyperparameterError: not even a tile of one example by one fits; the message says what would.

    >>> model = FlatModel(torch.nn.Linear(2, 2), "squared")
    >>> plan_single_tiles(model, model.weights, torch.zeros(900, 2), memory=2**24).side
    256
    """
    check_weights(model, w)
    n, others = count_examples(inputs), None if other_inputs is None else count_examples(other_inputs)
    structure, itemsize = find_structure(model, w, inputs), w.element_size()
    if method is Method.AUTO:
        scales = preconditioner_roots(model, w, preconditioner)
        method = choose_method(costs_of(structure, model, scales, (n, others), itemsize), memory)
    recipe = None if method is Method.VECTOR_PRODUCTS else _recipe(structure, model, w, method, preconditioner)
    tried = min(side or max(1, ceil(_TILE_ROWS / structure.p)), max(n, others or 0))
    while True:
        held = copies * itemsize * (structure.p * tried) ** 2
        numbers, most = _held_numbers(recipe, structure, model.size, tried, itemsize, device)
        chunk = _largest_chunk(numbers, min(tried, most), (memory - held) // itemsize)
        if chunk is not None:
            return SingleTilePlan(method, structure.p, tried, chunk, held + itemsize * numbers(chunk))
        if tried == 1:
            raise HyperparameterError(
                f"a memory limit of {memory} bytes is too little for one tile of one example by one: raise it, or take "
                "kernel_operator, which forms no kernel"
            )
        tried = (tried + 1) // 2


def _held_numbers(
    recipe: Recipe | None, structure: Structure, d: int, side: int, itemsize: int, device: torch.device | None
) -> tuple[Callable[[int], int], int]:
    """Numbers that the work on a tile of this side holds, by the examples differentiated at a time; and their most."""
    if recipe is None:
        return lambda chunk: product_numbers(structure, d, chunk) + 2 * (structure.p * side) ** 2, side
    most = max(1, chunk_bytes(device) // max(1, itemsize * features_work(recipe)))
    return lambda chunk: _peak(recipe, 2 * side, side, chunk), most


def _largest_chunk(numbers: Callable[[int], int], most: int, room: int) -> int | None:
    """By halving from the most there can be; None if not even one example fits."""
    chunk = most
    while numbers(chunk) > room:
        if chunk == 1:
            return None
        chunk = (chunk + 1) // 2
    return chunk


def _recipe(structure: Structure, model: FlatModel, w: Tensor, method: Method, M: Diagonal | None) -> Recipe:
    if method is Method.JACOBIAN_CONTRACTION:
        structure = structure.without_layers(model)
    return make_recipe(structure, preconditioner_roots(model, w, M))
