"""``python -m poprisk_lab.missing_rows NAME ...``: measure what stored comparisons lack, and keep the rest.

Rows and trials that a stored result has are not trained again: a fixed setting that was added to a study is trained
alone, and a search with more trials continues the stored one. A study whose task has changed is run as a whole.
``--plan`` says what would be run. Afterwards ``make pages`` writes the pages that show the results.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from poprisk._core.store import load_result, save_result
from poprisk.errors import DataError, PopRiskError
from poprisk_lab.engine import reading
from poprisk_lab.engine.arms import ARMS, USUAL, Arm, require_arm
from poprisk_lab.engine.ledger import RowLedger
from poprisk_lab.engine.search import trials
from poprisk_lab.engine.study import Study, describe, run_study

Saved = Mapping[str, Any]
RESULTS = Path(__file__).resolve().parents[3] / "lab/results"
COMPARISONS = (
    "grokking",
    "pinn",
    "lorenz",
    "inr",
    "dpo",
    "labels",
    "cifar",
    "teacher",
    "char_language",
    "sft",
)
"""The comparisons of optimizers. Only their studies are imported, so that no package for figures is needed."""


class StoredRows(RowLedger):
    """A ledger that also knows the rows and the trials of a stored study.

    Args:
        stored: The stored study; its task must be that of the study that is run.
        device: Kind of the device that it was measured on.
        tuning_seeds: Seeds of its trials.
        folder: Folder of the files of new rows, see :class:`~poprisk_lab.engine.ledger.RowLedger`.
    """

    def __init__(
        self, stored: Saved, device: str, tuning_seeds: Sequence[int] = (), folder: Path | None = None
    ) -> None:
        super().__init__(folder)
        self._device, self._stored = device, _trials_of(stored, tuning_seeds)
        for row in stored["rows"]:
            kept = {name: row[name] for name in ("curves", "gate", "failures")}
            outcome = {"row": kept, "portrait": stored["portraits"].get(row["label"])}
            self._stored[_key(row["hyper"], row["seeds"], ARMS[row["arm"]].definition())] = outcome
        defaults = reading.find_row(stored, ARMS["defaults"].label)
        self._followed = {} if defaults is None else defaults["hyper"]

    def find(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """The outcome of a row; ``None`` if it is not stored."""
        found = super().find(asked)
        if found is not None or asked["device"] != self._device:
            return found
        followed = asked["followed"]
        if followed is not None and {**USUAL, **self._followed} != {**USUAL, **followed["hyper"]}:
            return None
        return self._stored.get(_key(asked["hyper"], asked["seeds"], asked["rule"]))


@dataclass(frozen=True)
class Missing:
    """What a stored result lacks of one study.

    Attributes:
        study: The study as it is planned now.
        settings: Labels of the fixed settings without a row.
        trials: Number of trials that were not made.
        stored: The stored study with the same task; ``None`` if there is none.
    """

    study: Study
    settings: tuple[str, ...]
    trials: int
    stored: Saved | None

    @property
    def words(self) -> str:
        """What would be run, in a line."""
        found = [f"{self.trials} trials and the rows chosen from them"] if self.trials else []
        return f"{self.study.task.name}: {'; '.join([*found, *self.settings]) or 'another choice of arms'}"


def missing(stored: Saved, studies: Sequence[Study], tuning_seeds: Sequence[int] = ()) -> list[Missing]:
    """What the stored studies lack, in the order of the plan; nothing for a study that is complete.

    Args:
        stored: The stored studies by name.
        studies: The studies as they are planned now.
        tuning_seeds: Seeds of the stored trials.
    """
    found = []
    for study in studies:
        there = stored.get(study.task.name)
        there = there if there is not None and is_same_task(study, there) else None
        labels = set() if there is None else {row["label"] for row in there["rows"]}
        made = {} if there is None else _trials_of(there, tuning_seeds)
        settings = tuple(setting.label for setting in study.settings if setting.label not in labels)
        lacking = sum(key not in made for key in _planned_trials(study))
        if settings or lacking or there is None or set(there["arms"]) != set(study.arms):
            found.append(Missing(study, settings, lacking, there))
    return found


def is_same_task(study: Study, stored: Saved) -> bool:
    """Whether a stored study has the task of the planned one; folders may differ."""
    return _without_folders(_plain(describe(study.task))) == _without_folders(stored["task"])


def complete(saved: Saved, lacking: Sequence[Missing], device: torch.device, folder: Path | None) -> dict[str, Any]:
    """The result with what it lacked.

    Args:
        saved: The stored result.
        lacking: What :func:`missing` found.
        device: Device to compute on; stored rows of another kind of device are not used.
        folder: Folder for finished rows, from which a later run continues.

    Returns:
        The result as it is stored. ``earlier`` says which studies were measured, wholly or in part, before.
    """
    studies, measured = dict(saved["result"]["studies"]), "cuda" if saved["environment"]["gpu"] else "cpu"
    kept = [name for name in studies if name not in {each.study.task.name for each in lacking if each.stored is None}]
    for each in lacking:
        name, stored = each.study.task.name, each.stored
        print(f"{each.words}", flush=True)
        seeds = saved["config"].get("tuning_seeds", ())
        ledger = RowLedger(folder) if stored is None else StoredRows(stored, measured, seeds, folder)
        made = run_study(each.study, device, lambda words: None, ledger)
        before = 0.0 if stored is None else stored["seconds"]
        studies[name] = made | {"seconds": round(math.fsum((before, made["seconds"])), 1)}
    earlier = {"studies": kept, **{key: saved[key] for key in ("created", "environment")}}
    return {**saved["result"], "studies": studies, "earlier": [*saved["result"].get("earlier", ()), earlier]}


def run_missing(name: str, results: Path, output: Path, data: Path, only: Sequence[str] = ()) -> Path | None:
    """Measure what one stored result lacks and write the completed one. Returns the file; None if nothing is lacking.

    Raises:
        DataError: the result is not stored, or data are missing.
    """
    config, lacking, saved = _plan(name, results, data, only)
    if not lacking:
        return None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        result = complete(saved, lacking, device, output / f"{name}.parts")
    finally:
        torch.set_float32_matmul_precision(before)
    output.mkdir(parents=True, exist_ok=True)
    return save_result(output / f"{name}.json", saved["kind"], _plain(asdict(config)), result)


def _plan(name: str, results: Path, data: Path, only: Sequence[str]) -> tuple[Any, list[Missing], Saved]:
    if name not in COMPARISONS:
        raise DataError(f"no stored comparison is called {name!r}; choose from {', '.join(COMPARISONS)}")
    path, module = results / f"{name}.json", import_module(f"poprisk_lab.paper.{name}.study")
    if not path.is_file():
        raise DataError(f"{path} is missing: run python -m poprisk_lab.results {name} instead")
    saved, config = load_result(path, module.KIND), _configured(module, data)
    needed = config
    if only and "data" in saved["config"]:  # of the labels: no files are needed for data sets that are not asked for
        needed = replace(config, data=tuple(d for d in config.data if any(each.startswith(d) for each in only)))
    wanted = [study for study in module.studies(needed) if not only or study.task.name in only]
    return config, missing(saved["result"]["studies"], wanted, saved["config"].get("tuning_seeds", ())), saved


def _configured(module: Any, data: Path) -> Any:
    """The full size, with its files in a folder of data sets."""
    if hasattr(module, "full_config"):
        folder = data / "smollm2"
        return module.full_config(folder.as_posix(), ((folder / "preferences.safetensors").as_posix(),))
    config = type(module.SMOKE)()
    return replace(config, folder=data.as_posix()) if hasattr(config, "folder") else config


def _planned_trials(study: Study) -> list[str]:
    arms: list[Arm] = [require_arm(name) for name in study.arms]
    return [
        _key(arm.hyper(trial), study.tuning_seeds, arm.definition())
        for arm in arms
        for trial in trials(study.ranges(arm), study.trials)
    ]


def _trials_of(stored: Saved, seeds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The trials of a stored study; only the curve of the primary metric was kept, which is all that a choice needs."""
    metric, found = reading.primary(stored)["name"], {}
    for name, arm in stored["arms"].items():
        for trial in arm["trials"]:
            failures = sum(curve[-1] is None for curve in trial["curve"])
            row = {"curves": {metric: trial["curve"]}, "gate": None, "failures": failures}
            found[_key(trial["hyper"], seeds, ARMS[name].definition())] = {"row": row, "portrait": None}
    return found


def _key(hyper: Mapping[str, float], seeds: Sequence[int], rule: Mapping[str, Any]) -> str:
    """The same for stored hyper-parameters, which leave out what the rule does not use, and for complete ones."""
    unused = ("beta2",) if rule["rule"] == "msvag" else ()
    used = {name: value for name, value in {**USUAL, **hyper}.items() if name not in unused}
    return json.dumps([used, list(seeds), dict(rule)], sort_keys=True)


def _plain(value: Any) -> Any:
    """As it is after having been stored: tuples are lists."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _without_folders(value: Any) -> Any:
    """Without the places of files, which differ between machines."""
    if not isinstance(value, Mapping):
        return value
    places = {key for key, each in value.items() if key == "folder" or (key == "data" and isinstance(each, list))}
    return {key: _without_folders(each) for key, each in value.items() if key not in places}


def main(arguments: Sequence[str] | None = None) -> int:
    """Complete stored results by name. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m poprisk_lab.missing_rows", description="Measure what stored comparisons lack."
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"of {', '.join(COMPARISONS)}")
    parser.add_argument("--study", action="append", default=[], help="only this study; may be repeated")
    parser.add_argument("--plan", action="store_true", help="say what would be run, and run nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the stored results")
    parser.add_argument("--output", type=Path, help="folder for the completed results; default: that of the results")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with the data sets; default: data")
    options = parser.parse_args(arguments)
    failed = 0
    for name in options.names:
        try:
            if options.plan:
                lacking = _plan(name, options.results, options.data, options.study)[1]
                print("\n".join(each.words for each in lacking) or f"{name}: complete")
                continue
            path = run_missing(name, options.results, options.output or options.results, options.data, options.study)
            print(f"{name}: complete" if path is None else f"Wrote {path}", flush=True)
        except (PopRiskError, OSError) as error:
            failed += 1
            print(f"{name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
