"""What the signal page shows: the numbers of a saved result as slots of ``page.md.jinja``, and as a table."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk._core.statistics import paired_difference
from poprisk._core.store import load_result
from poprisk_lab.pages.template import render_blocks
from poprisk_lab.pages.wording import processor_minutes, seeds_words, spread
from poprisk_lab.paper.signal.groups import LITERAL, LITERAL_GRADIENT, LOSS, NEIGHBOURS, REGISTERED, SCORES
from poprisk_lab.paper.signal.study import KIND

Saved = Mapping[str, Any]
PAPER = {"rank": 5.3, "decades": 6}
"""What the caption of the paper's figure reports."""
BAR = 0.8
"""Required area under the ROC curve."""
_SCORE_WORDS = {
    REGISTERED: "‖[(I − Π_n) g(0)]ᵢ‖: output gradient outside the n leading directions (chosen in advance)",
    LITERAL: "share of the example in the lowest quarter of the directions (the literal reading)",
    LITERAL_GRADIENT: "output gradient in the lowest quarter of the directions",
    LOSS: "loss at the end of the run",
    NEIGHBOURS: "share of nearest neighbours with a different label (needs no run)",
}


def slots(saved: Saved) -> dict[str, Any]:
    """What ``page.md.jinja`` asks for."""
    config, result = saved["config"], saved["result"]
    found = result["summary"]
    value = {name: found["digits"][name]["value"] for name in SCORES}
    registered, final = ([run["auc"][name] for run in result["digits"]] for name in (REGISTERED, LOSS))
    runs = [*result["runs"], *result["digits"]]
    return {
        "config": config,
        "digits": config["digits"],
        "environment": saved["environment"],
        "paper": PAPER,
        "bar": BAR,
        "found": found,
        "registered": found["digits"][REGISTERED],
        "literal": found["digits"][LITERAL],
        "seeds": seeds_words(config["seeds"]),
        "digits_seeds": seeds_words(config["digits"]["seeds"]).capitalize(),
        "scores": scores(saved),
        "reaches_bar": found["digits_lowest"][REGISTERED] >= BAR,
        "difference": paired_difference(registered, final),
        "better": [f"{_SCORE_WORDS[name]}: {value[name]:.3f}" for name in SCORES if value[name] > value[REGISTERED]],
        "runs": len(runs),
        "minutes": processor_minutes(runs),
    }


def page_slots(results: Path) -> dict[str, Any]:
    """The slots from the stored ``signal.json``."""
    return slots(load_result(results / "signal.json", KIND))


def lines(saved: Saved) -> Iterator[RenderableType]:
    """The areas of all scores and a sentence, for a terminal."""
    shown = Table(
        title="Finding wrong labels on digits: area under the ROC curve", title_justify="left", title_style=""
    )
    shown.add_column("score of an example", overflow="fold")
    shown.add_column("mean", justify="right")
    shown.add_column("lowest seed", justify="right")
    for row in scores(saved):
        shown.add_row(*row)
    yield shown
    yield Text(render_blocks("poprisk_lab.paper.signal", "page.md.jinja", slots(saved))["headline"], style="bold")


def scores(saved: Saved) -> list[list[str]]:
    """Each score with its area under the ROC curve, mean and lowest seed."""
    found = saved["result"]["summary"]
    return [
        [_SCORE_WORDS[name], spread(found["digits"][name], 3), f"{found['digits_lowest'][name]:.3f}"] for name in SCORES
    ]
