"""The cost models under the names by which they were measured: from named sizes to a cost."""

from collections.abc import Callable, Mapping
from math import ceil

from poprisk.errors import DataError
from poprisk_lab.costs import kernels, training, trajectories
from poprisk_lab.costs.cost import OperationCost
from poprisk_lab.costs.network import Network

Sizes = Mapping[str, float]


def cost_of(operation: str, sizes: Sizes) -> OperationCost:
    """The cost of a measured operation.

    Args:
        operation: One of ``OPERATION_MODELS``.
        sizes: As the benchmark names them.

    Raises:
        DataError: an operation without a model, or a size that is missing.

    >>> cost_of("rounded_product", {"examples": 2, "row_length": 8}).half_flops
    64
    """
    if operation not in OPERATION_MODELS:
        raise DataError(f"no cost model is called {operation!r}; there are {', '.join(OPERATION_MODELS)}")
    try:
        return OPERATION_MODELS[operation](sizes)
    except KeyError as missing:
        raise DataError(f"the cost of {operation!r} needs the size {missing}, got {', '.join(sizes)}") from None


def _perceptron(sizes: Sizes) -> Network:
    inputs, width, outputs = (int(sizes[name]) for name in ("inputs", "width", "outputs"))
    return Network.perceptron([inputs, width, width, outputs])


def _optimizer_step(sizes: Sizes) -> OperationCost:
    states = training.StateBytes(**{name: int(sizes[name]) for name in ("p", "g", "m", "v", "s")})
    return training.optimizer_step(sizes["weights"], states)


def _training_step(sizes: Sizes) -> OperationCost:
    first, itemsize = sizes["width"] ** 2, int(sizes["itemsize"])
    cost = training.training_step(sizes["layers"] * first, sizes["tokens"], first=first, itemsize=itemsize)
    # Of each layer's outputs and their gradients, those of the activation between included.
    passed = 11 * sizes["layers"] * sizes["tokens"] * sizes["width"] * itemsize
    held = cost.bytes_held + sizes["layers"] * sizes["tokens"] * sizes["width"] * itemsize
    return cost + OperationCost(bytes_moved=passed, bytes_held=held, launches=sizes["layers"])


def _jacobian_tile(sizes: Sizes) -> OperationCost:
    n = sizes["examples"]
    return kernels.jacobian_tile(_perceptron(sizes), n, n, chunks=2 * ceil(n / sizes["chunk"]))


def _factor_tile(sizes: Sizes) -> OperationCost:
    n = sizes["examples"]
    return kernels.factor_tile(_perceptron(sizes), n, n, chunks=2 * ceil(n / sizes["chunk"]))


def _product_tile(sizes: Sizes) -> OperationCost:
    return kernels.product_tile(_perceptron(sizes), sizes["rows"], sizes["columns"])


def _convolution_rows(sizes: Sizes) -> OperationCost:
    names = ("forward_flops", "first_flops", "activations", "weights")
    chunks = ceil(sizes["examples"] / sizes["chunk"]) if "chunk" in sizes else 1
    return kernels.rounded_rows(*(sizes[name] for name in names), examples=sizes["examples"], chunks=chunks)


def _rounded_product(sizes: Sizes) -> OperationCost:
    return kernels.rounded_product(sizes["examples"], sizes["examples"], sizes["row_length"])


def _kernel_product(sizes: Sizes) -> OperationCost:
    return kernels.kernel_product(_perceptron(sizes), sizes["examples"], sizes["columns"])


def _window_gramian(sizes: Sizes) -> OperationCost:
    names = ("steps", "batch", "examples", "columns")
    return trajectories.window_gramian(_perceptron(sizes), **{name: sizes[name] for name in names})


def _window_transfer(sizes: Sizes) -> OperationCost:
    names = ("steps", "batch", "examples", "test_examples", "columns")
    return trajectories.window_transfer(_perceptron(sizes), **{name: sizes[name] for name in names})


def _adjoint(sizes: Sizes) -> OperationCost:
    names = ("steps", "batch", "queries")
    return trajectories.adjoint(_perceptron(sizes), **{name: sizes[name] for name in names})


def _retraining(sizes: Sizes) -> OperationCost:
    names = ("steps", "batch", "members")
    return trajectories.retraining(_perceptron(sizes), **{name: sizes[name] for name in names})


_STEPS = ("optimizer_step", "adamw_step", "training_step")
_PRODUCTS = ("product_tile", "kernel_product", "window_gramian", "window_transfer")
QUEUED = (*_STEPS, *_PRODUCTS)
"""Operations in which nothing waits for the device: on a GPU they are launched while earlier ones run."""
OPERATION_MODELS: dict[str, Callable[[Sizes], OperationCost]] = {
    "optimizer_step": _optimizer_step,
    "adamw_step": _optimizer_step,
    "training_step": _training_step,
    "jacobian_tile": _jacobian_tile,
    "factor_tile": _factor_tile,
    "product_tile": _product_tile,
    "convolution_rows": _convolution_rows,
    "rounded_product": _rounded_product,
    "kernel_product": _kernel_product,
    "window_gramian": _window_gramian,
    "window_transfer": _window_transfer,
    "adjoint": _adjoint,
    "retraining": _retraining,
}
"""Every measured operation's cost as a function of its sizes."""
