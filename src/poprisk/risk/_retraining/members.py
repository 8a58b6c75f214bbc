"""The members of an ensemble of trainings: their example weights, examples and labels, and their batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from poprisk._core.autodiff import Inputs, parts_of, take_examples
from poprisk.errors import DataError, RunError
from poprisk.runs import Problem, Run, SegmentReader

_UNEXPLAINED = 1e-6
"""Relative difference from 1 beyond which a recorded factor is not rounding."""
Buffers = tuple[dict[str, Tensor], ...]
"""For each member, the buffers that training changed (running statistics), by name."""


@dataclass(frozen=True)
class Members:
    r"""How each of K trainings differs from the recorded one.

    A step whose gradient was :math:`\sum_{i \in B} \omega_i \nabla \ell_i` has
    :math:`\sum_{i \in B} \omega_i \alpha_{ki} \nabla \ell_{ki}` for member k: examples are weighted and never deleted,
    so that every member sees the recorded batches.

    Args:
        weights: α, one row for each member, one number (0 or more) for each training example; 1 means as recorded.
        index_map: The example at position i of member k: a training example 0 … n-1, or n + j for row j of ``pool``;
            default: the training examples themselves.
        pool: Inputs and targets of further examples.
        targets: Each member's own targets [K, n, …] for the training inputs, e.g. other labels.
        initial: Each member's first weights; default: the run's.

    >>> Members(torch.tensor([[1.0, 1.0, 0.0]])).count
    1
    """

    weights: Float[Tensor, "members n"]
    index_map: Int[Tensor, "members n"] | None = None
    pool: tuple[Inputs, Tensor] | None = None
    targets: Tensor | None = None
    initial: Float[Tensor, "members d"] | None = None

    @property
    def count(self) -> int:
        """K."""
        return len(self.weights)


@dataclass(frozen=True)
class Retrained:
    """The members after training."""

    weights: Float[Tensor, "members d"]
    """Weights after the last step; NaN where a member diverged."""
    kept: dict[int, Float[Tensor, "members d"]]
    """Weights before the steps that were asked for."""
    trainings: float
    """Cost in trainings like the recorded one."""
    notes: tuple[str, ...]
    """What was taken over from the recorded run instead of trained again."""
    step: int = 0
    """The step of the run that the members take next."""
    state: tuple[Float[Tensor, "members d"], ...] = ()
    """State of their optimizers there, to resume from."""
    buffers: dict[int, Buffers] = field(default_factory=dict)
    """Buffers before each kept step and at the end, if the members were trained one after another."""
    members: tuple[dict[str, Tensor], ...] = ()
    """Checkpoints of members that were trained one after another, to resume from."""


class MemberExamples:
    """The examples of a slice of the members, batch by batch; shared where no member has its own."""

    def __init__(
        self, problem: Problem, members: Members, chunk: slice, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._problem, self._dtype = problem, dtype
        self.weights = members.weights[chunk].to(device, dtype)
        self._targets = None if members.targets is None else cast(members.targets[chunk].to(device), dtype)
        self._map, self._changed, self._pool = None, None, None
        if members.index_map is not None:
            self._map = members.index_map[chunk].to(device)
            own = torch.arange(len(problem), device=device)
            self._changed = (self._map != own).any(0).to("cpu")  # once: batches are recorded on the CPU
        if members.pool is not None:
            self._pool = (moved(members.pool[0], device), members.pool[1].to(device))

    def batch(self, index: Tensor, generator: Generator | None) -> tuple[Inputs, Tensor, tuple[int | None, int | None]]:
        """Inputs and targets, and the axis of members of each; None where members share them."""
        if self._map is not None and self._changed is not None and bool(self._changed[index].any()):
            rows = self._map[:, index.to(self._map.device)]
            inputs, targets = self._own(rows)
            return inputs, targets, (0, 0)
        inputs, targets = self._problem.batch(index, generator=generator, dtype=self._dtype)
        if self._targets is None:
            return inputs, targets, (None, None)
        return inputs, self._targets[:, index.to(self._targets.device)], (None, 0)

    def _own(self, rows: Int[Tensor, "members b"]) -> tuple[Inputs, Tensor]:
        problem, n = self._problem, len(self._problem)
        inputs, targets = take_examples(problem.inputs, rows.clamp(max=n - 1)), problem.targets[rows.clamp(max=n - 1)]
        if self._pool is not None:
            beyond, strange = rows >= n, (rows - n).clamp(min=0)
            others, labels = take_examples(self._pool[0], strange), self._pool[1][strange]
            pairs = zip(parts_of(inputs), parts_of(others), strict=True)
            merged = tuple(_pick(beyond, other, own) for own, other in pairs)
            inputs, targets = merged if isinstance(inputs, tuple) else merged[0], _pick(beyond, labels, targets)
        converted = tuple(cast(part, self._dtype) for part in parts_of(inputs))
        return converted if isinstance(inputs, tuple) else converted[0], cast(targets, self._dtype)


def check_members(run: Run, members: Members, keep: Sequence[int]) -> None:
    """Refuse members that do not fit the run.

    Raises:
        DataError: weights are negative, not finite or of the wrong shape, or an index is out of range.
        RunError: other examples for an augmented run.
    """
    n, weights, K = run.num_examples, members.weights, members.count
    if weights.dim() != 2 or weights.shape[1] != n or not K or not weights.is_floating_point():
        raise DataError(
            f"weights must have a row of {n} numbers per member, one for each training example, got {weights.dtype} of "
            f"shape {list(weights.shape)}"
        )
    if not bool(((weights >= 0) & weights.isfinite()).all()):
        raise DataError("example weights must be finite and not negative: use 0 to leave an example out")
    if bool((weights.sum(1) == 0).any()):
        raise DataError("every member needs an example with a positive weight, got a member with weight 0 for all")
    if members.index_map is not None:
        rows = n + (0 if members.pool is None else len(members.pool[1]))
        index = members.index_map
        if index.shape != (K, n) or index.is_floating_point() or bool(((index < 0) | (index >= rows)).any()):
            raise DataError(
                f"index_map must be whole numbers from 0 to {rows - 1} of shape {[K, n]}, got {list(index.shape)}"
            )
        if members.targets is not None:
            raise DataError("index_map and targets cannot be combined: examples of the pool have targets of their own")
    elif members.pool is not None:
        raise DataError("pool needs an index_map with the positions of its examples")
    if members.targets is not None and members.targets.shape[:2] != (K, n):
        raise DataError(f"the shape of targets must start with {[K, n]}, got {list(members.targets.shape)}")
    if members.initial is not None and members.initial.shape != (K, run.num_weights):
        raise DataError(f"initial must have shape {[K, run.num_weights]}, got {list(members.initial.shape)}")
    if run.augmented and members.index_map is not None:
        raise RunError("an augmented run cannot be retrained with other examples: train without augment")
    if any(not 0 <= k <= run.num_steps for k in keep):
        raise DataError(f"weights can be kept before the steps 0 … {run.num_steps}, got {list(keep)}")


def mean_weights(index: Tensor, batches: int) -> Float[Tensor, "b"]:
    """The weight of each example of a micro-batch, one of several, in the loss of a step that is their mean."""
    return torch.full((len(index),), 1 / (batches * len(index)), dtype=torch.float64)


def recorded_factor(reader: SegmentReader, k: int, notes: list[str]) -> float:
    """The recorded factor of the gradient of step k; adds a note where its origin is not known."""
    factor, scale = reader.factor(k)
    if abs(factor * scale - 1) > _UNEXPLAINED:
        notes.append(
            "gradients were multiplied by factors of unknown origin (such as clipping in a custom loop): "
            "each member uses the recorded factors"
        )
    return factor * scale


def cannot_repeat(run: Run, k: int, w: Float[Tensor, "d"]) -> None:
    """Refuse weights before step k that should be the recorded ones and are not.

    Raises:
        RunError: they differ by more than rounding.
    """
    recorded = run.weights(k).to(w)
    distance, off = (recorded - run.weights(0).to(w)).norm(), (w - recorded).norm()
    if not bool(off <= 1e-3 * distance + 1e-5 * recorded.norm()):
        raise RunError(
            f"step {k - 1} cannot be repeated: its weights differ by {float(off / recorded.norm()):.1e} "
            "(relative). Record a run without a variance source, whose loop does not change gradients"
        )


def moved(inputs: Inputs, device: torch.device) -> Inputs:
    """Inputs on another device."""
    return tuple(x.to(device) for x in inputs) if isinstance(inputs, tuple) else inputs.to(device)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating-point tensor in another precision; integers stay as they are."""
    return x.to(dtype) if x.is_floating_point() else x


def _pick(where: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(where.reshape(*where.shape, *[1] * (no.dim() - where.dim())), yes.to(no.dtype), no)
