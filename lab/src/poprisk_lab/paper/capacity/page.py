"""Table, sentences and page of the capacity experiment, from its saved result: no number in them is typed by hand."""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk_lab.pages.wording import bullets, short, table, wrapped

Saved = Mapping[str, Any]
_HEAD = ["features", "tr Γ_0 / m", "slope measured", "distance in standard errors", "worst training error / σ²"]


def capacity_lines(saved: Saved) -> Iterator[RenderableType]:
    """The slopes and a sentence, for a terminal."""
    shown = Table(title="Error of interpolated noise against its variance", title_justify="left", title_style="")
    for name in _HEAD:
        shown.add_column(name, justify="right", overflow="fold")
    for row in _rows(saved):
        shown.add_row(*row)
    yield shown
    yield Text(_headline(saved), style="bold")


def capacity_page(saved: Saved) -> str:
    """The whole of ``docs/capacity.md``."""
    parts = [
        "# The capacity axis: double descent and interpolated noise",
        wrapped(_headline(saved)),
        "![Risk along predictive rank and along width, increments, and the error of interpolated noise](capacity.png)",
        wrapped(_set_up(saved["config"])),
        "## What was measured",
        bullets(_findings(saved)),
        wrapped("Noise alone, interpolated; slope of the mean squared test error against the variance of the noise:"),
        table(_HEAD, _rows(saved)),
        "## What differs from the paper's caption",
        bullets(_differences(saved)),
        "## How it was made",
        wrapped(_origin(saved)),
    ]
    return "\n\n".join(parts) + "\n"


def _headline(saved: Saved) -> str:
    ranks, widths = saved["result"]["ranks"], saved["result"]["widths"]["compared"]
    worst = max(abs(_deviation(study)) for study in saved["result"]["noise"])
    return (
        f"The simulated risk is within 2 standard errors of its maximum at the predicted peak in {ranks['hits']} of "
        f"{ranks['with_peak']} random-feature problems that have one; along the width theory and simulation differ by "
        f"{widths['largest_deviation']:.1f} standard errors at most; the error of interpolated noise grows with its "
        f"variance at the rate tr Γ_0, within {worst:.1f} standard errors."
    )


def _set_up(config: Saved) -> str:
    return (
        f"Random cosine features of normal inputs with {config['dimension']} entries; the truth is a sum of five "
        f"random waves, the noise has standard deviation {config['sigma']:g}. *Predictive rank* (A1, B): "
        f"{config['examples']} examples, {config['width']} features, {config['tests']} test inputs, {config['draws']} "
        "draws of the noise; every fit is a least-norm regression on the projected targets, and its error is taken to "
        f"the fit of the clean targets. *Width* (A2): {config['sweep_examples']} examples, least-norm fits on "
        f"{min(config['widths'])} to {max(config['widths'])} features, error to the truth. *Noise* (C): targets are "
        "noise and nothing else. Errors are per test output. The dimension of the inputs was chosen after a look at "
        "several settings, so that peaks and the second descent are plain to see."
    )


def _findings(saved: Saved) -> Iterator[str]:
    ranks, widths = saved["result"]["ranks"], saved["result"]["widths"]
    shown, compared = ranks["shown"], widths["compared"]
    yield (
        f"**A1 and B.** Problems were drawn seed after seed until {ranks['with_peak']} of {ranks['problems']} had "
        f"their highest risk inside; {ranks['only_local']} had an interior sign change but a higher end, and "
        f"{ranks['without_peak']} none, so that no peak is claimed. The claim holds in {ranks['hits']}; over all "
        f"problems and ranks simulation and theory differ by {ranks['largest_deviation']:.1f} standard errors at most. "
        f"The figure shows the problem whose peak, at r = {shown['peak']}, stands out most: it lies above the higher "
        f"end by {max(ranks['prominences']):.0%} of itself, where the median is {median(ranks['prominences']):.1%}."
    )
    yield (
        f"**A2.** The highest exact risk is at {compared['peak']} features for {saved['config']['sweep_examples']} "
        f"examples. Exact and simulated risk differ by {compared['largest_deviation']:.1f} standard errors at most. "
        "The paper's corollary has bias and variance to the clean interpolant only; without the misfit ‖Ū_Q − f*‖² and "
        f"the cross term the risk would be off by up to {_largest_gap(widths):.0%} of itself (dashed)."
    )
    yield (
        "**C.** The error is a straight line in σ² through 0 at every width, with slope tr Γ_0. Training targets are "
        "met to rounding. At the peak the slope is so large that it is left out of the figure."
    )


def _differences(saved: Saved) -> Iterator[str]:
    ranks, noise = saved["result"]["ranks"], saved["result"]["noise"]
    changes = ", ".join(str(r) for r in ranks["sign_changes"])
    yield (
        "*“Perfectly aligns”*: within the error of the simulation. *“Occurs exactly where this increment crosses below "
        "zero”*: true by construction of the increments, with one addition. They can change sign more than once, here "
        f"after r = {changes}; each change from plus to minus is a local peak, and the highest of them is the peak."
    )
    yield (
        "The peak along the predictive rank is not the classical one. The classical peak is at as many features as "
        "examples (A2), where every width is another kernel; the predictive rank orders the directions of one kernel "
        "by their visibility, and its risk is against Ū_Q and not against the truth."
    )
    reservoir = {saved["config"]["sweep_examples"] - study["rank"] for study in noise}
    held = "no directions" if reservoir == {0} else f"up to {max(reservoir)} directions"
    yield (
        "*“Proving the residual noise is trapped in the test-invisible reservoir”* does not follow. Linear growth "
        f"holds for any linear fit, also at the peak, where the slope is {short(noise[0]['visibility'])}. These "
        f"kernels leave {held} to the reservoir: all noise is fitted and moves test outputs. What makes overfitting "
        f"benign is that tr Γ_0 falls with width, to {noise[-1]['visibility']:.2g} per test output at "
        f"{noise[-1]['width']} features; "
        + ("there it is still above 1, the noise itself." if noise[-1]["visibility"] > 1 else "there it is below 1.")
    )


def _rows(saved: Saved) -> list[list[str]]:
    return [
        [
            str(study["width"]),
            f"{study['visibility']:.4g}",
            f"{study['slope']:.4g} ± {study['slope_error']:.2g}",
            f"{_deviation(study):+.1f}",
            short(study["train_error"]),
        ]
        for study in saved["result"]["noise"]
    ]


def _deviation(study: Saved) -> float:
    return (study["slope"] - study["visibility"]) / study["slope_error"]


def _largest_gap(widths: Saved) -> float:
    pairs = zip(widths["compared"]["theory"], widths["without_misfit"], strict=True)
    return max(abs(exact - without) / exact for exact, without in pairs)


def _origin(saved: Saved) -> str:
    environment = saved["environment"]
    return (
        "`poprisk reproduce capacity --output DIR` writes `capacity.json` (here `results/capacity.json`) with its "
        "figure, and `python -m poprisk_lab.paper.capacity.figure` this page. It took "
        f"{saved['result']['processor_seconds']:.1f} seconds of processor time on an {environment['cpu']}, torch "
        f"{environment['torch']}."
    )
