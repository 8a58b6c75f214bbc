r"""The self-influence metric: directions along which examples answer to their own loss unevenly are complex.

With the train transfer D of a window and covectors :math:`a_i = \nabla\Psi_{z_i}(e_i(s))`,

.. math:: R^a_{S,\gamma,\beta} = R_{S,\gamma} + \beta\, D^\top A_a^\top C_n A_a D, \qquad
   (A_a x)_i = \langle a_i, x_i \rangle, \qquad C_n = I - \tfrac1n 1 1^\top

(``def:self_influence_metric``). The centring leaves alone what moves all examples' losses alike.
"""

from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import (
    LinearOperator,
    Spectrum,
    from_dense,
    from_functions,
    spectrum_of_factor,
    top_eigenpairs,
)
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators import Transfer, Window, require_shape
from poprisk.theory.metrics import Metric, metric_of

# Outputs up to which the roots are taken by a dense decomposition if the caller does not say.
_DENSE_SIDE = 2000
_MARGIN = 1.05


def start_covectors(window: Window) -> Float[Tensor, "n p"]:
    r"""The covectors :math:`a_i = \nabla_u \ell(u_i(s), y_i)` of the training loss at the window's start.

    >>> import torch
    >>> from poprisk._core.autodiff import FlatModel
    >>> from poprisk.operators._gradient_descent import gradient_descent
    >>> model = FlatModel.from_function(lambda w, x: w * x, torch.zeros(1), "squared")
    >>> x, y = torch.ones(2, 1), torch.tensor([[1.0], [2.0]])
    >>> start_covectors(Window(gradient_descent(model, x, y, lr=0.1, steps=1), model, x, y))
    tensor([[-1.],
            [-2.]])
    """
    n = window.num_examples
    return n * window.output_gradient.reshape(n, -1)


def self_influence_responses(train_transfer: Transfer, covectors: Float[Tensor, "n p"]) -> LinearOperator:
    r""":math:`C_n A_a D`: how each example's own loss answers, less the mean over examples.

    Without the centring, :math:`(A_a D h)_i = \langle a_i, G_{Q_i} h \rangle` (``prop:self_influence_decomp``).

    Raises:
        DataError: D is not square with as many rows as there are covector entries.

    >>> import torch
    >>> B = self_influence_responses(torch.eye(2), torch.tensor([[1.0], [3.0]]))
    >>> B @ torch.ones(2)
    tensor([-1.,  1.])
    """
    n, p = covectors.shape
    require_shape(train_transfer, (n * p, n * p), "train_transfer, for these covectors,")
    D = from_dense(train_transfer) if isinstance(train_transfer, Tensor) else train_transfer
    a = covectors.to(D.device, D.dtype)

    def contract(X: Tensor) -> Tensor:
        losses = (a[:, :, None] * X.reshape(n, p, -1)).sum(dim=1)
        return losses - losses.mean(dim=0)

    def spread(Y: Tensor) -> Tensor:
        return (a[:, :, None] * (Y - Y.mean(dim=0))[:, None, :]).reshape(n * p, -1)

    return from_functions(contract, spread, (n, n * p), D.dtype, D.device) @ D


def self_influence_metric(
    base: Metric,
    train_transfer: Transfer,
    covectors: Float[Tensor, "n p"],
    beta: float,
    *,
    dense: bool | None = None,
    accuracy: float = 1e-13,
    memory: int = 2**30,
) -> Metric:
    r"""The metric :math:`R^a_{S,\gamma,\beta}` over a base metric, :math:`I` or ``graph_metric``.

    Args:
        base: :math:`R_{S,\gamma}`.
        train_transfer: D, a matrix or ``window.train_transfer``.
        covectors: :math:`a_i`, one row per example; ``start_covectors(window)`` for the training loss.
        beta: β ≥ 0, in units of complexity per squared change of loss; 0 gives the base itself.
        dense: Roots by a decomposition of the N×N matrix, or by polynomials of its products; dense up to N = 2000 if
            not given.
        accuracy: Accuracy of the polynomials.
        memory: Bytes for the n×N matrix :math:`C_n A_a D`, which polynomials are made of where it fits, at the cost of
            one backward sweep; where it does not, each of their products is a forward and a backward sweep.

    Raises:
        DataError: sizes do not fit.
        HyperparameterError: β negative, or too large for a polynomial of the products.

    >>> import torch
    >>> from poprisk.theory import euclidean_metric
    >>> metric = self_influence_metric(euclidean_metric(2), torch.eye(2).double(), torch.tensor([[1.0], [-1.0]]), 3.0)
    >>> metric.matrix.to_dense()
    tensor([[2.5000, 1.5000],
            [1.5000, 2.5000]], dtype=torch.float64)
    """
    if not 0 <= beta < float("inf"):
        raise HyperparameterError(f"beta must be a finite number ≥ 0, got {beta}")
    B = self_influence_responses(train_transfer, covectors)
    if base.size != B.shape[1]:
        raise DataError(f"the base metric must act on {B.shape[1]} outputs, got one of size {base.size}")
    if beta == 0:
        return base
    if base.size <= _DENSE_SIDE if dense is None else dense:
        responses = B.to_dense()
        return metric_of(base.matrix.to_dense() + beta * responses.T @ responses)
    if B.shape[0] * B.shape[1] * B.dtype.itemsize <= memory:
        B = from_dense(B.adjoint().to_dense().T)
    gram = B.T @ B
    pairs = top_eigenpairs(gram, 1, tolerance=1e-3)
    largest = base.interval[1] + _MARGIN * beta * (pairs.values[0].item() + pairs.residuals[0].item())
    return metric_of(base.matrix + beta * gram, smallest=base.interval[0], largest=largest, accuracy=accuracy)


def weighted_transfer(metric: Metric, test_transfer: Transfer) -> LinearOperator:
    r"""The self-influence-weighted signal operator :math:`T = R^{-1/2} G^\top G R^{-1/2}`, for any metric R.

    What a test set really saw, per unit of complexity; :math:`T \preceq \|\Gamma_Q\| C_R`.

    Raises:
        DataError: G does not act on the metric's outputs.

    >>> import torch
    >>> from poprisk.theory.metrics import metric_of
    >>> weighted_transfer(metric_of(4 * torch.eye(1)), torch.tensor([[6.0]])).to_dense()
    tensor([[9.]])
    """
    require_shape(test_transfer, (test_transfer.shape[0], metric.size), "test_transfer, for this metric,")
    G = from_dense(test_transfer) if isinstance(test_transfer, Tensor) else test_transfer
    half = G @ metric.inverse_root
    return half.T @ half


def weighted_transfer_spectrum(metric: Metric, test_transfer: Float[Tensor, "M N"]) -> Spectrum:
    r"""Eigenvalues and vectors of T, from the singular values of :math:`G R^{-1/2}`.

    >>> import torch
    >>> from poprisk.theory.metrics import metric_of
    >>> weighted_transfer_spectrum(metric_of(4 * torch.eye(1)), torch.tensor([[6.0]])).values
    tensor([9.])
    """
    require_shape(test_transfer, (test_transfer.shape[0], metric.size), "test_transfer, for this metric,")
    return spectrum_of_factor((metric.inverse_root @ test_transfer.T).T)
