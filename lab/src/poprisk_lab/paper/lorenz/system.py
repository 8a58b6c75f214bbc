r"""Lorenz '63, the true system: its states on the attractor, by Runge and Kutta's method in float64."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from poprisk._core.seeds import stream

MEANS = (0.0, 0.0, 23.55)
DEVIATIONS = (7.926, 9.011, 8.617)
"""Of x, y and z over the attractor: averages over 80,000 units of time; a test takes them again."""
LYAPUNOV_EXPONENT = 0.906
"""Largest, per unit of time: errors grow e-fold in 1 / 0.906."""
_INNER_STEP = 0.01  # of Runge and Kutta's method: its error in one interval is some 1e-6 of a standard deviation
_BURN_IN = 25.0  # units of time: a random state is at the attractor after a few, but may linger at its centres


def simulate(seeds: Sequence[int], steps: int, interval: float) -> NDArray[np.float64]:
    """True trajectories on the attractor, two a seed, all at once, in the system's own units.

    Each starts at a random state and is followed for a while before anything is kept.

    Returns:
        [train and test, seeds, steps + 1, 3], read-only.

    >>> train, test = simulate([0, 1], steps=3, interval=0.02)
    >>> train.shape, bool((train == test).any())
    ((2, 4, 3), False)
    """
    return _simulated(tuple(seeds), steps, interval)


@lru_cache(maxsize=8)  # the noise levels of a sweep share their trajectories
def _simulated(seeds: tuple[int, ...], steps: int, interval: float) -> NDArray[np.float64]:
    streams = [stream(seed, f"lorenz {use}") for use in ("train", "test") for seed in seeds]
    draws = np.array([np.random.default_rng(each).standard_normal(3) for each in streams])
    burnt_in = orbit(in_own_units(draws).T, 1, _BURN_IN)[-1]
    states = orbit(burnt_in, steps, interval).transpose(2, 0, 1).reshape(2, len(seeds), steps + 1, 3)
    states.flags.writeable = False
    return states


def orbit(start: NDArray[np.float64], steps: int, interval: float) -> NDArray[np.float64]:
    """States after 0, 1, …, steps intervals, by Runge and Kutta's classical method: [steps + 1, 3, trajectories]."""
    inner = max(1, round(interval / _INNER_STEP))
    h, state, states = interval / inner, start, [start]
    for _ in range(steps):
        for _ in range(inner):
            k1 = velocity(state)
            k2 = velocity(state + 0.5 * h * k1)
            k3 = velocity(state + 0.5 * h * k2)
            k4 = velocity(state + h * k3)
            state = state + (h / 6) * (k1 + 2 * (k2 + k3) + k4)
        states.append(state)
    return np.stack(states)


def velocity(state: NDArray[np.float64]) -> NDArray[np.float64]:
    r"""The vector field at states [3, trajectories].

    >>> velocity(np.array([[1.0], [2.0], [3.0]])).ravel().tolist()
    [10.0, 23.0, -6.0]
    """
    x, y, z = state
    there = np.empty_like(state)
    there[0], there[1], there[2] = 10.0 * (y - x), x * (28.0 - z) - y, x * y - (8.0 / 3.0) * z
    return there


def standardized(states: NDArray[np.float64]) -> NDArray[np.float64]:
    """States [..., 3] in standard deviations from the attractor's mean.

    >>> standardized(np.array([7.926, 0.0, 23.55])).tolist()
    [1.0, 0.0, 0.0]
    """
    return (states - np.array(MEANS)) / np.array(DEVIATIONS)


def in_own_units(states: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of :func:`standardized`.

    >>> in_own_units(np.array([1.0, 0.0, 0.0])).tolist()
    [7.926, 0.0, 23.55]
    """
    return np.array(MEANS) + np.array(DEVIATIONS) * states
