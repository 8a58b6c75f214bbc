r"""Kernels that are never formed: products with them, one pull-back and one push-forward each."""

from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, take_examples
from poprisk._core.linalg import LinearOperator, from_functions
from poprisk.operators._kernels.method import check_request
from poprisk.operators._kernels.validation import Diagonal, preconditioner_diagonal


def kernel_operator(
    model: FlatModel,
    w: Tensor,
    inputs: Inputs,
    other_inputs: Inputs | None = None,
    *,
    preconditioner: Diagonal | None = None,
) -> LinearOperator:
    r"""The kernel :math:`K = J M J'^\top` known by its products :math:`K X = J (M (J'^\top X))`.

    About five forward passes over the examples per column, and memory for d numbers per column.

    Args:
        model: The model and its loss; the loss is not used.
        w: Weights at which the Jacobians are taken, like ``model.weights``.
        inputs: The n examples of the rows.
        other_inputs: The n' examples of the columns; without them the kernel is symmetric, :math:`J M J^\top`.
        preconditioner: The diagonal of M: a number, or a vector like w.

    Returns:
        An operator [n p, n' p]; index i·p + j is output j of example i.

    Raises:
        DataError: weights, inputs or preconditioner do not fit the model, or weights are of low precision.

    >>> import torch
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False), "squared")
    >>> K = kernel_operator(model, model.weights, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    >>> K @ torch.tensor([1.0, 0.0])
    tensor([5., 2.])
    """
    n, others = check_request(model, w, inputs, other_inputs)
    M = preconditioner_diagonal(model, w, preconditioner)
    p = model.outputs(w, take_examples(inputs, slice(0, 1))).shape[1]
    w = w.detach()

    def product(rows: Inputs, columns: Inputs, X: Tensor) -> Tensor:
        pulled = model.vjp(w, columns, X)
        return model.jvp(w, rows, pulled if M is None else M.unsqueeze(1) * pulled)

    columns, shape = inputs if other_inputs is None else other_inputs, (n * p, (others or n) * p)
    back = None if other_inputs is None else lambda Y: product(columns, inputs, Y)
    return from_functions(lambda X: product(inputs, columns, X), back, shape, w.dtype, w.device, symmetric=back is None)
