"""Numbers of DPO and fine-tuning for the page on recipes: what KeepBest kept, beside the same run's checkpoints."""

from pathlib import Path
from typing import Any

from poprisk_lab.pages.wording import table
from poprisk_lab.recipes.judging import gain_over
from poprisk_lab.recipes.stored_tasks import StoredTask, read
from poprisk_lab.recipes.wording import gain_words

FILE = "recipe_fine_tuning.json"


def fine_tuning_table(results: Path) -> str:
    """Each task: last step, best checkpoint on the evaluation set, mean, and what was kept; empty if not stored.

    Args:
        results: Folder with ``recipe_fine_tuning.json``, which :mod:`poprisk_lab.paper.dpo.recipe` writes.
    """
    stored = read(results / FILE)
    if stored is None:
        return ""
    rows = [_row(name, task, stored["result"]["runs"]) for name, task in stored["result"]["tasks"].items()]
    head = ["task", "metric", "last step", "best on test", "mean, last step", "kept"]
    return table([*head, "kept, gain over last", "kept, gain over best"], rows, words=2)


def _row(name: str, described: dict[str, Any], runs: list[dict[str, Any]]) -> list[str]:
    metric = described["metrics"][0]
    own = [run for run in runs if run["task"] == name]
    values = {
        kind: {run["seed"]: run[kind][metric["name"]] for run in own} for kind in ("last", "best", "mean", "kept")
    }
    task = StoredTask(name, metric["name"], metric["higher_is_better"], False, (), values["last"], values["best"])
    means = [f"{sum(each.values()) / len(each):{metric['spec']}}" for each in values.values()]
    gains = [gain_words(gain_over(task, values["kept"], values[base])) for base in ("last", "best")]
    return [name.replace("_", " "), metric["name"], *means, *gains]
