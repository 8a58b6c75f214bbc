"""Sentences and page of the time-axis experiment, from its saved result: no number in them is typed by hand."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from poprisk_lab.pages.wording import bullets, short, spread, table, wrapped

Saved = Mapping[str, Any]
PAPER = {"interpolated": 1e3, "generalized": 1e5}
"""What the caption of the paper's figure reports."""


def time_lines(saved: Saved) -> Iterator[RenderableType]:
    """A sentence, for a terminal."""
    yield Text(_headline(saved), style="bold")


def time_page(saved: Saved) -> str:
    """The whole of ``docs/time.md``."""
    runs = saved["result"]["runs"]
    rows = [
        [str(r["seed"]), _time(r["interpolated_at"]), _time(r["generalized_at"]), _time(r["overtaken_at"]), _end(r)]
        for r in runs
    ]
    head = ["seed", "all training signs right", "test halfway", "slow mass above fast", "test accuracy, end"]
    parts = [
        "# The time axis: implicit bias and delayed generalization",
        wrapped(_headline(saved)),
        "![Filters of single directions, accuracies and transfer mass over time](time.png)",
        wrapped(_set_up(saved["config"])),
        "## What was measured",
        bullets(_findings(saved)),
        wrapped("Times t at which something has happened for good, seed by seed:"),
        table(head, rows),
        "## What differs from the paper's caption",
        bullets(_differences(saved)),
        "## How it was made",
        wrapped(_origin(saved)),
    ]
    return "\n\n".join(parts) + "\n"


def _headline(saved: Saved) -> str:
    found, seeds = saved["result"]["summary"], saved["config"]["seeds"]
    return (
        f"Gradient descent on a linear model has every training sign right {_when(found['interpolated_at'])}, "
        f"where test accuracy is {spread(found['accuracy_when_interpolated'], 3)}; test accuracy is halfway to its "
        f"end, {spread(found['final_accuracy'], 3)}, {_when(found['generalized_at'])} "
        f"({'one seed' if seeds == 1 else f'{seeds} seeds, geometric mean of times'}). The filter of the frozen kernel "
        f"gives its test outputs to {found['worst_output_error']:.1%} of the largest at every time."
    )


def _set_up(config: Saved) -> str:
    return (
        f"{config['examples']} examples have {config['marks']} marks that have nothing to do with their label, and a "
        f"signal of {config['dimension']} entries, the sign of whose first is the label ±1. A linear model sees "
        f"{config['memorizing']} strong features, random combinations of narrow bumps (width {config['bump_width']:g}) "
        f"around the marks of the training examples, and the signal multiplied by the root of {config['weakness']:g}. "
        f"It is trained from zero by full-batch gradient descent under squared loss (learning rate {config['lr']:g}, "
        f"{config['steps']} steps) and tested on {config['test_examples']} examples. The strong features have "
        f"{config['examples'] - config['memorizing']} dimensions fewer than there are examples: what they cannot fit "
        "is left to the signal. Nothing but the kernel's spectrum makes generalization late here. "
        "The features were chosen after several others had been tried, so that both the delay and the overtaking show."
    )


def _findings(saved: Saved) -> Iterator[str]:
    found, run = saved["result"]["summary"], saved["result"]["runs"][0]
    fast, slow = run["modes"][0], run["modes"][-1]
    yield (
        f"**A.** Direction {fast['index'] + 1} (σ² = {short(fast['mobility'])}) is half fitted at t = "
        f"{_time(fast['half_time'])}, direction {slow['index'] + 1} (σ² = {short(slow['mobility'])}) at t = "
        f"{_time(slow['half_time'])}. Measured points lie on the filter 1 − exp(−tσ²/n). Weight decay "
        f"{saved['config']['decay']:g} (dotted) ends slow directions at σ²/(σ² + nλ), the ridge filter, and leaves "
        "fast ones alone: here it would switch the signal off."
    )
    yield (
        f"**B.** Test accuracy is {spread(found['accuracy_when_interpolated'], 3)} when the training signs are right "
        f"and {spread(found['final_accuracy'], 3)} at the end; all three events happen in {found['reached']} of "
        f"{saved['config']['seeds']} seeds. What the filter predicts and what descent does agree to "
        f"{found['worst_output_error']:.1%} of the largest test output, the difference being steps of finite length."
    )
    yield (
        "**C.** Transfer mass is the diagonal of n² M_t Γ_0 M_t. The fast directions saturate early; the slow ones "
        f"pass them {_when(found['overtaken_at'])}, {_ratio(found)} times the time at which test accuracy is halfway."
    )


def _differences(saved: Saved) -> Iterator[str]:
    found = saved["result"]["summary"]
    yield (
        f"*“Interpolates at t = {PAPER['interpolated']:.0f}, random chance until {PAPER['generalized']:.0f}”*: the "
        "delay is reproduced, its two times are a choice of features and are not the paper's. Test accuracy is "
        f"{spread(found['accuracy_when_interpolated'], 3)} before it rises, a little above chance, and it rises over "
        "more than a decade of time, not at once: a frozen kernel has no sharper transition to offer."
    )
    yield (
        "*“Overtake them at the same scale where test accuracy rises”* is reproduced only loosely: the slow directions "
        f"pass the fast ones {_ratio(found)} times later than test accuracy is halfway. Transfer mass measures how far "
        "test outputs *can* be moved, whatever the labels; it need not be larger for accuracy to rise. How the two "
        "masses compare depends on how far the strong features reach test inputs, which was chosen here."
    )
    yield (
        "*“Target fit decomposed over the eigenvectors of Γ_0”*: the filter 1 − exp(−tσ²/n) acts on the singular "
        "directions of the kernel, over which panel A is drawn. They are the eigenvectors of Γ_0 only in special "
        "cases; the largest squared overlap of an eigenvector with a singular direction is "
        f"{spread(found['predictive_overlap'], 3)} on average here."
    )
    yield "The paper speaks of a network; this is a linear model, where the statement is exact."


def _origin(saved: Saved) -> str:
    runs, environment = saved["result"]["runs"], saved["environment"]
    minutes = sum(run["processor_seconds"] for run in runs) / 60
    return (
        "`poprisk reproduce time --output DIR` writes `time.json` (here `results/time.json`) with its figure, and "
        f"`python -m poprisk_lab.paper.time_axis.figure` this page. {len(runs)} runs took {minutes:.1f} minutes of processor "
        f"time on an {environment['cpu']}, torch {environment['torch']}. The figure shows the first seed."
    )


def _ratio(found: Saved) -> str:
    if found["overtaken_at"] is None or found["generalized_at"] is None:
        return "–"
    return f"{found['overtaken_at'] / found['generalized_at']:.1f}"


def _time(value: float | None) -> str:
    if value is None:
        return "never"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{value:.0f}" if value < 1e4 else f"{mantissa}e{int(exponent)}"


def _when(value: float | None) -> str:
    return "at no time" if value is None else f"at t = {_time(value)}"


def _end(run: Saved) -> str:
    return f"{run['test_accuracy'][-1]:.3f}"
