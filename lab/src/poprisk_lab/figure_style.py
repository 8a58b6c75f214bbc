"""Style of the figures: one colour for each optimizer, other colours, font sizes, and the width of a page.

Figures are shown about 800 pixels wide. At :data:`WIDTH` inches a point of type is then 1.16 pixels: :data:`SMALL` is
the smallest size that a figure may use. Colours are those of Okabe and Ito, with a few of Paul Tol's; markers and line
styles tell them apart without colour.
"""

from typing import Any

WIDTH = 9.6
"""Width of a figure that fills the page, in inches."""
SMALL = 8.5
"""The smallest size of text, in points: 9.8 pixels where a figure of :data:`WIDTH` is shown 800 pixels wide."""
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#56B4E9"
_AMBER, _ROSE, _WINE, _BROWN, _GREY = "#E69F00", "#E377A8", "#882255", "#8C6D46", "#777777"
INK, FAINT, PALE = "#222222", "#8A8A8A", "#EDEDED"
SHADE = "#E3EEF6"
"""Behind what is singled out."""
DEEP = "#9FBCD6"
"""The dark end of a table's shading; text on it is still easy to read."""
SLATE = "#5A7184"
"""Points whose optimizer has no colour of its own."""
HELD, LOST = "#CFE6F3", "#F8D9C4"
"""Cells of a table: what holds, and what does not."""

AVERAGED = "averaged"
"""The key of averaged weights and of KeepBest's choice among them in :data:`OPTIMIZERS`."""
BEST_GATE = "best_gate"
"""The key of the best of several gates, where that is another gate from point to point."""
_PEERS = ("adabelief", "msvag", "cautious", "grokfast", "cubed", "schedule_free", "casmo", "magma", "rm3", "sam")
_CONTROLS = ("gate_schedule", "random_mask", "matched_norm", "shuffled_gate")
OPTIMIZERS: dict[str, tuple[str, str]] = {
    "adamw": (INK, "s"),
    "adamw_cosine": (_GREY, "s"),
    AVERAGED: (GREEN, "P"),
    "defaults": (BLUE, "o"),
    "soft": (ORANGE, "v"),
    "soft_calibrated": (_AMBER, "^"),
    "hard": (_ROSE, "<"),
    "hard_calibrated": (_WINE, ">"),
    "snr": (PURPLE, "D"),
    "tensor_gate": (SKY, "d"),
    "relative": (SKY, "o"),
    BEST_GATE: (SLATE, "D"),
    **dict.fromkeys(_CONTROLS, (FAINT, "x")),
    **dict.fromkeys(_PEERS, (_BROWN, "p")),
}
"""Colour and marker of every optimizer, by the name of its arm: the only place where a figure may take them from.

AdamW is black whatever its learning rate; line styles tell its settings apart. Each gate has a colour of its own. The
controls share one, and so do the rules of other papers: they are always named beside their points.
"""
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def colour_of(arm: str) -> str:
    """The colour of an optimizer's lines and points.

    >>> colour_of("adamw")
    '#222222'
    """
    return OPTIMIZERS[arm][0]


def marker_of(arm: str) -> str:
    """The marker of an optimizer."""
    return OPTIMIZERS[arm][1]


def text_colour(colour: str) -> str:
    """The same hue, darkened until text in it can be read on white (a contrast of 4.5 to 1).

    >>> text_colour("#222222"), text_colour("#E69F00")
    ('#222222', '#9C6C00')
    """
    channels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    factor = 1.0
    while _contrast(factor * c for c in channels) < 4.5:
        factor -= 0.01
    return "#" + "".join(f"{round(factor * c):02X}" for c in channels)


def _contrast(channels: Any) -> float:
    """Contrast with white of a colour in sRGB, as the web's guidelines for accessibility define it."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels]
    return 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
