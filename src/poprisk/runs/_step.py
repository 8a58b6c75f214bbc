r"""The steps of a run: how a loop hands one over, what is kept of it, and what it was as an affine map.

:class:`StepContext` is the block around a step of the training loop, :class:`StepRecord` is what is written after the
step, and :class:`AffineStep` is the step as an affine map of its gradient, from which operators are built.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from poprisk._core.seeds import step_generator
from poprisk.errors import DataError, RunError

PerWeight = float | Float[Tensor, "d"]
"""One number for all weights, or one for each: parameter groups may differ."""


@dataclass(frozen=True)
class AffineStep:
    r"""What step k did to the flat weights, given the output gradient g of the mean training loss.

    .. math::
       f_k &= J_S(w_k)^\top S_k\, g_k, \qquad g_k = \nabla_u \Phi_S(u_k), \quad
       \Phi_S = \tfrac1n \textstyle\sum_i \ell_i \\
       v_k &= \beta_k v_{k-1} + \kappa_k (f_k + \lambda^c_k w_k) \\
       w_{k+1} - w_k &= -M_k \odot \bigl(a_k v_k + b_k (f_k + \lambda^c_k w_k)\bigr) - \lambda_k \odot w_k + \sigma_k

    Adam, AdamW and PopRiskAdamW have κ = 1-β, a = 1, b = 0 and everything else inside M; torch's SGD has
    κ = 1 - dampening (1 at its first step), and with Nesterov a = β, b = 1. A clipped or accumulated gradient differs
    only in S. :mod:`poprisk.runs._linearize` has the table.
    """

    batch: Int[Tensor, "b"]
    """Indices of the training examples; an example drawn twice appears twice."""
    selection: Float[Tensor, "b"]
    """The diagonal of S on the batch: n/b for a mean, times the clip factor and the weights of the examples."""
    preconditioner: Float[Tensor, "d"]
    """M, including learning rate, gate and bias corrections."""
    momentum: PerWeight = 0.0
    """β."""
    new_gradient: PerWeight = 1.0
    """κ."""
    buffer_share: PerWeight = 1.0
    """a."""
    direct_share: PerWeight = 0.0
    """b."""
    decay: PerWeight = 0.0
    """λ, decoupled weight decay, including the learning rate."""
    coupled_decay: PerWeight = 0.0
    """λᶜ, weight decay that is added to the gradient (torch's SGD and Adam)."""
    source: PerWeight = 0.0
    """σ, any other change of the weights."""


@dataclass
class StepRecord:
    """What is recorded of one step."""

    parts: list[tuple[Tensor, Tensor | None]]
    """Indices of each micro-batch, and the weight of each example's loss if it is not 1 / (their number)."""
    factor: float
    """Factor by which the gradients were multiplied after backward()."""
    loss_scale: float
    loss: Tensor | float | None
    weights: Float[Tensor, "d"] | None = None
    """Weights before the step; this field and the next two are set only in dense recording."""
    linear: dict[str, Tensor] | None = None
    """Linearization of the optimizer's step, by the names on disk: see :meth:`Linearizer.after`."""
    source: Float[Tensor, "d"] | None = None


Indices = Tensor | Sequence[int]
Parts = list[tuple[Any, Tensor | None]]


@runtime_checkable
class Observer(Protocol):
    """What is told when a step begins and ends: the recorder."""

    seed: int
    examples: int

    def enter(self, step: "StepContext") -> None:
        """Called when the block begins."""
        ...

    def leave(self, step: "StepContext", failed: bool) -> None:
        """Called when the block ends."""
        ...


class StepContext:
    """The block around one step, as returned by :meth:`Recorder.step <poprisk.runs.Recorder.step>`."""

    def __init__(self, recorder: Observer, number: int, parts: Parts, loss_scale: float, *, check_now: bool) -> None:
        self._recorder, self.number, self.loss_scale, self._check_now = recorder, number, loss_scale, check_now
        self.loss: Tensor | float | None = None
        """Loss of the step, recorded if you set it; it is detached."""
        self.state: Literal["new", "open", "moving", "moved", "over"] = "new"
        self.parts: list[tuple[Tensor, Tensor | None]] = []
        self.factor = 1.0
        self.weights_before: Tensor | None = None
        self.gradient: Tensor | None = None
        self.linear: dict[str, Tensor] | None = None
        for indices, weights in parts:
            self._add(indices, weights)

    @property
    def seed(self) -> int:
        """The seed of the recording."""
        return self._recorder.seed

    @property
    def generator(self) -> Generator:
        """A new generator, seeded for this step; augmentation that draws only from it can be replayed."""
        return step_generator(self.seed, self.number)

    def micro_batch(self, indices: Indices, weights: Tensor | None = None) -> None:
        """Add the examples of one micro-batch to the step.

        Raises:
            RunError: the block has not begun, or optimizer.step() was called already.
            DataError: an index is out of range.
        """
        if self.state != "open":
            raise RunError("call micro_batch inside the step's block, before optimizer.step()")
        self._add(indices, weights)

    def detached_loss(self) -> Tensor | float | None:
        """The loss without its graph."""
        return self.loss.detach() if isinstance(self.loss, Tensor) else self.loss

    def _add(self, indices: Indices, weights: Tensor | None) -> None:
        index = torch.as_tensor(indices)
        if index.dim() != 1 or not index.numel() or index.is_floating_point() or index.dtype == torch.bool:
            raise RunError(
                f"indices must be a vector of whole numbers, at least one, got {index.dtype} {list(index.shape)}"
            )
        if weights is not None and weights.shape != index.shape:
            raise RunError(
                f"weights must have one entry for each of the {len(index)} indices, got {list(weights.shape)}"
            )
        if self._check_now and index.device.type == "cpu":  # on other devices this would wait for the device
            check_range(index, self._recorder.examples)
        self.parts.append((index.detach().long().clone(), None if weights is None else weights.detach().clone()))

    def __enter__(self) -> "StepContext":
        if self.state != "new":
            raise RunError("a step can be recorded only once: call recorder.step(…) for each step")
        self._recorder.enter(self)
        self.state = "open"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._recorder.leave(self, failed=kind is not None)
        finally:
            self.state = "over"
            self.weights_before = self.gradient = self.linear = None


def micro_batches(indices: Any, weights: Any) -> Parts:
    """Indices and weights of each micro-batch, from one tensor or several."""
    if indices is None:
        return []
    several = isinstance(indices, list | tuple) and len(indices) > 0 and isinstance(indices[0], Tensor | list | tuple)
    if several and all(not isinstance(x, Tensor) or x.dim() == 1 for x in indices):
        given = [None] * len(indices) if weights is None else list(weights)
        if len(given) != len(indices):
            raise RunError(
                f"weights must have one entry for each of the {len(indices)} micro-batches, got {len(given)}"
            )
        return list(zip(indices, given, strict=True))
    return [(indices, weights)]


def check_range(index: Tensor, examples: int) -> None:
    """Check that all indices are in range.

    Raises:
        DataError: an index is negative or too large.
    """
    values = index.numpy()  # faster than torch's min and max, and this runs in every step
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= examples:
        raise DataError(
            f"indices must lie in 0 … {examples - 1}, got {low if low < 0 else high}: pass positions in the training "
            "set, e.g. from recorder.dataset(…)"
        )
