"""Leverage with controls: real deletions where it is not certain enough by itself, and trainings are short."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from poprisk._core.autodiff import resolve_loss
from poprisk.errors import RunError
from poprisk.risk._controls import Control, Deletions, as_many_as_needed, control_order, deleted_outputs
from poprisk.risk._duplicates import duplicate_groups, same_group
from poprisk.risk._error import example_losses_of
from poprisk.risk._exclusion import excluded_together
from poprisk.risk._leverage.leverage import Leverage, leverage
from poprisk.risk._verdict import FIRST_CONTROLS, LARGEST_CONTROL_ERROR, MOST_LEVERAGE_CONTROLS
from poprisk.runs import Run

CONTROL_WORK = 3e11
"""Multiplications up to which controls are trained unasked: about half a minute of one core."""
_PER_STEP = 1e7
"""Multiplications that take as long as what PyTorch does in a step besides."""
_KEPT = 2**24
"""Number of weights of all controls together that are kept for a step."""


class LeverageControls:
    """The real deletions for leverage at several steps of a run, which are trained when they are needed.

    Args:
        controls: Their number; None for 16, or up to 32 as long as that makes the risk more certain, if leverage alone
            is not certain and they take no longer than half a minute or so.
        seed: Seed for the examples that are used, and for which of them are deleted.
    """

    def __init__(self, controls: int | None = None, seed: int = 0) -> None:
        self.controls, self.seed = controls, seed
        self._deletions: Deletions | None = None

    def at(
        self, run: Run, k: int, examples: int | Int[Tensor, "m"] | None = None, later: Sequence[int] = ()
    ) -> Leverage:
        """Leverage before step k, with controls if it needs them.

        Args:
            run: The run; a later call may give one that has grown.
            k: The step.
            examples: See :func:`leverage`.
            later: Steps of later calls for the same run, to which the trainings are taken along.
        """
        found = leverage(run, [k], examples, seed=self.seed)[0]
        first, most = self._number(run, found)
        if not most:
            return found
        order = control_order(found.examples, run.num_examples, self.seed)
        if self._deletions is None:
            groups = excluded_together(duplicate_groups(run.problem.inputs))
            self._deletions = Deletions(same_group(groups, found.examples[order]))
        deletions = self._deletions

        def with_controls(count: int) -> Leverage:
            control = _control(run, found, deletions, order[:count])
            return replace(found, control=control, cost=found.cost + count)

        try:
            if found.step not in deletions.steps:
                deletions.follow(run, sorted({found.step, *later}))
            return as_many_as_needed(with_controls, Leverage.enough, first, most)
        except RunError as error:
            return replace(found, obstacle=str(error))

    def _number(self, run: Run, found: Leverage) -> tuple[int, int]:
        """How many controls there are at first and at most."""
        m = len(found.examples)
        if self.controls is not None:
            return min(self.controls, m), min(self.controls, m)
        risk = found.risk
        certain = risk.valid and float(risk.standard_error) <= LARGEST_CONTROL_ERROR * abs(float(risk.value))
        return FIRST_CONTROLS, 0 if certain and not found.gated else min(most_unasked(run), m)


def most_unasked(run: Run) -> int:
    """Largest number of controls that are trained unasked: 0 where the first 16 would take too long."""
    most = min(int(CONTROL_WORK / training_work(run)), _KEPT // run.num_weights, MOST_LEVERAGE_CONTROLS)
    return most if most >= FIRST_CONTROLS else 0


def training_work(run: Run) -> float:
    """Number of multiplications that take as long as training the run once more."""
    first, dtype = run.problem.batch(torch.tensor([0]))[0], run.layout.dtype
    parts = [x.to(dtype) if x.is_floating_point() else x for x in (first if isinstance(first, tuple) else (first,))]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run.module().eval()(*parts)
    forward = max(counter.get_total_flops() / 2, run.num_weights)
    return run.num_steps * max(3.0 * forward * len(run.batch(0)), _PER_STEP)


def _control(run: Run, found: Leverage, deletions: Deletions, rows: Int[Tensor, "k"]) -> Control:
    examples = found.examples[rows]
    weights, buffers, notes = deletions.weights(run, found.step, len(rows))
    outputs, targets = deleted_outputs(run, examples, weights, buffers).cpu(), run.problem.targets[examples].cpu()
    targets = targets.to(outputs.dtype) if targets.is_floating_point() else targets
    return Control(rows, example_losses_of(resolve_loss(run.problem.loss), outputs, targets), notes=notes)


def controls_work(run: Run) -> float:
    """Number of multiplications that take as long as the controls that may be trained unasked."""
    return most_unasked(run) * training_work(run)
