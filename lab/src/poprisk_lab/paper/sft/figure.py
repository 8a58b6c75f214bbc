"""The figure of the fine-tuning study, from its saved result."""

from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.direct_labels import End, label_ends
from poprisk_lab.engine.reading import curve, find_row
from poprisk_lab.figure_style import STYLE, WIDTH, colour_of
from poprisk_lab.pages.seed_curves import draw_seeds, mean_and_range
from poprisk_lab.paper.sft.numbers import title
from poprisk_lab.paper.sft.study import CALIBRATED, PAPER_RULE, SHARED_ADAMW, SNR, SUGGESTED
from poprisk_lab.paper.sft.task import HELD_OUT

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the fine-tuning figure") from None

Saved = Mapping[str, Any]
_CURVES = {"adamw": "--", SHARED_ADAMW: "-", PAPER_RULE: "-", CALIBRATED: "-", SNR: "-", SUGGESTED: "-"}
"""What is drawn, and its line style."""


def draw(saved: Saved) -> Figure:
    """Held-out loss along training, one panel a study; lines are means over the seeds, bands their range.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "sft")`` gives.
    """
    studies = list(saved["result"]["studies"].values())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
        panels = figure.subplots(1, len(studies), squeeze=False)[0]
        for place, (axes, study) in enumerate(zip(panels, studies, strict=True)):
            ends = []
            for name, line in _CURVES.items():
                found = find_row(study, name)
                if found is not None:
                    words = (
                        f"{found['label']}, tuned" if found["chosen_for"] else found["label"].replace(" at ", "\nat ")
                    )
                    values, colour = curve(found, HELD_OUT), colour_of(found["arm"])
                    look: Any = {"linestyle": line, "linewidth": 1.8}
                    draw_seeds(axes, study["evaluation_steps"], values, found["label"], colour, **look)
                    ends.append(End(words, mean_and_range(values)[0][-1], colour, line))
            axes.set_title(f"{'ABCDEF'[place]}  {_capital(title(study))}")
            axes.set_xlabel("step")
            axes.set_xlim(study["evaluation_steps"][0], study["evaluation_steps"][-1])
            if study is studies[-1]:
                label_ends(axes, ends)
        panels[0].set_ylabel("held-out loss (nats per token)")
    return figure


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]
