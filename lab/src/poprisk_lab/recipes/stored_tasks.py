"""The stored trainings in one form: the study of recipes on all tasks, and CIFAR-10N with augmentation."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Unit = Literal["points", "percent", "decibels"]
SeedValues = Mapping[int, float]
Numbers = NDArray[np.float64]
USUAL_RATE = 1e-3
ANY = "any mean"
"""All tail averages and the weights themselves, with the choice left to the block."""
MOMENTS = {
    "last": (),
    "error": ("held_error", "held_loss"),
    "loss": ("held_loss",),
    "half error": ("half_held_error", "half_held_loss"),
    "half loss": ("half_held_loss",),
    "kept": ("held_error", "held_loss"),
}
"""The last step, the moment with the least error or loss on the held-back block or on half of it, and KeepBest's.

With each, the curves that decide; the second where there is no error. Between equal errors the loss decides.
"""
_NEAR = 0.5
"""Standard errors within which errors count as equal for KeepBest's choice; chosen on tasks of the study."""
SEARCHES = ("labels", "teacher", "lorenz", "inr", "char_language", "cifar")
"""Stored results with a search for AdamW's settings."""
_FAMILIES = ("digits", "fashion", "cifar10", "teacher", "char", "lorenz", "inr")
_LABELS = {"worse_label": "worst", "random_label1": "random 1", "aggre_label": "aggregate", "clean_label": "clean"}
_NETS = {"small": "small ResNet", "resnet18": "ResNet-18"}
_ARMS = {
    "gate": "literal",
    "mean": "gate_schedule",
    "shuffled": "shuffled_gate",
    "random": "random_mask",
    "relative": "relative_3",
}
"""Openings of the CIFAR-10N trainings by the names of the study; their relative gate may open up to 3, not 1."""
_USUAL_EPOCHS = {"small": 40, "resnet18": 30}
"""Lengths for which every mean was measured; other lengths are not ranked."""


@dataclass(frozen=True)
class StoredRow:
    """One optimizer at one setting.

    Attributes:
        arm: Name of the optimizer.
        lr: Learning rate.
        share: Share of the training examples held back.
        seeds: Its seeds.
        averages: The weights themselves (``weights``) and their means.
        finals: For each moment, the metric on test data of the weights it chooses, [seed, average]; NaN for a training
            that diverged.
        jointly: For each moment but the last, the same where the block also chooses among weights and tail averages.
        best: Best value of the weights themselves along the run, for each seed.
    """

    arm: str
    lr: float
    share: float
    seeds: tuple[int, ...]
    averages: tuple[str, ...]
    finals: Mapping[str, Numbers]
    jointly: Mapping[str, Numbers]
    best: Numbers

    def values(self, average: str, moment: str) -> dict[int, float] | None:
        """The metric on test data by seed; None if it is not stored. The average ``any mean`` is the joint choice."""
        found = self.jointly.get(moment) if average == ANY else None
        if average in self.averages and moment in self.finals:
            found = self.finals[moment][:, self.averages.index(average)]
        return None if found is None else dict(zip(self.seeds, found.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class StoredTask:
    """One task with everything that was trained on it.

    Attributes:
        name: Name of the task.
        metric: Name of the test metric.
        higher_is_better: Whether larger values are better.
        clean: Whether the training data are free of noise.
        rows: What was trained.
        tuned_last: Last step of tuned AdamW, by seed.
        tuned_best: Best step of each seed of tuned AdamW, chosen on the test set.
        searched: Whether these come from a stored search, not from the rates of the study.
        ranked: Whether the task counts in the ranking.
    """

    name: str
    metric: str
    higher_is_better: bool
    clean: bool
    rows: tuple[StoredRow, ...]
    tuned_last: SeedValues
    tuned_best: SeedValues
    searched: bool = True
    ranked: bool = True

    @property
    def unit(self) -> Unit:
        """How differences count: see :meth:`gain`."""
        if "PSNR" in self.metric:
            return "decibels"
        return "points" if self.higher_is_better else "percent"

    @property
    def limit(self) -> float:
        """Loss that counts as none: 0.5 points, or 1%."""
        return 0.5 if self.unit == "points" else 1.0

    @cached_property
    def usual_last(self) -> SeedValues:
        """Last step of AdamW, or AdamW with cosine if better, at the usual settings; empty if neither is stored."""
        rows = [self.row(arm, 0.0) or self.row(arm, 0.05) for arm in ("adamw", "adamw_cosine")]
        found = [values for row in rows if row and (values := row.values("weights", "last"))]
        sign = 1 if self.higher_is_better else -1
        return max(found, key=lambda each: sign * mean(each.values()), default={})

    def gain(self, value: float, base: float) -> float:
        """How much better a value is than another: points of accuracy, or percent of the other error.

        A training that diverged loses 100.

        >>> StoredTask("t", "test accuracy", True, False, (), {}, {}).gain(0.75, 0.5)
        25.0
        >>> StoredTask("t", "loss", False, False, (), {}, {}).gain(0.5, 1.0)
        50.0
        >>> round(StoredTask("t", "clean PSNR", True, False, (), {}, {}).gain(30.0, 20.0))
        90
        """
        if not np.isfinite(value):
            return -100.0
        if self.unit == "points":
            return 100 * (value - base)
        ratio = 10 ** ((base - value) / 10) if self.unit == "decibels" else value / base
        return 100 * (1 - ratio)

    def row(self, arm: str, share: float, lr: float | None = None) -> StoredRow | None:
        """The row of an arm with this share held back, at this rate, or at the usual one if there are several."""
        own = [row for row in self.rows if row.arm == arm and (row.share > 0) == (share > 0)]
        if lr is not None:
            own = [row for row in own if row.lr == lr]
        elif len(own) > 1:
            own = [row for row in own if row.lr == USUAL_RATE] or own
        return max(own, key=lambda row: len(row.seeds)) if own else None


def stored_tasks(results: Path) -> list[StoredTask]:
    """All tasks of the folder of results: the study, if it is stored, and CIFAR-10N with augmentation.

    Args:
        results: Folder with ``recipes.json`` (or ``.json.gz``), ``recipe_cifar.json``, ``recipe_cifar_arms.json`` and
            the stored searches; each may be missing.
    """
    return [*_studied(results), *_cifar(results)]


def read(path: Path) -> Any:
    """A JSON file, or its compressed form with ``.gz`` added to the name; None if there is neither."""
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    packed = path.with_name(f"{path.name}.gz")
    return json.loads(gzip.decompress(packed.read_bytes())) if packed.exists() else None


def examples_of(task: Mapping[str, Any]) -> int:
    """Number of training examples of a stored task; 1000 if it is not described."""
    described = task.get("task", {})
    if "train_size" in described.get("config", {}):
        return described["config"]["train_size"]
    return next(iter(described["streams"].values()))[0] if "streams" in described else 1000


def best(values: Numbers, higher: bool) -> Numbers:
    """Best value along the last axis; what diverged is not the best."""
    worst = -np.inf if higher else np.inf
    filled = np.where(np.isfinite(values), values, worst)
    return filled.max(-1) if higher else filled.min(-1)


def condensed(row: Mapping[str, Any], metric: str, higher: bool, examples: int) -> dict[str, Any]:
    """A row of the study with what its curves say at the end of every recipe, instead of the curves.

    Args:
        row: A row with ``curves`` and held-back curves, each [seed][average][evaluation].
        metric: Name of the metric.
        higher: Whether larger values are better.
        examples: Number of training examples, of which the row holds back a share.
    """
    test = np.array(row["curves"][metric], dtype=float)
    averages = row["averages"]
    tails = [k for k, name in enumerate(averages) if name == "weights" or name.startswith("tail")]
    finals, jointly = {"last": test[:, :, -1]}, {}
    held = {name: _filled(row[name]) for name in ("held_error", "held_loss") if row.get(name) is not None}
    held |= {name: _filled(row[name]) for name in ("half_held_error", "half_held_loss") if row.get(name) is not None}
    for moment, names in MOMENTS.items():
        there = [name for name in names if name in held]
        if moment == "kept" and "accuracy" not in metric:
            there = [name for name in there if name.endswith("loss")]  # KeepBest goes by the loss
        if there:
            count = max(1.0, examples * row["share"]) if moment == "kept" else np.inf
            curves = [held[name] for name in there]
            place = chosen_moment(curves, count)
            finals[moment] = np.take_along_axis(test, place[..., None], 2)[:, :, 0]
            place = chosen_moment([curve[:, tails].reshape(len(test), -1) for curve in curves], count)
            jointly[moment] = np.take_along_axis(test[:, tails].reshape(len(test), -1), place[:, None], 1)[:, 0]
    kept = {name: row[name] for name in ("arm", "hyper", "share", "seeds", "averages")}
    weights = test[:, averages.index("weights")]
    return kept | {"finals": _lists(finals), "jointly": _lists(jointly), "best": _listed(best(weights, higher))}


def chosen_moment(curves: Sequence[Numbers], count: float = np.inf) -> NDArray[np.int64]:
    """The moment of the least error, or of the least loss among errors that are about equal.

    KeepBest compares the errors of two moments example by example, within one paired standard error. The stored curves
    have means only, so errors within half a standard error of the least stand in for it.

    Args:
        curves: Errors and losses, or losses alone, with the moments on the last axis; infinite where not measured.
        count: Number of held-back examples, for the standard error; infinite if only equal errors count as equal.

    >>> errors, losses = np.array([0.5, 0.20, 0.19, 0.20]), np.array([1.0, 0.5, 0.6, 0.4])
    >>> [int(chosen_moment([errors, losses], n)) for n in (100, np.inf)]
    [3, 2]
    """
    first, last = curves[0], curves[-1]
    if len(curves) == 1:
        return np.asarray(first.argmin(-1))
    least = first.min(-1, keepdims=True)
    finite = np.where(np.isfinite(least), least, 0.0)
    near = least + _NEAR * np.sqrt(finite * (1 - finite) / count)
    return np.asarray(np.where(first <= near, last, np.inf).argmin(-1))


def _filled(values: Any) -> Numbers:
    found = np.array(values, dtype=float)
    return np.where(np.isfinite(found), found, np.inf)


def _lists(arrays: Mapping[str, Numbers]) -> dict[str, Any]:
    return {name: _listed(values) for name, values in arrays.items()}


def _listed(values: Numbers) -> Any:
    """Nested lists; None for values that are not finite."""
    if values.ndim:
        return [_listed(each) for each in values]
    return float(values) if np.isfinite(values) else None


def _studied(results: Path) -> Iterator[StoredTask]:
    stored = read(results / "recipes.json")
    if stored is None:
        return
    searches = _searches(results)
    for name in sorted(stored["tasks"], key=_family):
        task = stored["tasks"][name]
        higher, metric = task["higher_is_better"], task["metric"]
        rows = tuple(_row(row, metric, higher, examples_of(task)) for row in task["rows"])
        search = searches.get(name)
        if search is not None and _same(search["task"], task.get("task")):
            last, top = _searched(search, metric, higher)
            yield StoredTask(name, metric, higher, task["clean"], rows, last, top)
        else:
            last, top = _rated(rows, higher)
            yield StoredTask(name, metric, higher, task["clean"], rows, last, top, searched=False)


def _family(name: str) -> tuple[int, str]:
    places = [place for place, family in enumerate(_FAMILIES) if name.startswith(family)]
    return min(places, default=len(_FAMILIES)), name


def _row(row: Mapping[str, Any], metric: str, higher: bool, examples: int) -> StoredRow:
    if "curves" in row:
        row = condensed(row, metric, higher, examples)
    finals, jointly = (
        {moment: np.array(values, dtype=float) for moment, values in row[name].items()}
        for name in ("finals", "jointly")
    )
    seeds, averages, top = tuple(row["seeds"]), tuple(row["averages"]), np.array(row["best"], dtype=float)
    return StoredRow(row["arm"], row["hyper"]["lr"], row["share"], seeds, averages, finals, jointly, top)


def _searches(results: Path) -> dict[str, Any]:
    found = [read(results / f"{name}.json") for name in SEARCHES]
    return {name: study for one in found if one for name, study in one["result"]["studies"].items()}


def _same(stored: Mapping[str, Any], new: Mapping[str, Any] | None) -> bool:
    """Whether two tasks are the same up to where their data lie and how often they are measured."""
    if new is None:
        return True
    apart = {"folder", "evaluations"}
    a, b = stored["config"], new["config"]
    return all(a[name] == b[name] for name in (set(a) & set(b)) - apart)


def _searched(search: Mapping[str, Any], metric: str, higher: bool) -> tuple[SeedValues, SeedValues]:
    def chosen(reason: str) -> tuple[list[int], NDArray[np.float64]]:
        row = next(row for row in search["rows"] if row["arm"] == "adamw" and reason in row["chosen_for"])
        return row["seeds"], np.array(row["curves"][metric], dtype=float)

    (last_seeds, last), (best_seeds, top) = chosen("last"), chosen("best")
    return (
        dict(zip(last_seeds, last[:, -1].tolist(), strict=True)),
        dict(zip(best_seeds, best(top, higher).tolist(), strict=True)),
    )


def _rated(rows: Sequence[StoredRow], higher: bool) -> tuple[SeedValues, SeedValues]:
    """AdamW's weights at the best of the trained rates and schedules, at the last and at the best step."""
    own = [row for row in rows if row.arm in ("adamw", "adamw_cosine")]
    whole = [row for row in own if row.share == 0] or own
    sign = 1 if higher else -1
    lasts = [row.values("weights", "last") or {} for row in whole]
    tops = [dict(zip(row.seeds, row.best.tolist(), strict=True)) for row in whole]
    found = [max(each, key=lambda one: sign * mean(one.values()), default={}) for each in (lasts, tops)]
    return found[0], found[1]


def _cifar(results: Path) -> Iterator[StoredTask]:
    files = [read(results / f"{name}.json") for name in ("recipe_cifar", "recipe_cifar_arms")]
    runs = [run for one in files if one for run in one["runs"]]
    kinds = sorted({(run["net"], run["labels"], run["epochs"]) for run in runs}, key=_order)
    for net, labels, epochs in kinds:
        own = [run for run in runs if (run["net"], run["labels"], run["epochs"]) == (net, labels, epochs)]
        rows = tuple(_grouped(own))
        last, top = _rated(rows, True)
        usual = epochs == _USUAL_EPOCHS.get(net)
        name = f"CIFAR-10N {_LABELS.get(labels, labels)}, {_NETS.get(net, net)}" + (
            "" if usual else f", {epochs} epochs"
        )
        if last:
            yield StoredTask(name, "test accuracy", True, labels == "clean_label", rows, last, top, False, usual)


def _order(kind: tuple[str, str, int]) -> tuple[Any, ...]:
    net, labels, epochs = kind
    return (
        list(_NETS).index(net) if net in _NETS else 9,
        epochs,
        list(_LABELS).index(labels) if labels in _LABELS else 9,
    )


def _grouped(runs: Sequence[Mapping[str, Any]]) -> Iterator[StoredRow]:
    def setting(run: Mapping[str, Any]) -> tuple[Any, ...]:
        optimizer = run.get("optimizer", "adamw")
        cosine = run["schedule"] == "cosine" and optimizer == "adamw"
        arm = "adamw_cosine" if cosine else _ARMS.get(optimizer, optimizer)
        columns = len(run["test_accuracy"][0])
        tails = tuple(run.get("tails") or (0.02, 0.05, 0.1, 0.2, 0.5, 1.0))[: columns - 1]
        return arm, run["lr"], run["share"], run.get("wd", 1e-2), tails, len(run["steps"])

    for key in sorted({setting(run) for run in runs}, key=str):
        own = sorted((run for run in runs if setting(run) == key), key=lambda run: run["seed"])
        arm, lr, share, decay, tails, _ = key
        names = [name for name in own[0] if _is_curve(name)]
        curves = {name: np.array([run[name] for run in own], dtype=float).swapaxes(1, 2) for name in names}
        row: dict[str, Any] = {name: curves[name] for name in ("held_loss", "half_held_loss")}
        row |= {f"{half}held_error": 1 - curves[f"{half}held_accuracy"] for half in ("", "half_")}
        row |= {"arm": arm, "hyper": {"lr": lr, "weight_decay": decay}, "share": share}
        row |= {"seeds": [run["seed"] for run in own], "averages": ["weights", *(f"tail {tail:g}" for tail in tails)]}
        yield _row(row | {"curves": {"test accuracy": curves["test_accuracy"]}}, "test accuracy", True, own[0]["size"])


def _is_curve(name: str) -> bool:
    return name == "test_accuracy" or name.startswith(("held_", "half_held_"))
