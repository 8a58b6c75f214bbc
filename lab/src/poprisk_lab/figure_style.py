"""Style of the figures: colours that people with any colour vision can distinguish, and font sizes."""

from typing import Any

# Colours of Okabe and Ito; markers and line styles distinguish them without colour.
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#AA4499", "#56B4E9"
INK, FAINT, PALE = "#222222", "#8A8A8A", "#EDEDED"
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
