r"""The graph metric :math:`R_{S,\gamma} = I + \gamma \hat L_S`: outputs that differ between neighbours are complex.

The paper says "graph Laplacian" and leaves the graph open. Here it is the symmetric k-nearest-neighbour graph of the
inputs (an edge where either of two examples is among the k nearest of the other) and the normalized Laplacian

.. math:: \hat L_S = I - \Delta^{-1/2} A \Delta^{-1/2}, \qquad \Delta = \operatorname{diag}(A 1)

whose eigenvalues lie in [0, 2], so that γ means the same for every graph. An example without an edge has a zero row.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import LinearOperator, from_functions, identity
from poprisk.errors import DataError, HyperparameterError
from poprisk.theory.metrics import Metric, euclidean_metric, lifted_over_outputs, metric_of

# Examples up to which the roots are taken by a dense decomposition if the caller does not say.
_DENSE_SIDE = 2000


def neighbour_graph(points: Float[Tensor, "n *features"], neighbours: int = 10) -> Any:
    """The symmetric k-nearest-neighbour graph, a sparse SciPy matrix of zeros and ones.

    Args:
        points: One row per example, of any shape; distances are Euclidean.
        neighbours: k, below n.

    Raises:
        DataError: points that are not finite.
        HyperparameterError: k is not between 1 and n - 1.

    >>> neighbour_graph(torch.tensor([[0.0], [1.0], [5.0]]), neighbours=1).toarray().astype(int).tolist()
    [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    """
    from scipy.sparse import csr_matrix
    from scipy.spatial import KDTree

    n = len(points)
    if not 1 <= neighbours < n:
        raise HyperparameterError(f"neighbours must lie between 1 and n - 1 = {n - 1}, got {neighbours}")
    flat = points.detach().reshape(n, -1).to("cpu", torch.float64).numpy()
    if not np.isfinite(flat).all():
        raise DataError("the points of a graph must be finite, got NaN or infinity: clean the inputs first")
    nearest = np.asarray(KDTree(flat).query(flat, k=neighbours + 1)[1])
    others = [row[row != i][:neighbours] for i, row in enumerate(nearest)]  # equal points may come before oneself
    rows, columns = np.repeat(np.arange(n), neighbours), np.concatenate(others)
    directed = csr_matrix((np.ones(n * neighbours), (rows, columns)), shape=(n, n))
    return directed.maximum(directed.T)


def normalized_laplacian(adjacency: Any) -> Any:
    r""":math:`\hat L = I - \Delta^{-1/2} A \Delta^{-1/2}` of a graph, a sparse SciPy matrix.

    Args:
        adjacency: Symmetric weights that are not negative: a SciPy sparse matrix, an array or a tensor.

    Raises:
        DataError: not square, not symmetric, or negative.

    >>> normalized_laplacian([[0.0, 2.0], [2.0, 0.0]]).toarray()
    array([[ 1., -1.],
           [-1.,  1.]])
    """
    from scipy.sparse import csr_matrix, diags

    A: Any = csr_matrix(adjacency, dtype=np.float64)
    if A.shape[0] != A.shape[1] or abs(A - A.T).max() > 0 or (A.nnz and not A.data.min() >= 0):
        raise DataError(f"a graph needs a square symmetric matrix of weights ≥ 0, got shape {list(A.shape)}")
    degrees = np.asarray(A.sum(axis=1)).ravel()
    linked = degrees > 0
    scale = diags(np.divide(1.0, np.sqrt(degrees), out=np.zeros_like(degrees), where=linked))
    return csr_matrix(diags(linked.astype(np.float64)) - scale @ A @ scale)


def graph_metric(
    points: Float[Tensor, "n *features"],
    gamma: float,
    *,
    neighbours: int = 10,
    outputs: int = 1,
    dense: bool | None = None,
    dtype: torch.dtype = torch.float64,
    accuracy: float = 1e-13,
) -> Metric:
    r"""The metric :math:`I + \gamma \hat L_S \otimes I_p` of the inputs' nearest-neighbour graph.

    Args:
        points: The n inputs, or features of them, of any shape.
        gamma: γ ≥ 0; 0 gives the identity.
        neighbours: k of the graph.
        outputs: p, outputs per example.
        dense: Roots by a decomposition of the n×n matrix, or by polynomials of the sparse one; dense up to n = 2000
            if not given.
        dtype: Data type of the operators.
        accuracy: Accuracy of the polynomials.

    Raises:
        DataError, HyperparameterError: as of ``neighbour_graph``; γ negative.

    >>> metric = graph_metric(torch.tensor([[0.0], [1.0], [5.0]]), gamma=2.0, neighbours=1)
    >>> metric.matrix.to_dense().diag()
    tensor([3., 3., 3.], dtype=torch.float64)
    """
    laplacian = normalized_laplacian(neighbour_graph(points, neighbours))
    return laplacian_metric(
        laplacian, gamma, outputs=outputs, dense=dense, dtype=dtype, device=points.device, accuracy=accuracy
    )


def laplacian_metric(
    laplacian: Any,
    gamma: float,
    *,
    outputs: int = 1,
    dense: bool | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    accuracy: float = 1e-13,
) -> Metric:
    r""":math:`I + \gamma \hat L \otimes I_p` for a Laplacian of one's own, as ``normalized_laplacian`` returns it.

    Raises:
        HyperparameterError: γ is negative.

    >>> laplacian_metric(normalized_laplacian([[0.0, 1.0], [1.0, 0.0]]), 4.0).interval  # eigenvalues 1 and 1 + 2γ
    (1.0, 9.0)
    """
    if not (gamma >= 0 and np.isfinite(gamma)):
        raise HyperparameterError(f"gamma must be a finite number ≥ 0, got {gamma}")
    n = laplacian.shape[0]
    if gamma == 0:
        return euclidean_metric(n * outputs, dtype=dtype, device=device)
    R = identity(n, dtype=dtype, device=device) + gamma * _sparse_operator(laplacian, dtype, device)
    interval = (1.0, 1.0 + 2.0 * gamma)
    if n <= _DENSE_SIDE if dense is None else dense:
        decomposed = metric_of(R.to_dense())
        metric = Metric(R, decomposed.root, decomposed.inverse_root, interval, decomposed.accuracy)
    else:
        metric = metric_of(R, smallest=interval[0], largest=interval[1], accuracy=accuracy)
    return lifted_over_outputs(metric, outputs)


def _sparse_operator(matrix: Any, dtype: torch.dtype, device: torch.device | str) -> LinearOperator:
    entries = matrix.tocoo()
    indices = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
    values = torch.from_numpy(entries.data).to(dtype)
    sparse = torch.sparse_coo_tensor(indices, values, matrix.shape, check_invariants=True).coalesce().to(device)
    return from_functions(lambda X: torch.sparse.mm(sparse, X), None, matrix.shape, dtype, device, symmetric=True)
