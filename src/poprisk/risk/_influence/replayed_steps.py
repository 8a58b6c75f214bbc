r"""The work on each step of a run, captured once as a CUDA graph and replayed with the numbers of every step.

Carrying q directions through a step of a small network takes dozens of short operations, and launching them from Python
takes longer than computing them. Steps of one form (the same sizes, the same entries in the rule's table) differ only
in their numbers: the work is captured on a static copy of one step, and replayed with the numbers of each other.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor

from poprisk._core.autodiff import capture_graph
from poprisk.risk._influence.linear_stack import StackBatch
from poprisk.risk._influence.step_jacobian import DiagonalJacobian, Entry, StepJacobian

# The work on a step: reads and writes tensors that stay in place, and returns a tensor to look at, or None.
Work = Callable[[StepJacobian], Tensor | None]


class ReplayedSteps:
    """Does the work on one step after the other; from the second step of a form on it replays a graph.

    Args:
        work: The same operations for every step of a form, on tensors that stay in place between steps.
        capture: Whether to capture graphs; if not, the work is still done on static copies.

    >>> done = []
    >>> ReplayedSteps(lambda step: done.append(step), capture=False) is not None
    True
    """

    def __init__(self, work: Work, *, capture: bool) -> None:
        self._work, self._capture = work, capture
        self.refused: str | None = None
        """Why the work could not be captured, if that failed; it is then done without a graph."""
        self._seen: set[Hashable] = set()
        self._still: dict[Hashable, tuple[StepJacobian, torch.cuda.CUDAGraph | None, Tensor | None]] = {}

    @property
    def forms(self) -> int:
        """Number of forms that are replayed."""
        return len(self._still)

    def take(self, step: StepJacobian) -> Tensor | None:
        """Do the work on this step; the result is overwritten by the next call."""
        form = form_of(step)
        if form is None or self.refused is not None or form not in self._seen:
            self._seen.add(form)  # the first step of a form also loads what must be loaded before a capture
            return self._work(step)
        if form not in self._still:
            captured = self._captured(still_copy(step))
            if self.refused is not None:
                return self._work(step)
            self._still[form] = captured
        still, graph, given = self._still[form]
        load(still, step)
        if graph is None:
            return self._work(still)
        graph.replay()
        return given

    def _captured(self, still: StepJacobian) -> tuple[StepJacobian, torch.cuda.CUDAGraph | None, Tensor | None]:
        if not self._capture:
            return still, None, None
        try:
            return (still, *capture_graph(lambda: self._work(still)))
        except RuntimeError as error:
            self.refused = str(error)
            return still, None, None


def form_of(step: StepJacobian) -> Hashable | None:
    """What steps that share a graph have in common; None for a step that cannot be captured."""
    if type(step.batch) is not StackBatch or type(step.rule) is not DiagonalJacobian:
        return None
    return tuple(_kind(number) for number in _numbers(step))


def still_copy(step: StepJacobian) -> StepJacobian:
    """A copy of the step with its own tensors; numbers in the rule's table become tensors too."""
    assert isinstance(step.batch, StackBatch)
    assert isinstance(step.rule, DiagonalJacobian)
    like = step.batch.w
    entries = [
        _cloned(entry) if entry is None or isinstance(entry, Tensor) else like.new_full((), entry)
        for entry in step.rule.entries()
    ]
    return replace(
        step,
        examples=step.examples.clone(),
        batch=step.batch.on([_cloned(x) for x in step.batch.tensors()]),
        rule=step.rule.on(entries),
        clip=_cloned(step.clip),
    )


def load(still: StepJacobian, step: StepJacobian) -> None:
    """Copy the numbers of a step into a static copy of its form."""
    for target, source in zip(_numbers(still), _numbers(step), strict=True):
        if isinstance(target, Tensor):
            target.copy_(source) if isinstance(source, Tensor) else target.fill_(source or 0.0)


def _numbers(step: StepJacobian) -> list[Entry]:
    """Everything that differs from step to step."""
    assert isinstance(step.batch, StackBatch)
    assert isinstance(step.rule, DiagonalJacobian)
    return [step.examples, step.clip, *step.batch.tensors(), *step.rule.entries()]


def _kind(number: Entry) -> Hashable:
    return (tuple(number.shape), number.dtype) if isinstance(number, Tensor) else type(number)


def _cloned(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone(memory_format=torch.contiguous_format)
