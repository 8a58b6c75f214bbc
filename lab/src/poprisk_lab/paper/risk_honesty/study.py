"""``python -m poprisk_lab.paper.risk_honesty.study``: run the settings of a split, one JSON line for each answer.

    python -m poprisk_lab.paper.risk_honesty.study --split tune --folder DIR --limit 20 --methods auto k_fold
    python -m poprisk_lab.paper.risk_honesty.study --split tune report --folder DIR --workers 2 --output FILE

Lines go to ``DIR/SPLIT.jsonl`` as they come, each in one write. What is there is not made again, so that a run that was
interrupted goes on where it was. With ``--output`` the lines of both splits, if they are there, are condensed into a
result with its summary. RULE.md says how answers are judged.
"""

import argparse
import json
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from poprisk._core.store import environment, save_result
from poprisk._core.store.exclusive import append_line
from poprisk.runs import Run
from poprisk_lab.paper.risk_honesty.design import SPLITS, Split, settings
from poprisk_lab.paper.risk_honesty.judging import KIND, summarize
from poprisk_lab.paper.risk_honesty.methods import Method, as_row, available, finite, remembered
from poprisk_lab.paper.risk_honesty.task import Setting, Truth

TRUTH = "truth"
"""Name of the line with the true risk of a setting."""
SECONDS = 300.0
"""Processor time after which a method counts as having no answer."""
Row = Mapping[str, Any]


class TimeLimitError(Exception):
    """A method took more than its time."""


def lines_of(folder: Path, split: str) -> list[dict[str, Any]]:
    """The stored lines of a split; a line that was cut off is left out."""
    path, rows = folder / f"{split}.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def run_setting(setting: Setting, methods: Mapping[str, Method], folder: Path, *, seconds: float = SECONDS) -> int:
    """Make and store what is missing of one setting; returns how many lines were written."""
    path = folder / f"{setting.split}.jsonl"
    done = {row["method"]: row for row in lines_of(folder, setting.split) if row["setting"] == setting.name}
    wanted = [method for method in methods.values() if method.name not in done and method.defined(setting)]
    if not wanted and TRUTH in done:
        return 0
    with warnings.catch_warnings(), remembered(done):
        warnings.simplefilter("ignore")
        run = setting.run()
        if TRUTH not in done:
            _store(path, setting, TRUTH, lambda: _truth(setting, run), seconds)
        for method in wanted:
            _store(path, setting, method.name, lambda method=method: as_row(method.estimate(setting, run)), seconds)
    return len(wanted) + (TRUTH not in done)


def _truth(setting: Setting, run: Run) -> dict[str, Any]:
    kept = setting.kept_truth(run)
    return {
        **_plain(setting.truth(run)),
        "kept": None if kept is None else _plain(kept),
        "training_loss": finite(setting.training_loss(run)),
        "weights": run.num_weights,
    }


def _plain(truth: Truth) -> dict[str, Any]:
    return {key: finite(value) for key, value in asdict(truth).items()}


def _store(path: Path, setting: Setting, name: str, make: Callable[[], Row], seconds: float) -> None:
    """Append a line with the answer, or with the reason why there is none."""
    start = time.process_time()
    try:
        with _limited(seconds):
            found = dict(make())
    except TimeLimitError:
        found = {"value": None, "standard_error": None, "valid": False, "reason": f"no answer within {seconds:g} s"}
    except Exception as error:  # whatever goes wrong is the answer
        said = f"{type(error).__name__}: {error}"
        found = {"value": None, "standard_error": None, "valid": False, "raised": True, "reason": said}
    taken = round(time.process_time() - start, 3)
    about = {"setting": setting.name, "method": name, "seconds": taken, "commit": _commit()}
    append_line(path, json.dumps({**about, **found}))


@cache
def _commit() -> str | None:
    return environment()["commit"]


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeLimitError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _worker(split: Split, index: int, names: Sequence[str], folder: Path) -> str:
    torch.set_num_threads(1)
    setting = settings(split)[index]
    start = time.process_time()
    made = run_setting(setting, chosen_methods(names), folder)
    return f"{setting.name}: {made} answers in {time.process_time() - start:.1f} s"


def chosen_methods(names: Sequence[str]) -> dict[str, Method]:
    """The methods of these names that there are; all of them without names."""
    return {name: method for name, method in available().items() if not names or name in names}


def condensed(folder: Path) -> dict[str, Any]:
    """The stored lines of both splits as one result: every setting with its truth and its answers, and a summary."""
    found: dict[str, Any] = {}
    for split in SPLITS:
        rows = lines_of(folder, split)
        answers: dict[str, dict[str, Any]] = {}
        for row in rows:
            kept = {key: value for key, value in row.items() if key not in ("setting", "method", "commit")}
            answers.setdefault(row["setting"], {})[row["method"]] = kept
        made = [
            {"name": s.name, "factors": s.factors, TRUTH: answers[s.name].pop(TRUTH), "answers": answers[s.name]}
            for s in settings(split)
            if TRUTH in answers.get(s.name, {})
        ]
        if made:
            found[split] = {"commits": _commits(rows), "summary": summarize(made), "settings": made}
    return found


def _commits(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Which commits of the library the answers of each method are from, and how many."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        of_method = found.setdefault(row["method"], {})
        of_method[str(row["commit"])] = of_method.get(str(row["commit"]), 0) + 1
    return found


def run_split(split: Split, names: Sequence[str], folder: Path, limit: int | None, workers: int) -> None:
    """Make what is missing of a split, in so many processes, and say so."""
    count = len(settings(split))
    chosen = list(range(count))[:: max(1, count // limit) if limit else 1][:limit]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        jobs = [pool.submit(_worker, split, i, names, folder) for i in chosen]
        for done, each in enumerate(as_completed(jobs), 1):
            print(f"{done} of {len(jobs)}: {each.result()}", flush=True)


def main() -> None:
    """Parse the options, run, condense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", nargs="*", choices=list(SPLITS), default=[], help="none: only condense")
    parser.add_argument("--folder", type=Path, help="where the lines are stored; default: a temporary folder")
    parser.add_argument("--limit", type=int, help="run only so many settings of a split, spread over the design")
    parser.add_argument("--methods", nargs="*", default=[], help="names of methods; default: all there are")
    parser.add_argument("--workers", type=int, default=1, help="number of processes, one thread each")
    parser.add_argument("--smoke", action="store_true", help="a small version, to see that it works")
    parser.add_argument("--output", type=Path, help="write the condensed result to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        for split in arguments.split:
            run_split(split, arguments.methods, folder, 2 if arguments.smoke else arguments.limit, arguments.workers)
        if arguments.output is not None:
            config = {"rule": "RULE.md", "seeds": {split: levels.seed for split, levels in SPLITS.items()}}
            save_result(arguments.output, KIND, config, condensed(folder))


if __name__ == "__main__":
    main()
