"""The figure of the study of a teacher's labels: every optimizer's last step, a panel for each share of wrong labels.

It is the figure that the engine draws of any comparison.
"""

from poprisk_lab.engine.figure import draw_comparison as draw

__all__ = ["draw"]
