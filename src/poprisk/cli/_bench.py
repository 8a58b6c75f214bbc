"""``poprisk bench``: what a step of PopRiskAdamW costs beside AdamW's, here."""

from dataclasses import asdict
from typing import Annotated

import typer

from poprisk.cli._options import AsJson, examples
from poprisk.cli._outcome import note
from poprisk.cli._output import show
from poprisk.errors import HyperparameterError

EXAMPLES = examples("poprisk bench", "poprisk bench --device cuda", "poprisk bench --json")


def bench(
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda. Default: cuda where there is one, else cpu.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a step of PopRiskAdamW costs beside torch's AdamW on this machine, in under a minute.

    Both take turns on the same weights and gradients, so that their ratio holds also where other programs run. Nothing
    is written.
    """
    import torch

    from poprisk._core.store import environment
    from poprisk.cli._bench_table import bench_lines
    from poprisk.cli._progress import part_progress
    from poprisk.cli._step_time import CASES, kernel_time, step_times

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda") or (chosen == "cuda" and not torch.cuda.is_available()):
        raise HyperparameterError(f"device must be cpu, or cuda where there is one, got {chosen}")
    with part_progress("bench", [*CASES, "kernel tile"]) as progress:
        cases = {}
        for name, shapes in CASES.items():
            progress(name)
            cases[name] = step_times(shapes, chosen)
        progress("kernel tile")
        tile = kernel_time(chosen)
    for warning in dict.fromkeys(w for case in cases.values() for w in case.notes):
        note(f"warning: {warning}")
    found = {"device": chosen, "steps": {name: asdict(case) for name, case in cases.items()}}
    found |= {"kernel_tile": asdict(tile), "environment": environment()}
    show(bench_lines(found), found, as_json)
