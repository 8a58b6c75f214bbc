"""The sections of a report: each turns a part of the analysis into words and charts, or says how to get that part."""

import math
from dataclasses import dataclass, replace

from poprisk.report._analysis.analyze import Analysis
from poprisk.report._analysis.curves import HeldBackCurve
from poprisk.report._analysis.operators import MOST_OUTPUTS, WindowFacts
from poprisk.report._drawing.advice import gap_words
from poprisk.report._drawing.first_screen import facts_of
from poprisk.report._drawing.svg_chart import Axis, Line, bar_chart, heat_map, line_chart, number, scatter_chart
from poprisk.report._drawing.wording import percent, size_of

_CURVE_POINTS = 400
_LAYERS = 24
_STEP = Axis("step")
_CELLS = {
    "initial": "error before training",
    "transferred": "clean signal transferred",
    "residual_bias": "clean signal not transferred",
    "trapped_noise": "label noise in the reservoir",
    "signal_noise": "label noise in the signal channel",
    "source": "weight decay and momentum",
}
_HOW_CELLS = (
    "this needs targets without label noise, and the squared loss; use analyze(run, clean=CleanTargets(train, test)), "
    "or poprisk report RUN --clean targets.npz with the arrays train and test"
)

_MEANINGS = {
    "operators": "Training acted on the directions above the line and left those below it alone: what a label wrote "
    "below the line, no test output depends on.",
    "cells": "The longest bar is where the test error comes from: too little training if it is signal not transferred, "
    "wrong labels if it is label noise in the signal channel.",
    "drift": "Where diffusion grows like drift, chance in the batches moved the test outputs as much as the data did: "
    "a larger batch or averaged weights would help.",
    "displacement": "Points on the line mean that the operators explain how every test output moved, so that the "
    "sections above can be trusted.",
    "gates": "Weights with a closed gate saw gradients that disagree between examples; moving them would have fitted "
    "noise.",
    "kernel": "A kernel that moves far means that the network learned features of its own; one that stays near 0 means "
    "that it trained like a linear model.",
}
"""What the picture of each section means."""
_SEE_OPERATORS = "this needs the operators of the run; “Signal channel and reservoir” says why they are missing"


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    key: str
    title: str
    lead: str = ""
    """What the section shows, in a few sentences."""
    charts: tuple[str, ...] = ()
    """The charts, as HTML."""
    missing: str = ""
    """Why there is nothing to show, and how to get it."""
    notes: tuple[str, ...] = ()
    wide: bool = False
    """Whether the section takes the whole width of the page."""
    meaning: str = ""
    """What the picture means for the reader, in one sentence."""


def sections(found: Analysis) -> list[Section]:
    """All sections but the table of examples, in the order of the page; those with nothing to show come last."""
    made = [
        curves_section(found),
        spectrum_section(found),
        cells_section(found),
        drift_section(found),
        displacement_section(found),
        gate_section(found),
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


def spectrum_section(found: Analysis) -> Section:
    """The spectrum of W with signal channel and reservoir, and the spectrum of Γ_Q."""
    title, window = "Signal channel and reservoir", found.window
    if window is None:
        return Section("operators", title, missing=_why_no_operators(found))
    values = window.dissipation
    half = _count_for(values, 0.5)
    index = [float(j) for j in range(1, len(values) + 1)]
    lines = [
        Line("signal channel", index[: window.rank], values[: window.rank], color=0, points=len(values) <= 150),
        Line("reservoir", index[window.rank :], values[window.rank :], color=5, points=True),
    ]
    order = Axis("direction, by decreasing dissipation")
    charts = [
        line_chart(
            [line for line in lines if line.x],
            order,
            Axis("eigenvalue of W", log=True),
            "Dissipation along each direction of the output gradient",
            level=window.cutoff if len(values) > window.rank else None,
            level_name="signal channel above, reservoir below",
        )
    ]
    notes = list(window.notes)
    if window.visibility:
        seen = [float(j) for j in range(1, len(window.visibility) + 1)]
        charts.append(
            line_chart(
                [Line("Γ_Q", seen, window.visibility, color=1, points=len(seen) <= 150)],
                Axis("direction, by decreasing effect on the test outputs"),
                Axis("eigenvalue of Γ_Q", log=True),
                "Squared test displacement per unit of dissipation",
                height=220,
            )
        )
    lead = (
        "The operators of a run are linear maps from the gradient of the loss with respect to the training outputs, "
        "before the first step, to the change of every output over the run. The signal channel contains the "
        "directions of this gradient along which training reduced the loss (dissipation); the reservoir contains the "
        f"others, which no test output depends on. Of {window.outputs} directions, {window.rank} are in the signal "
        f"channel and {window.outputs - window.rank} in the reservoir; {half} hold half of the dissipation. The "
        f"{window.directions} strongest, which hold {percent(window.directions_share)} of it, define the groups in the "
        "table of examples."
    )
    return Section("operators", title, lead, tuple(charts), notes=tuple(notes))


def cells_section(found: Analysis) -> Section:
    """Terms of the test error."""
    title, window = "Terms of the test error", found.window
    if window is None or window.cells is None:
        why = _HOW_CELLS if window is not None else f"{_HOW_CELLS}; it also needs the operators of the run"
        return Section("cells", title, missing=why)
    cells = window.cells
    total = sum(cells.values())
    chart = bar_chart([_CELLS[name] for name in cells], list(cells.values()), "Terms of the mean squared test error")
    lead = (
        f"The mean squared error against the clean targets, on {_queries(window)}, is {number(total)}, the sum of the "
        "bars. A negative bar reduces the error."
    )
    return Section("cells", title, lead, (chart,))


def drift_section(found: Analysis) -> Section:
    """Drift against diffusion."""
    title, window = "Drift and diffusion", found.window
    if window is None:
        return Section("drift", title, missing=_SEE_OPERATORS)
    if window.drift is None:
        why = window.notes[0] if window.notes else "the recorded batches do not match any known sampling scheme"
        return Section("drift", title, missing=why)
    drift, steps = window.drift, [float(k) for k in window.drift.steps]
    lines = [Line(name, steps, values, color=j, dash=j) for j, (name, values) in enumerate(drift.parts.items())]
    chart = line_chart(lines, _STEP, Axis("norm of the test displacement", zero=True), "Displacement up to each step")
    drawn = {
        "epochs": "drawn without replacement in each epoch",
        "independent": "drawn independently at each step",
        "replacement": "drawn with replacement",
    }
    lead = (
        f"How far mean gradients (drift) and the randomness of batches (diffusion) had moved the outputs on "
        f"{_queries(window)}, with batches {drawn[drift.sampling]}."
    )
    closure = f"the four terms add up to the measured displacement with a relative error of {number(drift.closure)}"
    return Section("drift", title, lead, (chart,), notes=(closure,))


def displacement_section(found: Analysis) -> Section:
    """Predicted against measured test displacement."""
    title, window = "Test displacement: predicted and measured", found.window
    if window is None:
        return Section("displacement", title, missing=_SEE_OPERATORS)
    if window.predicted is None or window.displacement is None:
        return Section("displacement", title, missing=window.notes[0])
    true, predicted = window.displacement, window.predicted
    size = math.sqrt(sum(v * v for v in true)) or 1.0
    error = math.sqrt(sum((a - b) ** 2 for a, b in zip(true, predicted, strict=True))) / size
    chart = scatter_chart(
        true, predicted, Axis("measured on the network"), Axis("predicted by the operators"), "Test outputs"
    )
    lead = (
        f"Each point is one output on {_queries(window)}: its measured change over the run, and the prediction "
        "-G g + source from the operator G and the output gradient g before the first step. Relative error "
        f"{number(error)}."
    )
    return Section("displacement", title, lead, (chart,))


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


def _why_no_operators(found: Analysis) -> str:
    reason = found.left_out.get("operators", "not computed")
    return (
        reason
        if "np = " in reason
        else f"{reason} (operators of a whole run are formed for up to np = {MOST_OUTPUTS} training outputs)"
    )


def _queries(window: WindowFacts) -> str:
    return f"the first {window.queries} test inputs"


def _count_for(values: list[float], share: float) -> int:
    """Number of leading values that hold a given share of the sum.

    >>> _count_for([3.0, 2.0, 1.0], 0.5)
    1
    """
    total, summed = sum(values), 0.0
    for j, value in enumerate(values, 1):
        summed += value
        if summed >= share * total:
            return j
    return len(values)
