"""Filtered fits of a frozen kernel from the paper, float64 numpy, no singular basis (``sec:classical_phenomena``).

Each filter is a matrix on training outputs, F = U M Uᵀ, made of K_SS and K_QS alone.
"""

import numpy as np
from scipy.linalg import expm


def pseudo_inverse(K: np.ndarray) -> np.ndarray:
    return np.linalg.pinv(K, rcond=1e-12, hermitian=True)


def mobile(K: np.ndarray) -> np.ndarray:
    """The projector on the range of K."""
    return K @ pseudo_inverse(K)


def gradient_flow(K: np.ndarray, n: int, t: float) -> np.ndarray:
    """I - e^{-tK/n}."""
    return np.eye(len(K)) - expm(-t * K / n)


def ridge(K: np.ndarray, n: int, eta: float) -> np.ndarray:
    """K (K + nηI)^{-1}."""
    return K @ np.linalg.inv(K + n * eta * np.eye(len(K)))


def threshold(K: np.ndarray, tau: float) -> np.ndarray:
    """1_{[τ,∞)}(K)."""
    values, U = np.linalg.eigh(K)
    return U[:, values >= tau] @ U[:, values >= tau].T


def predictive_rank(K: np.ndarray, H: np.ndarray, r: int) -> np.ndarray:
    """The top-r eigenspace of U Γ_0 Uᵀ = K† Hᵀ H K†."""
    psi = np.linalg.eigh(visibility(K, H))[1][:, ::-1][:, :r]
    return psi @ psi.T


def decayed_flow(K: np.ndarray, n: int, decay: float, t: float) -> np.ndarray:
    """u(t) = F y for ∂u = -K(u - y)/n - λu, u(0) = 0, from the exponential of the flow of (u, y)."""
    N = len(K)
    flow = np.block([[-K / n - decay * np.eye(N), K / n], [np.zeros((N, 2 * N))]])
    return expm(t * flow)[:N, N:]


def visibility(K: np.ndarray, H: np.ndarray) -> np.ndarray:
    """U Γ_0 Uᵀ."""
    C = H @ pseudo_inverse(K)
    return C.T @ C


def predict(H: np.ndarray, K: np.ndarray, F: np.ndarray, y: np.ndarray, u_S: np.ndarray, u_Q: np.ndarray) -> np.ndarray:
    """U_Q + H K† F (y - U_S)."""
    return u_Q + H @ pseudo_inverse(K) @ F @ (y - u_S)


def risk(
    K: np.ndarray, H: np.ndarray, F: np.ndarray, residual: np.ndarray, noise: np.ndarray, gap: np.ndarray | None = None
) -> tuple[float, float, float]:
    """Bias, variance and total of ``thm:unified_bias_variance``; with gap = Ū_Q - f* the total against the truth."""
    C = H @ pseudo_inverse(K)
    unfit = C @ (mobile(K) - F) @ residual
    variance = np.trace(C @ F @ noise @ F.T @ C.T)
    shift = 0 if gap is None else gap
    return float(unfit @ unfit), float(variance), float(np.sum((shift - unfit) ** 2) + variance)


def decayed_weights(X: np.ndarray, y: np.ndarray, decay: float, t: float, w_0: np.ndarray) -> np.ndarray:
    """w(t) of ∂w = -Xᵀ(Xw - y)/n - λw (``thm:linear_ridge``), from the exponential of the affine flow."""
    n, d = X.shape
    flow = np.zeros((d + 1, d + 1))
    flow[:d, :d] = -X.T @ X / n - decay * np.eye(d)
    flow[:d, d] = X.T @ y / n
    return (expm(t * flow) @ np.append(w_0, 1.0))[:d]
