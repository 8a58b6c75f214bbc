"""Numbers of the grokking study, from its saved result: steps to 95% accuracy, and the verdict on the paper's 4.9×."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk._core.store import load_result
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.reading import final, find_row, reached, row, steps_to
from poprisk_lab.pages.claims import VerdictRow, verdict_row
from poprisk_lab.pages.gate_choice import chosen_gate, fixed_gate, searched_gates, tuned_gates
from poprisk_lab.pages.paired_ratio import Ratio, steps_ratio
from poprisk_lab.pages.template import render_block
from poprisk_lab.paper.grokking.quick_adamw import KIND as QUICK
from poprisk_lab.paper.grokking.study import ADAMW, PAPER_RULE, RULES, SHARED, TUNED, GrokkingConfig, shared_label
from poprisk_lab.paper.grokking.task import TEST_ACCURACY, TRAIN_ACCURACY

Saved = Mapping[str, Any]
PACKAGE = "poprisk_lab.paper.grokking"
PAPER_STEPS = {"adamw": 29_450, "population risk": 5_950}
"""To 95% held-out accuracy, from the caption of the paper's figure."""
PAPER_SPEED_UP = PAPER_STEPS["adamw"] / PAPER_STEPS["population risk"]
BAR = PAPER_SPEED_UP / 2
"""The claim holds if the whole interval of our speed-up is at half the paper's or above."""
TEST, TRAIN = TEST_ACCURACY.name, TRAIN_ACCURACY.name
DEFAULTS = ARMS["defaults"].label


def target(study: Saved) -> str:
    """The accuracy to reach, in percent."""
    return f"{study['task']['metrics'][0]['target']:.0%}"


def quickest(study: Saved, name: str) -> Any:
    """The row chosen for its time to the target; where no trial met it, for its best accuracy, or else its last.

    So that an optimizer that never gets there is shown as such, and does not drop out.
    """
    return find_row(study, name, "target") or find_row(study, name, "best") or find_row(study, name)


def mean_steps(study: Saved, each: Saved) -> float:
    """Mean steps to the target over the seeds; a seed that missed it counts with the whole training."""
    budget = study["task"]["steps"]
    steps = [budget if step is None else step for step in steps_to(study, each, TEST)]
    return math.fsum(steps) / len(steps)


def best_gate(study: Saved) -> str | None:
    """The arm of the gate whose chosen trial met the target first on the *tuning* seeds; None if none did."""
    chosen = chosen_gate(study, "target")
    return None if chosen is None else chosen["arm"]


def lines(saved: Saved) -> Iterator[RenderableType]:
    """Every row's steps to the target and its last accuracy, then the verdict, for a terminal."""
    studies = saved["result"]["studies"]
    for name, study in studies.items():
        table = Table(title=f"{name}: {study['task']['description']}", title_justify="left", title_style="")
        table.add_column("optimizer", overflow="fold")
        for head in (f"steps to {target(study)}", "reached", "last accuracy", "diverged"):
            table.add_column(head, justify="right")
        for each in _one_row_an_arm(study):
            found = steps_to(study, each, TEST)
            steps = f"{'≥ ' if None in found else ''}{mean_steps(study, each):,.0f}"
            steps = steps if any(step is not None for step in found) else "not reached"
            table.add_row(each["label"], steps, reached(study, each, TEST), _mean(each), str(each["failures"]))
        yield table
    yield Text(render_block(PACKAGE, "note", {}))
    yield Text(claims(saved)[0].verdict, style="bold")


def _one_row_an_arm(study: Saved) -> list[Any]:
    given = [each for each in study["rows"] if not each["chosen_for"]]
    found = [quickest(study, name) for name in study["arms"]]
    return given + [each for each in found if each is not None]


def _mean(each: Saved) -> str:
    values = final(each, TEST)
    return f"{math.fsum(values) / len(values):.3f}"


def _against(study: Saved, each: Saved, adamw: Saved) -> str:
    """A row's steps, and how many times fewer they are than AdamW's."""
    speed = steps_ratio(steps_to(study, adamw, TEST), steps_to(study, each, TEST), study["evaluation_steps"])
    return _steps_words(study, each) + ("" if speed is None else f", {_fewer(speed)}")


def claims(saved: Saved) -> list[VerdictRow]:
    """The paper's 4.9 times fewer steps, beside ours with shared hyper-parameters and with equal tuning."""
    studies, decays = saved["result"]["studies"], saved["config"]["weight_decays"]
    slots = {
        "paper_ours": PAPER_STEPS["population risk"],
        "paper_adamw": PAPER_STEPS["adamw"],
        "paper_speed_up": PAPER_SPEED_UP,
        "bar": BAR,
        "shared": [_shared(studies[SHARED], decay) for decay in decays],
        "tuned": _tuned(studies[TUNED]),
    }
    slots["equal_tuning"] = render_block(PACKAGE, "equal_tuning", slots)
    return [verdict_row(PACKAGE, slots)]


def section_note(saved: Saved, results: Path) -> str | None:
    """What is wrong with the stored search, from trainings at given settings; None if there is nothing to say.

    Args:
        saved: The stored study.
        results: Folder of the stored results.
    """
    study, path = saved["result"]["studies"][TUNED], results / f"{QUICK}.json"
    searched = study["arms"]["adamw"]
    if searched["chosen"]["target"] is not None or not path.exists():
        return None
    quick = load_result(path, QUICK)
    config, runs = quick["config"], quick["result"]["runs"]
    low, high = searched["search"]["lr"]
    slots = {
        "trials": len(searched["trials"]),
        "low": low,
        "high": high,
        "lr": config["lr"],
        "decay": config["weight_decay"],
        "beta2": config["beta2"],
        "target": target(study),
        "steps": [f"{run['reached']:,}" for run in runs if run["reached"] is not None],
        "seeds": len(runs),
        "planned": GrokkingConfig(),
    }
    return render_block(PACKAGE, "sparse_search", slots)


def _shared(study: Saved, decay: float) -> dict[str, Any]:
    """One weight decay: the steps of every rule, and the verdict on the paper's rule against AdamW."""
    rows = {rule: find_row(study, shared_label(rule, decay)) for rule in RULES}
    adamw, paper = (row(study, shared_label(rule, decay)) for rule in (ADAMW, PAPER_RULE))
    slow, fast = (steps_to(study, each, TEST) for each in (adamw, paper))
    speed = steps_ratio(slow, fast, study["evaluation_steps"])
    neither = all(step is None for step in (*slow, *fast))
    missed = "Undecided" if None in slow else "Not held"
    return {
        "decay": decay,
        "steps": {rule: "not measured" if each is None else _steps_words(study, each) for rule, each in rows.items()},
        "verdict": missed if speed is None else speed.verdict(BAR),
        "fewer": None if speed is None else _fewer(speed),
        "neither": neither,
        "budget": study["task"]["steps"],
        "rule_reached": reached(study, paper, TEST),
        "adamw_reached": reached(study, adamw, TEST),
    }


def _tuned(study: Saved) -> dict[str, Any]:
    """The tuned AdamW and the tuned gates, with their steps to the target."""
    adamw, gates = quickest(study, "adamw"), tuned_gates(study, "target")
    return {
        "adamw": None if adamw is None else _steps_words(study, adamw),
        "gates": [
            {"label": label, "steps": _steps_words(study, each), "fewer": _gain_in_steps(study, each, adamw)}
            for label, each in gates.items()
            if adamw is not None
        ],
        "searched": len(searched_gates(study)),
        "fixed_arrived": fixed_gate(study, "target") is not None,
    }


def _gain_in_steps(study: Saved, each: Saved, adamw: Saved) -> str | None:
    """How many times fewer steps a row takes than AdamW; None where it did not always arrive."""
    speed = steps_ratio(steps_to(study, adamw, TEST), steps_to(study, each, TEST), study["evaluation_steps"])
    return None if speed is None else _fewer(speed)


def _steps_words(study: Saved, each: Saved) -> str:
    steps = steps_to(study, each, TEST)
    there = [step for step in steps if step is not None]
    if not there:
        return f"not reached in {study['task']['steps']:,} steps ({reached(study, each, TEST)})"
    among = "" if len(there) == len(steps) else " where it did"
    return f"{math.fsum(there) / len(there):,.0f} steps{among} ({reached(study, each, TEST)})"


def _fewer(speed: Ratio) -> str:
    """How many times fewer steps, or how many times more; a lower bound where AdamW did not always arrive."""
    if speed.at_least:
        return f"{speed.words} fewer steps (a lower bound: a run of AdamW that did not arrive counts as its length)"
    return f"{speed.inverse.words} more steps" if speed.value < 1 else f"{speed.words} fewer steps"
