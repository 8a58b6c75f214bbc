"""Table, sentences and page of the coupling experiment, from its saved result: no number in them is typed by hand."""

import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk_lab.paper.coupling.study import FULL_BATCH, MINIBATCH, REPEATED

Saved = Mapping[str, Any]
Row = Mapping[str, Any]
PAPER = {"error": 0.165, "correlation": 0.991, "peak": 4.8, "end": 2.4}
"""What the caption of the paper's figure reports."""
_EXACT = 1e-8  # a relative error below this is rounding, and given as the worst of all seeds
_IN_TERMINAL = ("error of", "kernel drift", "‖R⊥‖", "reservoir", "bounds")  # how the quantities shown there begin
_QUANTITIES: dict[str, Callable[[Row], str]] = {
    "error of A∘(Δu_S − source_S) + source_Q": lambda r: _error(r["coupled_error"], r["worst_coupled_error"]),
    "error of −G g(0) + source_Q": lambda r: f"≤ {_short(r['worst_transferred_error'])}",
    "error of kernel regression with the kernel of the start": lambda r: _spread(r["frozen_error"], 2),
    "error of A∘ Δu_S, sources left out": lambda r: _spread(r["sourceless_error"], 4),
    "kernel drift, highest": lambda r: _spread(r["drift_peak"], 1),
    "kernel drift, at the end": lambda r: _spread(r["drift_end"], 1),
    "‖R⊥‖ / ‖C_Q‖": lambda r: _error(r["relative_remainder"], r["worst_relative_remainder"]),
    "σ_min(C_S), lowest seed": lambda r: _short(r["lowest_train_root"]),
    "reservoir, directions": lambda r: _one_or_range(r["reservoir_dimensions"]),
    "‖G P_res‖ / ‖G‖": lambda r: f"≤ {_short(r['worst_reservoir_leak'])}" if any(r["reservoir_dimensions"]) else "–",
    "share of the last gradient in the reservoir": lambda r: (
        _spread(r["residual_in_reservoir"], 2) if any(r["reservoir_dimensions"]) else "–"
    ),
    "‖Δu_Q − source_Q‖ against its bound": lambda r: _spread(r["tightness"], 3),
    "largest secant correction of a step": lambda r: _short(r["worst_correction"]),
    "training loss, start → end": lambda r: " → ".join(f"{mean['value']:.3f}" for mean in r["train_loss"]),
    "test error, start → end": lambda r: " → ".join(f"{mean['value']:.2f}" for mean in r["test_error"]),
    "bounds that hold": lambda r: f"{r['bounds_held']} of {r['bounds_checked']}",
}


def coupling_lines(saved: Saved) -> Iterator[RenderableType]:
    """The main rows of the table and a sentence, for a terminal."""
    head, *rows = _table(saved)
    table = Table(title=_error_note(saved), title_justify="left", title_style="")
    table.add_column(head[0], overflow="fold")
    for name in head[1:]:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        if row[0].startswith(_IN_TERMINAL):
            table.add_row(*row)
    yield table
    yield Text(_headline(saved), style="bold")


def coupling_page(saved: Saved) -> str:
    """The whole of ``docs/coupling.md``."""
    head, *rows = _table(saved)
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    parts = [
        "# Train-test coupling under feature learning",
        _wrapped(_headline(saved)),
        "![Spectra, predicted against true test displacement, and kernel drift](coupling.png)",
        _wrapped(_set_up(saved["config"])),
        "## What was measured",
        _wrapped(_error_note(saved)),
        table,
        "\n".join(_wrapped(f"- {text}", indent="  ") for text in _findings(saved)),
        "## Where the theorem ends",
        _wrapped(_limits(_case(saved, REPEATED))),
        "## What differs from the paper",
        "\n".join(_wrapped(f"- {text}", indent="  ") for text in _differences(_case(saved, MINIBATCH))),
        "## How it was made",
        _wrapped(_origin(saved)),
    ]
    return "\n\n".join(parts) + "\n"


def _set_up(config: Mapping[str, Any]) -> str:
    batch = _setting(config, MINIBATCH)["batch_size"]
    repeated = _setting(config, FULL_BATCH)["repeated"]
    return (
        f"A network of two hidden layers of {config['width']} tanh units learns x₁x₂ of normal inputs with "
        f"{config['dimension']} entries from {config['examples']} examples, whose labels carry noise of standard "
        f"deviation {config['noise']:g}. It is trained by SGD (learning rate {config['lr']:g}, momentum "
        f"{config['momentum']:g}, weight decay {config['weight_decay']:g}) for {config['steps']} steps in float64, and "
        "every step is recorded. The operators are those of the whole run; the test set has "
        f"{config['test_examples']} inputs. Three cases: minibatches of {batch}; full batches, with {repeated} of the "
        "inputs a second time under another label; minibatches with these repeated inputs."
    )


def _findings(saved: Saved) -> Iterator[str]:
    mini, full = _case(saved, MINIBATCH), _case(saved, FULL_BATCH)
    summary, runs = saved["result"]["summary"], saved["result"]["runs"]
    yield (
        "**Panels A1 and A2.** The eigenvalues of GᵀG lie under those of W times ‖Γ_Q‖, index by index. With full "
        f"batches the {_one_or_range(full['reservoir_dimensions'])} directions that set two labels of one input "
        f"against each other are a reservoir: they hold {_spread(full['residual_in_reservoir'], 2)} of the norm of the "
        "last output gradient, and move no test output. With minibatches there is no reservoir: a step reacts to "
        "nothing but the examples it draws, so that examples cancel only if they are never drawn apart. W has full "
        "rank and a flat spectrum, and the bound on the test displacement is looser: "
        f"{_spread(mini['tightness'], 3)} of it is used, against {_spread(full['tightness'], 3)}."
    )
    yield (
        "**Panel B.** From the training displacement the test displacement follows to "
        f"{_short(mini['worst_coupled_error'])} or better, from the output gradient at the start to "
        f"{_short(mini['worst_transferred_error'])}; the paper's figure has {PAPER['error']:g} (correlation "
        f"{PAPER['correlation']:g}). Kernel regression with the kernel of the start is off by "
        f"{_spread(mini['frozen_error'], 2)} (correlation {_spread(mini['frozen_correlation'], 3)})."
    )
    yield (
        f"**Panel C.** The kernel moves by {_spread(mini['drift_peak'], 1)} times its first norm at the highest and by "
        f"{_spread(mini['drift_end'], 1)} at the end, {mini['lowest_drift_peak']:.1f} at the highest in the seed where "
        f"it moves least; the paper reports {PAPER['peak']:g} and {PAPER['end']:g}."
    )
    yield (
        "**Not made to fit.** The secant that closes each step's Jacobians supplies at most "
        f"{_short(max(row['worst_correction'] for row in summary))} of a step; the rest is quadrature, with up to "
        f"{max(run['most_nodes'] for run in runs)} nodes."
    )


def _limits(row: Row) -> str:
    return (
        "The paper's theorem says that under squared loss the training displacement determines the test displacement. "
        "It is a statement about full gradients. With minibatches *and* repeated inputs it fails: two examples with "
        "one input have one output, so no training displacement tells them apart, but a batch that holds one of them "
        "and not the other reacts to its label, and the test outputs move. Then ‖R⊥‖ / ‖C_Q‖ is "
        f"{_spread(row['relative_remainder'], 3)}, and the best linear predictor is off by "
        f"{_spread(row['coupled_error'], 3)}. The transfer G still gives the test displacement to "
        f"{_short(row['worst_transferred_error'])}, because it starts from the output gradient and not from the "
        "training displacement. For distinct inputs the theorem survives minibatches here; what guards it is "
        "σ_min(C_S), which inputs close to each other make small."
    )


def _differences(row: Row) -> Iterator[str]:
    yield (
        "Time is discrete, the operators are exact for the steps that were taken, and what weight decay did on its own "
        f"is the source. Left out, it costs {_spread(row['sourceless_error'], 4)} of relative error."
    )
    yield (
        "The paper's panel A compares the eigenvalues of Γ_Q with those of W. They are in different units and not "
        "ordered; what holds, and is drawn, is λ_j(GᵀG) ≤ ‖Γ_Q‖ λ_j(W)."
    )
    yield "The paper does not give the network, the data and the step sizes of its figure; these are not they."


def _origin(saved: Saved) -> str:
    runs, environment = saved["result"]["runs"], saved["environment"]
    minutes = sum(run["processor_seconds"] for run in runs) / 60
    return (
        "`poprisk reproduce coupling --output DIR` writes `coupling.json` (here `results/coupling.json`) with its "
        "figure, and `python -m poprisk_lab.paper.coupling.figure` this page. "
        f"{len(runs)} runs took {minutes:.1f} minutes of processor time on an {environment['cpu']}, torch "
        f"{environment['torch']}. Panels A and B show the first seed."
    )


def _wrapped(text: str, indent: str = "") -> str:
    """Lines of at most 120 characters, as in the pages written by hand."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _headline(saved: Saved) -> str:
    row, seeds = _case(saved, MINIBATCH), saved["config"]["seeds"]
    return (
        f"While the tangent kernel moves by {_spread(row['drift_peak'], 1)} times its norm, the training displacement "
        f"gives the test displacement to a relative error of {_short(row['worst_coupled_error'])} at most; with the "
        f"kernel of the start it is {_spread(row['frozen_error'], 2)}"
        + (" (one seed)." if seeds == 1 else f" ({seeds} seeds, mean ± standard error).")
    )


def _error_note(saved: Saved) -> str:
    seeds = saved["config"]["seeds"]
    several = "One seed." if seeds == 1 else f"Mean ± standard error over {seeds} seeds; ≤ is the worst of them."
    return f"Errors are relative to ‖Δu_Q‖, drifts to ‖K_SS(0)‖ in operator norm. {several}"


def _table(saved: Saved) -> list[list[str]]:
    rows = saved["result"]["summary"]
    head = ["", *(_case_words(saved["config"], row["case"]) for row in rows)]
    return [head, *([name, *(write(row) for row in rows)] for name, write in _QUANTITIES.items())]


def _case_words(config: Mapping[str, Any], name: str) -> str:
    case = _setting(config, name)
    batch = "full batch" if case["batch_size"] is None else f"batches of {case['batch_size']}"
    return f"{batch}, {case['repeated'] or 'no'} inputs repeated"


def _setting(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next(case for case in config["cases"] if case["name"] == name)


def _case(saved: Saved, name: str) -> Row:
    return next(row for row in saved["result"]["summary"] if row["case"] == name)


def _error(mean: Mapping[str, Any], worst: float) -> str:
    return f"≤ {_short(worst)}" if worst < _EXACT else _spread(mean, 3)


def _spread(mean: Mapping[str, Any], digits: int) -> str:
    value, error = f"{mean['value']:.{digits}f}", mean["standard_error"]
    return value if error is None else f"{value} ± {error:.{digits}f}"


def _short(value: float) -> str:
    if value >= 1e-3:
        return f"{value:.2g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _one_or_range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
