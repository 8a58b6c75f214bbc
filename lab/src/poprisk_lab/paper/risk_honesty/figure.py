r"""The figure and the page on how far population risk from one run may be believed, from its saved result."""

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poprisk._core.store import load_result, write_figure, write_text
from poprisk.cli._demonstration.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, STYLE
from poprisk.errors import MissingExtraError
from poprisk_lab.paper.risk_honesty.study import summarize

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the population-risk figure") from None

KIND = "influence benchmark: honesty"
Row = Mapping[str, Any]
_SHOWN = "classes, 40% replaced"
"""The task whose curve is drawn."""
_NAMES = {
    "exclusion": "exclusion (one run)",
    "first_order": "first order, the paper's L_pop (one run)",
    "kernel_gcv": "GCV on the last tangent kernel (one run, squared loss only)",
    "takeuchi": "Takeuchi's criterion (one run)",
    "holdout": "a fifth held out (one training on the rest)",
    "k_fold": "10-fold (10 trainings)",
    "auto": '`method="auto"`, no training',
    "auto, 10 trainings": '`method="auto"`, `retrain_budget=10`',
}


def draw_population_risk(rows: Sequence[Row]) -> Figure:
    """Estimated against true risk in every setting, and one task along its training."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 4.3), layout="constrained")
        scatter, curve = figure.subplots(1, 2)
        _draw_scatter(scatter, rows)
        _draw_curve(curve, rows)
    return figure


def _draw_scatter(axes: Axes, rows: Sequence[Row]) -> None:
    kinds = (("exclusion", "o", BLUE), ("first_order", "^", ORANGE), ("k_fold", "s", GREEN))
    for name, marker, colour in kinds:
        for valid in (False, True):
            found = [(r["truth"], r["estimates"][name]) for r in rows if r["estimates"][name]["valid"] is valid]
            if not found:
                continue
            label = f"{name.replace('_', ' ')}, {'believed' if valid else 'not believed'}"
            fill = {"color": colour} if valid else {"mfc": "none", "mec": colour, "alpha": 0.55}
            points = [t for t, _ in found], [e["value"] for _, e in found]
            axes.loglog(*points, marker, linestyle="none", markersize=4.5 if valid else 5, label=label, **fill)
    truths = [row["truth"] for row in rows]
    ends = [min(truths), max(truths)]
    axes.plot(ends, ends, color=INK, linewidth=1, zorder=0)
    axes.set_title(f"A  {len(rows)} settings")
    axes.set_xlabel("true risk, large test set (loss)")
    axes.set_ylabel("estimated risk (loss)")
    lowest = min(row["estimates"]["first_order"]["value"] for row in rows)
    axes.set_ylim(bottom=0.6 * lowest, top=60 * max(truths))  # room for the legend
    axes.legend(loc="upper left", handletextpad=0.1, fontsize=8.5, ncols=2, columnspacing=0.8)


def _draw_curve(axes: Axes, rows: Sequence[Row]) -> None:
    tasks = [row["task"] for row in rows]
    task = _SHOWN if _SHOWN in tasks else tasks[0]
    moments = [row for row in rows if row["task"] == task and row["seed"] == rows[0]["seed"]]
    steps = [row["step"] for row in moments]
    axes.plot(steps, [row["training_loss"] for row in moments], "--", color=FAINT, label="training loss")
    axes.plot(steps, [row["truth"] for row in moments], "-", color=INK, linewidth=2, label="true risk")
    for name, marker, colour in (("exclusion", "o", BLUE), ("k_fold", "s", GREEN)):
        found = [(k, row["estimates"][name]) for k, row in zip(steps, moments, strict=True)]
        found = [(k, e) for k, e in found if e["valid"]]
        x, y = [k for k, _ in found], [e["value"] for _, e in found]
        errors = [2 * e["standard_error"] for _, e in found]
        label = f"{name.replace('_', ' ')} ± 2 errors, where believed"
        axes.errorbar(x, y, errors, fmt=f"{marker}-", color=colour, markersize=5, capsize=3, label=label)
    first = [row["estimates"]["first_order"]["value"] for row in moments]
    axes.plot(steps, first, "^:", color=ORANGE, markersize=5, label="first order, believed or not")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"B  {task}, one seed")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy" if "classes" in task or "digits" in task else "half squared error")
    axes.legend(loc="lower left")


def population_risk_page(saved: Mapping[str, Any]) -> str:
    """The whole of ``docs/population_risk.md``."""
    rows, config = saved["result"]["rows"], saved["config"]
    everything = summarize(rows)
    regression = summarize([row for row in rows if "kernel_gcv" in row["estimates"]])
    parts = [_INTRODUCTION, _HEADING, _wrap(_results(rows, config, everything)), _table(everything)]
    parts += [_wrap(words) for words in (_reading(everything), _regression(regression), _stopping(everything))]
    return "\n\n".join([*parts, _LIMITS]) + "\n"


def _wrap(words: str) -> str:
    return textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False)


def _results(rows: Sequence[Row], config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    tasks = "; ".join(dict.fromkeys(row["task"] for row in rows))
    steps = ", ".join(str(k) for k in config["steps"])
    return (
        f"{summary['settings']} settings: {len(config['tasks'])} tasks ({tasks}), {len(config['seeds'])} seeds, the "
        f"moments {steps} of one training each; {config['n']} examples, a hidden layer of {config['width']} tanh "
        f"units, batches of {config['batch_size']}. The truth is the loss on a large test set with the same noise. "
        f"Exclusion and first order look at {config['examples']} of the examples. *Covered*: the truth lies within "
        "two standard errors plus 5%."
    )


def _table(summary: Mapping[str, Any]) -> str:
    head = ["estimator", "believed", "covered", "believed but off by > 20%", "off by > 20%", "median error"]
    lines = [head, ["---", "--:", "--:", "--:", "--:", "--:"]]
    for name, words in _NAMES.items():
        c = summary["columns"].get(name)
        if c is None:
            continue
        covered = "no error given" if c["coverage"] is None else f"{c['covered']} of {c['valid']}"
        believed = f"{c['valid']} of {c['settings']}"
        wrong, off = c["off by more than 20%, believed"], c["off by more than 20%"]
        lines.append([words, believed, covered, f"{wrong}", f"{off}", f"{100 * c['median error, all']:.1f}%"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _reading(summary: Mapping[str, Any]) -> str:
    c = summary["columns"]
    exclusion, first, auto = c["exclusion"], c["first_order"], c["auto, 10 trainings"]
    return (
        f"Where exclusion is believed ({exclusion['valid']} of {exclusion['settings']} settings) it covers the truth "
        "in "
        f"{exclusion['covered']}; first order, with its stricter rule, is believed in {first['valid']} and never there "
        f"off by more than 20% ({first['off by more than 20%, believed']} of {first['valid']}), though it is so in "
        f"{first['off by more than 20%']} settings in all. With ten trainings allowed an answer is valid in "
        f"{auto['valid']} of {auto['settings']}."
    )


def _regression(summary: Mapping[str, Any]) -> str:
    c = summary["columns"]
    shown = [(words, c[name]) for name, words in _NAMES.items() if name in c and not name.startswith("auto")]
    figures = "; ".join(
        f"{words}: {100 * col['median error, all']:.1f}%, {col['off by more than 20%']} off by more than 20%"
        for words, col in shown
    )
    return (
        f"**On the {summary['settings']} regression settings alone**, believed or not: {figures}. Generalized "
        "cross-validation on the tangent kernel of the last weights is there a strong rival for an estimate without an "
        "error; it has no form for cross-entropy and no verdict."
    )


def _stopping(summary: Mapping[str, Any]) -> str:
    words = {
        "never": "not at all",
        "evidence": "by the evidence criterion",
        "disparity": "by gradient disparity",
        "holdout": "by a held-out fifth",
        "k_fold": "by 10-fold",
        "exclusion": "by exclusion where it is believed",
    }
    found = "; ".join(f"{words[name]}: {100 * excess:.1f}%" for name, excess in summary["stopping"].items())
    return (
        f"**Stopping.** The mean excess of the true risk over that of the best of the moments, when stopped {found}. "
        "(The trainings that a held-out fifth or ten folds take are not counted here; the held-out model itself sees "
        "fewer examples.)"
    )


_HEADING = "## Measured\n\n![Estimated against true risk, and one training](population_risk.png)"

_INTRODUCTION = """# Population risk from one run

```python
from poprisk import population_risk

risk = population_risk(run)  # trains nothing
print(risk)  # value ± standard error (valid or not: why)
risk = population_risk(run, retrain_budget=10)  # may train ten times where the run alone cannot tell
```

**Exclusion** follows, for each of some examples, the run that would have been without it: every recorded step is
linearized about itself with that example's gradient and curvature taken out. For linear models this is leave-one-out
exactly, at any moment of any training. For networks it holds until the run has become chaotic. The displaced prediction
is computed along the tangent and by the network itself; where the two disagree, it is not believed.

**First order** is the paper's L_pop, the training loss plus tr(J C_n)/(n − 1). Every derivative by an example's weight
is proportional to its residual, so at interpolation it tends to the training loss whatever the truth is. It is believed
only where exclusion, which keeps what it leaves out, agrees.

**K-fold** trains ten times in one stacked computation and speaks of a learner on nine tenths of the examples. Its
standard error is inflated by how far the model bends to its data: naive errors undercover."""

_LIMITS = """## Limits

- The thresholds (agreement to a tenth, 1 example in 20, a sampling error of 7% for first order) were set on smaller
  problems of the same kind (24 to 300 examples, other teachers) before these settings were run. All settings are tanh
  networks. The check looks at the bend of the outputs, not of the path that led to the weights: it is a test, no proof.
- No sample of n knows of mistakes rarer than 1 in n. For classification, the loss of one more mistake is part of every
  standard error; for regression with heavy tails nothing stands in for it.
- Exclusion costs about two trainings' arithmetic for each example it looks at, all of them in one replay. Networks with
  batch statistics, dropout, augmentation or bf16 weights have no exact influence; K-fold by hand remains.

Made by `python benchmarks/influence.py --part honesty --output results/risk_honesty.json` and
`python -m poprisk_lab.paper.risk_honesty.figure`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m poprisk_lab.paper.risk_honesty.figure``: the figure and the page under ``docs`` from the stored result."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.paper.risk_honesty.figure", description=__doc__)
    parser.add_argument("--result", type=Path, default=Path("results/risk_honesty.json"))
    parser.add_argument("--output", type=Path, default=Path("docs"), help="directory for population_risk.png and .md")
    options = parser.parse_args(arguments)
    saved = load_result(options.result, KIND)
    figure_at = write_figure(
        options.output / "population_risk.png", draw_population_risk(saved["result"]["rows"]), dpi=140
    )
    page_at = write_text(options.output / "population_risk.md", population_risk_page(saved))
    print(f"Wrote {figure_at} and {page_at}")


if __name__ == "__main__":
    main()
