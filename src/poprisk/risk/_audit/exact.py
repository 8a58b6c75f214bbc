"""The exact tier: columns from an example's effect through the recorded training."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import take_examples
from poprisk._core.costs import current_limits, is_out_of_memory
from poprisk._core.text import first_line
from poprisk.errors import DataError, LimitError, PopRiskError, RunError
from poprisk.operators import Window
from poprisk.risk._audit.table import AuditTable
from poprisk.risk._classes import class_view, own_and_other
from poprisk.risk._exclusion import exclusion
from poprisk.risk._influence.matrix import cast_inputs, self_influence
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.runs import Run

_CHEAP = 10.0
"""Approximate seconds on a CPU up to which tier="auto" computes the exact columns."""
_PER_SECOND = 5e9
"""Approximate multiplications of a CPU in a second."""
_STEP_OVERHEAD = 5e-3
"""Seconds that one step of one pass takes even for the smallest network."""
_PASSES = 2
"""Passes through the run: backward for influence, forward for exclusion."""
_PER_DIRECTION = 12
"""Multiplications per weight and example of a step, for one direction forward and one back."""
_MOST_OUTPUTS = 20_000
"""Outputs of all examples over all steps beyond which the displacement column is left out."""
_MOST_JACOBIAN = 3e7
"""Entries of one step's Jacobian beyond which it is left out too."""
_QUERIES = 100
"""Number of test examples used for it."""


def exact_obstacle(run: Run) -> str | None:
    """Why the exact tier is not possible for this run; None if it is."""
    if run.obstacles:
        return run.obstacles[0]
    if run.augmented:
        return "its inputs were augmented: train without augmentation"
    return None


def exact_columns(run: Run, table: AuditTable, obstacle: str | None, *, demanded: bool) -> AuditTable:
    """The table with the exact columns if they are possible and cheap enough, else with a note.

    Args:
        run: The run.
        table: The columns that every run has.
        obstacle: Why they are not possible, if known.
        demanded: Whether to compute them at any cost, and to raise if they are not possible.

    Raises:
        RunError: they are demanded, but the run's model, optimizer or loss does not allow them.
    """
    if obstacle is not None:
        return _with_note(table, f"no exact columns: {obstacle}")
    price = seconds(run)
    limits = current_limits()
    allowed = _CHEAP if limits is None or limits.budget is None else limits.left()
    if not demanded and price > allowed:
        over = f"over the limit of {_CHEAP:.0f} s" if allowed == _CHEAP else "over what is left of the budget"
        return _with_note(table, f'exact columns would take about {price:.0f} s, {over}: use tier="exact"')
    try:
        unrolled = Unrolled(run)
        columns = {"self_influence": _numbers(self_influence(unrolled).value)}
        columns |= _left_out(unrolled, table)
        columns |= _displacement(unrolled)
    except KeyboardInterrupt:
        return _with_note(table, "no exact columns: interrupted")
    except (PopRiskError, RuntimeError) as error:  # of PyTorch: an operation without the derivatives it takes
        if is_out_of_memory(error):
            raise
        if demanded and not isinstance(error, LimitError):
            raise RunError(f"the exact tier is not possible for this run: {first_line(error)}") from error
        return _with_note(table, f"no exact columns: {first_line(error)}")
    notes = [unrolled.note] if unrolled.note else []
    if "displacement" not in columns:
        notes.append("no column displacement: it needs a problem with a test set and a small run")
    doubtful = int(columns["loo_doubtful"].sum())
    if doubtful:
        notes.append(f"loo_loss is doubtful for {doubtful} examples, whose linearized and actual predictions differ")
    return replace(table, columns=table.columns | columns, notes=(*table.notes, *notes))


def seconds(run: Run) -> float:
    """Approximate time of the exact columns on a CPU: directions × steps × batch × weights, and some per step."""
    batch = len(run.batch(0))
    multiplications = _PASSES * _PER_DIRECTION * run.num_examples * run.num_steps * batch * run.num_weights
    return multiplications / _PER_SECOND + _PASSES * run.num_steps * _STEP_OVERHEAD


def _left_out(unrolled: Unrolled, table: AuditTable) -> dict[str, Tensor]:
    """Loss and margin (or residual) of each example without it."""
    found = exclusion(unrolled, controls=0)
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
    """Norm of the transfer from each example to the test set, which needs the Jacobians of every step."""
    run, test = unrolled.run, unrolled.run.problem.test
    outputs = run.num_examples * unrolled.num_outputs
    if test is None or outputs * run.num_steps > _MOST_OUTPUTS or outputs * run.num_weights > _MOST_JACOBIAN:
        return {}
    queries = cast_inputs(take_examples(test[0], slice(0, _QUERIES)), torch.float64)
    return {"displacement": _numbers(example_scores(Window.of_run(run, test_inputs=queries)))}


def example_scores(window: Window) -> Float[Tensor, "n"]:
    r"""How much each training example can move the test predictions: :math:`\|\mathsf G_Q^{(i)}(T)\|_{op}`.

    The score is 0 for an example whose output gradient at the window's start has no effect on the test predictions. G
    is formed by columns or by rows, whichever are fewer.

    Raises:
        DataError: the window has no test set.
    """
    if window.test_inputs is None:
        raise DataError("scores need a window with a test set: pass test_inputs=… to the window")
    transfer = window.test_transfer
    rows, columns = transfer.shape
    G = transfer.T.to_dense().T if rows < columns else transfer.to_dense()
    blocks = G.reshape(rows, window.num_examples, -1).movedim(1, 0)
    return torch.linalg.matrix_norm(blocks, 2)


def _numbers(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value).double().cpu()


def _with_note(table: AuditTable, note: str) -> AuditTable:
    return replace(table, notes=(*table.notes, note))
