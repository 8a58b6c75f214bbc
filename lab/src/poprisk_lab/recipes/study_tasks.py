"""The tasks of the study that chooses a recipe, with the sizes of the results stored before it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Int
from torch import Tensor

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.task import StackedTask
from poprisk_lab.paper.char_language.task import CharLanguageTask, evenly
from poprisk_lab.paper.cifar.task import CifarTask
from poprisk_lab.paper.inr.task import InrTask
from poprisk_lab.paper.labels.task import DIGITS, FASHION, LabelTask
from poprisk_lab.paper.lorenz.task import LorenzTask
from poprisk_lab.paper.teacher.task import TeacherTask
from poprisk_lab.recipes.study_rows import ROWS, StudyRow

EVALUATIONS = 40
CIFAR_LABELS = ("clean", "random1", "worse")
_NOT_SMALL = ("fashion", "char")


@dataclass(frozen=True)
class ManyPassesTask(CharLanguageTask):
    """The clean text of :class:`CharLanguageTask`, cut down to evenly spaced windows and read many times.

    Attributes:
        windows: Number of training windows.

    >>> task = ManyPassesTask(windows=100, batch_size=10, steps=50)
    >>> task.name, task.streams
    ('char_5_passes', {'windows': (100, 10)})
    """

    windows: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.batch_size <= self.windows <= len(super().train_windows()):
            most = len(super().train_windows())
            raise HyperparameterError(f"windows must lie between batch_size and {most}, got {self.windows}")

    @property
    def name(self) -> str:
        """The number of passes over the windows."""
        return f"char_{round(self.steps * self.batch_size / self.windows)}_passes"

    def train_windows(self) -> Int[Tensor, "windows time"]:
        """The evenly spaced windows."""
        everything = super().train_windows()
        return everything[evenly(len(everything), self.windows)]


@dataclass(frozen=True)
class StudyTask:
    """A task as the study trains on it.

    Attributes:
        task: The task.
        clean: Whether the training data are free of noise.
        rows: Which rows are trained: ``all``, ``few`` for a large network, ``fewest`` for images.
        seeds: Number of seeds.
        compiled: Whether the losses are compiled on a GPU.
        arms: If given, only rows of these arms are trained, and of the swap test only lr 1e-3.
    """

    task: StackedTask
    clean: bool
    rows: str = "all"
    seeds: int = 5
    compiled: bool = False
    arms: tuple[str, ...] = ()

    def chosen_rows(self) -> list[StudyRow]:
        """The rows to train."""
        rows = ROWS[self.rows]
        if not self.arms:
            return rows
        swapped = ("adamw", "adamw_cosine", "relative")
        return [row for row in rows if row.name in self.arms and (row.name not in swapped or row.hyper["lr"] == 1e-3)]


def _labels(data: str, folder: str | None, **sizes: int) -> list[StudyTask]:
    noises = (0.0, 0.2, 0.4, 0.6)
    return [StudyTask(LabelTask(data=data, folder=folder, noise=noise, **sizes), not noise) for noise in noises]


def _digits(_: str) -> list[StudyTask]:
    return _labels(DIGITS, None, evaluations=EVALUATIONS)


def _fashion(data: str) -> list[StudyTask]:
    sizes = {"train_size": 10_000, "width": 256, "batch_size": 128, "steps": 3000}
    return _labels(FASHION, f"{data}/fashion", evaluations=EVALUATIONS, **sizes)


def _teacher(_: str) -> list[StudyTask]:
    return [StudyTask(TeacherTask(noise=noise, evaluations=EVALUATIONS), not noise) for noise in (0.0, 0.2, 0.4)]


def _lorenz(_: str) -> list[StudyTask]:
    return [StudyTask(LorenzTask(noise=noise, evaluations=EVALUATIONS), not noise) for noise in (0.0, 0.1, 0.4)]


def _inr(_: str) -> list[StudyTask]:
    return [StudyTask(InrTask(noise=noise, evaluations=EVALUATIONS), not noise) for noise in (0.2, 0.0)]


def _char(_: str) -> list[StudyTask]:
    noises = (0.0, 0.2)
    tasks = [CharLanguageTask(noise=noise, evaluations=EVALUATIONS) for noise in noises]
    return [StudyTask(task, not task.noise, compiled=True) for task in tasks]


def _passes(_: str) -> list[StudyTask]:
    size = ManyPassesTask(width=128, evaluations=EVALUATIONS)
    lengths = [passes * (size.windows // size.batch_size) for passes in (25, 60)]
    return [StudyTask(replace(size, steps=steps), True, rows="few", compiled=True) for steps in lengths]


def _cifar(data: str) -> list[StudyTask]:
    tasks = [
        CifarTask(f"{data}/cifar10", labels=labels, epochs=30, evaluations=EVALUATIONS // 2, train_size=20_000)
        for labels in CIFAR_LABELS
    ]
    return [StudyTask(task, task.labels == "clean", rows="fewest", seeds=3, compiled=True) for task in tasks]


FAMILIES: Mapping[str, Callable[[str], list[StudyTask]]] = {
    "digits": _digits,
    "teacher": _teacher,
    "lorenz": _lorenz,
    "inr": _inr,
    "char": _char,
    "passes": _passes,
    "fashion": _fashion,
    "cifar": _cifar,
}
"""For each family its tasks, given the folder with the data."""

_SMALL: Mapping[type, dict[str, Any]] = {
    LabelTask: {"width": 8, "steps": 12, "evaluations": 3, "train_size": 200, "batch_size": 20},
    TeacherTask: {"width": 8, "steps": 12, "evaluations": 3, "train_size": 100, "test_size": 50, "batch_size": 20},
    LorenzTask: {"width": 8, "steps": 12, "evaluations": 3, "train_pairs": 100, "test_states": 60, "batch_size": 20},
    InrTask: {"size": 16, "frequencies": 8, "width": 16, "layers": 2, "batch": 64, "steps": 12, "evaluations": 3},
    CharLanguageTask: {
        "width": 8,
        "heads": 2,
        "layers": 1,
        "context": 8,
        "batch_size": 6,
        "steps": 8,
        "evaluations": 2,
        "measured_windows": 8,
    },
    CifarTask: {"folder": None, "width": 2, "batch_size": 16, "epochs": 1, "evaluations": 2, "train_size": 160},
}


def study_tasks(data: str, small: bool = False) -> dict[str, list[StudyTask]]:
    """The tasks of every family.

    Args:
        data: Folder with ``fashion`` and ``cifar10``.
        small: Whether to use sizes of seconds, without any files and without the whole text.
    """
    families = {family: make(data) for family, make in FAMILIES.items() if not (small and family in _NOT_SMALL)}
    if not small:
        return families
    return {family: [replace(one, task=_small(one.task), seeds=2) for one in own] for family, own in families.items()}


def _small(task: StackedTask) -> StackedTask:
    if isinstance(task, ManyPassesTask):
        passes = task.steps * task.batch_size // task.windows
        return replace(task, **_SMALL[CharLanguageTask] | {"windows": 40, "steps": passes // 3})
    return replace(task, **_SMALL[type(task)])  # type: ignore[type-var]  # tasks are dataclasses
