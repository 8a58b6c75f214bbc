"""Time of a report on two cores, part by part, and the sections it lacks: the run of the demo and the README's model.

The time is that of the analysis, the training left out; the page itself is written in less than a second.

    python lab/benchmarks/report_time.py --output lab/results/report_time.json
"""

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from poprisk import Problem, Run, analyze, train
from poprisk._core.store import save_result
from poprisk.cli._demonstration.recorded import REPORT_TRAININGS, record_demo, report_budget
from poprisk.cli._demonstration.study import DemoConfig
from poprisk.report._drawing.sections import sections

KIND = "report time"
README = Path(__file__).resolve().parents[2] / "README.md"


def demo(folder: Path) -> tuple[Run, dict[str, Any]]:
    """The run of `make demo`, with the options of its report."""
    config = DemoConfig()
    return record_demo(config, folder / "demo"), {"budget": report_budget(config), "retrain": REPORT_TRAININGS}


def readme(folder: Path) -> tuple[Run, dict[str, Any]]:
    """The README's task.py, as `poprisk train task.py:make_task --epochs 100` trains it."""
    found = re.search(r"```python\n(# task.py.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (folder / "task.py").write_text(found[1], encoding="utf-8")
    problem = Problem.build(f"{folder / 'task.py'}:make_task")
    rule = partial(torch.optim.AdamW, lr=1e-3)
    run = train(problem, rule, 1700, batch_size=32, hold_back=0.05, path=folder / "readme", progress=False)
    return run, {}


RUNS: dict[str, Callable[[Path], tuple[Run, dict[str, Any]]]] = {"demo": demo, "readme": readme}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Seconds of each part, by the clock and of the processor, and what the page lacks."""
    run, options = RUNS[name](folder)
    marks: list[tuple[str, float, float]] = []

    def note(part: str) -> None:
        marks.append((part, time.perf_counter(), time.process_time()))
        print(name, *marks[-1], flush=True)

    note("begin")
    found = analyze(run, progress=note, **options)
    note("end")
    parts = {
        before[0]: {"seconds": round(after[1] - before[1], 2), "processor_seconds": round(after[2] - before[2], 2)}
        for before, after in pairwise(marks[1:])
    }
    return {
        "steps": run.num_steps,
        "outputs": None if found.window is None else found.window.outputs,
        "steps_read": None if found.window is None else run.num_steps - found.window.readings.start,
        "seconds": round(marks[-1][1] - marks[0][1], 2),
        "processor_seconds": round(marks[-1][2] - marks[0][2], 2),
        "parts": parts,
        "missing": [section.title for section in sections(found) if section.missing],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    result: dict[str, Any] = {"threads": given.threads}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only:
            result[name] = measure(name, Path(folder))
            print(f"Wrote {save_result(given.output, KIND, {'threads': given.threads}, result)}", flush=True)


if __name__ == "__main__":
    main()
