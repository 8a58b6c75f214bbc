"""The tasks on which PopRiskAdamW's defaults were chosen: results there are in-sample, elsewhere out-of-sample.

They are tasks of the other studies. The stored result of ``default_choice`` names them; without a stored result, the
study's own configuration does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poprisk._core.store import load_result
from poprisk_lab.engine.reading import StoredStudy
from poprisk_lab.engine.study import describe
from poprisk_lab.pages.template import render_block

KIND = "default_choice"


@dataclass(frozen=True)
class DefaultTasks:
    """The tasks that decided on the defaults.

    Attributes:
        names: Names of the tasks.
        families: Families of the tasks, see :func:`family`.
        seeds: Seeds with which the candidates were trained.
        is_stored: Whether this was read from a stored result.
    """

    names: tuple[str, ...]
    families: frozenset[tuple[str, str, bool]]
    seeds: tuple[int, ...]
    is_stored: bool

    def includes(self, study: StoredStudy) -> bool:
        """Whether the defaults were chosen on a task of this family, at whatever noise."""
        return family(study["task"]) in self.families

    @property
    def sentence(self) -> str:
        """How the defaults were chosen, and what that means for the rows of a page."""
        slots = {"kind": KIND, "is_stored": self.is_stored, "tasks": self.names, "seeds": self.seeds}
        return render_block("poprisk_lab.paper.default_choice", "introduction", slots)


def family(task: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Class and data of a stored task, and whether the data are clean; noisy and clean data are two families.

    >>> family({"name": "digits-20", "config": {"task": "LabelTask", "data": "digits", "noise": 0.2}})
    ('LabelTask', 'digits', False)
    """
    config = task["config"]
    spoiled = config.get("noise") or config.get("wrong_share") or config.get("labels", "clean") != "clean"
    return config.get("task", task.get("name", "")), str(config.get("data", "")), not spoiled


def default_tasks(folder: Path) -> DefaultTasks:
    """How the defaults were chosen, from a folder of results or else from the configuration of the study."""
    path = folder / f"{KIND}.json"
    if path.exists():
        studies = load_result(path, KIND)["result"]["studies"].values()
        seeds = {seed for study in studies for row in study["rows"] for seed in row["seeds"]}
        return _of([study["task"] for study in studies], seeds, is_stored=True)
    from poprisk_lab.paper.default_choice.study import (  # builds every task: imported only if needed
        DefaultChoiceConfig,
        studies,
    )

    config = DefaultChoiceConfig()
    return _of([describe(study.task) for study in studies(config)], set(config.seeds), is_stored=False)


def _of(tasks: Sequence[Mapping[str, Any]], seeds: set[int], *, is_stored: bool) -> DefaultTasks:
    names = tuple(task["name"] for task in tasks)
    return DefaultTasks(names, frozenset(map(family, tasks)), tuple(sorted(seeds)), is_stored)
