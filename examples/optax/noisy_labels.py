"""A small network on labels of which three in ten are wrong, with ``optax.adamw`` and with ``poprisk_adamw``.

Needs ``pip install 'poprisk[jax]'`` and nothing else; takes some seconds on a CPU:

    python examples/optax/noisy_labels.py

A random network with one hidden layer labels random inputs, some of the training labels are flipped, and a wider
network learns them. Both optimizers get a grid of learning rates and the same batches, AdamW with torch's weight decay,
the other with its own. The table shows the error on clean test data at the last step and at the best one. The best
step, and the best rate of a grid, are chosen with the test set in hand, which nobody has in earnest.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from poprisk.integrations.optax import poprisk_adamw

LITERAL = partial(poprisk_adamw, weight_decay=5e-3, normalize_gate=False)
OPTIMIZERS: dict[str, tuple[Callable, tuple[float, ...]]] = {
    "optax.adamw": (partial(optax.adamw, weight_decay=1e-2), (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)),
    "poprisk_adamw": (LITERAL, (1e-2, 3e-2, 6e-2, 1e-1, 3e-1)),
}
CUSTOMARY = {"optax.adamw": 1e-3, "poprisk_adamw": 6e-2}
"""The learning rate one would try first: AdamW's usual one, and 60 times it for the literal gate of strength 100."""


class Task(NamedTuple):
    """All that chance decides about one training: data, first weights, and which examples are in which batch."""

    inputs: np.ndarray
    labels: np.ndarray
    """Partly wrong."""
    test_inputs: np.ndarray
    test_labels: np.ndarray
    """Right."""
    weights: dict[str, Any]
    batches: Any
    """Indices, 25 batches to a row."""


def noisy_task(seed: int, steps: int, flipped: float, examples: int = 1000, dimension: int = 20) -> Task:
    """Labels of a random teacher, a share of those for training flipped."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(examples + 2000, dimension)).astype(np.float32)
    scores = np.asarray(logits(random_weights(random, dimension, width=8), inputs))
    labels = np.sign(scores - np.median(scores))
    wrong = random.random(examples) < flipped
    return Task(
        inputs=inputs[:examples],
        labels=np.where(wrong, -1, 1) * labels[:examples],
        test_inputs=inputs[examples:],
        test_labels=labels[examples:],
        weights=random_weights(random, dimension, width=128),
        batches=random.integers(examples, size=(steps // 25, 25, 100)),
    )


def random_weights(random: np.random.Generator, dimension: int, width: int) -> dict[str, Any]:
    """Weights of a network with one hidden layer and one output."""
    return {
        "hidden": np.float32(random.normal(size=(dimension, width)) / np.sqrt(dimension)),
        "bias": np.zeros(width, np.float32),
        "output": np.float32(random.normal(size=width) / np.sqrt(width)),
    }


def logits(weights: dict[str, Any], inputs: jax.typing.ArrayLike) -> jax.Array:
    """What the network says; its sign is the label."""
    return jax.nn.relu(inputs @ weights["hidden"] + weights["bias"]) @ weights["output"]


def train(make: Callable, rate: jax.Array, task: Task) -> jax.Array:
    """The test error after every 25 steps."""
    optimizer = make(rate)

    def loss(weights: dict[str, Any], chosen: jax.Array) -> jax.Array:
        return jax.nn.softplus(-task.labels[chosen] * logits(weights, task.inputs[chosen])).mean()

    def step(carry: tuple, chosen: jax.Array) -> tuple[tuple, None]:
        weights, state = carry
        updates, state = optimizer.update(jax.grad(loss)(weights, chosen), state, weights)
        return (optax.apply_updates(weights, updates), state), None

    def stretch(carry: tuple, batches: jax.Array) -> tuple[tuple, jax.Array]:
        carry, _ = jax.lax.scan(step, carry, batches)
        return carry, (jnp.sign(logits(carry[0], task.test_inputs)) != task.test_labels).mean()

    return jax.lax.scan(stretch, (task.weights, optimizer.init(task.weights)), task.batches)[1]


def errors_over_time(make: Callable, rates: tuple[float, ...], tasks: Task) -> np.ndarray:
    """Test error by task, learning rate and time: all trainings as one compiled program."""
    over_rates = jax.vmap(partial(train, make), (0, None))
    over_tasks = jax.vmap(over_rates, (None, 0))
    return np.asarray(jax.jit(over_tasks)(jnp.array(rates), tasks))


def table(curves: dict[str, np.ndarray]) -> list[str]:
    """One line per optimizer and learning rate, in percent, averaged over the seeds."""
    lines = [f"{'test error, %':<16}{'lr':>8}{'last step':>12}{'best step':>12}"]
    for name, (_, rates) in OPTIMIZERS.items():
        last, best = 100 * curves[name][..., -1].mean(0), 100 * curves[name].min(-1).mean(0)
        for i, rate in enumerate(rates):
            notes = [note for note, holds in _notes(name, i, last).items() if holds]
            lines.append(f"{name:<16}{rate:>8.0e}{last[i]:>12.1f}{best[i]:>12.1f}  {', '.join(notes)}".rstrip())
    return lines


def _notes(name: str, i: int, last: np.ndarray) -> dict[str, bool]:
    rate = OPTIMIZERS[name][1][i]
    return {"customary": rate == CUSTOMARY[name], "best of the grid at the last step": i == int(last.argmin())}


def verdict(curves: dict[str, np.ndarray]) -> str:
    """The gate at its default against AdamW at the best rate of its grid, last step, paired by seed."""
    adamw, ours = (curves[name][..., -1] for name in OPTIMIZERS)
    tuned = adamw[:, adamw.mean(0).argmin()]
    default = ours[:, OPTIMIZERS["poprisk_adamw"][1].index(CUSTOMARY["poprisk_adamw"])]
    difference = 100 * (default - tuned)
    error = difference.std(ddof=1) / len(difference) ** 0.5
    return (
        f"poprisk_adamw at its default lr minus optax.adamw at the best lr of its grid, last step: "
        f"{difference.mean():+.1f} ± {error:.1f} points (standard error over {len(difference)} seeds)"
    )


def main(arguments: list[str] | None = None) -> dict[str, np.ndarray]:
    """Trains, prints the table and returns the test errors behind it."""
    parser = argparse.ArgumentParser(description="AdamW and the population-risk gate on noisy labels, in JAX.")
    parser.add_argument("--steps", type=int, default=2000, help="a multiple of 25")
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--flipped", type=float, default=0.3, help="share of wrong training labels")
    o = parser.parse_args(arguments)
    if o.steps < 25 or o.steps % 25 or o.seeds < 2:
        parser.error(f"steps must be a multiple of 25 and seeds at least 2, got {o.steps} and {o.seeds}")
    tasks = jax.tree.map(lambda *seeds: np.stack(seeds), *(noisy_task(i, o.steps, o.flipped) for i in range(o.seeds)))
    curves = {name: errors_over_time(make, rates, tasks) for name, (make, rates) in OPTIMIZERS.items()}
    print("\n".join([*table(curves), "", verdict(curves)]))
    return curves


if __name__ == "__main__":
    main()
