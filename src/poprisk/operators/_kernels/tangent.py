r"""Empirical tangent kernels at given weights: :math:`K_{SS}`, :math:`K_{QS}`, and :math:`K^M` preconditioned."""

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs
from poprisk.errors import DataError
from poprisk.operators._kernels.method import Method
from poprisk.operators._kernels.precision import Precision
from poprisk.operators._kernels.tiles import Tile, tiled_kernel
from poprisk.operators._kernels.validation import Diagonal


def train_kernel(
    model: FlatModel,
    w: Float[Tensor, "d"],
    inputs: Inputs,
    *,
    preconditioner: Diagonal | None = None,
    method: Method | str = Method.AUTO,
    memory: int | None = None,
) -> Float[Tensor, "N N"]:
    r"""The tangent kernel of a set of examples, all pairs of outputs.

    .. math:: K_{SS} = J_S J_S^\top, \qquad K_{SS}^M = J_S M J_S^\top

    Args:
        model: The model and its loss; the loss is not used.
        w: Weights at which the Jacobian is taken, like ``model.weights`` (``run.weights(k)`` of a recorded run).
        inputs: The n examples.
        preconditioner: The diagonal of M: a number, or a vector like w.
        method: The algorithm, or its name; ``method_costs`` tells what each costs.
        memory: Memory limit in bytes for work and result together; default: half of what is free.

    Returns:
        The kernel [n p, n p], symmetric to the last bit; index i·p + j is output j of example i. Nothing is summed
        over outputs.

    Raises:
        DataError: weights, inputs or preconditioner do not fit the model, or weights are of low precision.
        HyperparameterError: the memory limit is too small; the message says what is needed.

    >>> import torch
    >>> model = FlatModel(torch.nn.Linear(2, 1), "squared")
    >>> train_kernel(model, model.weights, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))  # xᵀx' + 1
    tensor([[6., 3.],
            [3., 2.]])
    """
    options = {"preconditioner": preconditioner, "method": method, "memory": memory}
    return tiled_kernel(model, w, inputs, holds_result=True, **options).assembled()


def cross_kernel(
    model: FlatModel,
    w: Float[Tensor, "d"],
    query_inputs: Inputs,
    train_inputs: Inputs,
    *,
    preconditioner: Diagonal | None = None,
    method: Method | str = Method.AUTO,
    memory: int | None = None,
) -> Float[Tensor, "M N"]:
    r"""The tangent kernel between test and training examples, :math:`K_{QS} = J_Q J_S^\top` or :math:`J_Q M J_S^\top`.

    Args:
        model: The model and its loss; the loss is not used.
        w: Weights at which the Jacobians are taken.
        query_inputs: The examples Q of the rows.
        train_inputs: The examples S of the columns.
        preconditioner: The diagonal of M: a number, or a vector like w.
        method: The algorithm, or its name; ``method_costs`` tells what each costs.
        memory: Memory limit in bytes for work and result together; default: half of what is free.

    Returns:
        The kernel [q p, n p], in the order of ``train_kernel``.

    Raises:
        DataError: weights, inputs or preconditioner do not fit the model, or weights are of low precision.
        HyperparameterError: the memory limit is too small; the message says what is needed.

    >>> import torch
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False), "squared")
    >>> cross_kernel(model, model.weights, torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    tensor([[3., 1.]])
    """
    options = {"preconditioner": preconditioner, "method": method, "memory": memory}
    return tiled_kernel(model, w, query_inputs, train_inputs, holds_result=True, **options).assembled()


def output_trace(K: Float[Tensor, "rows columns"], outputs: int) -> Float[Tensor, "n m"]:
    r"""The sum over outputs of the same index, :math:`\sum_j K_{ij,i'j}`: one number for a pair of examples.

    >>> import torch
    >>> output_trace(torch.tensor([[1.0, 5.0], [5.0, 2.0]]), outputs=2)
    tensor([[3.]])
    """
    rows, columns = K.shape
    if outputs < 1 or rows % outputs or columns % outputs:
        raise DataError(f"the sides of a kernel must be multiples of p = {outputs}, got {list(K.shape)}: check outputs")
    blocks = K.reshape(rows // outputs, outputs, columns // outputs, outputs)
    return blocks.diagonal(dim1=1, dim2=3).sum(dim=2)


def kernel_tiles(
    model: FlatModel,
    w: Float[Tensor, "d"],
    inputs: Inputs,
    other_inputs: Inputs | None = None,
    *,
    preconditioner: Diagonal | None = None,
    method: Method | str = Method.AUTO,
    memory: int | None = None,
    precision: Precision | str | None = None,
) -> Iterator[Tile]:
    r"""The blocks of a kernel, one after the other, for kernels larger than memory.

    Args:
        model: The model and its loss; the loss is not used.
        w: Weights at which the Jacobians are taken.
        inputs: The examples of the rows.
        other_inputs: The examples of the columns. Without them the kernel is symmetric, and only the tiles on and above
            the diagonal are computed: each other tile is the transpose of its mirror image.
        preconditioner: The diagonal of M: a number, or a vector like w.
        method: The algorithm, or its name; ``method_costs`` tells what each costs.
        memory: Memory limit in bytes for the work on tiles; default: half of what is free.
        precision: Precision in which Jacobian rows are multiplied, see :class:`~poprisk.operators.Precision`. Blocks
            are then float32 and carry a bound on their error, and the method is ``"layer factors"``. Default: w's own.

    Returns:
        Tiles with their position, in outputs (i·p + j); together they cover the kernel once.

    Raises:
        DataError: weights, inputs or preconditioner do not fit the model, or weights are of low precision.
        HyperparameterError: the memory limit is too small (the message says what is needed), or the precision
            is unknown.

    >>> import torch
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False), "squared")
    >>> sum(tile.block.numel() for tile in kernel_tiles(model, model.weights, torch.ones(5, 2)))
    25
    """
    options = {"preconditioner": preconditioner, "method": method, "memory": memory, "precision": precision}
    return tiled_kernel(model, w, inputs, other_inputs, **options).tiles()
