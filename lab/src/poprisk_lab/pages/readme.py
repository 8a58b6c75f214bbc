"""Numbers of the measured parts of ``README.md`` (``readme.md.jinja``): the demo, and KeepBest on all tasks."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from poprisk_lab.pages.wording import scaled
from poprisk_lab.recipes.judging import Recipe, TaskGain, judge
from poprisk_lab.recipes.numbers import KEEPER
from poprisk_lab.recipes.stored_tasks import stored_tasks
from poprisk_lab.recipes.wording import task_words, value_words


def slots(results: Path) -> dict[str, Any]:
    """The slots of the template, from the folder of results."""
    judged = judge(KEEPER, stored_tasks(results))
    seeds = [len(gain.task.tuned_last) for gain in judged.gains.values()]
    return {
        "demo": _demo(json.loads((results / "demo/result.json").read_text(encoding="utf-8"))),
        "measured": [_row(gain) for gain in (*judged.noisy, *judged.clean)],
        "noisy": len(judged.noisy),
        "clean": len(judged.clean),
        "reached": sum(gain.at_oracle for gain in judged.noisy),
        "above_last": sum(gain.above_last for gain in judged.noisy),
        "within": sum(gain.within_bar for gain in judged.clean),
        "unsearched": sum(not gain.task.searched for gain in judged.gains.values()),
        "seeds": (min(seeds), max(seeds)),
    }


def _demo(saved: dict[str, Any]) -> dict[str, Any]:
    summary = saved["result"]["summary"]
    rows = [[r["label"], *(scaled(r[k], 100) for k in ("last", "best", "memorized"))] for r in summary["rows"]]
    return {
        "rows": rows,
        "headline": summary["headline"],
        "sensitivity": summary["sensitivity_line"],
        "config": saved["config"],
    }


def _row(gain: TaskGain) -> list[str]:
    """AdamW as it is, with KeepBest, tuned, and at the checkpoint that only the test set can find."""
    task = gain.task
    usual = Recipe("adamw").values(task)
    values = [mean(usual.values())] if usual else []
    values += [gain.value, mean(task.tuned_last.values()), mean(task.tuned_best.values())]
    words = [value_words(task, value) for value in values]
    if not usual:
        words.insert(0, "–")
    words[1] = f"**{words[1]}**"
    return [task_words(task) + ("" if task.searched else " *"), *words]
