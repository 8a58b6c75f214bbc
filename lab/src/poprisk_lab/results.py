"""``python -m poprisk_lab.results NAME ...``: run studies again and store their results under ``lab/results``.

A result comes from one of two places: a study that ``poprisk reproduce`` knows too (:mod:`poprisk_lab.reproductions`),
or a script with options of its own (:data:`SCRIPTS`). ``--list`` names them all. Afterwards ``make pages`` writes the
pages that show the results.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from poprisk.errors import PopRiskError
from poprisk_lab.reproductions import DATA, known, reproduction

ROOT = Path(__file__).resolve().parents[3]
"""The repository."""
RESULTS = ROOT / "lab/results"


@dataclass(frozen=True)
class Script:
    """A result that a script writes.

    Attributes:
        summary: What it measures, in a line.
        command: Arguments of the Python interpreter, run in the repository; ``{output}`` and ``{data}`` are replaced.
        data: The data it needs; empty if none.
        device: Where it must run; empty if anywhere.
        file: Where the result goes below the folder of results, if not ``NAME.json``.
        smoke: Option for a run of a few seconds; empty if there is none.
    """

    summary: str
    command: tuple[str, ...]
    data: str = ""
    device: str = ""
    file: str = ""
    smoke: str = "--smoke"


SCRIPTS: dict[str, Script] = {
    "demo": Script(
        "the demonstration of the README: noisy digits",
        ("-m", "poprisk", "demo", "--output", "{output}"),
        file="demo/result.json",
        smoke="",
    ),
    "operator_readings": Script(
        "the operator sections of a report against exact operators",
        ("-m", "poprisk_lab.theory.operator_readings", "--output", "{output}"),
    ),
    "operators_cpu": Script(
        "leading eigenpairs of W at np = 10,000, certified, and how the cost grows",
        ("benchmarks/operators.py", "--output", "{output}"),
    ),
    "operator_sections_cpu": Script(
        "time of the operator sections of a report at np = 50,000, on two cores",
        ("lab/benchmarks/operator_sections.py", "--data", "{data}", "--only", "mnist", "--output", "{output}"),
        data="mnist",
        smoke="--tiny",
    ),
    "operator_sections_cuda": Script(
        "the same on a GPU, and for ResNet-18",
        ("lab/benchmarks/operator_sections.py", "--data", "{data}", "--device", "cuda", "--output", "{output}"),
        data="mnist",
        device="GPU",
        smoke="--tiny",
    ),
    "clean_lm": Script(
        "gates of strength 1 on clean text, by learning rate",
        ("-m", "poprisk_lab.paper.clean_lm.study", "--output", "{output}"),
    ),
    "clipping": Script(
        "clipped gradients and the gate",
        ("-m", "poprisk_lab.paper.clipping.study", "--output", "{output}"),
    ),
    "learning_rate_guide": Script(
        "which learning rate to use when AdamW is replaced",
        ("-m", "poprisk_lab.paper.learning_rate.study", "--output", "{output}"),
    ),
    "gate_evidence": Script(
        "why the gates differ: turning points and twin runs",
        ("-m", "poprisk_lab.gates.evidence", "--data", "{data}", "--output", "{output}"),
        data="fashion",
    ),
    "risk_honesty": Script(
        "estimates of population risk against the truth, by the rule of paper/risk_honesty/RULE.md",
        ("-m", "poprisk_lab.paper.risk_honesty.study", "--split", "report", "--output", "{output}"),
    ),
    "audits": Script(
        "audits of labels against the truth: counts of wrong labels, and rankings",
        ("-m", "poprisk_lab.audits.study", "--data", "{data}", "--output", "{output}"),
        data="fashion",
    ),
    "mnist_influence": Script(
        "influence of single examples, and mislabelled ones, on MNIST",
        ("lab/benchmarks/influence.py", "--data", "{data}/mnist", "--output", "{output}"),
        data="mnist",
    ),
    "recipes": Script(
        "every optimizer, mean of its weights and moment on every task, by the rule of recipes/RULE.md",
        ("-m", "poprisk_lab.recipes.condense", "--data", "{data}", "--output", "{output}"),
        data="fashion",
        device="GPU",
    ),
    "recipe_public": Script(
        "KeepBest, its refit and the swap by the library's public functions, on the small tasks",
        ("-m", "poprisk_lab.recipes.public", "--data", "{data}", "--output", "{output}"),
        data="fashion",
        smoke="--small",
    ),
    "label_wave": Script(
        "Label Wave, a stopping rule without held-back examples, on digits and the teacher",
        ("-m", "poprisk_lab.recipes.label_wave", "{output}"),
        smoke="",
    ),
    "grokking_adamw": Script(
        "grokking with AdamW at a high learning rate, nothing searched",
        ("-m", "poprisk_lab.paper.grokking.quick_adamw", "{output}"),
    ),
    "recipe_cifar": Script(
        "means of the weights and held-back blocks on CIFAR-10N, by the rule of recipes/RULE.md",
        ("-m", "poprisk_lab.recipes.cifar_run", "{data}/cifar10", "{output}"),
        data="cifar10",
        device="GPU",
        smoke="",
    ),
    "recipe_cifar_arms": Script(
        "the same: longer trainings of ResNet-18, gates and their controls",
        ("-m", "poprisk_lab.recipes.cifar_run", "{data}/cifar10", "{output}", "--plan", "arms"),
        data="cifar10",
        device="GPU",
        smoke="",
    ),
    "at_scale_cifar": Script(
        "CIFAR-10N, ResNet-18: risk along the run, and wrong labels against five folds",
        ("-m", "poprisk_lab.at_scale.cifar", "--data", "{data}/cifar10", "--output", "{output}"),
        data="cifar10",
        device="GPU",
    ),
    "at_scale_lora": Script(
        "influence of 1,000 preference pairs on a language model fine-tuned with LoRA",
        ("-m", "poprisk_lab.at_scale.lora", "--data", "{data}/smollm2", "--output", "{output}"),
        data="smollm2",
        device="GPU",
    ),
    "influence_ranking": Script(
        "influence through some of the parameters beside all of them, against real removals",
        ("-m", "poprisk_lab.at_scale.ranking", "--output", "{output}"),
    ),
    "mutation": Script(
        "which tests notice when the code that the paper table cites is broken",
        ("-m", "poprisk_lab.mutation.survey", "--output", "{output}"),
        smoke="",
    ),
    "swap": Script(
        "PopRiskAdamW in AdamW's place at AdamW's learning rates: noisy digits, three gates",
        ("-m", "poprisk_lab.recipes.swap", "--output", "{output}"),
    ),
    "cost_models_cpu": Script(
        "time and memory of the library's operations, for the page on scaling",
        ("lab/benchmarks/cost_models.py", "--device", "cpu", "--out", "{output}"),
    ),
    "cost_models_gpu": Script(
        "the same on a GPU",
        ("lab/benchmarks/cost_models.py", "--device", "cuda", "--out", "{output}"),
        device="GPU",
    ),
    "scale_gpu": Script(
        "what one GPU can hold and how long it takes",
        ("lab/benchmarks/scale_gpu.py", "--out", "{output}"),
        device="GPU",
    ),
    "scale_jobs": Script(
        "what jobs in a store cost over plain loops",
        ("lab/benchmarks/scale_jobs.py", "--out", "{output}"),
        device="GPU",
        smoke="--tiny",
    ),
    "kernel_cpu": Script(
        "tangent kernels against other packages",
        ("benchmarks/kernel.py", "--output", "{output}"),
        smoke="",
    ),
    "optimizer_step_cpu": Script(
        "an optimizer step against PyTorch's fused AdamW",
        ("benchmarks/optimizer_step.py", "--device", "cpu", "--output", "{output}"),
        smoke="",
    ),
    "optimizer_step_cuda": Script(
        "the same on a GPU",
        ("benchmarks/optimizer_step.py", "--device", "cuda", "--output", "{output}"),
        device="GPU",
        smoke="",
    ),
}
"""Results that no ``poprisk reproduce`` gives."""


def kind_of(path: Path) -> str | None:
    """The kind of a stored result; None if the file is none, or of no kind."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content.get("kind") if isinstance(content, dict) else None


def names() -> list[str]:
    """Every result that can be made again."""
    return [*known(), *SCRIPTS]


def file_of(name: str) -> str:
    """Where the result of this name is stored, below the folder of results."""
    return SCRIPTS[name].file or f"{name}.json" if name in SCRIPTS else f"{name}.json"


def data_of(name: str) -> str:
    """The folder among the data sets that a study needs; empty if it needs none."""
    if name in SCRIPTS:
        return SCRIPTS[name].data
    files = reproduction(name).files
    return "" if files is None else files.folder


def took(path: Path) -> str:
    """How long a stored result took and where, as far as the file says."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "not stored"
    seconds, environment = _seconds(saved), saved.get("environment") or {}
    where = environment.get("gpu") or environment.get("cpu") or "unknown device"
    if seconds < 1:  # put together from parts that had been made before
        return f"time not recorded, {where}"
    return f"{seconds / 60:.0f} min, {where}" if seconds >= 90 else f"{seconds:.0f} s, {where}"


def _seconds(saved: Mapping[str, Any]) -> float:
    """What all parts of a result took together; 0 where none says."""
    result = saved.get("result", {})
    result = result if isinstance(result, dict) else {}
    studies, runs = result.get("studies", {}), result.get("runs", [])
    parts = [*studies.values(), *(runs if isinstance(runs, list) else []), result, saved]
    found = (part.get(key) for part in parts if isinstance(part, dict) for key in ("seconds", "processor_seconds"))
    return math.fsum(value for value in found if isinstance(value, int | float))


def listing(results: Path = RESULTS) -> str:
    """A line for each result: its name, what it shows, the data it needs and the time it took."""
    lines = []
    for name in names():
        summary = SCRIPTS[name].summary if name in SCRIPTS else known()[name].partition(" (needs")[0]
        needs = [f"data/{data_of(name)}"] if data_of(name) else []
        needs += [SCRIPTS[name].device] if name in SCRIPTS and SCRIPTS[name].device else []
        lines.append(f"{name}: {summary}")
        lines.append(f"    needs {' and '.join(needs) or 'no data'}; stored run: {took(results / file_of(name))}")
    return "\n".join(lines)


def make(name: str, results: Path, data: Path, *, smoke: bool = False) -> Path:
    """Run one study and store its result.

    Raises:
        PopRiskError: data are missing, or the study failed.
        subprocess.CalledProcessError: a script failed.
    """
    path = results / file_of(name)
    if name in SCRIPTS:
        script = SCRIPTS[name]
        output = path.parent if script.file else path
        path.parent.mkdir(parents=True, exist_ok=True)
        given = [word.format(output=output.resolve(), data=data.resolve()) for word in script.command]
        subprocess.run(
            [sys.executable, *given, *([script.smoke] if smoke and script.smoke else [])], cwd=ROOT, check=True
        )
        return path
    import_module("poprisk.cli")  # first: it imports the lab's command itself
    from poprisk_lab.reproduce import run_study

    return run_study(name, smoke, results, data if data_of(name) else None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run studies by name. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m poprisk_lab.results", description="Run studies again and store their results."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="results to make again, or all")
    parser.add_argument("--list", action="store_true", help="list the results with the data and the time they need")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results; default: lab/results")
    parser.add_argument("--data", type=Path, default=Path(DATA), help=f"folder with the data sets; default: {DATA}")
    parser.add_argument("--smoke", action="store_true", help="a few seconds each, for a test; needs --output")
    options = parser.parse_args(arguments)
    if options.list:
        print(listing(options.output))
        return 0
    wanted = names() if options.names == ["all"] else options.names
    unknown = [name for name in wanted if name not in names()]
    if unknown or not wanted:
        problem = f"no result is called {', '.join(unknown)}" if unknown else "name the results to make again"
        parser.error(f"{problem}; choose from: {', '.join(names())}, or all (--list says what each needs)")
    if options.smoke and options.output.resolve() == RESULTS.resolve():
        parser.error("--smoke gives numbers that mean nothing: name another folder with --output")
    failed = []
    for name in wanted:
        try:
            print(f"Wrote {make(name, options.output, options.data, smoke=options.smoke)}", flush=True)
        except (PopRiskError, OSError, subprocess.CalledProcessError) as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
