"""Language modelling, clean and with wrong answers: figure, tables and verdicts, from the saved result."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from poprisk.cli._demonstration.figure_style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, STYLE
from poprisk.errors import MissingExtraError
from poprisk_lab.engine import reading
from poprisk_lab.engine.figure import draw_study
from poprisk_lab.engine.reading import StoredRow, StoredStudy
from poprisk_lab.pages.claims import Claim
from poprisk_lab.pages.comparison import (
    ADAMW,
    Gain,
    adamw_reference,
    adamw_words,
    comparison_lines,
    gain,
    gain_words,
    mean_words,
)
from poprisk_lab.pages.gate_choice import tuned_gates
from poprisk_lab.paper.char_language.study import (
    ADAMW_INHERITED,
    CALIBRATED_INHERITED,
    DEFAULTS,
    PAPER_INHERITED,
    SNR_INHERITED,
)
from poprisk_lab.paper.char_language.task import HELD_OUT

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the figure of the language model") from None

Saved = Mapping[str, Any]
_CURVES = {
    ADAMW: (INK, "-"),
    ADAMW_INHERITED: (INK, "--"),
    DEFAULTS: (BLUE, "-"),
    "soft": (SKY, "-"),
    PAPER_INHERITED: (ORANGE, "--"),
    SNR_INHERITED: (GREEN, "--"),
    CALIBRATED_INHERITED: (PURPLE, "--"),
}


def draw_char_language(saved: Saved) -> Figure:
    """For each text: held-out loss along the way, and the last step of every optimizer.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "char_language")`` gives.
    """
    studies = saved["result"]["studies"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.6, 6.9 * len(studies)), layout="constrained")
        panels = figure.subplots(len(studies), 2, squeeze=False)
        for i, (study, (curves, forest)) in enumerate(zip(studies.values(), panels, strict=True)):
            _draw_curves(curves, study, f"{'AC'[i]}  Held-out loss, {_title(study)}")
            draw_study(forest, study, f"{'BD'[i]}  Last step, {_title(study)}")
    return figure


def _title(study: StoredStudy) -> str:
    noise = study["task"]["config"]["noise"]
    return f"{noise:.0%} wrong answers" if noise else "clean text"


def _draw_curves(axes: Axes, study: StoredStudy, title: str) -> None:
    steps = study["evaluation_steps"]
    for name, (colour, line) in _CURVES.items():
        row = reading.find_row(study, name)
        if row is None:
            continue
        columns = list(zip(*reading.curve(row, HELD_OUT), strict=True))
        mean = [math.fsum(values) / len(values) for values in columns]
        axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.15, lw=0)
        tuned = f"{row['label']}, tuned" if row["chosen_for"] else row["label"]
        axes.plot(steps, mean, color=colour, linestyle=line, linewidth=2, label=tuned)
    target = reading.primary(study)["target"]
    if target is not None:
        axes.axhline(target, color=INK, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss (nats per character)")
    axes.set_xlim(0, steps[-1])
    seeds = len(study["rows"][0]["seeds"])
    range_words = "" if seeds == 1 else f"mean and range of {seeds} seeds"
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, title=range_words, title_fontsize=9.5)


def char_language_lines(saved: Saved) -> Iterator[RenderableType]:
    """The tables of all optimizers, then the verdicts."""
    yield from comparison_lines(saved)
    for claim in claims_char_language(saved):
        yield Text(claim.sentence, style="bold")


def claims_char_language(saved: Saved) -> list[Claim]:
    """How far the gate is behind or ahead on each text, at AdamW's learning rate and after equal tuning."""
    return [_claim(name, study) for name, study in saved["result"]["studies"].items()]


def _claim(name: str, study: StoredStudy) -> Claim:
    inherited = reading.row(study, ADAMW_INHERITED)
    reference = adamw_reference(study) or inherited
    given = {label: reading.row(study, label) for label in (PAPER_INHERITED, SNR_INHERITED, DEFAULTS)}
    unchanged = {label: _gain(study, row, inherited) for label, row in given.items()}
    contenders = {**tuned_gates(study, "last"), DEFAULTS: reading.row(study, DEFAULTS)}
    after = {words: _gain(study, row, reference) for words, row in contenders.items()}
    what = "Clean language model" if name == "char_clean" else "Language model with wrong answers"
    return Claim(
        claim=f"{what}: the gate as a one-line change to AdamW (Algorithm 1)",
        paper="no figure: the paper has no such experiment",
        paper_conditions=_cell(ADAMW_INHERITED, inherited, unchanged),
        equal_tuning=_cell(reference["label"], reference, after),
        sentence=(
            f"{what}: at AdamW's learning rate the paper's rule ends {_nats(unchanged[PAPER_INHERITED])}; against "
            f"{adamw_words(study)} " + ", ".join(f"{words} ends {_nats(gained)}" for words, gained in after.items())
        )
        + ".",
    )


def _gain(study: StoredStudy, row: StoredRow, reference: StoredRow) -> Gain:
    metric = reading.primary(study)
    ends = [reading.final(each, metric["name"]) for each in (row, reference)]
    return gain(ends[0], ends[1], higher_is_better=metric["higher_is_better"])


def _cell(reference: str, row: StoredRow, gains: Mapping[str, Gain]) -> str:
    parts = [f"{reference}: {mean_words(reading.final(row, HELD_OUT), '.3f')} nats"]
    parts += [f"{label}: {gain_words(gained, '.3f', bootstrap=False)}" for label, gained in gains.items()]
    return "; ".join(parts)


def _nats(gained: Gain) -> str:
    """Ahead or behind by how many nats, and how surely."""
    if gained.diverged is not None:
        return f"nowhere to compare: {gained.diverged.words}"
    words = f"{abs(gained.value):.3f} nats {'ahead' if gained.value > 0 else 'behind'}"
    if gained.interval is None:
        return f"{words} (one seed)"
    if gained.verdict == "unclear":
        return f"{words} (undecided: the 95% interval of the gain is {_ends(gained.interval)})"
    return f"{words} (95% interval of the gain {_ends(gained.interval)})"


def _ends(interval: tuple[float, float]) -> str:
    return f"{interval[0]:+.3f} to {interval[1]:+.3f}".replace("-", "−")
