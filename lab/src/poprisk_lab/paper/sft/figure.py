"""Fine-tuning a language model, clean and with wrong targets: figure, tables and verdicts, from the saved result."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from poprisk.cli._demonstration.figure_style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, STYLE
from poprisk.errors import MissingExtraError
from poprisk_lab.engine.reading import StoredRow, StoredStudy, curve, final, find_row, row
from poprisk_lab.pages.claims import Claim
from poprisk_lab.pages.comparison import (
    Gain,
    adamw_reference,
    adamw_words,
    comparison_lines,
    gain,
    gain_words,
    mean_words,
)
from poprisk_lab.pages.gate_choice import tuned_gates
from poprisk_lab.pages.seed_curves import draw_seeds
from poprisk_lab.paper.sft.study import CALIBRATED, DEFAULTS, HELD_OUT, PAPER_RULE, SHARED_ADAMW, SNR, SUGGESTED

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the fine-tuning figure") from None

Saved = Mapping[str, Any]
_CURVES = {
    "adamw": (INK, "--"),
    SHARED_ADAMW: (BLUE, "-"),
    PAPER_RULE: (ORANGE, "-"),
    CALIBRATED: (PURPLE, "-"),
    SNR: (GREEN, "-"),
    SUGGESTED: (SKY, "-."),
}


def draw_sft(saved: Saved) -> Figure:
    """Held-out loss along training, one panel a study; lines are means over the seeds, bands their range.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "sft")`` gives.
    """
    studies = list(saved["result"]["studies"].values())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * len(studies), 4.6), layout="constrained")
        panels = figure.subplots(1, len(studies), squeeze=False)[0]
        for place, (axes, study) in enumerate(zip(panels, studies, strict=True)):
            for name, (colour, line) in _CURVES.items():
                found = find_row(study, name)
                if found is not None:
                    words = f"{found['label']}, tuned" if found["chosen_for"] else found["label"]
                    values = curve(found, HELD_OUT)
                    draw_seeds(axes, study["evaluation_steps"], values, words, colour, linestyle=line, linewidth=1.8)
            axes.set_title(f"{'ABCDEF'[place]}  {_title(study)}")
            axes.set_xlabel("step")
            axes.set_ylabel("held-out loss (nats per token)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _title(study: StoredStudy) -> str:
    noise = study["task"]["config"]["noise"]
    return f"{noise:.0%} of the targets wrong" if noise else "Clean text"


def sft_lines(saved: Saved) -> Iterator[RenderableType]:
    """The tables of all optimizers, then the verdicts, for a terminal."""
    yield from comparison_lines(saved)
    for claim in claims_sft(saved):
        yield Text(claim.sentence, style="bold")


def claims_sft(saved: Saved) -> list[Claim]:
    """How far each gate is ahead or behind on each text, at AdamW's learning rate and after equal tuning."""
    return [_claim(study) for study in saved["result"]["studies"].values()]


def _claim(study: StoredStudy) -> Claim:
    shared = row(study, SHARED_ADAMW)
    reference = adamw_reference(study) or shared
    inherited = {label: _gain(row(study, label), shared) for label in (PAPER_RULE, CALIBRATED, SNR, SUGGESTED)}
    contenders = {**tuned_gates(study, "last"), DEFAULTS: row(study, DEFAULTS)}
    after = {words: _gain(each, reference) for words, each in contenders.items()}
    what = f"Fine-tuning a language model, {_title(study)[0].lower()}{_title(study)[1:]}"
    return Claim(
        claim=f"{what}: the gate as a one-line change to AdamW (Algorithm 1)",
        paper="no figure: the paper has no such experiment",
        paper_conditions=_cell(SHARED_ADAMW, shared, inherited),
        equal_tuning=_cell(reference["label"], reference, after),
        sentence=f"{what}: at AdamW's learning rate the paper's rule ends {_nats(inherited[PAPER_RULE])}, calibrated α "
        f"{_nats(inherited[CALIBRATED])}; against {adamw_words(study)} "
        + ", ".join(f"{words} ends {_nats(gained)}" for words, gained in after.items())
        + ".",
    )


def _gain(first: StoredRow, second: StoredRow) -> Gain:
    return gain(final(first, HELD_OUT), final(second, HELD_OUT), higher_is_better=False)


def _cell(reference: str, each: StoredRow, gains: Mapping[str, Gain]) -> str:
    parts = [f"{reference}: {mean_words(final(each, HELD_OUT), '.3f')} nats"]
    return "; ".join([*parts, *(f"{label}: {gain_words(g, '.3f', bootstrap=False)}" for label, g in gains.items())])


def _nats(gained: Gain) -> str:
    if gained.diverged is not None:
        return f"nowhere to compare: {gained.diverged.words}"
    words = f"{abs(gained.value):.3f} nats {'ahead' if gained.value > 0 else 'behind'}"
    return f"{words} (undecided)" if gained.verdict == "unclear" else words
