r"""The exact tier: columns that follow an example's effect through the training that happened."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from poprisk._core.autodiff import take_examples
from poprisk._core.progress import Report, training_progress
from poprisk.errors import PopRiskError, RunError
from poprisk.operators import Window
from poprisk.risk._audit.classes import class_view, own_and_other
from poprisk.risk._audit.table import AuditTable
from poprisk.risk._exclusion import exclusion
from poprisk.risk._influence.displacement import example_scores
from poprisk.risk._influence.matrix import cast_inputs, self_influence
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._influence.step_jacobian import StepJacobian
from poprisk.runs import Run

_CHEAP = 10.0
"""Seconds on a CPU, about, up to which the exact columns are made without being asked for."""
_PER_SECOND = 5e9
"""Multiplications of a CPU in a second, about."""
_STEP_OVERHEAD = 5e-3
"""Seconds that one step of one pass takes however small the network is."""
_PASSES = 2
"""Through the run: back for the influence, forward for the examples' absence."""
_PER_DIRECTION = 12
"""Multiplications per weight and example of a step, for one direction forward and one back."""
_MOST_OUTPUTS = 20_000
"""Of all examples over all steps: past it the transfer to the test set is not formed."""
_MOST_JACOBIAN = 3e7
"""Entries of one step's Jacobian, outputs by weights: past it neither."""
_QUERIES = 100
"""So many of the test set's examples stand for it."""


def exact_obstacle(run: Run) -> str | None:
    """Why the exact tier is not possible for this run, in words; None if it is."""
    if run.obstacles:
        return run.obstacles[0]
    if run.augmented:
        return "its inputs were augmented, so that no step saw the examples as they are: train without augmentation"
    return None


def exact_columns(
    run: Run, table: AuditTable, obstacle: str | None, *, demanded: bool, progress: bool = False
) -> AuditTable:
    """The table with the exact columns where they can be had, else with a note.

    Args:
        run: The run.
        table: What every run has.
        obstacle: Why they cannot be had, where that is known.
        demanded: Whether to make them whatever they cost, and to raise where they cannot be had.
        progress: Show how far it is, on stderr.

    Raises:
        RunError: they are demanded and the run's model, optimizer or loss allows none.
    """
    if obstacle is not None:
        return _with_note(table, f"no exact columns: {obstacle}")
    price = seconds(run)
    if not demanded and price > _CHEAP:
        return _with_note(table, f'exact columns would take about {price:.1g} s on a CPU: tier="exact" makes them')
    try:
        unrolled = _Shown(run)
        with unrolled.shown(table.columns["loss"].mean(), progress):
            columns = {"self_influence": _numbers(self_influence(unrolled).value)}
            columns |= _left_out(unrolled, table)
        columns |= _displacement(unrolled)
    except (PopRiskError, RuntimeError) as error:  # of PyTorch: an operation without the derivatives it takes
        if demanded:
            raise RunError(f"the exact tier is not possible for this run: {_first_line(error)}") from error
        return _with_note(table, f"no exact columns: {_first_line(error)}")
    notes = [unrolled.note] if unrolled.note else []
    if "displacement" not in columns:
        notes.append("no column displacement: it needs a problem with a test set, and a small run")
    doubtful = int(columns["loo_doubtful"].sum())
    if doubtful:
        notes.append(f"loo_loss is doubtful for {doubtful} examples, over whose absence the network bends")
    return replace(table, columns=table.columns | columns, notes=(*table.notes, *notes))


def seconds(run: Run) -> float:
    """What the exact columns take on a CPU, about: directions × steps × batch × weights, and some for each step."""
    batch = len(run.batch(0))
    multiplications = _PASSES * _PER_DIRECTION * run.num_examples * run.num_steps * batch * run.num_weights
    return multiplications / _PER_SECOND + _PASSES * run.num_steps * _STEP_OVERHEAD


class _Shown(Unrolled):
    """A run that tells how many of its steps have been linearized."""

    _report: Report | None = None
    _loss: Tensor
    _taken = 0

    @contextmanager
    def shown(self, loss: Tensor, progress: bool) -> Iterator[None]:
        """Show, within, how far the passes of both columns are."""
        turns = math.ceil(self.num_examples / self.columns_at_a_time())
        total = _PASSES * turns * (self.stop - self.start)
        with training_progress("exact columns", 0, total, shown=progress) as self._report:
            self._loss = loss
            yield
        self._report = None

    def step(self, k: int) -> StepJacobian:
        """See the base class."""
        self._taken += 1
        if self._report is not None:
            self._report(self._taken, self._loss)
        return super().step(k)


def _left_out(unrolled: Unrolled, table: AuditTable) -> dict[str, Tensor]:
    """Loss and margin (or residual) of each example, had the run not seen it."""
    found = exclusion(unrolled)
    columns = {"loo_loss": found.losses.double().cpu(), "loo_doubtful": found.doubtful.cpu()}
    outputs = found.excluded_outputs.cpu()
    view = class_view(unrolled.run.problem, outputs) if table.kind == "classes" else None
    if view is not None:
        own, other, _ = own_and_other(view.scores(outputs), view.labels)
        columns["loo_margin"] = own - other
    elif table.kind == "regression":
        columns["loo_residual"] = (outputs - table.targets.cpu().reshape(outputs.shape).to(outputs)).norm(dim=1)
    return columns


def _displacement(unrolled: Unrolled) -> dict[str, Tensor]:
    """Needs the transfer from every example to the test set, for which each step's Jacobians are formed."""
    run, test = unrolled.run, unrolled.run.problem.test
    outputs = run.num_examples * unrolled.num_outputs
    if test is None or outputs * run.num_steps > _MOST_OUTPUTS or outputs * run.num_weights > _MOST_JACOBIAN:
        return {}
    queries = cast_inputs(take_examples(test[0], slice(0, _QUERIES)), torch.float64)
    return {"displacement": _numbers(example_scores(Window.of_run(run, test_inputs=queries)))}


def _numbers(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value).double().cpu()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _with_note(table: AuditTable, note: str) -> AuditTable:
    return replace(table, notes=(*table.notes, note))
