"""The figure of the fine-tuning study, from its saved result."""

from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.engine.reading import curve, find_row
from poprisk_lab.figure_style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, STYLE
from poprisk_lab.pages.seed_curves import draw_seeds
from poprisk_lab.paper.sft.numbers import title
from poprisk_lab.paper.sft.study import CALIBRATED, PAPER_RULE, SHARED_ADAMW, SNR, SUGGESTED
from poprisk_lab.paper.sft.task import HELD_OUT

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


def draw(saved: Saved) -> Figure:
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
            axes.set_title(f"{'ABCDEF'[place]}  {_capital(title(study))}")
            axes.set_xlabel("step")
            axes.set_ylabel("held-out loss (nats per token)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]
