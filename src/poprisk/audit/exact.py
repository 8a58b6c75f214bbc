r"""The exact tier: columns that follow an example's effect through the training that happened."""

from dataclasses import replace

import torch
from torch import Tensor

from poprisk.audit.classes import class_view, own_and_other
from poprisk.audit.table import AuditTable
from poprisk.autodiff.flat import take_examples
from poprisk.errors import PopRiskError, RunError
from poprisk.influence import Unrolled, example_scores, exclusion, self_influence
from poprisk.influence.matrix import cast_inputs
from poprisk.operators import Window
from poprisk.runs import Run

_CHEAP = 3e10
"""Multiplications up to which the exact columns are made without being asked for: seconds on a CPU."""
_PER_DIRECTION = 12
"""Multiplications per weight and example of a step, for one direction forward and one back."""
_MOST_OUTPUTS = 20_000
"""Of all examples over all steps: past it the transfer to the test set is not formed."""
_QUERIES = 100
"""So many of the test set's examples stand for it."""


def exact_obstacle(run: Run) -> str | None:
    """Why the exact tier is not possible for this run, in words; None if it is."""
    if run.obstacles:
        return run.obstacles[0]
    if run.augmented:
        return "its inputs were augmented, so that no step saw the examples as they are: train without augmentation"
    return None


def exact_columns(run: Run, table: AuditTable, obstacle: str | None, *, demanded: bool) -> AuditTable:
    """The table with the exact columns where they can be had, else with a note.

    Raises:
        RunError: they are demanded and the run's optimizer or loss allows none.
    """
    if obstacle is not None:
        return _with_note(table, f"no exact columns: {obstacle}")
    price = multiplications(run)
    if not demanded and price > _CHEAP:
        return _with_note(table, f'exact columns would take about {price:.0e} multiplications: tier="exact" makes them')
    try:
        unrolled = Unrolled(run)
        columns = {"self_influence": _numbers(self_influence(unrolled).value)}
        columns |= _left_out(unrolled, table)
        columns |= _displacement(run, unrolled.num_outputs)
    except PopRiskError as error:
        if demanded:
            raise RunError(f"the exact tier is not possible for this run: {error}") from None
        return _with_note(table, f"no exact columns: {error}")
    notes = [unrolled.note] if unrolled.note else []
    if "displacement" not in columns:
        notes.append("no column displacement: it needs a problem with a test set, and a small run")
    doubtful = int(columns["loo_doubtful"].sum())
    if doubtful:
        notes.append(f"loo_loss is doubtful for {doubtful} examples, over whose absence the network bends")
    return replace(table, columns=table.columns | columns, notes=(*table.notes, *notes))


def multiplications(run: Run) -> float:
    """What the exact columns take, roughly: directions × steps × batch × weights."""
    batch = len(run.batch(0))
    return 2.0 * _PER_DIRECTION * run.num_examples * run.num_steps * batch * run.num_weights


def _left_out(unrolled: Unrolled, table: AuditTable) -> dict[str, Tensor]:
    """Loss and margin (or residual) of each example, had the run not seen it."""
    found = exclusion(unrolled)
    columns = {"loo_loss": found.losses.double(), "loo_doubtful": found.doubtful}
    outputs = found.excluded_outputs
    view = class_view(unrolled.run.problem, outputs) if table.kind == "classes" else None
    if view is not None:
        own, other, _ = own_and_other(view.scores(outputs), view.labels)
        columns["loo_margin"] = own - other
    elif table.kind == "regression":
        columns["loo_residual"] = (outputs - table.targets.reshape(outputs.shape).to(outputs)).norm(dim=1)
    return columns


def _displacement(run: Run, outputs: int) -> dict[str, Tensor]:
    """Needs the transfer from every example to the test set, for which each step's Jacobians are formed."""
    test = run.problem.test
    if test is None or run.num_examples * outputs * run.num_steps > _MOST_OUTPUTS:
        return {}
    queries = cast_inputs(take_examples(test[0], slice(0, _QUERIES)), torch.float64)
    return {"displacement": example_scores(Window.of_run(run, test_inputs=queries))}


def _numbers(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value).double()


def _with_note(table: AuditTable, note: str) -> AuditTable:
    return replace(table, notes=(*table.notes, note))
