r"""Rounded rows of any examples, made a chunk at a time; a block of a kernel is made of two sets of them.

Every kernel in lower precision is made here, whether one process streams its tiles or many make one each.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, Replayed, take_examples
from poprisk.errors import HyperparameterError
from poprisk.operators._kernels.features import Factors, Recipe, feature_pieces, make_recipe
from poprisk.operators._kernels.layers import Structure
from poprisk.operators._kernels.method import Method
from poprisk.operators._kernels.precision import Precision, error_bound, float32_products
from poprisk.operators._kernels.rounded import PanelLayout, RoundedRows, contract_rounded, panel_layout
from poprisk.operators._kernels.validation import count_examples

# Rows of some examples in pieces, and the factors of the other layers.
Pieces = tuple[list[Tensor], tuple[Factors, ...]]
# Factors of layers with several positions are multiplied one example at a time, at about half the speed of a product.
_LOOPS = 2.0
# Calls after which a graph is there, see Replayed.
_CALLS_TO_CAPTURE = 3


class RoundedFeatures:
    """Makes the rounded rows of examples, and blocks between them.

    On a GPU whole chunks are replayed as CUDA graphs, the rest is launched as it is. Weights and chunks are copied
    first: some products round by how their operands lie in memory.

    Args:
        model: The model.
        w: Where the Jacobians are taken; they are computed in its dtype.
        recipe: As :func:`rounded_recipe` makes it.
        precision: Of rows and products.
        chunk: Examples differentiated at a time.
        graphs: Whether chunks are replayed; by default on a GPU.

    >>> from poprisk.operators._kernels.layers import find_structure
    >>> model, x = FlatModel(torch.nn.Linear(2, 1), "squared"), torch.tensor([[1.0, 2.0], [0.0, 1.0]])
    >>> recipe = rounded_recipe(find_structure(model, model.weights, x), {}, Precision.FLOAT16)
    >>> features = RoundedFeatures(model, model.weights, recipe, Precision.FLOAT16, chunk=2)
    >>> features.block(features.side(x[:1]), features.side(x)).round(decimals=1)
    tensor([[6., 3.]])
    """

    def __init__(
        self,
        model: FlatModel,
        w: Float[Tensor, "d"],
        recipe: Recipe,
        precision: Precision,
        chunk: int,
        *,
        graphs: bool | None = None,
    ) -> None:
        self.recipe, self.precision, self.chunk = recipe, precision, chunk
        self.layout = rounded_layout(model, recipe)
        self._device, w = w.device, _still(w)

        def pieces(first: Tensor, *others: Tensor) -> Pieces:
            return feature_pieces(model, w, recipe, (first, *others) if others else first)

        self.pieces: Callable[..., Pieces] = pieces
        """The features of a chunk, given as the parts of its inputs; overwritten by the next ones."""
        if w.is_cuda if graphs is None else graphs:
            whole = lambda parts: parts[0].shape[0] == chunk  # noqa: E731
            self.pieces = Replayed(pieces, capture=w.is_cuda, only=whole)

    @property
    def bound(self) -> float:
        """On the error of every entry, see :func:`~poprisk.operators._kernels.precision.error_bound`."""
        return error_bound(self.precision, self.recipe.row_length, self.layout.width)

    def warm(self, inputs: Inputs) -> None:
        """Captures what can be replayed now, so that no chunk's bits depend on how many came before it.

        Args:
            inputs: Some example; only its shape matters.
        """
        if isinstance(self.pieces, Replayed):
            first = [part[:1] for part in (inputs if isinstance(inputs, tuple) else (inputs,))]
            chunk = tuple(part.expand(self.chunk, *part.shape[1:]) for part in first)
            for _ in range(_CALLS_TO_CAPTURE):
                self._chunk(chunk)

    def side(self, inputs: Inputs) -> RoundedRows:
        """The rows of some examples, a few differentiated at a time."""
        n, p = count_examples(inputs), self.recipe.structure.p
        made = RoundedRows.empty(self.precision, self.layout, n * p, self._device)
        for chunk in whole_slices(n, self.chunk):
            taken = take_examples(inputs, chunk)
            made.fill(chunk.start * p, *self._chunk(taken if isinstance(taken, tuple) else (taken,)))
        return made

    def block(self, rows: RoundedRows, columns: RoundedRows) -> Float[Tensor, "bp cp"]:
        """The block between two sets in float32; symmetric to the last bit where they are one and the same."""
        block = contract_rounded(rows, columns)
        return mirrored(block) if rows is columns else block

    def _chunk(self, parts: tuple[Tensor, ...]) -> Pieces:
        copies = tuple(_still(part) for part in parts)
        with float32_products("ieee"):  # a unit that falls on the other side of its kink is no rounding error
            return self.pieces(*copies)


def whole_slices(total: int, size: int) -> Iterator[slice]:
    """Consecutive slices of one length, but for the last: a graph is replayed for one length only.

    >>> list(whole_slices(5, 4))
    [slice(0, 4, None), slice(4, 5, None)]
    """
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _still(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def mirrored(block: Float[Tensor, "b b"]) -> Float[Tensor, "b b"]:
    """The upper triangle and its mirror image.

    >>> mirrored(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[1., 2.],
            [2., 4.]])
    """
    return block.triu() + block.triu(1).T


def rounded_recipe(structure: Structure, scales: Mapping[str, Tensor], precision: Precision) -> Recipe:
    """Which layers stay factors when products of rows are as fast as the precision makes them."""
    return make_recipe(structure, scales, row_speed=_LOOPS * precision.speed)


def rounded_layout(model: FlatModel, recipe: Recipe) -> PanelLayout:
    """The panels of a model's rows."""
    sizes = [model.parameters[name].numel() for name in recipe.structure.plain]  # in the order of feature_pieces
    for layer in recipe.unfolded:
        sizes += [layer.inputs * layer.outputs, *([layer.outputs] if layer.bias else [])]
    return panel_layout(sizes or [0])


def rounded_bytes(recipe: Recipe, layout: PanelLayout, precision: Precision, itemsize: int) -> int:
    """What the rows, norms and factors of one example take, with factors of so many bytes a number."""
    return recipe.structure.p * (layout.columns * precision.itemsize + 4) + itemsize * recipe.factor_length


def check_rounded_method(method: Method, precision: Precision | str) -> None:
    """Refuses methods that multiply no rows.

    Raises:
        HyperparameterError: as said.

    >>> check_rounded_method(Method.AUTO, "float16")
    """
    if method not in (Method.AUTO, Method.LAYER_FACTORS):
        name = precision.value if isinstance(precision, Precision) else precision
        raise HyperparameterError(
            f"precision={name!r} rounds rows beside factors of layers, method 'auto' or 'layer factors', got "
            f"{method.value!r}: take one of them, or leave precision out"
        )
