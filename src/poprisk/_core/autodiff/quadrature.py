r"""Gauss–Legendre averages over a segment, and how many nodes one needs."""

from collections.abc import Callable
from functools import lru_cache
from math import ceil, log

import torch

from poprisk.errors import HyperparameterError

# What an adaptive average aims at, and the most nodes it spends: the error left is closed by a secant, so that float32,
# which is there for scale, need not pay for digits it does not have.
DEFAULT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
NODE_CAP = {torch.float64: 32, torch.float32: 8}
# An error below the first that shrinks by less than the second is rounding: no number of nodes will lower it.
SMALL, STALLED = 1e-6, 0.9


@lru_cache(maxsize=64)
def gauss_legendre(nodes: int) -> tuple[tuple[float, float], ...]:
    r"""Positions θ in (0, 1) and weights ω (sum 1): :math:`\int_0^1 f \approx \sum_i \omega_i f(\theta_i)`.

    Exact for polynomials of degree 2·nodes - 1.

    >>> round(sum(weight * theta**3 for theta, weight in gauss_legendre(2)), 15)
    0.25
    """
    from numpy.polynomial.legendre import leggauss

    positions, weights = leggauss(nodes)
    return tuple(zip(((1 + positions) / 2).tolist(), (weights / 2).tolist(), strict=True))


def check_nodes(nodes: int | None, tolerance: float | None, max_nodes: int | None) -> None:
    """Refuses a number of nodes below one and a tolerance that is not positive."""
    for name, value in (("nodes", nodes), ("max_nodes", max_nodes)):
        if value is not None and value < 1:
            raise HyperparameterError(f"{name} must be at least 1, got {value}: leave it out to have it chosen")
    if tolerance is not None and not tolerance > 0:
        raise HyperparameterError(f"tolerance must be positive, got {tolerance}: leave it out for the dtype's default")


def choose_nodes(error: Callable[[int], float], target: float, cap: int) -> int:
    r"""A small number of nodes whose error meets the target, or the cap.

    Gauss sums of a smooth function converge geometrically, so two errors foretell the number needed; the guess is
    tried, never jumps further than double, and is made again from the newest pair where it was too small. Kinks (ReLU)
    make the convergence slow and lead to the cap. The search ends early where a small error no longer falls (rounding),
    and at a NaN.

    >>> choose_nodes(lambda m: 10.0 ** (-3 * m), 1e-11, cap=32)
    4
    """
    nodes, last = 1, None
    while True:
        found = error(nodes)
        if nodes >= cap or not found > target:
            return nodes
        if last is not None and found / last[1] > STALLED and found < SMALL:
            return last[0]
        guess = nodes + 1
        if last is not None and found < last[1]:
            guess = nodes + ceil((nodes - last[0]) * log(found / target) / log(last[1] / found) - 1e-9)
        elif last is not None:
            guess = 2 * nodes
        last = nodes, found
        nodes = min(max(guess, nodes + 1), 2 * nodes, cap)
