"""What the page on scaling shows: the stored measurements and the cost models, as slots of ``page.md.jinja``."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from poprisk.errors import DataError
from poprisk_lab.costs.page.forecast import (
    assumed,
    kernels_table,
    messages_table,
    optimizer_table,
    query_trainings,
    recording_table,
    runs_table,
)
from poprisk_lab.costs.page.jobs import jobs_table
from poprisk_lab.costs.page.methods import NEEDED, calls_table, methods_table, tile_methods_table
from poprisk_lab.costs.page.one_gpu import elsewhere_table, precisions_table, reached_table
from poprisk_lab.costs.page.predictions import Predictor
from poprisk_lab.costs.page.tables import (
    GOOD,
    Measured,
    biases,
    machines_table,
    models_table,
    storage_table,
    summary,
)

_TRAINING = ("optimizer_step", "training_step")
_TILES = ("jacobian_tile", "factor_tile", "product_tile")
_MISSING = "*Not measured.*"


def page_slots(results: Path) -> dict[str, Any]:
    """The slots from the benchmarks stored in a folder."""
    jobs = results / "scale_jobs.json"
    shown = {"jobs": jobs_table(json.loads(jobs.read_text())) if jobs.exists() else _MISSING}
    return slots(measurements(results), elsewhere(results)) | shown


def measurements(folder: Path) -> list[Measured]:
    """Every stored benchmark, a GPU's first.

    Raises:
        DataError: there is none.
    """
    paths = folder.glob("cost_models_*.json")
    found = [Measured(f"results/{path.name}", json.loads(path.read_text())) for path in paths]
    if not found:
        raise DataError(f"{folder} has no cost_models_*.json: run benchmarks/cost_models.py first")
    return sorted(found, key=lambda each: (not each.is_gpu, each.file))


def elsewhere(folder: Path) -> Mapping[str, Any] | None:
    """What another benchmark measured on a GPU, if it is there."""
    path = folder / "scale_gpu.json"
    return json.loads(path.read_text()) if path.exists() else None


def slots(found: Sequence[Measured], other: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What ``page.md.jinja`` asks for.

    Args:
        found: The benchmarks that the models were fitted with.
        other: One that they were not.
    """
    predictors = [Predictor.of(each) for each in found]
    stored = next((each for each in found if each.saved["storage"]), found[0])
    return {
        "good": GOOD,
        "machines": [summary(each) for each in found],
        "machines_table": machines_table(found),
        "models": models_table(),
        "elsewhere": elsewhere_table(predictors[0], other) if other and found[0].is_gpu else _MISSING,
        "reached": reached_table(other) if other else _MISSING,
        "precisions": precisions_table(other) if other else _MISSING,
        "storage": storage_table(stored),
        "assumed": assumed(predictors[0]),
        "bias": biases(found[0]),
        "optimizer": _first(predictors, _TRAINING, optimizer_table),
        "messages": _first(predictors, _TRAINING, messages_table),
        "kernels": _first(predictors, NEEDED, kernels_table),
        "runs": _first(predictors, ("adjoint", "retraining"), runs_table),
        "recording": recording_table(),
        "methods": _first(predictors, NEEDED, methods_table),
        "calls": calls_table(),
        "tiles": _first(predictors, _TILES, tile_methods_table),
        "query_trainings": query_trainings(),
    }


def draw(results: Path) -> Any:
    """The figure, from the benchmarks stored in a folder."""
    from poprisk_lab.costs.page.figure import draw_scaling

    return draw_scaling(measurements(results))


def _first(predictors: Sequence[Predictor], needed: Sequence[str], write: Callable[[Predictor], str]) -> str:
    """A table for the first machine with all the measurements it needs; the machine is named if it is not the first."""
    for predictor in predictors:
        if predictor.has(*needed):
            name, other = predictor.machine.name, predictors[0].machine.name
            note = f"*For {name}, because not every operation needed was measured on {other}.*\n\n"
            return ("" if predictor is predictors[0] else note) + write(predictor)
    return _MISSING
