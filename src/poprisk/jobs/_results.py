"""What jobs made: matrices that may be larger than memory, and K-fold estimates from stored weights."""

import warnings
from typing import Any

import torch
from typing_extensions import TypedDict

from poprisk._core.linalg import StoredMatrix
from poprisk._core.store import Cell, TiledArray, check_schema, load_tiled, open_store, parsed_json
from poprisk.errors import JobError, MixedNumericsWarning
from poprisk.jobs._engine import shipped_run
from poprisk.jobs._kinds import BUFFER, NOTES
from poprisk.risk import Resampled, k_fold_of_weights
from poprisk.runs import Problem, Run, run_digest


class _Notes(TypedDict):
    notes: list[str]
    alone: bool


def open_matrix(store: Any, name: str, *, partial: bool = False, device: torch.device | str = "cpu") -> StoredMatrix:
    """Open a kernel or the columns of an operator.

    Args:
        store: The store: a directory, an address that fsspec knows, or a Zarr store.
        name: The name, as returned by ``JobPlan``.
        partial: Open what there is before all jobs are done: the kernel of the first examples, or the first rows or
            columns.
        device: Device for products.

    Raises:
        JobError: jobs are not done, or the group is not a matrix.
        DataError: there is no such group, or its metadata is damaged.
    """
    group = load_tiled(open_store(store), name)
    if group.kind == "folds":
        raise JobError(f"{name!r} is not a matrix: use open_resampled")
    cells = _finished(group, partial)
    if group.where["symmetric"]:
        cells = sorted({*cells, *((j, i) for i, j in cells)})
    return StoredMatrix(group, cells, device)


def open_resampled(store: Any, name: str, *, run: Run | None = None, problem: Problem | None = None) -> Resampled:
    """What :func:`poprisk.risk.k_fold` returns, from trainings done as jobs.

    Args:
        store: The store.
        name: The name, as returned by ``JobPlan.k_fold``.
        run: The run; default: the directory that was planned with.
        problem: Its problem, where the directory's own description shall not be used.

    Raises:
        JobError: jobs are not done, or the group is not a K-fold.
        DataError: there is no such group, or it is damaged.
    """
    group = load_tiled(open_store(store), name)
    if group.kind != "folds":
        raise JobError(f"{name!r} is not a K-fold: use open_matrix")
    weights = torch.cat([group.tile(cell) for cell in _finished(group, False)])
    found = [parsed_json(bytes(row.tolist()), f"the notes of {name!r}") for row in group.whole(NOTES)]
    check_schema(list[_Notes], found, f"the notes of {name!r}")
    opened, buffers = shipped_run(group, {} if run is None else {group.name: run}, problem).open(), None
    if run_digest(opened) != group.content["digest"]:
        raise JobError(f"{name!r} was planned with another run than {opened.path}: pass that one as run=")
    if found[0]["alone"]:
        stacked = {key: group.whole(f"{BUFFER}{key}") for key, _ in opened.module().named_buffers()}
        buffers = [{key: x[c] for key, x in stacked.items()} for c in range(len(weights))]
    notes = tuple(dict.fromkeys(note for each in found for note in each["notes"]))
    return k_fold_of_weights(opened, weights, group.content["seed"], notes=notes, buffers=buffers)


def _finished(group: TiledArray, partial: bool) -> list[Cell]:
    """All tiles; of an unfinished group those of its leading part, or an error."""
    done, cells = group.done(), group.cells()
    missing = [cell for cell in cells if cell not in done]
    whole_rows = not group.where["symmetric"] and group.where["tile"][0] < group.where["shape"][0]
    axis = 0 if whole_rows else 1  # cells come row by row, or column by column up to the diagonal
    part = [cell for cell in cells if not missing or cell[axis] < missing[0][axis]]
    if missing and not (partial and part):
        raise JobError(
            f"{len(missing)} of {len(cells)} jobs of {group.name!r} are not done: run_jobs(store), or poprisk jobs "
            f"resume '{group.store}'"
        )
    if len(kinds := group.where["numerics"]) > 1:
        warnings.warn(
            f"{group.name!r} was computed on {len(kinds)} kinds of machine ({'; '.join(map(str, kinds))}): it equals "
            "what one of them gives to rounding, not to the bit",
            MixedNumericsWarning,
            stacklevel=3,
        )
    return part
