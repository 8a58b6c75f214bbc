"""Closed forms of the linear model u = X w under squared loss Φ = ‖u - y‖²/2n, float64 numpy (``sec:linear_model``)."""

from dataclasses import dataclass

import numpy as np


@dataclass
class LinearOperators:
    """Prop. ``prop:linear_operators`` on [0, T]."""

    P: np.ndarray
    W: np.ndarray
    W_factor: np.ndarray  # a square root: W = W_factorᵀ W_factor, exact also where W is tiny
    D: np.ndarray
    G: np.ndarray
    A: np.ndarray  # the optimal predictor, K_QS K_SS†
    rank: int


def linear_operators(X: np.ndarray, X_test: np.ndarray, T: float, s: float = 0.0) -> LinearOperators:
    """P = e^{-τK/n}, W = n/2 (I - e^{-2τK/n}), D = n (I - e^{-τK/n}), G = n K_QS K† (I - e^{-τK/n}), τ = T - s.

    The kernel is constant, so a window depends on its length only. `expm1` keeps slow directions exact.
    """
    n, tau = X.shape[0], T - s
    U, sigma, Vt = compact_svd(X)
    rates = sigma**2 * tau / n
    saturation, double = -np.expm1(-rates), -np.expm1(-2 * rates)
    return LinearOperators(
        P=np.eye(n) - (U * saturation) @ U.T,
        W=(U * (n / 2 * double)) @ U.T,
        W_factor=np.sqrt(n / 2 * double)[:, None] * U.T,
        D=(U * (n * saturation)) @ U.T,
        G=(X_test @ Vt.T / sigma * (n * saturation)) @ U.T,
        A=(X_test @ Vt.T / sigma) @ U.T,
        rank=len(sigma),
    )


def flow_outputs(X: np.ndarray, X_eval: np.ndarray, y: np.ndarray, w_0: np.ndarray, t: float) -> np.ndarray:
    """X_eval w(t) under gradient flow: w(t) = w_0 + V Σ^{-1} (I - e^{-tΣ²/n}) Uᵀ (y - X w_0)."""
    n = X.shape[0]
    U, sigma, Vt = compact_svd(X)
    a = U.T @ (y - X @ w_0)
    return X_eval @ (w_0 + Vt.T @ (-np.expm1(-(sigma**2) * t / n) / sigma * a))


def ridge_filter(sigma: np.ndarray, n: int, decay: float, t: float) -> np.ndarray:
    """Eq. ``lin_wd_filter``: M_j(t) = σ²/(σ² + nλ) (1 - e^{-(σ² + nλ)t/n}); w_0 = 0."""
    return sigma**2 / (sigma**2 + n * decay) * -np.expm1(-(sigma**2 + n * decay) * t / n)


def decayed_weights(X: np.ndarray, y: np.ndarray, decay: float, t: float) -> np.ndarray:
    """w(t) of ∂w = -∇L - λw from w_0 = 0 (``thm:linear_ridge``): α_j = σ_j a_j/(σ_j² + nλ) (1 - e^{-γ_j t})."""
    n = X.shape[0]
    U, sigma, Vt = compact_svd(X)
    return Vt.T @ (ridge_filter(sigma, n, decay, t) / sigma * (U.T @ y))


def ridge_weights(X: np.ndarray, y: np.ndarray, decay: float) -> np.ndarray:
    """The limit, Eq. ``lin_wd_limit``: Xᵀ (X Xᵀ + nλ I)^{-1} y."""
    n = X.shape[0]
    return X.T @ np.linalg.solve(X @ X.T + n * decay * np.eye(n), y)


def compact_svd(X: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X = U diag(σ) Vᵀ over the nonzero singular values."""
    U, sigma, Vt = np.linalg.svd(X, full_matrices=False)
    keep = sigma > max(X.shape) * np.finfo(float).eps * sigma[0]
    return U[:, keep], sigma[keep], Vt[keep]
