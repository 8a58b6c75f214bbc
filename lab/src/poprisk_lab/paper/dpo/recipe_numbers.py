"""Numbers of the recipe on a language model, from its stored result: last step, mean of the weights, kept moment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poprisk._core.store import load_result
from poprisk_lab.pages.comparison import gain, gain_words, mean_words
from poprisk_lab.pages.wording import table
from poprisk_lab.paper.dpo.recipe import KIND

Saved = Mapping[str, Any]
_WORDS = {"last": "last step", "best": "best checkpoint", "mean": "mean of the weights", "kept": "kept moment"}


def recipe_slots(results: Path) -> dict[str, Any] | None:
    """The slots of the section on the page of verdicts; None if the result is not stored."""
    path = results / f"{KIND}.json"
    return slots(load_result(path, KIND)) if path.exists() else None


def slots(saved: Saved) -> dict[str, Any]:
    """Settings, and a table with a row for each task and metric."""
    config, result = saved["config"], saved["result"]
    return {
        "dpo_lr": config["dpo_lr"],
        "sft_lr": config["sft_lr"],
        "share": config["share"],
        "tail": config["tail"],
        "seeds": len(config["seeds"]),
        "measured": sorted({run["measured"] for run in result["runs"]}),
        "table": recipe_table(result),
    }


def recipe_table(result: Saved) -> str:
    """Mean ± standard error of each kind of weights, and the gains of the kept ones, pair by pair."""
    head = ["task", "metric", *_WORDS.values(), "kept over last", "kept over best checkpoint"]
    rows = []
    for name, task in result["tasks"].items():
        runs = [run for run in result["runs"] if run["task"] == name]
        for metric in task["metrics"]:
            values = {kind: [run[kind][metric["name"]] for run in runs] for kind in _WORDS}
            gains = [gain(values["kept"], values[other], metric["higher_is_better"]) for other in ("last", "best")]
            cells = [mean_words(each, metric["spec"]) for each in values.values()]
            words = [gain_words(each, metric["spec"], bootstrap=False) for each in gains]
            rows.append([name, metric["name"], *cells, *words])
    return table(head, rows, words=2)
