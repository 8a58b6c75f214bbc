r"""The kernel scaled by the curvature of the loss, whose eigenvalues are relaxation rates.

In gradient flow :math:`\partial_t g = -B K_{SS}\, g` (paper: ``tangent_kernel_timescales``). The product
:math:`B K_{SS}` has the eigenvalues of the symmetric :math:`\widetilde K_B = B^{1/2} K_{SS} B^{1/2}`; for squared loss
that is :math:`K_{SS}/n`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import (
    LinearOperator,
    from_functions,
    spectrum_of_eigenpairs,
    spectrum_of_matrix,
    top_eigenpairs,
)
from poprisk.errors import DataError


def curvature_root(output_hessian: Float[Tensor, "n p p"]) -> Float[Tensor, "n p p"]:
    r"""The blocks of :math:`B^{1/2}`, where B is block diagonal with blocks :math:`\nabla^2\ell_i / n`.

    >>> curvature_root(torch.eye(2).repeat(4, 1, 1))[0]
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """
    H = output_hessian
    if H.dim() != 3 or H.shape[1] != H.shape[2] or H.shape[0] == 0:
        raise DataError(f"output_hessian must be [n, p, p], one block per example, got {list(H.shape)}")
    size = H.abs().max().item()
    slack = 10 * H.shape[1] * torch.finfo(H.dtype).eps * size
    if not (H - H.mT).abs().max().item() <= slack:
        raise DataError("output_hessian must be finite and symmetric in every block: take it from model.output_hessian")
    values, V = torch.linalg.eigh((H + H.mT) / 2)
    if values.min().item() < -slack:
        raise DataError(
            f"the loss must be convex in the outputs, got a curvature of {values.min().item():.3g} beside {size:.3g}: "
            "relaxation rates do not exist here"
        )
    return (V * (values.clamp(min=0) / H.shape[0]).sqrt().unsqueeze(1)) @ V.mT


def scaled_kernel(K: Float[Tensor, "N N"], output_hessian: Float[Tensor, "n p p"]) -> Float[Tensor, "N N"]:
    r"""The scaled tangent kernel :math:`B^{1/2} K_{SS} B^{1/2}`, dense.

    Raises:
        DataError: sizes do not fit, or a block without a real root.

    >>> K = torch.tensor([[4.0, 2.0], [2.0, 4.0]])
    >>> scaled_kernel(K, torch.ones(2, 1, 1)).round(decimals=3)  # squared loss: K/n
    tensor([[2., 1.],
            [1., 2.]])
    """
    _check_side(K.shape, output_hessian)
    root = curvature_root(output_hessian).to(K.dtype)
    half = _multiply(root, K)
    scaled = _multiply(root, half.T)
    return (scaled + scaled.T) / 2


def scaled_kernel_operator(K: LinearOperator, output_hessian: Float[Tensor, "n p p"]) -> LinearOperator:
    r"""The same known by its products; see ``scaled_kernel``.

    >>> from poprisk._core.linalg import identity
    >>> scaled_kernel_operator(identity(2), torch.full((2, 1, 1), 2.0)) @ torch.tensor([1.0, 3.0])
    tensor([1., 3.])
    """
    _check_side(K.shape, output_hessian)
    if not K.symmetric:
        raise DataError(f"the scaled kernel needs a symmetric train kernel, got {K!r}: leave other_inputs out")
    blocks = curvature_root(output_hessian).to(K.dtype)
    root = from_functions(lambda X: _multiply(blocks, X), None, K.shape, K.dtype, K.device, symmetric=True)
    return root @ K @ root


@dataclass(frozen=True, eq=False)
class Timescales:
    r"""Relaxation rates :math:`\lambda_1 \ge \lambda_2 \ge \dots > 0` of the loss gradient and their directions."""

    rates: Float[Tensor, "r"]
    """Eigenvalues of the scaled kernel that are not zero within ``resolution``."""
    vectors: Float[Tensor, "N r"]
    """Orthonormal eigenvectors, one per column."""
    resolution: float
    """Absolute size below which an eigenvalue cannot be told from zero."""
    complete: bool
    """Whether these are all nonzero eigenvalues; otherwise they are the largest, and ``condition`` is a lower bound."""

    @property
    def times(self) -> Float[Tensor, "r"]:
        """Relaxation times 1/λ, fastest first."""
        return 1 / self.rates

    @property
    def condition(self) -> float:
        """The largest over the smallest nonzero eigenvalue; NaN where there is none."""
        return (self.rates[0] / self.rates[-1]).item() if len(self.rates) else float("nan")


def timescales(
    scaled: Float[Tensor, "N N"] | LinearOperator, k: int | None = None, *, cutoff: float | None = None
) -> Timescales:
    """Relaxation rates from a scaled kernel.

    Args:
        scaled: The scaled kernel, as a matrix or an operator.
        k: Number of leading rates; needed for an operator, default for a matrix: all.
        cutoff: Eigenvalues up to this share of the largest count as zero; by default what rounding leaves, N·eps for
            a matrix, and the residuals for an operator.

    Raises:
        DataError: no k for an operator, a cutoff outside [0, 1), or a matrix that is not positive semidefinite.

    >>> scale = timescales(torch.diag(torch.tensor([8.0, 0.0, 2.0])))
    >>> scale.rates.round(decimals=3), scale.condition, scale.complete
    (tensor([8., 2.]), 4.0, True)
    """
    if cutoff is not None and not 0 <= cutoff < 1:
        raise DataError(f"cutoff must be a share of the largest eigenvalue in [0, 1), got {cutoff}")
    if isinstance(scaled, Tensor):
        spectrum = spectrum_of_matrix(scaled)
    elif k is None:
        raise DataError("for an operator say how many leading rates to find: pass k")
    else:
        spectrum = spectrum_of_eigenpairs(top_eigenpairs(scaled, k))
    level = spectrum.largest * (spectrum.resolution if cutoff is None else cutoff)
    found = int((spectrum.values > level).sum())
    kept = found if k is None else min(found, k)
    # All of them are known if the next one, listed or bounded, is at rounding level.
    complete = kept == found and (spectrum.rest <= level or found < spectrum.values.shape[0])
    return Timescales(spectrum.values[:kept], spectrum.vectors[:, :kept], level, complete)


def _multiply(blocks: Tensor, X: Tensor) -> Tensor:
    n, p, _ = blocks.shape
    return (blocks @ X.reshape(n, p, -1)).reshape(n * p, -1)


def _check_side(shape: tuple[int, ...], output_hessian: Tensor) -> None:
    side = output_hessian.shape[0] * output_hessian.shape[-1]
    if tuple(shape) != (side, side):
        raise DataError(
            f"a kernel for {output_hessian.shape[0]} examples with {output_hessian.shape[-1]} outputs is "
            f"[{side}, {side}], got {list(shape)}: take both for the same examples"
        )
