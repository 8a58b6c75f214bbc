"""Couplings of synthetic runs: one that forgets directions, and one whose steps overshoot."""

import numpy as np
import torch

from oracles.run_operators import DenseStep, operators_of, random_steps
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import Coupling


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(X: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(X, 2).item()


def coupling_of(ops, **options) -> Coupling:
    return Coupling(dissipation_channels(tensor(ops.W_factor), tensor(ops.D), tensor(ops.G), **options))


def forgetful(seed: int, forgotten: int = 2) -> tuple[Coupling, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A window whose train transfer forgets some directions that dissipated: R_perp is not 0. With W, D and G."""
    ops = operators_of(random_steps(seed, never_drawn=1))
    W, D, G = tensor(ops.W), tensor(ops.D), tensor(ops.G)
    values, V = torch.linalg.eigh(W)
    V = V[:, values > 1e-9 * values[-1]]  # inside the signal channel: ker W must stay in ker D
    away = V @ torch.linalg.qr(normal(seed, V.shape[1], forgotten))[0]
    D = D - D @ away @ away.T
    return Coupling(dissipation_channels(tensor(ops.W_factor), D, G)), W, D, G


def overshoot() -> Coupling:
    """Two steps of squared loss that bring the one training output back to where it was: (1 - 3)(1 - 1.5) = 1."""
    one = np.ones((1, 1))
    steps = [
        DenseStep(J_S=one, Jbar_S=one, Jbar_Q=q * one, Bbar=one, S=np.ones(1), M=np.full(1, lr))
        for q, lr in ((1.0, 3.0), (2.0, 1.5))
    ]
    return coupling_of(operators_of(steps))
