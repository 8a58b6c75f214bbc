"""``python -m poprisk_lab.paper.risk_honesty.study``: run the settings of a split, one JSON line for each answer.

    python -m poprisk_lab.paper.risk_honesty.study --split tune --folder DIR --limit 20 --methods auto k_fold
    python -m poprisk_lab.paper.risk_honesty.study --split report --folder DIR --processes 14 --minutes 9 --output FILE
    python -m poprisk_lab.paper.risk_honesty.study --split report --folder DIR --scheduler tcp://10.0.0.5:8786

Lines go to ``DIR/SPLIT.jsonl`` as they come, each in one write. What is there is not made again, so that a run that was
interrupted, or ended after ``--minutes``, goes on where it was; lines made elsewhere can be appended. With ``--output``
the lines of each split that is there are condensed into a result with its summary, and a split whose lines are not
there stays as it is in the result. RULE.md says how answers are judged.
"""

import argparse
import json
import math
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from poprisk._core.cluster import current_cluster
from poprisk._core.store import append_line, environment, load_result, save_result
from poprisk.runs import Run
from poprisk_lab.paper.risk_honesty.design import SPLITS, Split, settings
from poprisk_lab.paper.risk_honesty.judging import KIND, summarize
from poprisk_lab.paper.risk_honesty.methods import Method, as_row, available, finite, remembered
from poprisk_lab.paper.risk_honesty.on_cluster import settings_on_cluster
from poprisk_lab.paper.risk_honesty.task import Setting, Truth
from poprisk_lab.scheduler import on_scheduler

TRUTH = "truth"
"""Name of the line with the true risk of a setting."""
SECONDS = 300.0
"""Processor time after which a method counts as having no answer."""
_SLOW = ("transformer", "cnn_batchnorm", "cnn", "gru")
Row = Mapping[str, Any]


class TimeLimitError(Exception):
    """A method took more than its time."""


class EndedError(Exception):
    """The time for the whole study is over."""


def lines_of(folder: Path, split: str) -> list[dict[str, Any]]:
    """The stored lines of a split; a line that was cut off is left out."""
    path, rows = folder / f"{split}.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def run_setting(
    setting: Setting,
    methods: Mapping[str, Method],
    folder: Path,
    *,
    seconds: float = SECONDS,
    end: float = math.inf,
    commit: str | None = None,
) -> int:
    """Make and store what is missing of one setting; returns how many lines were written.

    Args:
        setting: The setting.
        methods: The methods to ask.
        folder: Where lines are stored.
        seconds: Processor time of one method.
        end: Time (of ``time.time``) at which to stop; what is being made then is not stored.
        commit: The commit of the library; default: that of the working tree.
    """
    path = folder / f"{setting.split}.jsonl"
    done = {row["method"]: row for row in lines_of(folder, setting.split) if row["setting"] == setting.name}
    wanted = [method for method in methods.values() if method.name not in done and method.defined(setting)]
    if not wanted and TRUTH in done:
        return 0
    calls: dict[str, Callable[[Run], Row]] = {} if TRUTH in done else {TRUTH: lambda run: _truth(setting, run)}
    calls |= {each.name: lambda run, each=each: as_row(each.estimate(setting, run)) for each in wanted}
    written, about = 0, {"setting": setting.name, "commit": commit or _commit()}
    with warnings.catch_warnings(), remembered(done), suppress(EndedError):
        warnings.simplefilter("ignore")
        with _ending(end):
            run = setting.run()
            for name, call in calls.items():
                _store(path, {**about, "method": name}, lambda call=call: call(run), seconds)
                written += 1
    return written


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


def _store(path: Path, about: Row, make: Callable[[], Row], seconds: float) -> None:
    """Append a line with the answer, or with the reason why there is none."""
    start = time.process_time()
    try:
        with _limited(seconds):
            found = dict(make())
    except EndedError:
        raise
    except TimeLimitError:
        found = {"value": None, "standard_error": None, "valid": False, "reason": f"no answer within {seconds:g} s"}
    except Exception as error:  # whatever goes wrong is the answer
        said = f"{type(error).__name__}: {error}"
        found = {"value": None, "standard_error": None, "valid": False, "raised": True, "reason": said}
    append_line(path, json.dumps({**about, "seconds": round(time.process_time() - start, 3), **found}))


@cache
def _commit() -> str | None:
    return environment()["commit"]


def _limited(seconds: float) -> AbstractContextManager[None]:
    """Stop after so much processor time."""
    return _alarm(signal.SIGPROF, signal.ITIMER_PROF, seconds, TimeLimitError)


def _ending(end: float) -> AbstractContextManager[None]:
    """Stop at this time."""
    left = 0.0 if math.isinf(end) else max(end - time.time(), 1e-3)
    return _alarm(signal.SIGALRM, signal.ITIMER_REAL, left, EndedError)


@contextmanager
def _alarm(which: signal.Signals, timer: int, seconds: float, error: type[Exception]) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise error

    before = signal.signal(which, stop)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(which, before)


def _worker(split: Split, index: int, names: Sequence[str], folder: Path, end: float, commit: str | None) -> str:
    torch.set_num_threads(1)
    setting = settings(split)[index]
    start = time.process_time()
    made = run_setting(setting, chosen_methods(names), folder, end=end, commit=commit)
    return f"{setting.name}: {made} answers in {time.process_time() - start:.1f} s"


def chosen_methods(names: Sequence[str]) -> dict[str, Method]:
    """The methods of these names that there are; all of them without names."""
    return {name: method for name, method in available().items() if not names or name in names}


def condensed(folder: Path) -> dict[str, Any]:
    """The stored lines of each split as one result: every setting with its truth and its answers, and a summary."""
    found = {split: _condensed(split, lines_of(folder, split)) for split in SPLITS}
    return {name: each for name, each in found.items() if each["settings"]}


def _condensed(split: Split, lines: Sequence[Row]) -> dict[str, Any]:
    rows = list({(row["setting"], row["method"]): row for row in lines}.values())
    answers: dict[str, dict[str, Any]] = {}
    for row in rows:
        kept = {key: value for key, value in row.items() if key not in ("setting", "method", "commit")}
        answers.setdefault(row["setting"], {})[row["method"]] = kept
    made = [
        {"name": s.name, "factors": s.factors, TRUTH: answers[s.name].pop(TRUTH), "answers": answers[s.name]}
        for s in settings(split)
        if TRUTH in answers.get(s.name, {})
    ]
    return {"commits": _commits(rows), "summary": summarize(made), "settings": made}


def _commits(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Which commits of the library the answers of each method are from, and how many."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        of_method = found.setdefault(row["method"], {})
        of_method[str(row["commit"])] = of_method.get(str(row["commit"]), 0) + 1
    return found


def run_split(split: Split, chosen: Sequence[int], options: argparse.Namespace, folder: Path) -> None:
    """Make what is missing of some settings of a split, those of the slowest models first, and say so."""
    made = settings(split)
    slowest = sorted(chosen, key=lambda i: (made[i].model not in _SLOW, -made[i].steps * made[i].batch))
    end = math.inf if options.minutes is None else time.time() + 60 * options.minutes
    if current_cluster() is not None:
        _run_on_cluster(split, slowest, options, folder, end)
        return
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        rest = (options.methods, folder, end, options.commit)
        jobs = [pool.submit(_worker, split, i, *rest) for i in slowest]
        for done, each in enumerate(as_completed(jobs), 1):
            print(f"{done} of {len(jobs)}: {each.result()}", flush=True)


def _run_on_cluster(split: Split, chosen: Sequence[int], options: argparse.Namespace, folder: Path, end: float) -> None:
    """The same as tasks of the enclosing cluster; lines are stored here, as each setting is done."""
    known, rows = settings(split), lines_of(folder, split)
    given = [(i + 1, [json.dumps(row) for row in rows if row["setting"] == known[i].name]) for i in chosen]
    made = settings_on_cluster(split, given, options.methods, end, options.commit)
    for done, (place, lines) in enumerate(made, 1):
        for line in lines:
            append_line(folder / f"{split}.jsonl", line)
        print(f"{done} of {len(given)}: {known[chosen[place]].name}: {len(lines)} answers", flush=True)


def chosen_settings(split: Split, numbers: Sequence[int], limit: int | None) -> list[int]:
    """Indices of the settings of these numbers, or of so many spread over the design, or of all.

    >>> chosen_settings("tune", [3], None), len(chosen_settings("tune", [], 5)), len(chosen_settings("tune", [], None))
    ([2], 5, 112)
    """
    count = len(settings(split))
    if numbers:
        return [number - 1 for number in numbers]
    return list(range(count))[:: max(1, count // limit) if limit else 1][:limit]


def main() -> None:
    """Parse the options, run, condense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", nargs="*", choices=list(SPLITS), default=[], help="none: only condense")
    parser.add_argument("--folder", type=Path, help="where the lines are stored; default: a temporary folder")
    parser.add_argument("--limit", type=int, help="run only so many settings of a split, spread over the design")
    parser.add_argument("--settings", nargs="*", type=int, default=[], help="run only the settings of these numbers")
    parser.add_argument("--methods", nargs="*", default=[], help="names of methods; default: all there are")
    parser.add_argument("--processes", type=int, default=1, help="number of processes, one thread each")
    parser.add_argument("--scheduler", help="address of a Dask scheduler, whose workers do the settings instead")
    parser.add_argument("--minutes", type=float, help="end after so long; a later call goes on")
    parser.add_argument("--commit", help="the commit of the library, where there is no git")
    parser.add_argument("--smoke", action="store_true", help="a small version, to see that it works")
    parser.add_argument("--output", type=Path, help="write the condensed result to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, on_scheduler(options.scheduler):
        folder = options.folder or Path(temporary)
        for split in options.split:
            limit = 2 if options.smoke else options.limit
            run_split(split, chosen_settings(split, options.settings, limit), options, folder)
        if options.output is not None:
            config = {"rule": "RULE.md", "seeds": {split: levels.seed for split, levels in SPLITS.items()}}
            before = load_result(options.output, KIND)["result"] if options.output.exists() else {}
            save_result(options.output, KIND, config, {**before, **condensed(folder)})


if __name__ == "__main__":
    main()
