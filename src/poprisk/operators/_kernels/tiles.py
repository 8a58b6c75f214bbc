r"""Tiles of a kernel: the one place where they are made.

``TileMaker`` makes the block between any two sets of examples, in any precision. ``TiledKernel`` goes through all tiles
of a kernel in one process; jobs let many processes make one tile each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, Replayed, count_examples, slices, take_examples
from poprisk.errors import HyperparameterError
from poprisk.operators._kernels.features import Factors, Features, Recipe, compute_features, contract, feature_pieces
from poprisk.operators._kernels.layers import find_structure
from poprisk.operators._kernels.method import Method
from poprisk.operators._kernels.plan import TilePlan, check_rounded_method, cut, plan_tiles, recipe_of
from poprisk.operators._kernels.precision import Precision, error_bound, float32_products
from poprisk.operators._kernels.rounded import RoundedRows, contract_rounded, row_layout
from poprisk.operators._kernels.validation import Diagonal, check_weights, preconditioner_diagonal

# Rows of some examples in pieces, and the factors of the other layers.
Pieces = tuple[list[Tensor], tuple[Factors, ...]]
# What a tile needs from the examples along one of its sides: their features, or the examples where there are none.
Side = Features | RoundedRows | Inputs
# Number of calls after which a CUDA graph exists, see Replayed.
_CALLS_TO_CAPTURE = 3


@dataclass(frozen=True, eq=False)
class Tile:
    """One block of a kernel."""

    rows: slice
    """Its rows in the kernel, in outputs (i·p + j)."""
    columns: slice
    """Its columns in the kernel, in outputs."""
    block: Tensor
    bound: float | None = None
    r"""Bound on :math:`|\Delta K_{ij}| / \sqrt{K_{ii} K_{jj}}`; None in full precision."""


class TileMaker:
    r"""Makes tiles :math:`J M J'^\top` from pairs of sides; a side can serve many tiles.

    On a GPU whole chunks of rounded rows are replayed as CUDA graphs. For these, weights and chunks are copied first,
    because the rounding of some products depends on how their operands lie in memory.

    Args:
        model: The model and its loss; the loss is not used.
        w: Weights at which the Jacobians are taken, in w's own precision.
        inputs: At least one example; only its shape matters.
        method: The algorithm, not ``AUTO``: tiles of different methods differ in the last bits.
        chunk: Examples differentiated at a time.
        preconditioner: The diagonal of M: a number, or a vector like w.
        precision: Precision in which rows are multiplied; tiles are then float32 and ``bound`` bounds their error.
        recipe: How features are made, where a plan has found it already.
        graphs: Whether chunks of rounded rows are replayed; default: on a GPU.

    Raises:
        DataError: weights, inputs or preconditioner do not fit the model.
        HyperparameterError: the method is AUTO, or has no rows to round.

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
        *,
        recipe: Recipe | None = None,
        graphs: bool | None = None,
    ) -> None:
        check_weights(model, w)
        if method is Method.AUTO:
            raise HyperparameterError("TileMaker needs a method other than 'auto': use the method of plan_tiles")
        self.precision, self.chunk = precision, chunk
        self._model, self._w = model, w.detach() if precision is None else aligned(w)
        self._M = preconditioner_diagonal(model, w, preconditioner)
        if recipe is None and method is not Method.VECTOR_PRODUCTS:
            structure = find_structure(model, self._w, inputs)
            recipe = recipe_of(structure, model, w, method, preconditioner, precision)
        self.recipe = recipe
        if precision is not None:
            check_rounded_method(method, precision)
            self._round_with(graphs)

    def _round_with(self, graphs: bool | None) -> None:
        model, w, recipe, chunk = self._model, self._w, self.recipe, self.chunk
        assert recipe is not None
        self._layout = row_layout(model, recipe)

        def pieces(first: Tensor, *others: Tensor) -> Pieces:
            return feature_pieces(model, w, recipe, (first, *others) if others else first)

        self.pieces: Callable[..., Pieces] = pieces
        """The features of a chunk, given as the parts of its inputs; overwritten by the next ones."""
        if w.is_cuda if graphs is None else graphs:
            whole = lambda parts: parts[0].shape[0] == chunk  # noqa: E731
            self.pieces = Replayed(pieces, capture=w.is_cuda, only=whole)

    @property
    def bound(self) -> float | None:
        r"""Bound on :math:`|\Delta K_{ij}| / \sqrt{K_{ii} K_{jj}}` of every tile; None in full precision."""
        if self.precision is None or self.recipe is None:
            return None
        return error_bound(self.precision, self.recipe.row_length, self._layout.width)

    def warm(self, inputs: Inputs) -> None:
        """Captures CUDA graphs now, so that the bits of a chunk do not depend on how many came before it."""
        if self.precision is not None and isinstance(self.pieces, Replayed):
            first = [part[:1] for part in (inputs if isinstance(inputs, tuple) else (inputs,))]
            chunk = tuple(part.expand(self.chunk, *part.shape[1:]) for part in first)
            for _ in range(_CALLS_TO_CAPTURE):
                self._rounded_pieces(chunk)

    def side(self, inputs: Inputs) -> Side:
        """What tiles need from some examples, a chunk of which is differentiated at a time."""
        if self.recipe is None:
            return inputs
        if self.precision is None:
            return compute_features(self._model, self._w, self.recipe, inputs, self.chunk)
        n, p = count_examples(inputs), self.recipe.structure.p
        made = RoundedRows.empty(self.precision, self._layout, n * p, self._w.device)
        for chunk in cut(n, self.chunk, self.precision):
            taken = take_examples(inputs, chunk)
            made.fill(chunk.start * p, *self._rounded_pieces(taken if isinstance(taken, tuple) else (taken,)))
        return made

    def block(self, rows: Side, columns: Side) -> Float[Tensor, "bp cp"]:
        """The tile between two sides; symmetric to the last bit if they are the same object."""
        if isinstance(rows, RoundedRows) and isinstance(columns, RoundedRows):
            block = contract_rounded(rows, columns)
        elif isinstance(rows, Features) and isinstance(columns, Features):
            block = contract(rows, columns)
        else:
            assert not isinstance(rows, Features | RoundedRows)
            assert not isinstance(columns, Features | RoundedRows)
            block = self._products(rows, columns)
        return block.triu() + block.triu(1).T if rows is columns else block

    def _products(self, rows: Inputs, columns: Inputs) -> Tensor:
        """The Jacobian of one example of the shorter side at a time, pushed through the examples of the other side."""
        if count_examples(rows) < count_examples(columns):
            return self._products(columns, rows).T
        found = []
        for c in range(count_examples(columns)):
            J = self._model.output_jacobian(self._w, take_examples(columns, slice(c, c + 1))).squeeze(0)
            V = (J if self._M is None else self._M * J).T.contiguous()
            parts = (take_examples(rows, part) for part in slices(count_examples(rows), self.chunk))
            found.append(torch.cat([self._model.jvp(self._w, part, V) for part in parts]))
        return torch.cat(found, dim=1)

    def _rounded_pieces(self, parts: tuple[Tensor, ...]) -> Pieces:
        copies = tuple(aligned(part) for part in parts)
        with float32_products("ieee"):  # a unit on the other side of its kink would not be a rounding error
            return self.pieces(*copies)


@dataclass(frozen=True, eq=False)
class TiledKernel:
    """A kernel, and all that its tiles are made from."""

    maker: TileMaker
    plan: TilePlan
    inputs: Inputs
    others: Inputs | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the kernel, in outputs."""
        n, m = (count_examples(each) for each in (self.inputs, self.inputs if self.others is None else self.others))
        return n * self.plan.outputs, m * self.plan.outputs

    def tiles(self) -> Iterator[Tile]:
        """One block of rows after the other, each with all columns (of a symmetric kernel: from the diagonal on)."""
        n, m = (size // self.plan.outputs for size in self.shape)
        symmetric, columns = self.others is None, self.inputs if self.others is None else self.others
        whole = [self.maker.side(each) for each in (self.inputs, columns)[: 1 if symmetric else 2] if self.plan.keep]
        for first in cut(n, self.plan.rows, self.maker.precision):
            left = self._side(self.inputs, first, whole[0] if whole else None)
            if symmetric:
                yield self._tile(first, first, self.maker.block(left, left))
            for second in cut(m, self.plan.columns, self.maker.precision, start=first.stop if symmetric else 0):
                right = self._side(columns, second, whole[-1] if whole else None)
                yield self._tile(first, second, self.maker.block(left, right))
                del right
            del left

    def assembled(self) -> Float[Tensor, "rows columns"]:
        """The whole kernel."""
        K: Tensor | None = None
        for tile in self.tiles():
            K = tile.block.new_empty(self.shape) if K is None else K
            K[tile.rows, tile.columns] = tile.block
            if self.others is None:
                K[tile.columns, tile.rows] = tile.block.T
        assert K is not None
        return K

    def _side(self, inputs: Inputs, part: slice, whole: Side | None) -> Side:
        return whole.take(part) if isinstance(whole, Features) else self.maker.side(take_examples(inputs, part))

    def _tile(self, first: slice, second: slice, block: Tensor) -> Tile:
        p = self.plan.outputs
        rows, columns = (slice(part.start * p, part.stop * p) for part in (first, second))
        return Tile(rows, columns, block, self.maker.bound)


def tiled_kernel(
    model: FlatModel,
    w: Float[Tensor, "d"],
    inputs: Inputs,
    others: Inputs | None = None,
    *,
    preconditioner: Diagonal | None = None,
    method: Method | str = Method.AUTO,
    memory: int | None = None,
    precision: Precision | str | None = None,
    holds_result: bool = False,
    graphs: bool | None = None,
) -> TiledKernel:
    """Checks a request and plans it; arguments as in ``kernel_tiles``, ``plan_tiles`` and ``TileMaker``."""
    method, precision = Method.checked(method), None if precision is None else Precision.checked(precision)
    kind = {"preconditioner": preconditioner, "precision": precision}
    plan = plan_tiles(model, w, inputs, others, method=method, memory=memory, holds_result=holds_result, **kind)
    maker = TileMaker(model, w, inputs, plan.method, plan.chunk, **kind, recipe=plan.recipe, graphs=graphs)
    return TiledKernel(maker, plan, inputs, others)


def aligned(x: Tensor) -> Tensor:
    """A contiguous copy in memory allocated by torch: the rounding of some products depends on how operands lie."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def on_host(tiles: Iterator[Tile], keep: Callable[[Tile], bool] = lambda tile: True) -> Iterator[Tile]:
    """The tiles in the host's memory: each is copied while the next one is computed.

    On a GPU the copy runs on a stream of its own into pinned memory, and a tile is handed out once it has arrived.

    >>> from poprisk.operators import kernel_tiles
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False), "squared")
    >>> [tile.block.device.type for tile in on_host(kernel_tiles(model, model.weights, torch.ones(5, 2)))]
    ['cpu']
    """
    stream, waiting = None, None
    for tile in tiles:
        if not keep(tile):
            continue
        if not tile.block.is_cuda:
            yield tile
            continue
        stream = stream or torch.cuda.Stream(tile.block.device)
        stream.wait_stream(torch.cuda.current_stream(tile.block.device))
        with torch.cuda.stream(stream):
            block = torch.empty(tile.block.shape, dtype=tile.block.dtype, pin_memory=True)
            block.copy_(tile.block, non_blocking=True)
            tile.block.record_stream(stream)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        if waiting is not None:
            waiting[1].synchronize()
            yield waiting[0]
        waiting = (Tile(tile.rows, tile.columns, block, tile.bound), arrived)
    if waiting is not None:
        waiting[1].synchronize()
        yield waiting[0]
