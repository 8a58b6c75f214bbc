"""The sections of a run's report: each takes what the analysis found and gives words and charts, or how to get them."""

import math
from dataclasses import dataclass, replace

from poprisk.report._analysis import Analysis
from poprisk.report._analysis_parts import Memorization
from poprisk.report._audit import headline
from poprisk.report._svg_chart import Axis, Line, bar_chart, heat_map, line_chart, number, scatter_chart
from poprisk.report._window import MOST_OUTPUTS, WindowFacts

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
    "they need the targets without noise, and squared loss: run_report(run, path, clean=CleanTargets(train, test)), or "
    "poprisk report RUN --clean targets.npz with arrays train and test"
)

_SEE_OPERATORS = "it needs the operators of the run; see Signal channel and reservoir for why they are not here"


@dataclass(frozen=True)
class Section:
    """A piece of the page."""

    key: str
    title: str
    lead: str = ""
    """What is seen, in a sentence or two."""
    charts: tuple[str, ...] = ()
    """HTML, made here."""
    missing: str = ""
    """Why there is nothing to see, and how to get it."""
    notes: tuple[str, ...] = ()
    wide: bool = False
    """Whether it takes the whole width of the page."""


def summary_lines(found: Analysis) -> list[str]:
    """What was found, in sentences, the most important first."""
    lines = []
    curves = found.curves
    if found.memorization is not None and curves is not None:
        lines.append(_memorization_words(found.memorization, curves.train[0], curves.train[-1]))
    elif "memorization" in found.left_out:
        lines.append(f"What share was memorized is not known: {found.left_out['memorization']}.")
    if found.risk is not None:
        lines.append(_risk_words(found))
    elif "risk" in found.left_out and found.table is not None:
        lines.append(f"Population risk was not estimated: {found.left_out['risk']}.")
    if found.table is not None:
        lines.append(headline(found.table))
    if found.readings:
        lines += _stop_words(found)
    if found.gates is not None:
        gate = found.gates.overall
        lines.append(
            f"The gate let {_percent(gate['active_fraction'][-1])} of the weights move at the end; its mean "
            f"was {number(gate['mean_gate'][-1])}."
        )
    if found.kernel is not None:
        lines.append(
            f"The tangent kernel ended {_percent(found.kernel.drift[-1])} of its first norm away from where it began."
        )
    if not lines:
        lines.append(next(iter(found.left_out.values()), "Nothing could be computed."))
    return lines


def _memorization_words(found: Memorization, first: float, last: float) -> str:
    share, error = 100 * found.share, 100 * found.standard_error
    known = math.isfinite(error)
    size = f"{share:.0f} ± {error:.0f}%" if known else f"{share:.0f}%"
    doubt = " This is not told apart from none." if known and share < 2 * error else ""
    source = f"{found.source}, if that is drawn like the training set" if "test" in found.source else found.source
    return (
        f"{size} of the drop in training loss, from {number(first)} to {number(last)}, was memorization: new data do "
        f"not see it, by the {source}.{doubt}"
    )


def _risk_words(found: Analysis) -> str:
    risk = found.risk
    assert risk is not None
    verdict = "valid" if risk.valid else f"not valid: {risk.reason}"
    verdict = verdict.replace("retrain_budget=", "--retrain ")  # the command line's name of it
    size = str(risk).partition(" (")[0]
    tested = ""
    if found.curves is not None and found.curves.test is not None:
        tested = f", test loss {number(found.curves.test[-1])}"
    return f"Population risk {size} ({verdict}), for {risk.target}; training loss {number(risk.training_loss)}{tested}."


def _stop_words(found: Analysis) -> list[str]:
    believed = [r for r in found.readings or [] if r.risk.valid]
    if len(believed) < 2:
        return []
    best, last = min(believed, key=lambda r: float(r.risk.value)), believed[-1]
    if best.step == last.step:
        return [f"The estimated risk was lowest at the last step that can be judged, {last.step}."]
    low, high = float(best.risk.value), float(last.risk.value)
    told = high - low > float(last.risk.standard_error)
    verdict = "the steps between did not help new data" if told else "a difference within one standard error"
    return [
        f"The estimated risk was lowest at step {best.step}, {low:.4g}, and {high:.4g} at step {last.step}: {verdict}."
    ]


def sections(found: Analysis) -> list[Section]:
    """All but the table of examples, in the order of the page: those with nothing to see come last."""
    made = [
        curves_section(found),
        gate_section(found),
        spectrum_section(found),
        cells_section(found),
        drift_section(found),
        displacement_section(found),
        kernel_section(found),
    ]
    first, *others = sorted(made, key=lambda section: bool(section.missing))
    narrow = [section for section in others if len(section.charts) == 1]
    alone = narrow[-1:] if len(narrow) % 2 else []
    wide = [replace(s, wide=len(s.charts) != 1 or s in alone) for s in others]
    return [replace(first, wide=True), *wide]


def curves_section(found: Analysis) -> Section:
    """Losses over the run, with the estimated risk and its band."""
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
            notes = (*notes, f"hollow points may not be believed; at step {doubtful.step}: {doubtful.risk.reason}")
    else:
        notes = (*notes, f"no estimated risk: {found.left_out.get('risk', 'it was not computed')}")
    if not lines:
        return Section("curves", title, missing="no losses were recorded: set step.loss in the recorder's step")
    charts = [line_chart(lines, _STEP, Axis("mean loss"), "Loss over the run")]
    if curves is not None and curves.test_accuracy is not None:
        steps = [float(k) for k in curves.steps]
        accuracy = Line("test accuracy", steps, [100 * a for a in curves.test_accuracy], color=2, dash=1, points=True)
        charts.append(line_chart([accuracy], _STEP, Axis("%"), "Test accuracy", height=190))
    lead = "What the training examples say, what the test set says, and what the run alone says about new data."
    return Section("curves", title, lead, tuple(charts), notes=notes)


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
        Line("progress that fresh data would not see", steps, [100 * v for v in overall["self_fit"]], color=2, dash=2),
    ]
    signal = [1 / v if math.isfinite(v) and v > 0 else math.nan for v in overall["noise_scale"]]
    charts = [
        line_chart(share[:2], _STEP, Axis("%", zero=True), "How far the gate is open", height=220),
        line_chart(
            [Line("squared mean gradient over its noise in a batch", steps, signal, color=3)],
            _STEP,
            Axis("signal / noise", log=True),
            "Signal-to-noise of a batch gradient",
            height=200,
        ),
        line_chart(share[2:], _STEP, Axis("%"), "Share of each step's progress on its own batch only", height=200),
    ]
    names = list(gates.layers)[:_LAYERS]
    rows = [gates.layers[name]["mean_gate"] for name in names]
    charts.append(heat_map(names, gates.steps, rows, "Mean gate of each parameter"))
    more = len(gates.layers) - len(names)
    notes = (f"{more} more parameters are not drawn",) if more > 0 else ()
    lead = "A weight moves only as far as its gradient's signal stands out of its noise."
    return Section("gates", title, lead, tuple(charts), notes=notes)


def spectrum_section(found: Analysis) -> Section:
    """The spectrum of W with its two parts, and that of Γ_Q."""
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
    order = Axis("direction, by what it dissipated")
    charts = [
        line_chart(
            [line for line in lines if line.x],
            order,
            Axis("eigenvalue of W", log=True),
            "What each direction of the output gradient dissipated",
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
                Axis("direction, by what the test set sees of it"),
                Axis("eigenvalue of Γ_Q", log=True),
                "Squared test displacement for each unit of dissipation",
                height=220,
            )
        )
    reservoir = window.outputs - window.rank
    lead = (
        f"Of {window.outputs} directions of the output gradient, {window.rank} lie in the signal channel and "
        f"{f'{reservoir} in the reservoir, which no test output can see' if reservoir else 'none in the reservoir'}; "
        f"{half} hold half of all dissipation. The {window.directions} strongest, with "
        f"{_percent(window.directions_share)} of it, are the groups in the table of examples."
    )
    return Section("operators", title, lead, tuple(charts), notes=tuple(notes))


def cells_section(found: Analysis) -> Section:
    """What the test error is made of."""
    title, window = "What the test error is made of", found.window
    if window is None or window.cells is None:
        why = _HOW_CELLS if window is not None else f"{_HOW_CELLS}; the operators of the run are needed too"
        return Section("cells", title, missing=why)
    cells = window.cells
    total = sum(cells.values())
    chart = bar_chart([_CELLS[name] for name in cells], list(cells.values()), "Shares of the mean squared test error")
    lead = (
        f"The mean squared error against the clean targets on {_queries(window)} is {number(total)}; the bars add up "
        "to it. A negative bar works against the error."
    )
    return Section("cells", title, lead, (chart,))


def drift_section(found: Analysis) -> Section:
    """Drift against diffusion."""
    title, window = "Drift and diffusion", found.window
    if window is None:
        return Section("drift", title, missing=_SEE_OPERATORS)
    if window.drift is None:
        why = window.notes[0] if window.notes else "the batches contradict every known way of drawing them"
        return Section("drift", title, missing=why)
    drift, steps = window.drift, [float(k) for k in window.drift.steps]
    lines = [Line(name, steps, values, color=j, dash=j) for j, (name, values) in enumerate(drift.parts.items())]
    chart = line_chart(lines, _STEP, Axis("norm of the test displacement", zero=True), "Summed over the steps so far")
    drawn = {"epochs": "dealt out in epochs", "independent": "drawn independently", "replacement": "with replacement"}
    lead = (
        f"What mean gradients (drift) and the chance of batches (diffusion) had done to the outputs on "
        f"{_queries(window)}, taking batches to be {drawn[drift.sampling]}."
    )
    closure = f"the four parts add up to the measured displacement to a relative error of {number(drift.closure)}"
    return Section("drift", title, lead, (chart,), notes=(closure,))


def displacement_section(found: Analysis) -> Section:
    """Predicted against true test displacement."""
    title, window = "Test displacement: predicted and true", found.window
    if window is None:
        return Section("displacement", title, missing=_SEE_OPERATORS)
    if window.predicted is None or window.displacement is None:
        return Section("displacement", title, missing=window.notes[0])
    true, predicted = window.displacement, window.predicted
    size = math.sqrt(sum(v * v for v in true)) or 1.0
    error = math.sqrt(sum((a - b) ** 2 for a, b in zip(true, predicted, strict=True))) / size
    chart = scatter_chart(true, predicted, Axis("measured on the network"), Axis("by the operators"), "Test outputs")
    lead = (
        f"Each point is one output on {_queries(window)}: its change over the run, and -G g + source, which knows only "
        f"the output gradient before the first step. Relative error {number(error)}."
    )
    return Section("displacement", title, lead, (chart,))


def kernel_section(found: Analysis) -> Section:
    """Kernel drift."""
    title, kernel = "Kernel drift", found.kernel
    if kernel is None:
        return Section("kernel", title, missing=found.left_out.get("kernel", "not computed"))
    steps = [float(k) for k in kernel.steps]
    line = Line("distance from the first kernel", steps, [100 * v for v in kernel.drift], color=3, points=True)
    chart = line_chart([line], _STEP, Axis("% of the first norm", zero=True), "How far the kernel moved", height=220)
    lead = (
        f"Of the tangent kernel of the first {kernel.examples} training examples, in operator norm; 0 is lazy training."
    )
    return Section("kernel", title, lead, (chart,))


def _why_no_operators(found: Analysis) -> str:
    reason = found.left_out.get("operators", "not computed")
    return reason if "np = " in reason else f"{reason} (operators of a whole run are for np up to {MOST_OUTPUTS})"


def _queries(window: WindowFacts) -> str:
    return f"the first {window.queries} test inputs"


def _count_for(values: list[float], share: float) -> int:
    """How many of the leading values hold a share of the sum.

    >>> _count_for([3.0, 2.0, 1.0], 0.5)
    1
    """
    total, summed = sum(values), 0.0
    for j, value in enumerate(values, 1):
        summed += value
        if summed >= share * total:
            return j
    return len(values)


def _percent(share: float) -> str:
    """A share in percent, with a digit where it is small.

    >>> _percent(0.1234), _percent(0.0123)
    ('12%', '1.2%')
    """
    return f"{100 * share:.0f}%" if abs(share) >= 0.1 else f"{100 * share:.1f}%"
