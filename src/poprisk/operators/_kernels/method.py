r"""The algorithms that compute a kernel, and what each costs."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, count_examples
from poprisk.operators._kernels.features import Recipe, make_recipe
from poprisk.operators._kernels.layers import Structure, find_structure
from poprisk.operators._kernels.memory import least_bytes
from poprisk.operators._kernels.precision import Named
from poprisk.operators._kernels.validation import Diagonal, check_same_kind, check_weights, preconditioner_roots

# Vector products reach a fraction of the speed of one large matrix product; AUTO multiplies their operations by this.
_PRODUCT_OVERHEAD = 4


class Method(Named):
    r"""How the entries of an N×N' kernel are computed; all methods give the same numbers.

    With f operations in a forward pass of one example, n and n' examples, p outputs each, N = n p, and d weights:
    """

    AUTO = "auto"
    """The cheapest of the other methods within the memory limit."""
    JACOBIAN_CONTRACTION = "jacobian contraction"
    """Rows of the Jacobian, multiplied: 2 f (N + N') + 2 N N' d operations (half the last for a symmetric kernel),
    at least 2 p d numbers. Works for any model; the reference for the others."""
    LAYER_FACTORS = "layer factors"
    """The same with linear, convolution and embedding layers that are used once taken as outer products, where cheaper:
    about 2 N N' (outputs of the layer) in place of 2 N N' (inputs × outputs). Never more expensive than the
    contraction."""
    VECTOR_PRODUCTS = "vector products"
    """One pull-back per column, pushed forward through all examples: 2 f N' + 3 f n N' operations, no term in d N N';
    best for many outputs and for weights that are used in several places."""


@dataclass(frozen=True)
class Cost:
    """The cost of a method."""

    flops: float
    """Number of operations if features are computed once."""
    bytes: int
    """Smallest amount of memory that works, without the result."""


def method_costs(
    model: FlatModel,
    w: Tensor,
    inputs: Inputs,
    other_inputs: Inputs | None = None,
    *,
    preconditioner: Diagonal | None = None,
) -> dict[Method, Cost]:
    """What each method would cost for a kernel; arguments as in ``kernel_tiles``.

    Raises:
        DataError: weights, inputs or preconditioner do not fit the model.

    >>> import torch
    >>> model = FlatModel(torch.nn.Sequential(torch.nn.Linear(50, 64), torch.nn.Linear(64, 4)), "squared")
    >>> costs = method_costs(model, model.weights, torch.zeros(30, 50))
    >>> min(costs, key=lambda method: costs[method].flops)
    <Method.LAYER_FACTORS: 'layer factors'>
    """
    counts = check_request(model, w, inputs, other_inputs)
    structure = find_structure(model, w, inputs)
    scales = preconditioner_roots(model, w, preconditioner)
    return costs_of(structure, model, scales, counts, w.element_size())


def costs_of(
    structure: Structure,
    model: FlatModel,
    scales: Mapping[str, Tensor],
    counts: tuple[int, int | None],
    itemsize: int,
) -> dict[Method, Cost]:
    """The costs for a model whose structure is known."""
    n, others = counts
    costs = {}
    for method, found in (
        (Method.JACOBIAN_CONTRACTION, structure.without_layers(model)),
        (Method.LAYER_FACTORS, structure),
    ):
        recipe = make_recipe(found, scales)
        costs[method] = Cost(_contraction_flops(recipe, n, others), least_bytes(model, found, recipe, itemsize))
    flops = _product_flops(structure, n, others)
    costs[Method.VECTOR_PRODUCTS] = Cost(flops, least_bytes(model, structure, None, itemsize))
    return costs


def choose_method(costs: dict[Method, Cost], memory: int) -> Method:
    """The method with the fewest operations among those that fit; if none fits, the one that needs the least memory.

    >>> costs = {Method.LAYER_FACTORS: Cost(1.0, 1000), Method.VECTOR_PRODUCTS: Cost(50.0, 10)}
    >>> choose_method(costs, memory=10**6), choose_method(costs, memory=100)
    (<Method.LAYER_FACTORS: 'layer factors'>, <Method.VECTOR_PRODUCTS: 'vector products'>)
    """
    fitting = {method: cost for method, cost in costs.items() if cost.bytes <= memory}
    if not fitting:
        return min(costs, key=lambda method: costs[method].bytes)

    def price(method: Method) -> float:
        return fitting[method].flops * (_PRODUCT_OVERHEAD if method is Method.VECTOR_PRODUCTS else 1)

    return min(fitting, key=price)


def check_request(model: FlatModel, w: Tensor, inputs: Inputs, other_inputs: Inputs | None) -> tuple[int, int | None]:
    """Checks weights and inputs; returns n, and n' if there is a second set.

    Raises:
        DataError: weights or inputs do not fit the model.
    """
    check_weights(model, w)
    n = count_examples(inputs)
    if other_inputs is None:
        return n, None
    others = count_examples(other_inputs)
    check_same_kind(inputs, other_inputs)
    return n, others


def _contraction_flops(recipe: Recipe, n: int, others: int | None) -> float:
    s = recipe.structure
    pairs = (n * s.p) ** 2 / 2 if others is None else n * s.p * others * s.p
    unfolding = sum(2 * layer.positions * layer.size for layer in recipe.unfolded)
    return (n + (others or 0)) * s.p * (2 * s.forward_flops + unfolding) + pairs * recipe.pair_flops


def _product_flops(structure: Structure, n: int, others: int | None) -> float:
    columns = (others or n) * structure.p
    pairs = columns * n / (2 if others is None else 1)
    return 2.0 * structure.forward_flops * columns + 3.0 * structure.forward_flops * pairs
