"""The page on scaling: every number of ``docs/scaling.md`` from the stored measurements and the cost models.

``python -m poprisk_lab.costs.page.scaling`` writes the page's blocks and its figure; ``--check`` only compares the blocks.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from poprisk._core.store import write_text
from poprisk.errors import DataError
from poprisk_lab.costs.page.elsewhere import elsewhere_table
from poprisk_lab.costs.page.forecast import (
    assumptions,
    kernels_table,
    messages_table,
    optimizer_table,
    queries_sentence,
    recording_table,
    runs_table,
)
from poprisk_lab.costs.page.methods import NEEDED, calls_table, methods_table, tile_methods_table
from poprisk_lab.costs.page.predictions import Predictor
from poprisk_lab.costs.page.reached import precisions_table, reached_table
from poprisk_lab.costs.page.tables import (
    Measured,
    biases,
    checks_table,
    exponents_table,
    machines_table,
    misses,
    models_table,
    storage_table,
    summary_sentence,
)
from poprisk_lab.pages.marked_page import fill_marks
from poprisk_lab.pages.wording import bullets, wrapped

_FIGURE = "![Predicted against measured seconds, every operation at every size](scaling.png)"
_TRAINING = ("optimizer_step", "training_step")
_TILES = ("jacobian_tile", "factor_tile", "product_tile")


def measurements(folder: Path) -> list[Measured]:
    """Every stored benchmark, a GPU's first.

    Raises:
        DataError: there is none.
    """
    paths = folder.glob("cost_models_*.json")
    found = [Measured(f"results/{path.name}", json.loads(path.read_text())) for path in paths]
    if not found:
        raise DataError(f"no cost_models_*.json in {folder}: run benchmarks/cost_models.py first")
    return sorted(found, key=lambda each: (not each.is_gpu, each.file))


def elsewhere(folder: Path) -> Mapping[str, Any] | None:
    """What another benchmark measured on a GPU, if it is there."""
    path = folder / "scale_gpu.json"
    return json.loads(path.read_text()) if path.exists() else None


def page_blocks(found: Sequence[Measured], other: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The generated parts of the page, by the names of their places.

    Args:
        found: The benchmarks that the models were fitted with.
        other: One that they were not.
    """
    predictors = [Predictor.of(each) for each in found]
    stored = next((each for each in found if each.saved["storage"]), found[0])
    return {
        "scaling_summary": f"{bullets(summary_sentence(each) for each in found)}\n\n{_FIGURE}",
        "scaling_machines": machines_table(found),
        "scaling_models": models_table(),
        "scaling_checks": _by_machine(found, lambda each: f"{checks_table(each)}\n\n{misses(each)}"),
        "scaling_exponents": _by_machine(found, exponents_table),
        "scaling_elsewhere": elsewhere_table(predictors[0], other) if other and found[0].is_gpu else "*Not measured.*",
        "scaling_reached": reached_table(other) if other else "*Not measured.*",
        "scaling_precisions": precisions_table(other) if other else "*Not measured.*",
        "scaling_storage": storage_table(stored),
        "scaling_machine": wrapped(_machine_words(found[0])),
        "scaling_assumptions": bullets([*assumptions(predictors[0]), f"**Bias**: {biases(found[0])}"]),
        "scaling_optimizer": _first(predictors, _TRAINING, optimizer_table),
        "scaling_messages": _first(predictors, _TRAINING, messages_table),
        "scaling_kernels": _first(predictors, NEEDED, kernels_table),
        "scaling_runs": _first(predictors, ("adjoint", "retraining"), runs_table),
        "scaling_recording": recording_table(),
        "scaling_methods": _first(predictors, NEEDED, methods_table),
        "scaling_calls": calls_table(),
        "scaling_tiles": _first(predictors, _TILES, tile_methods_table),
        "scaling_queries": wrapped(queries_sentence()),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m poprisk_lab.costs.page.scaling [--check]``."""
    parser = argparse.ArgumentParser(
        prog="python -m poprisk_lab.costs.page.scaling", description="Write the page on scaling."
    )
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--page", type=Path, default=Path("docs/scaling.md"))
    parser.add_argument("--figure", type=Path, default=Path("docs/scaling.png"))
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page differs")
    options = parser.parse_args(arguments)
    found = measurements(options.results)
    before = options.page.read_text()
    after = fill_marks(before, page_blocks(found, elsewhere(options.results)))
    if options.check:
        if before != after:
            sys.exit(f"{options.page} differs from the results: run python -m poprisk_lab.costs.page.scaling")
        return
    from poprisk._core.store import write_figure
    from poprisk_lab.costs.page.figure import draw_scaling

    write_text(options.page, after)
    write_figure(options.figure, draw_scaling(found))
    print(f"Wrote {options.page} and {options.figure}")


def _first(predictors: Sequence[Predictor], needed: Sequence[str], write: Callable[[Predictor], str]) -> str:
    """A table for the first machine on which all that it needs was measured; its name, if that is not the first one."""
    for predictor in predictors:
        if predictor.has(*needed):
            name, other = predictor.machine.name, predictors[0].machine.name
            note = f"*For {name}: not all that is needed was measured on {other}.*\n\n"
            return ("" if predictor is predictors[0] else note) + write(predictor)
    return "*Not measured.*"


def _by_machine(found: Sequence[Measured], write: Callable[[Measured], str]) -> str:
    return "\n\n".join(f"**{each.machine.name}**\n\n{write(each)}" for each in found)


def _machine_words(measured: Measured) -> str:
    words = f"Predictions are for {measured.machine.name}, from `{measured.file}`, unless a table says otherwise."
    if not measured.is_gpu:
        words += " No GPU has been measured yet: where a table says GPU, read one such processor."
    return words


if __name__ == "__main__":
    main()
