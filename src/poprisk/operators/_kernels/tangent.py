r"""Empirical tangent kernels at given weights: :math:`K_{SS}`, :math:`K_{QS}`, and :math:`K^M` preconditioned."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, slices, take_examples
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._kernels.features import Features, compute_features, make_recipe
from poprisk.operators._kernels.layers import Structure, find_structure
from poprisk.operators._kernels.method import Method, check_request, choose_method, costs_of, product_numbers
from poprisk.operators._kernels.precision import Precision
from poprisk.operators._kernels.rounded_features import check_rounded_method
from poprisk.operators._kernels.rounded_tiles import prepare_rounded
from poprisk.operators._kernels.tiles import Tile, free_memory, plan_tiles, rectangular_tiles, symmetric_tiles
from poprisk.operators._kernels.validation import Diagonal, preconditioner_diagonal, preconditioner_roots


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
        w: Where the Jacobian is taken, like ``model.weights`` (``run.weights(k)`` of a recorded run).
        inputs: The n examples.
        preconditioner: The diagonal of M: a number, or a vector like w.
        method: The algorithm, or its name; see ``Method`` for costs.
        memory: Limit in bytes for work and result together; half of what is free if not given.

    Returns:
        The kernel [n p, n p], symmetric to the last bit; index i·p + j is output j of example i. Nothing is summed
        over outputs: ``output_trace`` does that.

    Raises:
        DataError: weights, inputs or preconditioner that do not fit, or weights of low precision.
        HyperparameterError: the memory limit is too small; the message says what is needed.

    >>> model = FlatModel(torch.nn.Linear(2, 1), "squared")
    >>> train_kernel(model, model.weights, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))  # xᵀx' + 1
    tensor([[6., 3.],
            [3., 2.]])
    """
    options = {"preconditioner": preconditioner, "method": method, "memory": memory}
    return _assemble(model, w, inputs, None, **options)


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
        w: Where the Jacobians are taken.
        query_inputs: The examples Q of the rows.
        train_inputs: The examples S of the columns.
        preconditioner: The diagonal of M: a number, or a vector like w.
        method: The algorithm, or its name; see ``Method`` for costs.
        memory: Limit in bytes for work and result together; half of what is free if not given.

    Returns:
        The kernel [q p, n p], in the order of ``train_kernel``.

    Raises:
        DataError: weights, inputs or preconditioner that do not fit, or weights of low precision.
        HyperparameterError: the memory limit is too small; the message says what is needed.

    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False), "squared")
    >>> cross_kernel(model, model.weights, torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    tensor([[3., 1.]])
    """
    options = {"preconditioner": preconditioner, "method": method, "memory": memory}
    return _assemble(model, w, query_inputs, train_inputs, **options)


def output_trace(K: Float[Tensor, "rows columns"], outputs: int) -> Float[Tensor, "n m"]:
    r"""The sum over outputs of the same index, :math:`\sum_j K_{ij,i'j}`: one number for a pair of examples.

    Args:
        K: A kernel as ``train_kernel`` or ``cross_kernel`` returns it.
        outputs: p.

    Raises:
        DataError: the kernel is not made of p×p blocks.

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
    r"""The blocks of a kernel one after the other, for kernels larger than memory.

    Args:
        model: The model and its loss; the loss is not used.
        w: Where the Jacobians are taken.
        inputs: The examples of the rows.
        other_inputs: The examples of the columns; without them the kernel is symmetric and only the tiles on and above
            the diagonal come: each other tile is the transpose of its mirror image.
        preconditioner: The diagonal of M: a number, or a vector like w.
        method: The algorithm, or its name; see ``Method`` for costs.
        memory: Limit in bytes for the work on tiles; half of what is free if not given.
        precision: Multiply rows in lower precision, see :class:`~poprisk.operators._kernels.Precision`: blocks are float32 and
            carry a bound on their error; rows and factors are then the only method. Default: in w's own.

    Returns:
        Tiles with their place, in outputs (i·p + j); together they cover the kernel, none twice.

    Raises:
        DataError: weights, inputs or preconditioner that do not fit, or weights of low precision.
        HyperparameterError: the memory limit is too small (the message says what is needed), or an unknown precision.

    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False), "squared")
    >>> sum(tile.block.numel() for tile in kernel_tiles(model, model.weights, torch.ones(5, 2)))
    25
    """
    if precision is None:
        return _tiles(model, w, inputs, other_inputs, preconditioner, method, memory, held=False)
    check_rounded_method(_checked_method(method), precision)
    arguments = (model, w, inputs, other_inputs, precision, preconditioner, memory)
    return prepare_rounded(*arguments, held_result=False).tiles()


def _assemble(model: FlatModel, w: Tensor, inputs: Inputs, others: Inputs | None, **options) -> Tensor:
    tiles = _tiles(model, w, inputs, others, **options, held=True)
    n, m = check_request(model, w, inputs, others)
    K: Tensor | None = None
    for tile in tiles:
        if K is None:
            p = model.outputs(w, take_examples(inputs, slice(0, 1))).shape[1]
            K = tile.block.new_empty(n * p, (m or n) * p)
        K[tile.rows, tile.columns] = tile.block
        if others is None:
            K[tile.columns, tile.rows] = tile.block.T
    assert K is not None
    return K


def _tiles(
    model: FlatModel,
    w: Tensor,
    inputs: Inputs,
    others: Inputs | None,
    preconditioner: Diagonal | None,
    method: Method | str,
    memory: int | None,
    *,
    held: bool,
) -> Iterator[Tile]:
    n, m = check_request(model, w, inputs, others)
    method = _checked_method(method)
    memory = _checked_memory(memory, w.device)
    w, itemsize = w.detach(), w.element_size()
    structure, scales = find_structure(model, w, inputs), preconditioner_roots(model, w, preconditioner)
    result = itemsize * n * (m or n) * structure.p**2 if held else 0
    if method is Method.AUTO:
        method = choose_method(costs_of(structure, model, scales, (n, m), itemsize), memory - result)
    if method is Method.VECTOR_PRODUCTS:
        chunk = _product_chunk(structure, model.size, n, itemsize, memory, result)
        return _product_tiles(model, w, inputs, others, preconditioner_diagonal(model, w, preconditioner), chunk)
    if method is Method.JACOBIAN_CONTRACTION:
        structure = structure.without_layers(model)
    recipe = make_recipe(structure, scales)
    plan = plan_tiles(recipe, n, m, itemsize, memory, result=result, device=w.device)

    def make(examples: Inputs, chunk: int) -> Features:
        return compute_features(model, w, recipe, examples, chunk)

    if others is None or m is None:
        return symmetric_tiles(make, plan, inputs, n, structure.p)
    return rectangular_tiles(make, plan, inputs, others, (n, m), structure.p)


def _product_tiles(
    model: FlatModel, w: Tensor, inputs: Inputs, others: Inputs | None, M: Tensor | None, chunk: int
) -> Iterator[Tile]:
    """One column example at a time: its Jacobian, pushed through the row examples."""
    columns = inputs if others is None else others
    n, m = check_request(model, w, inputs, columns)
    for c in range(m or n):
        J = model.output_jacobian(w, take_examples(columns, slice(c, c + 1))).squeeze(0)
        p, V = J.shape[0], (J if M is None else M * J).T.contiguous()
        at = slice(c * p, (c + 1) * p)
        for part in slices(c + 1 if others is None else n, chunk):
            block = model.jvp(w, take_examples(inputs, part), V)
            rows = slice(part.start * p, part.stop * p)
            if others is None and part.stop == c + 1:
                corner = block[-p:]  # on the diagonal: symmetric to the last bit
                block[-p:] = corner.triu() + corner.triu(1).T
            yield Tile(rows, at, block)


def _product_chunk(structure: Structure, d: int, n: int, itemsize: int, memory: int, result: int) -> int:
    chunk = n
    while chunk > 1 and result + itemsize * product_numbers(structure, d, chunk) > memory:
        chunk = (chunk + 1) // 2
    least = result + itemsize * product_numbers(structure, d, 1)
    if least > memory:
        raise HyperparameterError(
            f"memory={memory} bytes is too little: {least} bytes are the smallest that work here, {result} of them for "
            "the result; raise the limit, or use kernel_operator"
        )
    return chunk


def _checked_method(method: Method | str) -> Method:
    try:
        return Method(method)
    except ValueError:
        names = [each.value for each in Method]
        raise HyperparameterError(f"method must be a Method or one of {names}, got {method!r}") from None


def _checked_memory(memory: int | None, device: torch.device) -> int:
    if memory is None:
        return free_memory(device)
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
        raise HyperparameterError(f"memory must be a positive number of bytes, got {memory!r}: try 2**30")
    return memory
