"""The sections on the operators of a run: what it used up, the test error, drift and diffusion, displacement."""

import math

from poprisk.report._analysis.analyze import Analysis
from poprisk.report._analysis.operators import WindowFacts
from poprisk.report._analysis.readings import Readings
from poprisk.report._drawing.section import Section
from poprisk.report._drawing.svg_chart import Axis, Line, bar_chart, line_chart, number, scatter_chart
from poprisk.report._drawing.wording import percent, share_words

_STEP = Axis("step")
_CELLS = {
    "initial": "error before training",
    "transferred": "clean signal transferred",
    "residual_bias": "clean signal not transferred",
    "trapped_noise": "label noise in the reservoir",
    "signal_noise": "label noise in the signal channel",
    "source": "weight decay and momentum",
}
_SEE_OPERATORS = "this needs the operators of the run; “Signal channel and reservoir” says why they are missing"
_NO_DRIFT = "the recorded batches do not match any known sampling scheme"


def spectrum_section(found: Analysis) -> Section:
    """What of the labels was used up, and for small runs the spectra of W and Γ_Q."""
    title, window = "Signal channel and reservoir", found.window
    if window is None:
        return Section("operators", title, missing=found.left_out.get("operators", "not computed"))
    seen = window.readings
    steps = [float(k) for k in seen.steps]
    lines = []
    for j, (name, pairs) in enumerate(seen.left.items()):
        values, errors = ([100 * pair[i] for pair in pairs] for i in (0, 1))
        lines.append(Line(name, steps, values, j, errors, j, points=len(steps) <= 60))
    axis = Axis("% left", zero=True)
    charts = [line_chart(lines, _STEP, axis, "Share of the labels' gradient that training has not used up")]
    notes = [_how(seen), *window.notes, *([window.form] if window.form else [])]
    if window.dense is not None:
        charts += _spectra(window)
        notes.append(_counts(window))
    lead = (
        f"The gradient of the loss with respect to the training outputs, as it was {_begin(seen)}, is what the labels "
        "ask for. The part that training uses up is the signal channel; the part that it leaves is the reservoir, "
        f"and no test output depends on it. {_left_words(seen)} {_spread_words(window)}"
    )
    meaning = (
        "Where the label noise falls, wrong labels are being memorized: stop before that."
        if seen.known
        else "Where the line is flat, training has nothing left to learn."
    )
    return Section("operators", title, lead, tuple(charts), notes=tuple(notes), meaning=meaning)


def _spectra(window: WindowFacts) -> list[str]:
    dense = window.dense
    assert dense is not None
    values, rank = dense.dissipation, dense.rank
    index = [float(j) for j in range(1, len(values) + 1)]
    lines = [
        Line("signal channel", index[:rank], values[:rank], color=0, points=len(values) <= 150),
        Line("reservoir", index[rank:], values[rank:], color=5, points=True),
    ]
    charts = [
        line_chart(
            [line for line in lines if line.x],
            Axis("direction, by decreasing dissipation"),
            Axis("eigenvalue of W", log=True),
            "Dissipation along each direction of the output gradient",
            level=dense.cutoff if len(values) > rank else None,
            level_name="signal channel above, reservoir below",
        )
    ]
    if dense.visibility:
        seen = [float(j) for j in range(1, len(dense.visibility) + 1)]
        line = Line("Γ_Q", seen, dense.visibility, color=1, points=len(seen) <= 150)
        order = Axis("direction, by decreasing effect on the test outputs")
        title = "Squared test displacement per unit of dissipation"
        charts.append(line_chart([line], order, Axis("eigenvalue of Γ_Q", log=True), title, height=220))
    return charts


def _counts(window: WindowFacts) -> str:
    dense = window.dense
    assert dense is not None
    half = _count_for(dense.dissipation, 0.5)
    return (
        f"of {window.outputs} directions, {dense.rank} are in the signal channel and {window.outputs - dense.rank} in "
        f"the reservoir (exact); {half} hold half of the dissipation. The {dense.directions} strongest, which hold "
        f"{percent(dense.directions_share)} of it, define the groups in the table of examples"
    )


def _left_words(seen: Readings) -> str:
    ends = {name: pairs[-1] for name, pairs in seen.left.items()}
    told = " and ".join(f"{share_words(*pair)} of the gradient of {_the(name)}" for name, pair in ends.items())
    return f"After step {seen.stop}, {told} was left.{_known_words(seen)}"


def _known_words(seen: Readings) -> str:
    if seen.known == "audit":
        return f" Label noise is what the audit would change: the labels of {seen.wrong} suspects that were trained on."
    return f" Label noise is known here: {seen.wrong} labels differ from the clean ones." if seen.known else ""


def _spread_words(window: WindowFacts) -> str:
    """Along how many directions the loss was dissipated, and how much of it went into label noise."""
    value, least = window.readings.directions
    told = f"Dissipation is spread over about {_whole(value)} of {window.outputs} directions (at least {_whole(least)})"
    noise = window.readings.dissipated.get("label noise")
    if noise is None:
        return f"{told}."
    more = " (over 100% because clean labels and noise pull against each other)" if noise[0] > 1 else ""
    return f"{told}; {share_words(*noise)} of it went into label noise{more}."


def cells_section(found: Analysis) -> Section:
    """Terms of the test error, or of the test loss."""
    title, window = "Terms of the test error", found.window
    if window is None:
        return Section("cells", title, missing=_SEE_OPERATORS)
    if window.dense is not None and window.dense.cells is not None:
        return _error_cells(window, title)
    seen = window.readings
    if seen.terms is None:
        return Section("cells", title, missing=window.notes[0])
    names, (before, after) = list(seen.terms), seen.losses
    values = [before, *(seen.terms[name][0] for name in names)]
    chart = bar_chart([f"loss {_begin(seen)}", *names], values, "Terms of the mean test loss")
    errors = [f"{_the(name)} ± {number(seen.terms[name][1])}" for name in names if seen.terms[name][1]]
    lead = (
        f"The mean test loss on {_queries(window)} was {number(before)} {_begin(seen)} and {number(after)} after step "
        f"{seen.stop}; the bars add up to it, and a negative bar reduces it.{_known_words(seen)}"
        f"{' Errors (95%): ' * bool(errors)}{', '.join(errors)}{'.' * bool(errors)}"
    )
    how = "" if seen.known == "given" else "; with known clean targets: poprisk report RUN --clean targets.npz"
    meaning = (
        "The bar for label noise is what wrong labels cost on new data; the bar for clean labels is what was learned."
    )
    return Section(
        "cells", title, lead, (chart,), notes=(_how(seen) + how, *_form(window)), meaning=meaning if seen.known else ""
    )


def _error_cells(window: WindowFacts, title: str) -> Section:
    cells = None if window.dense is None else window.dense.cells
    assert cells is not None
    chart = bar_chart([_CELLS[name] for name in cells], list(cells.values()), "Terms of the mean squared test error")
    lead = (
        f"The mean squared error against the clean targets, on {_queries(window)}, is {number(sum(cells.values()))}, "
        "the sum of the bars (exact). A negative bar reduces the error."
    )
    meaning = (
        "The longest bar is where the test error comes from: too little training if it is signal not transferred, "
        "wrong labels if it is label noise in the signal channel."
    )
    return Section("cells", title, lead, (chart,), meaning=meaning)


def drift_section(found: Analysis) -> Section:
    """Drift against diffusion."""
    title, window = "Drift and diffusion", found.window
    if window is None:
        return Section("drift", title, missing=_SEE_OPERATORS)
    if window.drift is None:
        return Section("drift", title, missing=window.notes[0] if window.predicted is None else _NO_DRIFT)
    drift, steps = window.drift, [float(k) for k in window.drift.steps]
    errors = drift.errors or {}
    lines = [Line(name, steps, v, j, errors.get(name), j) for j, (name, v) in enumerate(drift.parts.items())]
    chart = line_chart(lines, _STEP, Axis("norm of the test displacement", zero=True), "Displacement up to each step")
    drawn = {
        "epochs": "drawn without replacement in each epoch",
        "independent": "drawn independently at each step",
        "replacement": "drawn with replacement",
    }
    lead = (
        f"How far mean gradients (drift) and the randomness of batches (diffusion) had moved the outputs on "
        f"{_queries(window)} since step {window.readings.start}, with batches {drawn[drift.sampling]}."
    )
    how = (
        f"estimated from two samples of {drift.sample} examples for each mean gradient; bands are 95% intervals"
        if drift.errors
        else "exact: each mean gradient is taken over all examples"
    )
    closure = f"the four terms add up to the measured displacement with a relative error of {number(drift.closure)}"
    meaning = (
        "Where diffusion grows like drift, chance in the batches moved the test outputs as much as the data did: a "
        "larger batch or averaged weights would help."
    )
    moved, either = math.hypot(*window.displacement or ()), min(drift.parts[k][-1] for k in ("drift", "diffusion"))
    if either > 3 * moved:  # then their sum is small beside them
        meaning = (
            f"Do not read drift and diffusion separately here: each is at least {number(either)}, but they nearly "
            f"cancel, and the test outputs moved by only {number(moved)}."
        )
    return Section("drift", title, lead, (chart,), notes=(how, closure, *_form(window)), meaning=meaning)


def displacement_section(found: Analysis) -> Section:
    """Predicted against measured test displacement."""
    title, window = "Test displacement: predicted and measured", found.window
    if window is None:
        return Section("displacement", title, missing=_SEE_OPERATORS)
    if window.predicted is None or window.displacement is None:
        return Section("displacement", title, missing=window.notes[0])
    true, predicted = window.displacement, window.predicted
    error = math.dist(true, predicted) / (math.hypot(*true) or 1.0)
    axes = Axis("measured on the network"), Axis("predicted by the operators")
    chart = scatter_chart(true, predicted, *axes, "Test outputs")
    lead = (
        f"Each point is one output on {_queries(window)}: its measured change over the steps {window.readings.start} "
        f"to {window.readings.stop}, and the prediction -G g + source from the operator G and the output gradient g "
        f"{_begin(window.readings)}. Relative error {number(error)}."
    )
    meaning = (
        "Points on the line mean that gradients and sources together carry every test output; the bars above say how "
        "much of it the gradients did."
        if window.form
        else "Points on the line mean that the operators explain how every test output moved, so that the sections "
        "above can be trusted."
    )
    return Section("displacement", title, lead, (chart,), notes=_form(window), meaning=meaning)


def _how(seen: Readings) -> str:
    """How the readings were made, and how to get those of the whole run."""
    at_a_time = "step by step" if seen.stretch == 1 else f"{seen.stretch} steps at a time"
    told = (
        f"computed from one sweep over steps {seen.start} to {seen.stop}, {at_a_time}, and a second one with twice as "
        "many at a time; errors are 95% intervals"
    )
    if not seen.start:
        return told
    return f"{told}; for the whole run: poprisk report RUN --budget {_whole(seen.budget_for_all)}"


def _form(window: WindowFacts) -> tuple[str, ...]:
    """That the network was not analyzed as the steps saw it, and where that is explained."""
    return ("of the network in its evaluation form: see “Signal channel and reservoir”",) if window.form else ()


def _begin(seen: Readings) -> str:
    return f"before step {seen.start}" if seen.start else "before the first step"


def _the(name: str) -> str:
    return f"the {name}" if name != "all labels" else name


def _whole(value: float) -> str:
    return f"{value:.0f}" if value < 100 else f"{float(f'{value:.2g}'):.0f}"


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
