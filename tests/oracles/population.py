"""Naive float64 code written from the paper's population-risk section: explicit loops, one equation each."""

import torch
from torch import Tensor


def rate_matrix_loop(G: Tensor) -> Tensor:
    """Eq. one_step_loo: A_B = ḡ ḡᵀ - Σ_B/(b-1)."""
    b, d = G.shape
    mean = sum(G[a] for a in range(b)) / b
    covariance = torch.zeros(d, d, dtype=G.dtype)
    for a in range(b):
        c = G[a] - mean
        covariance += torch.outer(c, c) / b
    return torch.outer(mean, mean) - covariance / (b - 1)


def off_diagonal_rate_loop(G: Tensor, M: Tensor) -> Tensor:
    """Eq. off_diagonal_rate, first form: the sum over pairs a ≠ c of g_aᵀ M g_c, for a dense M."""
    b = G.shape[0]
    total = torch.zeros((), dtype=G.dtype)
    for a in range(b):
        for c in range(b):
            if a != c:
                total = total + G[a] @ M @ G[c]
    return total / (b * (b - 1))


def kernel_rate_loop(J: Tensor, M: Tensor, r: Tensor) -> Tensor:
    """Eq. off_diagonal_kernel_rate: the sum over pairs a ≠ c of r_aᵀ (J_a M J_cᵀ) r_c, for a dense M."""
    b = J.shape[0]
    total = torch.zeros((), dtype=J.dtype)
    for a in range(b):
        for c in range(b):
            if a != c:
                K_ac = J[a] @ M @ J[c].T
                total = total + r[a] @ K_ac @ r[c]
    return total / (b * (b - 1))


def dense_projector(A: Tensor, P: Tensor, tolerance: float = 1e-13) -> tuple[Tensor, Tensor]:
    """Eq. full_psd_projector by the d×d eigendecomposition: M* and the sum of the positive eigenvalues."""
    root = torch.diag(P.sqrt())
    values, vectors = torch.linalg.eigh(root @ A @ root)
    keep = values > tolerance * values.abs().max()
    N = vectors[:, keep] @ vectors[:, keep].T
    return root @ N @ root, values[keep].sum()


def loo_risk_loop(loss, w: Tensor, examples: list, M: Tensor, lr: float) -> Tensor:
    """Theorem thm:kernel_increment: b⁻¹ Σ_a ℓ_a(w - η M ḡ_{-a}), with ḡ_{-a} the mean gradient of the others."""
    b = len(examples)
    total = torch.zeros((), dtype=w.dtype)
    for a in range(b):
        others = [_gradient(loss, w, examples[c]) for c in range(b) if c != a]
        stepped = w - lr * M @ (sum(others) / (b - 1))
        total = total + loss(stepped, examples[a]).detach()
    return total / b


def mean_variance_loop(G: Tensor) -> Tensor:
    """Eq. hard_filter: σ_k²/(b-1) with σ_k² = (Σ_B)_kk."""
    b = G.shape[0]
    mean = G.sum(dim=0) / b
    return sum((G[a] - mean) ** 2 for a in range(b)) / b / (b - 1)


def sum_variance_loop(X: Tensor) -> Tensor:
    """Unbiased variance of the sum of k independent rows: (k Σ x² - (Σ x)²)/(k-1)."""
    k = X.shape[0]
    return (k * (X**2).sum(dim=0) - X.sum(dim=0) ** 2) / (k - 1)


def _gradient(loss, w: Tensor, example) -> Tensor:
    w = w.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(w, example), w)[0]
