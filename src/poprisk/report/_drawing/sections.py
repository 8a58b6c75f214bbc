"""The sections of a report: each turns a part of the analysis into words and charts, or says how to get that part."""

import math
from dataclasses import replace

from poprisk.report._analysis.analyze import Analysis
from poprisk.report._analysis.curves import HeldBackCurve
from poprisk.report._analysis.gates import has_gate
from poprisk.report._drawing.advice import gap_words
from poprisk.report._drawing.first_screen import facts_of
from poprisk.report._drawing.operator_sections import (
    cells_section,
    displacement_section,
    drift_section,
    spectrum_section,
)
from poprisk.report._drawing.section import Section
from poprisk.report._drawing.svg_chart import Axis, Line, heat_map, line_chart
from poprisk.report._drawing.wording import percent, size_of

_CURVE_POINTS = 400
_LAYERS = 24
_STEP = Axis("step")
_MEANINGS = {
    "gates": "Weights with a closed gate saw gradients that disagree between examples; moving them would have fitted "
    "noise.",
    "kernel": "A kernel that moves far means that the network learned features of its own; one that stays near 0 means "
    "that it trained like a linear model.",
}
"""What the picture of each section means."""


def sections(found: Analysis) -> list[Section]:
    """All sections but the table of examples, in the order of the page; those with nothing to show come last."""
    made = [
        curves_section(found),
        spectrum_section(found),
        cells_section(found),
        drift_section(found),
        displacement_section(found),
        *([gate_section(found)] if found.gates is not None or has_gate(found.run) else []),
        kernel_section(found),
    ]
    made = [replace(s, meaning=s.meaning or _MEANINGS.get(s.key, "")) for s in made]
    shown = [s for s in made if not s.missing]
    narrow = [s for s in shown if len(s.charts) == 1]
    alone = narrow[-1:] if len(narrow) % 2 else []
    wide = [replace(s, wide=s.key == "curves" or len(s.charts) != 1 or s in alone) for s in shown]
    return [*wide, *(s for s in made if s.missing)]


def curves_section(found: Analysis) -> Section:
    """Losses over the run, and the estimated risk with its standard error."""
    title = "Learning curves"
    losses = found.run.losses.tolist()
    every = max(1, math.ceil(len(losses) / _CURVE_POINTS))
    kept = range(0, len(losses), every)
    lines = []
    if any(math.isfinite(v) for v in losses):
        lines.append(Line("loss of each batch", [float(k) for k in kept], [losses[k] for k in kept], color=5))
    curves, notes = found.curves, ()
    if curves is not None:
        steps = [float(k) for k in curves.steps]
        lines.append(Line("training loss, all examples", steps, curves.train, color=0))
        if curves.test is not None:
            lines.append(Line("test loss", steps, curves.test, color=2, dash=1))
        notes = curves.notes
    if found.readings:
        at = [float(r.step) for r in found.readings]
        values, errors = (
            [float(getattr(r.risk, name)) for r in found.readings] for name in ("value", "standard_error")
        )
        hollow = [not r.risk.valid for r in found.readings]
        lines.append(Line("estimated population risk ± one standard error", at, values, 1, errors, 0, True, hollow))
        if any(hollow):
            doubtful = next(r for r in found.readings if not r.risk.valid)
            notes = (
                *notes,
                f"hollow points are estimates that are not valid; at step {doubtful.step}: {doubtful.risk.reason}",
            )
    else:
        notes = (*notes, f"no estimated risk: {found.left_out.get('risk', 'it was not computed')}")
    if not lines:
        return Section("curves", title, missing="no losses were recorded; set step.loss inside recorder.step(…)")
    held = found.held_back
    lines += _held_lines(held, accuracy=False)
    mark = {} if held is None else {"mark": float(held.risk.step), "mark_name": f"kept: step {held.risk.step}"}
    charts = [line_chart(lines, _STEP, Axis("mean loss", log=None), "Loss over the run", **mark)]
    right = _held_lines(held, accuracy=True)
    if curves is not None and curves.test_accuracy is not None:
        steps = [float(k) for k in curves.steps]
        tested = Line("test accuracy", steps, [100 * a for a in curves.test_accuracy], color=2, dash=1, points=True)
        right.insert(0, tested)
    if right:
        named = "Accuracy" if len(right) > 1 else "Held-back accuracy" if mark else "Test accuracy"
        charts.append(line_chart(right, _STEP, Axis("%"), named, height=190, rising=True, **mark))
    lead = (
        "Training loss, test loss, and the population risk: the expected loss on new data from the same distribution, "
        "estimated from the run itself."
    )
    gap = gap_words(facts_of(found))
    meaning = f"{gap[0].upper()}{gap[1:]}." if gap else ""
    return Section("curves", title, lead + _held_words(held), tuple(charts), notes=notes, meaning=meaning)


def _held_lines(held: HeldBackCurve | None, *, accuracy: bool) -> list[Line]:
    """Held-back loss (or accuracy) of the averaged weights, a line for each tail."""
    lines = []
    for j, line in enumerate(held.lines if held is not None else ()):
        steps = [float(k) for k in line.steps]
        which = "" if line.tail is None else f", mean over the last {percent(line.tail)} of the steps"
        if not accuracy:
            lines.append(Line(f"held-back loss{which}", steps, line.losses, 3, line.errors, j % 5, points=True))
        elif line.accuracy is not None:
            lines.append(
                Line(f"held-back accuracy{which}", steps, [100 * a for a in line.accuracy], 3, None, j % 5, True)
            )
    return lines


def _held_words(held: HeldBackCurve | None) -> str:
    """What the chosen moment means."""
    if held is None:
        return ""
    risk = held.risk
    mean = "" if risk.tail is None else f" (averaged over about the last {percent(risk.tail)} of the steps up to it)"
    known = f"is {size_of(risk)}, corrected for this choice" if risk.valid else f"is not known: {risk.reason}"
    return (
        f" {held.examples} examples were held back from training. It ended with the weights of step {risk.step}{mean}: "
        f"they did best on these examples among {risk.measured} measurements, and their risk on new data with the same "
        f"label noise {known}. Everything else on this page describes the weights of the last step."
    )


def gate_section(found: Analysis) -> Section:
    """Gate and noise over time, and the gate of each parameter."""
    title, gates = "Gate and signal-to-noise", found.gates
    if gates is None:
        return Section("gates", title, missing=found.left_out.get("gates", "not computed"))
    steps = [float(k) for k in gates.steps]
    overall = gates.overall
    share = [
        Line("weights whose gate is open", steps, [100 * v for v in overall["active_fraction"]], color=0),
        Line("mean gate", steps, [100 * v for v in overall["mean_gate"]], color=1, dash=1),
        Line(
            "progress that does not carry over to new data",
            steps,
            [100 * v for v in overall["self_fit"]],
            color=2,
            dash=2,
        ),
    ]
    signal = [1 / v if math.isfinite(v) and v > 0 else math.nan for v in overall["noise_scale"]]
    charts = [
        line_chart(share[:2], _STEP, Axis("%", zero=True), "How far the gate is open", height=220),
        line_chart(
            [Line("squared mean gradient over its variance in a batch", steps, signal, color=3)],
            _STEP,
            Axis("signal / noise", log=True),
            "Signal-to-noise of a batch gradient",
            height=200,
        ),
        line_chart(
            share[2:], _STEP, Axis("%"), "Share of each step's progress that is specific to its batch", height=200
        ),
    ]
    names = list(gates.layers)[:_LAYERS]
    rows = [gates.layers[name]["mean_gate"] for name in names]
    charts.append(heat_map(names, gates.steps, rows, "Mean gate of each parameter"))
    more = len(gates.layers) - len(names)
    notes = (f"{more} more parameters are not shown",) if more > 0 else ()
    if max(overall["self_fit"], default=0.0) > 1:
        notes += ("over 100%, a step's progress on its own batch is a loss on other examples",)
    lead = (
        "The gate is a factor between 0 and 1 for each weight: the optimizer moves a weight only as far as the signal "
        "in its gradient stands out from the noise between examples."
    )
    return Section("gates", title, lead, tuple(charts), notes=notes)


def kernel_section(found: Analysis) -> Section:
    """Drift of the tangent kernel."""
    title, kernel = "Kernel drift", found.kernel
    if kernel is None:
        return Section("kernel", title, missing=found.left_out.get("kernel", "not computed"))
    steps = [float(k) for k in kernel.steps]
    line = Line("distance from the initial kernel", steps, kernel.drift, color=3, points=True)
    chart = line_chart(
        [line],
        _STEP,
        Axis("times the initial norm", zero=True),
        "Distance of the kernel from its initial value",
        height=220,
    )
    lead = (
        f"Distance of the tangent kernel of the first {kernel.examples} training examples from its initial value, in "
        "operator norm. At 0, the network trains like a linear model (lazy training)."
    )
    return Section("kernel", title, lead, (chart,))
