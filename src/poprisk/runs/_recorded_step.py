"""One step on its way: which examples, what was seen of its gradient, and what moved the weights."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from poprisk.errors import RunError
from poprisk.runs._execute import step_generator
from poprisk.runs._layout import Layout
from poprisk.runs._linearize import LinearizedStep, spread_coefficients
from poprisk.runs._segment import check_range

Indices = Tensor | Sequence[int]
Parts = list[tuple[Any, Tensor | None]]


@runtime_checkable
class Observer(Protocol):
    """Who wants to know when a step begins and ends: the recorder."""

    seed: int
    examples: int

    def enter(self, step: "RecordedStep") -> None:
        """The block begins."""
        ...

    def leave(self, step: "RecordedStep", failed: bool) -> None:
        """The block ends."""
        ...


class RecordedStep:
    """One step on its way: made by :meth:`Recorder.step`, used as a block."""

    def __init__(self, recorder: Observer, number: int, parts: Parts, loss_scale: float, *, check_now: bool) -> None:
        self._recorder, self.number, self.loss_scale, self._check_now = recorder, number, loss_scale, check_now
        self.loss: Tensor | float | None = None
        """Set it to keep the loss of the step; it is detached."""
        self.state: Literal["new", "open", "moving", "moved", "over"] = "new"
        self.parts: list[tuple[Tensor, Tensor | None]] = []
        self.factor = 1.0
        self.weights_before: Tensor | None = None
        self.gradient: Tensor | None = None
        self.linear: LinearizedStep | None = None
        for indices, weights in parts:
            self._add(indices, weights)

    @property
    def generator(self) -> Generator:
        """A new generator, seeded for this step: augmentation that draws from it alone can be replayed."""
        return step_generator(self._recorder.seed, self.number)

    def micro_batch(self, indices: Indices, weights: Tensor | None = None) -> None:
        """Add the examples of one micro-batch to the step.

        Raises:
            RunError: the step is over.
            DataError: an index out of range.
        """
        if self.state != "open":
            raise RunError("micro_batch belongs inside the step's block, before optimizer.step()")
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
        if self._check_now and index.device.type == "cpu":  # on a device a look would have to wait
            check_range(index, self._recorder.examples)
        self.parts.append((index.detach().long().clone(), None if weights is None else weights.detach().clone()))

    def __enter__(self) -> "RecordedStep":
        if self.state != "new":
            raise RunError("a recorded step can be used once: call recorder.step(…) for each")
        self._recorder.enter(self)
        self.state = "open"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._recorder.leave(self, failed=kind is not None)
        finally:
            self.state = "over"
            self.weights_before = self.gradient = self.linear = None


def unexplained(layout: Layout, step: RecordedStep, after: Tensor, parameters: Sequence[Tensor]) -> Tensor | None:
    """What moved the weights beside the step's own linear map; None if that is rounding."""
    before, gradient, linear = step.weights_before, step.gradient, step.linear
    assert before is not None
    assert gradient is not None
    assert linear is not None
    spread = spread_coefficients(layout, linear.coefficients)
    values = {name: x.to(before) if isinstance(x, Tensor) else x for name, x in spread.items()}
    driven = gradient + values["coupled_decay"] * before
    v = driven if linear.buffer is None else torch.where(_without_momentum(values, before), driven, linear.buffer)
    M = values["scale"] if linear.preconditioner is None else linear.preconditioner
    decay = values["decay"] if linear.decay is None else linear.decay
    push = M * (values["buffer_share"] * v + values["direct_share"] * driven)
    rest = (after - before) + push + decay * before
    eps = max(torch.finfo(p.dtype).eps for p in parameters)
    rounding = 64 * eps * (before.abs() + after.abs() + push.abs()) + torch.finfo(before.dtype).tiny
    return rest if bool((rest.abs() > rounding).any()) else None


def _without_momentum(values: dict[str, Any], like: Tensor) -> Tensor:
    return torch.as_tensor(values["momentum"], device=like.device) == 0


def micro_batches(indices: Any, weights: Any) -> Parts:
    """Indices and weights of each micro-batch, however they were given."""
    if indices is None:
        return []
    several = isinstance(indices, list | tuple) and len(indices) > 0 and isinstance(indices[0], Tensor | list | tuple)
    if several and all(not isinstance(x, Tensor) or x.dim() == 1 for x in indices):
        given = [None] * len(indices) if weights is None else list(weights)
        if len(given) != len(indices):
            raise RunError(f"{len(indices)} micro-batches need as many weights, got {len(given)}")
        return list(zip(indices, given, strict=True))
    return [(indices, weights)]
