"""``poprisk bench``: the cost of a step of PopRiskAdamW relative to AdamW, on this machine."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poprisk.cli._options import AsJson, examples
from poprisk.cli._outcome import note
from poprisk.cli._output import show, stdout, table
from poprisk.errors import HyperparameterError

if TYPE_CHECKING:
    from rich.console import RenderableType

EXAMPLES = examples("poprisk bench", "poprisk bench --device cuda", "poprisk bench --json")
_KINDS = ("foreach", "fused")


def bench(
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda. Default: cuda if available, otherwise cpu.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of a PopRiskAdamW step relative to torch's AdamW on this machine, in under a minute.

    Both optimizers take turns on the same weights and gradients, so the ratio is meaningful even on a busy machine.
    Nothing is written.
    """
    import torch

    from poprisk._core.progress import Progress
    from poprisk._core.store import environment
    from poprisk.cli._step_time import CASES, kernel_time, step_times

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda") or (chosen == "cuda" and not torch.cuda.is_available()):
        raise HyperparameterError(f"device must be cpu, or cuda if available, got {chosen}: use one of them")
    with Progress("bench", len(CASES) + 1, counted="{done} of {total} cases") as progress:
        cases = {}
        for place, (name, shapes) in enumerate(CASES.items()):
            progress.update(place, doing=name)
            cases[name] = step_times(shapes, chosen)
        progress.update(len(CASES), doing="kernel tile")
        tile = kernel_time(chosen)
    for warning in dict.fromkeys(w for case in cases.values() for w in case.notes):
        note(f"warning: {warning}")
    found = {"device": chosen, "steps": {name: asdict(case) for name, case in cases.items()}}
    found |= {"kernel_tile": asdict(tile), "environment": environment()}
    show(bench_lines(found, stdout().width), found, as_json)


def bench_lines(found: Mapping[str, Any], width: int) -> "Iterator[RenderableType]":
    """The table of ratios, and a line on the kernel."""
    env = found["environment"]
    where = (env["gpu"] if found["device"] == "cuda" else None) or f"{env['cpu']}, {env['threads']} threads"
    headings = ("weights", *(f"{kind}: ratio" for kind in _KINDS), *(f"{kind}: ms" for kind in _KINDS))
    rows = [
        (name, *(_ratio(case, kind) for kind in _KINDS), *(_times(case, kind) for kind in _KINDS))
        for name, case in found["steps"].items()
    ]
    yield from table(f"Time of one step on {where}: PopRiskAdamW relative to AdamW", headings, rows, width)
    yield "Ratio: median (and quartiles) over rounds in which both take turns. ms: PopRiskAdamW, AdamW."
    tile = found["kernel_tile"]
    yield (
        f"A tangent kernel of {tile['examples']} examples with {tile['outputs']} outputs and {tile['weights']} weights "
        f"takes {tile['milliseconds']:.3g} ms, as long as {tile['gradients']:.3g} gradients of these examples."
    )


def _ratio(case: Mapping[str, Any], kind: str) -> str:
    low, high = case["spread"][kind]
    return f"{case['ratios'][kind]:.2f} ({low:.2f}–{high:.2f})"


def _times(case: Mapping[str, Any], kind: str) -> str:
    ours, adamw = (case["milliseconds"][f"{name}, {kind}"] for name in ("PopRiskAdamW", "AdamW"))
    return f"{ours:.3g}, {adamw:.3g}"
