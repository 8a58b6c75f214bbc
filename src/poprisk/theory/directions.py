r"""Signal directions: where a run dissipated the most loss per unit of complexity.

.. math:: C_R = R^{-1/2} W R^{-1/2} = \sum_j \lambda_j \phi_j \phi_j^\top

with W the dissipation gramian of a window and R a metric (``thm:train_only_minimax_signal``). The test set enters none
of this.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import (
    LinearOperator,
    LowRank,
    OrthogonalProjector,
    Spectrum,
    column_norms,
    spectrum_of_eigenpairs,
    spectrum_of_factor,
    top_eigenpairs,
)
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators import Window
from poprisk.theory.effective_rank import RankKind, effective_rank
from poprisk.theory.metrics import Metric


@dataclass(frozen=True, eq=False)
class SignalDirections:
    """The eigenpairs of C_R, largest first, with certificates. Made by ``signal_directions``."""

    metric: Metric
    """R."""
    operator: LinearOperator
    """C_R itself."""
    spectrum: Spectrum
    """Eigenvalues λ and whitened directions φ; what is not listed is null space, or at most ``spectrum.rest``."""
    residuals: Float[Tensor, "k"]
    r""":math:`\|C_R \phi_j - \lambda_j \phi_j\|`: an eigenvalue of C_R lies that near each value."""
    converged: bool
    """Whether an iterative search reached its tolerance; a decomposition always does."""

    @property
    def values(self) -> Float[Tensor, "k"]:
        """λ."""
        return self.spectrum.values

    @property
    def whitened(self) -> Float[Tensor, "N k"]:
        """φ, orthonormal, in the coordinates of z = R^½ h."""
        return self.spectrum.vectors

    @property
    def rank(self) -> int:
        """ρ: number of eigenvalues that are distinguishable from 0."""
        return self.spectrum.count_above(max(self.spectrum.resolution * self.spectrum.largest, self.spectrum.rest))

    def value_after(self, r: int) -> float:
        r""":math:`\lambda_{r+1}`; past the last listed one 0, or the bound on what was not computed.

        >>> import torch
        >>> from poprisk.theory import euclidean_metric
        >>> directions = signal_directions(torch.diag(torch.tensor([10.0, 1.0])).double(), euclidean_metric(2))
        >>> directions.value_after(0), directions.value_after(1), directions.value_after(2)
        (100.0, 1.0, 0.0)
        """
        if not 0 <= r <= self.metric.size:
            raise HyperparameterError(f"r must lie between 0 and {self.metric.size}, got {r}")
        return self.values[r].item() if r < len(self.values) else self.spectrum.rest

    def effective_rank(self, kind: RankKind = "participation") -> float:
        """A rank that need not be whole, of the values listed; see ``poprisk.theory.effective_rank``."""
        return effective_rank(self.values, kind)

    def projector(self, r: int) -> OrthogonalProjector:
        r""":math:`Q_r = \sum_{j \le r} \phi_j \phi_j^\top`, the best rank-r projector on the whitened space.

        Differs from the paper, which calls it the unique one under a gap: others can attain the same worst case, as
        for C = diag(3, 2, 1), r = 1, the projector onto e_1 turned slightly toward e_3.

        Raises:
            HyperparameterError: r is negative or above the number of directions listed.
        """
        if not 0 <= r <= len(self.values):
            raise HyperparameterError(f"r must lie between 0 and the {len(self.values)} directions known, got {r}")
        return OrthogonalProjector(self.whitened[:, :r])

    def metric_projector(self, r: int) -> LinearOperator:
        r""":math:`\Pi_r = R^{-1/2} Q_r R^{1/2}`, the R-orthogonal projector on output gradients."""
        return self.metric.inverse_root @ self.projector(r) @ self.metric.root

    def directions(self, r: int) -> Float[Tensor, "N r"]:
        r""":math:`R^{-1/2} \phi_j`, j ≤ r: a basis of the range of :math:`\Pi_r`, orthonormal in the metric."""
        return self.metric.inverse_root @ self.projector(r).basis


def signal_directions(
    gramian: Float[Tensor, "m N"] | LinearOperator,
    metric: Metric,
    *,
    count: int | None = None,
    tolerance: float | None = None,
    max_products: int | None = None,
) -> SignalDirections:
    r"""The eigenpairs of :math:`C_R` for a dissipation gramian W.

    Args:
        gramian: A factor F with :math:`W = F^\top F` (``window.dense_operators().factor``), which is decomposed, or W
            as an operator (``window.dissipation_gramian``), whose leading pairs are searched.
        metric: R.
        count: Leading pairs wanted of an operator; required for one. All are returned for a factor.
        tolerance: Relative residual accepted by the search; as of ``top_eigenpairs``.
        max_products: Most products of the search with C_R.

    Raises:
        DataError: sizes do not fit, or an operator without ``count``.

    >>> import torch
    >>> from poprisk.theory.metrics import metric_of
    >>> W_factor = torch.diag(torch.tensor([3.0, 2.0]))
    >>> signal_directions(W_factor, metric_of(torch.diag(torch.tensor([9.0, 1.0])))).values  # 9/9 and 4/1
    tensor([4., 1.])
    """
    if gramian.shape[1] != metric.size:
        raise DataError(
            f"the metric must act on the {gramian.shape[1]} outputs of the gramian, got one of size {metric.size}: "
            "give it the number of outputs per example"
        )
    root = metric.inverse_root
    if isinstance(gramian, Tensor):
        whitened = (root @ gramian.T).T
        spectrum = spectrum_of_factor(whitened)
        operator: LinearOperator = LowRank(whitened.T)
        V = spectrum.vectors
        return SignalDirections(metric, operator, spectrum, column_norms(operator @ V - V * spectrum.values), True)
    if count is None:
        raise DataError("of a gramian known by its products only leading directions can be found: pass count=…")
    operator = root @ gramian @ root
    pairs = top_eigenpairs(operator, count, tolerance=tolerance, max_products=max_products)
    return SignalDirections(metric, operator, spectrum_of_eigenpairs(pairs), pairs.residuals, pairs.converged)


def signal_directions_of(window: Window, metric: Metric, *, count: int | None = None) -> SignalDirections:
    """The signal directions of a window: all of them from its dense operators, or ``count`` from products alone.

    >>> import torch
    >>> from poprisk._core.autodiff import FlatModel
    >>> from poprisk.operators._gradient_descent import gradient_descent
    >>> from poprisk.theory import euclidean_metric
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False).double(), "squared")
    >>> x, y = torch.diag(torch.tensor([2.0, 1.0])).double(), torch.ones(2, 1, dtype=torch.float64)
    >>> window = Window(gradient_descent(model, x, y, lr=0.1, steps=3), model, x, y)
    >>> signal_directions_of(window, euclidean_metric(2)).rank
    2
    """
    gramian = window.dense_operators().factor if count is None else window.dissipation_gramian
    return signal_directions(gramian, metric, count=count)
