"""The figure of the study of a teacher's labels: every optimizer's last step, by the share of wrong labels."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from poprisk_lab.engine.figure import draw_comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(saved: Mapping[str, Any]) -> "Figure":
    """The figure that the engine draws of any comparison, with the share of wrong labels in the titles.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "teacher")`` gives.
    """
    shares = [study["task"]["config"]["noise"] for study in saved["result"]["studies"].values()]
    return draw_comparison(saved, [f"{share:.0%} of the labels wrong" if share else "Clean labels" for share in shares])
