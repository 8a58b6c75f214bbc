"""Lorenz '63 from noisy states, shown from its saved result: the paper's four panels, and what became of its claims."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from poprisk.cli._demonstration.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, SKY, STYLE
from poprisk.errors import MissingExtraError
from poprisk_lab.engine.reading import StoredRow, StoredStudy, best, curve, final, find_row, row
from poprisk_lab.pages.claims import Claim
from poprisk_lab.pages.comparison import (
    Gain,
    adamw_checkpoints,
    adamw_reference,
    adamw_words,
    best_gate,
    comparison_lines,
    gain,
)
from poprisk_lab.pages.gate_choice import tuned_gate_words, tuned_gates
from poprisk_lab.pages.seed_curves import draw_seeds
from poprisk_lab.pages.wording import short
from poprisk_lab.paper.lorenz.study import DEFAULTS, PAPER_RULE, SHARED_ADAMW, SNR
from poprisk_lab.paper.lorenz.task import HELD_OUT, VALID_TIME

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the Lorenz figure") from None

Saved = Mapping[str, Any]
_MSE, _TIME = HELD_OUT.name, VALID_TIME.name
_GIVEN = {SHARED_ADAMW: BLUE, PAPER_RULE: ORANGE, SNR: GREEN, DEFAULTS: SKY}
_TUNED_ADAMW = "AdamW, tuned"
_HELD = {"better": "Held", "worse": "Not held", "unclear": "Undecided"}


def draw_lorenz(saved: Saved) -> Figure:
    """Held-out error along training, best against final, final across noise levels, and roll-outs in the x-z plane.

    Curves and bars are means over the seeds; bands are the range of the seeds, dots the seeds themselves.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "lorenz")`` gives.
    """
    study, noise = reference_study(saved), saved["config"]["reference"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.8, 8.4), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(1.25, 1))
        above, below = parts
        curves, bars = above.subplots(1, 2, width_ratios=(1, 1.1))
        levels, *planes = below.subplots(1, 4, width_ratios=(1.9, 1, 1, 1))
        _draw_curves(curves, study, f"A  Held-out error, noise {noise:g}")
        _draw_best_and_final(bars, study, f"B  Best and final, noise {noise:g}")
        _draw_levels(levels, saved)
        _draw_planes(planes, study)
    return figure


def reference_study(saved: Saved) -> StoredStudy:
    """The study at the noise level that is shown."""
    return next(s for noise, s in noise_levels(saved) if noise == saved["config"]["reference"])


def noise_levels(saved: Saved) -> list[tuple[float, StoredStudy]]:
    """Each level of the noise with its study, the lowest first."""
    studies = saved["result"]["studies"].values()
    return sorted(((study["task"]["config"]["noise"], study) for study in studies), key=lambda level: level[0])


def _rows(study: StoredStudy) -> dict[str, tuple[StoredRow, str]]:
    """What is drawn: the given rows and the tuned ones, by their words, with a colour each."""
    found = {label: (row(study, label), colour) for label, colour in _GIVEN.items()}
    tuned, gate = find_row(study, "adamw"), best_gate(study)
    if tuned is not None:
        found[_TUNED_ADAMW] = (tuned, INK)
    if gate is not None:
        found[tuned_gate_words(study)] = (gate, PURPLE)
    return found


def _draw_curves(axes: Axes, study: StoredStudy, title: str) -> None:
    for words, (each, colour) in _rows(study).items():
        line = "-" if words in _GIVEN else "--"
        draw_seeds(axes, study["evaluation_steps"], curve(each, _MSE), words, colour, linestyle=line, linewidth=1.8)
    axes.set_yscale("log")
    axes.set_xlim(0, study["task"]["steps"])
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.55)  # the legend's place
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("one-step MSE on true states")
    axes.legend(loc="upper right", ncols=1)


def _draw_best_and_final(axes: Axes, study: StoredStudy, title: str) -> None:
    """Two bars a row, with a dot a seed; the line is the best checkpoint of the AdamW with shared hyper-parameters."""
    rows = _rows(study)
    for place, (each, colour) in enumerate(reversed(rows.values())):
        for offset, values, alpha in ((0.2, best(each, _MSE, False), 0.4), (-0.2, final(each, _MSE), 1.0)):
            mean = math.fsum(values) / len(values)
            if math.isnan(mean):
                axes.text(0.02, place + offset, "diverged", transform=axes.get_yaxis_transform(), va="center")
                continue
            axes.barh(place + offset, mean, height=0.38, color=colour, alpha=alpha)
            axes.plot(values, [place + offset] * len(values), ".", color=INK, markersize=3)
    checkpoint = best(rows[SHARED_ADAMW][0], _MSE, False)
    axes.axvline(math.fsum(checkpoint) / len(checkpoint), color=BLUE, linestyle=":", linewidth=1.3)
    axes.set_yticks(range(len(rows)), list(reversed(rows)), fontsize=8.5)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter("{x:.1g}")
    axes.set_title(title)
    axes.set_xlabel(f"one-step MSE; pale: best step, full: last step\ndotted: best checkpoint of {SHARED_ADAMW}")


def _draw_levels(axes: Axes, saved: Saved) -> None:
    levels = noise_levels(saved)
    for words, (_, colour) in _rows(levels[0][1]).items():
        shown = [(noise, _rows(study).get(words)) for noise, study in levels]
        points = [(noise, final(found[0], _MSE)) for noise, found in shown if found is not None]
        means = [math.fsum(values) / len(values) for _, values in points]
        line = "-" if words in _GIVEN else "--"
        axes.plot([noise for noise, _ in points], means, line, marker="o", markersize=4, color=colour)
    axes.set_yscale("log")
    axes.set_title("C  Final error across noise")
    axes.set_xlabel("sensor noise (standard deviations)")
    axes.set_ylabel("final one-step MSE")


def _draw_planes(planes: Sequence[Axes], study: StoredStudy) -> None:
    """Roll-outs from one true state, the truth from there behind them in grey."""
    shown = {"AdamW": SHARED_ADAMW, "paper's rule": PAPER_RULE, "PopRiskAdamW": DEFAULTS}
    for axes, (words, label) in zip(planes, shown.items(), strict=True):
        portrait = study["portraits"][label]
        for states, colour, width in ((portrait["truth"], FAINT, 0.5), (portrait["rollout"], _GIVEN[label], 0.8)):
            axes.plot([state[0] for state in states], [state[2] for state in states], color=colour, linewidth=width)
        axes.set_xlim(-25, 25)
        axes.set_ylim(-5, 55)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(words)
    planes[0].set_title("D  Roll-outs, x against z (grey: truth)")


def lorenz_lines(saved: Saved) -> Iterator[RenderableType]:
    """The tables of every noise level, then the verdicts, for a terminal."""
    yield from comparison_lines(saved)
    for claim in claims_lorenz(saved):
        yield Text(claim.sentence, style="bold")


def claims_lorenz(saved: Saved) -> list[Claim]:
    """Final below AdamW's best checkpoint, final error at every noise level, and how long a roll-out holds."""
    return [_checkpoint_claim(saved), _levels_claim(saved), _rollout_claim(saved)]


def _checkpoint_claim(saved: Saved) -> Claim:
    study, noise = reference_study(saved), saved["config"]["reference"]
    adamw, paper, defaults = (row(study, label) for label in (SHARED_ADAMW, PAPER_RULE, DEFAULTS))
    checkpoint, tuned_checkpoint = best(adamw, _MSE, False), adamw_checkpoints(study) or best(adamw, _MSE, False)
    shared = gain(final(paper, _MSE), checkpoint, higher_is_better=False)
    tuned = gain(final(defaults, _MSE), tuned_checkpoint, higher_is_better=False)
    tuned_words = f"AdamW's best checkpoint {_mean(tuned_checkpoint)}; {DEFAULTS} last {_mean(final(defaults, _MSE))}"
    return Claim(
        claim="Lorenz '63: population-risk training finishes below AdamW's best checkpoint (figure, panel B)",
        paper="below; no number given",
        paper_conditions=f"noise {noise:g}: {SHARED_ADAMW}: best {_mean(checkpoint)}, last "
        f"{_mean(final(adamw, _MSE))}; {PAPER_RULE}: last {_mean(final(paper, _MSE))}",
        equal_tuning="; ".join([tuned_words, *_gate_ends(study)]),
        sentence=f"{_held(shared)} with shared hyper-parameters: the last step of the paper's rule has "
        f"{_relative(shared, checkpoint)} AdamW's best checkpoint. {_held(tuned)} against a tuned AdamW: the last step "
        f"of {DEFAULTS} (not tuned) has {_relative(tuned, tuned_checkpoint)} the best checkpoint of "
        f"{adamw_words(study)}.{_gate_sentence(study, tuned_checkpoint)}",
    )


def _gate_ends(study: StoredStudy) -> list[str]:
    return [f"{words} last {_mean(final(each, _MSE))}" for words, each in tuned_gates(study, "last").items()]


def _gate_sentence(study: StoredStudy, checkpoint: Sequence[float]) -> str:
    """The tuned gates against the same checkpoint: the best of several with several times the trials."""
    gains = {words: gain(final(each, _MSE), checkpoint, False) for words, each in tuned_gates(study, "last").items()}
    parts = [f"{words}: {_relative(gained, checkpoint)} it" for words, gained in gains.items()]
    return f" After tuning, {'; '.join(parts)}." if parts else " No gate was searched."


def _levels_claim(saved: Saved) -> Claim:
    levels = noise_levels(saved)
    shared = {noise: _last_gain(study, PAPER_RULE, SHARED_ADAMW) for noise, study in levels}
    tuned = {noise: _gain_of_defaults(study) for noise, study in levels}
    return Claim(
        claim="Lorenz '63: lower final error across sensor-noise levels (figure, panel C)",
        paper="lower; no number given",
        paper_conditions=_by_level(levels, lambda study: [row(study, SHARED_ADAMW), row(study, PAPER_RULE)]),
        equal_tuning=_by_level(levels, lambda study: [_adamw(study), row(study, DEFAULTS)]),
        sentence=f"Against AdamW with shared hyper-parameters the error of the paper's rule is {_counts(shared)}; that "
        f"of {DEFAULTS} against {adamw_words(levels[0][1])} is {_counts(tuned)} (0 is the clean control).",
    )


def _rollout_claim(saved: Saved) -> Claim:
    study, noise = reference_study(saved), saved["config"]["reference"]
    times = {label: final(row(study, label), _TIME) for label in (SHARED_ADAMW, PAPER_RULE, DEFAULTS)}
    times["adamw"] = final(_adamw(study), _TIME)
    shared = gain(times[PAPER_RULE], times[SHARED_ADAMW], higher_is_better=True)
    tuned = gain(times[DEFAULTS], times["adamw"], higher_is_better=True)
    words = {label: f"{math.fsum(values) / len(values):.2f}" for label, values in times.items()}
    return Claim(
        claim="Lorenz '63: roll-outs track the attractor while AdamW's drift away (figure, panel D)",
        paper="a picture; no number given",
        paper_conditions=f"noise {noise:g}, Lyapunov times near the truth: {SHARED_ADAMW} {words[SHARED_ADAMW]}, "
        f"{PAPER_RULE} {words[PAPER_RULE]}",
        equal_tuning=f"AdamW {words['adamw']}, {DEFAULTS} {words[DEFAULTS]}",
        sentence=f"{_held(shared)} with shared hyper-parameters: roll-outs of the paper's rule stay near the truth for "
        f"{words[PAPER_RULE]} Lyapunov times, AdamW's for {words[SHARED_ADAMW]}. {_held(tuned)} against a tuned "
        f"AdamW: {words[DEFAULTS]} for {DEFAULTS} (not tuned), {words['adamw']} for {adamw_words(study)}.",
    )


def _adamw(study: StoredStudy) -> StoredRow:
    """The tuned AdamW, or the best that was given."""
    return adamw_reference(study) or row(study, SHARED_ADAMW)


def _gain_of_defaults(study: StoredStudy) -> Gain:
    return gain(final(row(study, DEFAULTS), _MSE), final(_adamw(study), _MSE), higher_is_better=False)


def _last_gain(study: StoredStudy, first: str, second: str) -> Gain:
    return gain(final(row(study, first), _MSE), final(row(study, second), _MSE), higher_is_better=False)


def _counts(gains: Mapping[float, Gain]) -> str:
    """At which levels lower, at which higher, at which it cannot be told, and who diverged where."""
    found: dict[str, list[float]] = {}
    for noise, gained in gains.items():
        found.setdefault(_outcome(gained), []).append(noise)
    return ", ".join(
        f"{words} at noise {', '.join(f'{noise:g}' for noise in levels)}" for words, levels in sorted(found.items())
    )


def _outcome(gained: Gain) -> str:
    if gained.diverged is not None:
        sides = (("it", gained.diverged.first), ("AdamW", gained.diverged.second))
        failed = " and ".join(f"{side} diverged in {count}" for side, count in sides if count)
        return f"not known ({failed} of {gained.diverged.pairs} seeds)"
    return {"better": "lower", "worse": "higher", "unclear": "not clearly different"}[gained.verdict]


def _by_level(levels: Sequence[tuple[float, StoredStudy]], shown: Callable[[StoredStudy], Sequence[StoredRow]]) -> str:
    return "; ".join(
        f"noise {noise:g}: " + ", ".join(f"{each['label']} {_mean(final(each, _MSE))}" for each in shown(study))
        for noise, study in levels
    )


def _held(gained: Gain) -> str:
    return _HELD[gained.verdict]


def _relative(gained: Gain, reference: Sequence[float]) -> str:
    """The error in relation to the reference's mean, with Student's interval: more or less, in percent."""
    if gained.diverged is not None:
        failed = gained.diverged
        if failed.first:
            return f"no finite error in {failed.first} of {failed.pairs} seeds, against"
        return f"a finite error, AdamW in {failed.second} of {failed.pairs} seeds none, against"
    scale = math.fsum(reference) / len(reference)
    change = f"{abs(gained.value) / scale:.0%} {'less' if gained.value > 0 else 'more'} error"
    if gained.interval is not None:
        low, high = (-end / scale for end in reversed(gained.interval))
        change += f" [{low:+.0%}, {high:+.0%}]"
    return f"{change} than"


def _mean(values: Sequence[float]) -> str:
    mean = math.fsum(values) / len(values)
    return "diverged" if math.isnan(mean) else short(mean)
