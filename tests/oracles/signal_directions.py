"""Metrics and signal directions from the paper, float64 numpy, dense matrices (``app:optimal_signal_directions``)."""

import numpy as np


def neighbour_laplacian(points: np.ndarray, neighbours: int) -> np.ndarray:
    """I - Δ^{-1/2} A Δ^{-1/2} of the graph with an edge where either point is among the k nearest of the other."""
    n = len(points)
    A = np.zeros((n, n))
    for i in range(n):
        distances = [(np.sum((points[i] - points[j]) ** 2), j) for j in range(n) if j != i]
        for _, j in sorted(distances)[:neighbours]:
            A[i, j] = A[j, i] = 1.0
    degree = A.sum(axis=1)
    return np.eye(n) - A / np.sqrt(np.outer(degree, degree))


def graph_metric(points: np.ndarray, gamma: float, neighbours: int, p: int) -> np.ndarray:
    """R_{S,γ} = I + γ L̂ on n·p outputs, example by example: entry (ic, jd) is γ L_ij where c = d."""
    return np.eye(len(points) * p) + gamma * np.kron(neighbour_laplacian(points, neighbours), np.eye(p))


def self_influence_metric(base: np.ndarray, D: np.ndarray, a: np.ndarray, beta: float) -> np.ndarray:
    """``def:self_influence_metric``: base + β Dᵀ A_aᵀ C_n A_a D."""
    n, p = a.shape
    A_a = np.zeros((n, n * p))
    for i in range(n):
        A_a[i, i * p : (i + 1) * p] = a[i]
    C_n = np.eye(n) - np.ones((n, n)) / n
    return base + beta * D.T @ A_a.T @ C_n @ A_a @ D


def power(R: np.ndarray, exponent: float) -> np.ndarray:
    """A power of a positive definite matrix."""
    values, V = np.linalg.eigh(R)
    return (V * values**exponent) @ V.T


def whitened_gramian(W: np.ndarray, R: np.ndarray) -> np.ndarray:
    """C_R = R^{-1/2} W R^{-1/2} (``thm:train_only_minimax_signal``)."""
    return power(R, -0.5) @ W @ power(R, -0.5)


def top_projector(C: np.ndarray, r: int) -> np.ndarray:
    """Q_r."""
    V = np.linalg.eigh(C)[1][:, ::-1][:, :r]
    return V @ V.T


def attained_loss(C: np.ndarray, Q: np.ndarray, visibility: float) -> tuple[np.ndarray, float]:
    """The proof's A_Q = P² C^{1/2} u uᵀ C^{1/2} and λ_max((I - Q) A_Q (I - Q)); C positive definite."""
    rest = np.eye(len(C)) - Q
    v = np.linalg.eigh(rest @ C @ rest)[1][:, -1]
    u = power(C, 0.5) @ v
    u /= np.linalg.norm(u)
    A = visibility * np.outer(power(C, 0.5) @ u, power(C, 0.5) @ u)
    return A, float(np.linalg.eigvalsh(rest @ A @ rest)[-1])


def budget_level(values: np.ndarray, tau: float) -> float:
    """μ of the trace-budget relaxation by bisection on Σ (1 - √(μ/λ))_+ = τ."""
    low, high = 0.0, values.max()
    for _ in range(200):
        middle = (low + high) / 2
        spent = np.maximum(0.0, 1 - np.sqrt(middle / values)).sum()
        low, high = (middle, high) if spent > tau else (low, middle)
    return (low + high) / 2
