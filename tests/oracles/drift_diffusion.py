"""Drift, diffusion and what theory says of them, in naive float64 numpy: double sums, all subsets, plain loops.

A step is `dw_k = -M (a v_k + b (f_k + λᶜ w_k)) - λ w_k + σ`, `v_k = β v_{k-1} + κ (f_k + λᶜ w_k)`. Solved for v,

    v_k = (β_k … β_s) v_{s-1} + Σ_{j≤k} (β_k … β_{j+1}) κ_j (f_j + λᶜ_j w_j)

so a part of the gradients, drift or fluctuation, moves the weights by -M_k (a_k Σ_j (…) κ_j part_j + b_k part_k).
"""

from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

Number = float | np.ndarray


@dataclass
class GradientStep:
    """One step: the test Jacobian where it starts, all examples' gradients there, and its numbers."""

    J_Q: np.ndarray  # [M, d] at w_k
    G: np.ndarray  # [n, d] gradient of each example's loss at w_k
    batch: list[int]
    selection: np.ndarray  # [b] diagonal of S on the batch
    pool: list[int]  # what the batch was drawn from
    w: np.ndarray  # [d]
    M: np.ndarray  # [d]
    beta: Number = 0.0
    kappa: Number = 1.0
    a: Number = 1.0
    b: Number = 0.0
    decay: Number = 0.0
    coupled_decay: Number = 0.0
    extra: Number = 0.0

    @property
    def drawn(self) -> np.ndarray:
        """ĝ_k = J_Sᵀ S_k g_k, with 1/n inside g."""
        n = len(self.G)
        return sum(s * self.G[i] / n for s, i in zip(self.selection, self.batch, strict=True))

    @property
    def mean(self) -> np.ndarray:
        """μ_k: the mean over the pool, times the factor c on the batch mean (1 without clipping)."""
        c = self.selection.sum() / len(self.G)
        return c * sum(self.G[i] for i in self.pool) / len(self.pool)


def split(steps: list[GradientStep], buffer: np.ndarray) -> dict[str, np.ndarray]:
    """Drift, diffusion and source of a window, `eq:drift_diffusion_decomposition`, each step's share in a row."""
    drift = [step.mean for step in steps]
    diffusion = [step.drawn - step.mean for step in steps]
    decay = [step.coupled_decay * step.w for step in steps]
    nothing = np.zeros_like(buffer)
    moved = {
        "drift": [_motion(steps, k, drift, nothing) for k in range(len(steps))],
        "diffusion": [_motion(steps, k, diffusion, nothing) for k in range(len(steps))],
        "source": [_motion(steps, k, decay, buffer) - step.decay * step.w + step.extra for k, step in enumerate(steps)],
    }
    return {
        name: np.stack([step.J_Q @ dw for step, dw in zip(steps, all_dw, strict=True)])
        for name, all_dw in moved.items()
    }


def _motion(steps: list[GradientStep], k: int, part: list[np.ndarray], buffer: np.ndarray) -> np.ndarray:
    """What one part of the gradients, and a buffer carried in, do to the weights at step k."""
    v = buffer.copy()
    for between in range(k + 1):
        v = v * steps[between].beta
    for j in range(k + 1):
        term = steps[j].kappa * part[j]
        for between in range(j + 1, k + 1):
            term = term * steps[between].beta
        v = v + term
    return -steps[k].M * (steps[k].a * v + steps[k].b * part[k])


def remainder(jacobian, weights: list[np.ndarray], nodes: int = 40) -> np.ndarray:
    """R_Q of `eq:drift_diffusion_decomposition` from Jacobians only: Σ_k ∫ (J_Q(w_k + θ dw_k) - J_Q(w_k)) dw_k dθ."""
    positions, shares = np.polynomial.legendre.leggauss(nodes)
    total = 0.0
    for before, after in pairwise(weights):
        dw, J = after - before, jacobian(before)
        for theta, share in zip((1 + positions) / 2, shares / 2, strict=True):
            total = total + share * (jacobian(before + theta * dw) - J) @ dw
    return total


def covariance_over_all_batches(G: np.ndarray, b: int) -> np.ndarray:
    """Cov_B(g_B) of `eq:finite_pop_cov`, by drawing every subset of b examples once."""
    means = np.stack([G[list(batch)].mean(0) for batch in combinations(range(len(G)), b)])
    centred = means - means.mean(0)
    return centred.T @ centred / len(means)


def noise_mean_right_side(V: float, epsilon: float, n: int) -> float:
    """`eq:exchange_noise_mean`."""
    return V / n + 2 * np.sqrt(V) * epsilon + epsilon**2


def replace_two_terms(
    gradient, train, S: list, elsewhere: list, fresh: list[tuple], pairs: list[tuple[int, int]]
) -> dict[str, float]:
    """The terms of the noise-mean proof for one training set, `eq:replace_two_stability`.

    `gradient(w, z)` is Π∇ℓ(w, z); `train(S)` the weights; `fresh` has two new examples for each pair; `elsewhere` are
    examples nobody trained on, of which any two have the product ‖Π∇L_D(w)‖² in expectation.
    """
    w, n = train(S), len(S)
    mean = sum(gradient(w, z) for z in S) / n
    terms = {
        "noise_mean": mean @ mean,
        "trained": sum(gradient(w, z) @ gradient(w, z) for z in S) / n,
        "replaced": 0.0,
        "defect": 0.0,
        "channel": 0.0,
    }
    for (i, j), (new_i, new_j) in zip(pairs, fresh, strict=True):
        S_ij = list(S)
        S_ij[i], S_ij[j] = new_i, new_j
        w_ij = train(S_ij)
        for q in (i, j):
            c = gradient(w_ij, S[q])
            r = gradient(w, S[q]) - c
            terms["replaced"] += c @ c / (2 * len(pairs))
            terms["defect"] += r @ r / (2 * len(pairs))
    m = len(elsewhere)
    for p in range(m):
        for q in range(m):
            if p != q:
                terms["channel"] += gradient(w, elsewhere[p]) @ gradient(w, elsewhere[q]) / (m * (m - 1))
    return terms


def one_step_fresh_risk(loss, gradient, w: np.ndarray, S: list, Z: list, M: np.ndarray, lr: float) -> float:
    """The fresh-boundary risk of `thm:kernel_increment`: step on every b - 1 of S's batch, score on other examples."""
    step = sum(gradient(w, z) for z in S) / len(S)
    return sum(loss(w - lr * M * step, z) for z in Z) / len(Z)
