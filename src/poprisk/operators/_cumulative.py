r"""The error of a fixed predictor over all directions the kernel could have moved, on the path of the run and off it.

A window lifts a gradient direction h to the path :math:`T h = (\tilde M_j^{1/2} F_j h)_j`, and
:math:`G - A D = L T` for maps :math:`L_j` of one step each. With the projector :math:`P_{vis}` onto the range of T and
the projectors :math:`\Pi_j` onto what step j could have reached,

.. math:: \mathcal D_A = L \Pi L^\top = \mathcal D_A^{vis} + \mathcal N_A, \qquad
   \mathcal D_A^{vis} = L P_{vis} L^\top, \qquad \mathcal N_A = L (\Pi - P_{vis}) L^\top \succeq 0

(``thm:cumulative_error_split``). In gradient flow the lift is :math:`K_{SS}^{1/2} P_g`; in discrete time the maps must
carry the momentum, or the slack is not positive semidefinite.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import Spectrum, spectrum_of_matrix
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._channels import operator_norm, require_shape
from poprisk.operators._reach import effective_preconditioners
from poprisk.runs import AffineStep

# Directions below this many rounding errors of the leading one are no directions: as for the signal channel.
_MARGIN = 1e4


@dataclass(frozen=True, eq=False)
class LiftedStep:
    """One step of a run as dense matrices."""

    step: AffineStep
    """Its preconditioner and momentum."""
    gradient_map: Float[Tensor, "d N"]
    r""":math:`F_j = J_j^\top S_j P_j`, what a gradient at the start of the window has become in this step."""
    reach: Float[Tensor, "d N"]
    r""":math:`J_j^\top S_j`, what any output gradient would become in this step."""
    train_segment: Float[Tensor, "N d"]
    """J̄_S, averaged over the step."""
    test_segment: Float[Tensor, "M d"]
    """J̄_Q, averaged over the step."""


@dataclass(frozen=True, eq=False)
class CumulativeError:
    r"""Eq. ``lifted_error_split``, each part computed on its own."""

    total: Float[Tensor, "M M"]
    r""":math:`\mathcal D_A`."""
    visible: Float[Tensor, "M M"]
    r""":math:`\mathcal D_A^{vis}`, equal to ``path_error``."""
    slack: Float[Tensor, "M M"]
    r""":math:`\mathcal N_A`, the price of directions that the run never took; positive semidefinite."""

    @property
    def off_path_slack(self) -> Float[Tensor, "M M"]:
        r""":math:`\mathcal N_A` by its full name, the same as ``slack``."""
        return self.slack

    @property
    def mismatch(self) -> float:
        """How far total is from the sum of the parts, relative to it."""
        size = operator_norm(self.total)
        return operator_norm(self.total - self.visible - self.slack) / size if size else 0.0

    @property
    def smallest_slack(self) -> float:
        r"""The smallest eigenvalue of total - visible over the norm of total: not negative but for rounding."""
        size = operator_norm(self.total)
        return torch.linalg.eigvalsh(self.total - self.visible)[0].item() / size if size else 0.0


def lifted_maps(steps: Sequence[LiftedStep], A: Float[Tensor, "M N"] | None = None) -> list[Float[Tensor, "M d"]]:
    r"""The maps :math:`L_j` with :math:`G - A D = \sum_j L_j \tilde M_j^{1/2} F_j`.

    .. math:: L_j = \Bigl(\kappa_j \sum_{k \ge j} \beta_{j+1} \cdots \beta_k\, \Delta_k a_k M_k + b_j \Delta_j M_j\Bigr)
              \tilde M_j^{\dagger/2}, \qquad \Delta_k = \bar J_{Q,k} - A \bar J_{S,k}

    Args:
        steps: The window, first step first.
        A: The predictor; None stands for 0, and the maps add up to G.

    Raises:
        DataError: no step, shapes that do not fit, or a negative preconditioner.

    >>> J = torch.tensor([[1.0, 0.0]])
    >>> step = AffineStep(batch=torch.tensor([0]), selection=torch.ones(1), preconditioner=torch.tensor([4.0, 4.0]))
    >>> step = LiftedStep(step, J.T, J.T, J, torch.tensor([[3.0, 5.0]]))
    >>> lifted_maps([step])[0], lifted_maps([step], A=torch.tensor([[2.0]]))[0]
    (tensor([[ 6., 10.]]), tensor([[ 2., 10.]]))
    """
    steps = _checked(steps)
    if A is not None:
        require_shape(A, (steps[0].test_segment.shape[0], steps[0].train_segment.shape[0]), "A")
    maps, later = [], 0.0
    effective = effective_preconditioners([lifted.step for lifted in steps])
    for lifted, M_tilde in zip(reversed(steps), reversed(effective), strict=True):
        step = lifted.step
        difference = lifted.test_segment if A is None else lifted.test_segment - A @ lifted.train_segment
        moved = difference * step.preconditioner
        through_buffer = moved * step.buffer_share + later
        weighted = through_buffer * step.new_gradient + moved * step.direct_share
        maps.append(weighted * torch.where(M_tilde > 0, M_tilde, torch.inf).rsqrt())
        later = through_buffer * step.momentum
    return maps[::-1]


def cumulative_error(
    steps: Sequence[LiftedStep], A: Float[Tensor, "M N"], *, cutoff: float | None = None
) -> CumulativeError:
    r"""The cumulative error of a predictor over the steps of a run, in the lifted form of discrete time.

    .. math:: \mathcal D_A = \sum_j L_j \Pi_j L_j^\top, \qquad \Pi_j \text{ onto } range(\tilde M_j^{1/2} J_j^\top S_j)

    Without momentum and for full batches this is :math:`\sum_j \Delta_j K_j^\dagger \Delta_j^\top`, the paper's
    integral as a sum. If the predictor is preserved, :math:`\bar J_Q = A \bar J_S` throughout, it is 0, and G = A D.

    Args:
        steps: The window, first step first, dense.
        A: The predictor.
        cutoff: Directions whose singular value is at most this share of the largest one do not count as reached (by a
            step) or taken (by the run); by default 1e4 eps.

    Raises:
        DataError: no step, shapes that do not fit, or a negative preconditioner.
        HyperparameterError: a cut-off outside [0, 1).

    >>> J = torch.tensor([[1.0, 0.0]])
    >>> step = AffineStep(batch=torch.tensor([0]), selection=torch.ones(1), preconditioner=torch.tensor([4.0, 4.0]))
    >>> step = LiftedStep(step, J.T, J.T, J, torch.tensor([[3.0, 5.0]]))
    >>> error = cumulative_error([step], torch.tensor([[2.0]]))
    >>> error.total, error.slack  # of the two weights only the first was in reach, and the run took it
    (tensor([[4.]]), tensor([[0.]]))
    """
    coordinates, paths = [], []
    effective = effective_preconditioners([lifted.step for lifted in _checked(steps)])
    for L, step, M_tilde in zip(lifted_maps(steps, A), steps, effective, strict=True):
        root = M_tilde.sqrt().unsqueeze(1)
        U = _range_basis(root * step.reach, cutoff)
        coordinates.append(L @ U)
        paths.append(U.T @ (root * step.gradient_map))
    return _split(torch.cat(coordinates, dim=1), torch.cat(paths), cutoff)


def flow_cumulative_error(
    weights: Float[Tensor, "nodes"],
    train_kernels: Float[Tensor, "m N N"],
    cross_kernels: Float[Tensor, "m M N"],
    propagators: Float[Tensor, "m N N"],
    A: Float[Tensor, "M N"],
    *,
    cutoff: float | None = None,
) -> CumulativeError:
    r"""The cumulative error in gradient flow (``thm:cumulative_error_split``), from kernels on a quadrature.

    .. math:: \mathcal D_A = \int_s^T \Delta_A K_{SS}^\dagger \Delta_A^\top d\tau, \qquad \Delta_A = K_{QS} - A K_{SS}

    The split holds for the sums themselves, whatever the error of the quadrature: the nodes are a discrete lift.

    Args:
        weights: Positive weights of the quadrature.
        train_kernels: K_SS at the nodes.
        cross_kernels: K_QS at the nodes; must vanish where K_SS does, as J_Q J_Sᵀ does.
        propagators: P_g(τ, s) at the nodes.
        A: The predictor.
        cutoff: Eigenvalues of K_SS at most this share of the largest one count as 0 (by default N·eps), and directions
            of the path likewise by its square root.

    Raises:
        DataError: shapes do not fit, weights that are not positive, or a K_SS that is not positive semidefinite.
        HyperparameterError: a cut-off outside [0, 1).

    >>> ones = torch.ones(1, 1, 1)
    >>> flow_cumulative_error(torch.tensor([0.5]), 4 * ones, 6 * ones, ones, torch.tensor([[1.0]])).total
    tensor([[0.5000]])
    """
    m, N, _ = train_kernels.shape
    M = cross_kernels.shape[1]
    shapes = (tuple(train_kernels.shape), tuple(cross_kernels.shape), tuple(propagators.shape), tuple(weights.shape))
    if shapes != ((m, N, N), (m, M, N), (m, N, N), (m,)) or m == 0:
        raise DataError(
            f"kernels, propagators and weights must be [m, N, N], [m, M, N], [m, N, N] and [m], got "
            f"{[list(shape) for shape in shapes]}"
        )
    if not (weights > 0).all():
        raise DataError(f"weights of the quadrature must be positive, got a minimum of {weights.min().item():.3g}")
    require_shape(A, (M, N), "A")
    coordinates, paths = [], []
    for weight, K_SS, K_QS, P in zip(weights, train_kernels, cross_kernels, propagators, strict=True):
        spectrum = spectrum_of_matrix(K_SS)
        roots, V = _kept(spectrum, cutoff)
        coordinates.append(weight.sqrt() * (K_QS - A @ K_SS) @ V / roots)
        paths.append(weight.sqrt() * roots.unsqueeze(1) * (V.T @ P))
    return _split(torch.cat(coordinates, dim=1), torch.cat(paths), None if cutoff is None else cutoff**0.5)


def _split(L: Tensor, T: Tensor, cutoff: float | None) -> CumulativeError:
    """D_A = L Lᵀ, split by the projector onto the range of T."""
    Q = _range_basis(T, cutoff)
    on_path = L @ Q
    off_path = L - on_path @ Q.T
    return CumulativeError(L @ L.T, on_path @ on_path.T, off_path @ off_path.T)


def _range_basis(X: Tensor, cutoff: float | None) -> Tensor:
    if cutoff is not None and not 0 <= cutoff < 1:
        raise HyperparameterError(f"cutoff must lie in [0, 1), relative to the largest singular value, got {cutoff}")
    share = _MARGIN * torch.finfo(X.dtype).eps if cutoff is None else cutoff
    U, s, _ = torch.linalg.svd(X, full_matrices=False)
    return U[:, : int((s > share * s[:1]).sum())]


def _kept(spectrum: Spectrum, cutoff: float | None) -> tuple[Tensor, Tensor]:
    share = spectrum.resolution if cutoff is None else cutoff
    k = spectrum.count_above(share * spectrum.largest)
    return spectrum.roots[:k], spectrum.vectors[:, :k]


def _checked(steps: Sequence[LiftedStep]) -> Sequence[LiftedStep]:
    if not steps:
        raise DataError("a window needs at least one step, got none")
    N, d = steps[0].train_segment.shape
    M = steps[0].test_segment.shape[0]
    for k, step in enumerate(steps):
        for name, X, shape in _matrices(step, N, M, d):
            require_shape(X, shape, f"{name} of step {k}")
        M_k = step.step.preconditioner
        if tuple(M_k.shape) != (d,) or not (M_k >= 0).all():
            raise DataError(
                f"preconditioner of step {k} must be a vector [{d}] that is not negative, got shape "
                f"{list(M_k.shape)}: the gramian of a run needs its square root"
            )
    return steps


def _matrices(step: LiftedStep, N: int, M: int, d: int) -> Iterator[tuple[str, Tensor, tuple[int, int]]]:
    yield "gradient_map", step.gradient_map, (d, N)
    yield "reach", step.reach, (d, N)
    yield "train_segment", step.train_segment, (N, d)
    yield "test_segment", step.test_segment, (M, d)
