"""A bench for a terminal: times of a step, and their ratios."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

_KINDS = ("foreach", "fused")


def bench_lines(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The table of ratios, then the kernel's line."""
    env = found["environment"]
    where = (env["gpu"] if found["device"] == "cuda" else None) or f"{env['cpu']}, {env['threads']} threads"
    table = Table(title=f"One step on {where}: PopRiskAdamW over AdamW", title_justify="left", title_style="")
    for heading in ("weights", *(f"{kind}: ratio" for kind in _KINDS), *(f"{kind}: ms" for kind in _KINDS)):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    for name, case in found["steps"].items():
        table.add_row(name, *(_ratio(case, kind) for kind in _KINDS), *(_times(case, kind) for kind in _KINDS))
    yield table
    yield "Ratio: median over rounds in which both take turns, and its quartiles; ms: PopRiskAdamW, AdamW."
    tile = found["kernel_tile"]
    yield (
        f"A tangent kernel of {tile['examples']} examples with {tile['outputs']} outputs, {tile['weights']} weights: "
        f"{tile['milliseconds']:.3g} ms, as long as {tile['gradients']:.3g} gradients of these examples."
    )


def _ratio(case: Mapping[str, Any], kind: str) -> str:
    low, high = case["spread"][kind]
    return f"{case['ratios'][kind]:.2f} ({low:.2f}–{high:.2f})"


def _times(case: Mapping[str, Any], kind: str) -> str:
    ours, adamw = (case["milliseconds"][f"{name}, {kind}"] for name in ("PopRiskAdamW", "AdamW"))
    return f"{ours:.3g}, {adamw:.3g}"
