"""Time of the four operator sections of a report: an MLP on MNIST, a ResNet-18 on CIFAR-10, 5,000 images of each.

Each task trains on 5,000 images, 20% of them with wrong labels, and records every step; then the sections are computed
as ``poprisk report`` does, on the same device: one sweep of readings for the signal channel and reservoir, the terms of
the test loss and the test displacement, and one for drift and diffusion. A pilot of four steps says how long a step
takes, so that the readings keep to ``--seconds``; if the whole run does not fit, they are of its last steps, and the
result says how long all of it would take.

    python lab/benchmarks/operator_sections.py --data FOLDER --device cuda --output FILE
    python lab/benchmarks/operator_sections.py --tiny --output FILE     # random images, on the CPU
"""

import argparse
import math
import resource
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scale_models import ResNet18
from torch import Tensor, nn

from poprisk import Problem, Run, train
from poprisk._core.autodiff import take_examples
from poprisk._core.store import save_result
from poprisk.operators import evaluation_of
from poprisk.report._analysis.operators import QUERIES, drift_curve
from poprisk.report._analysis.readings import ALLOWANCE, Plan, longest_stretch, plan_readings, readings, step_seconds
from poprisk.runs import replace_labels
from poprisk_lab.data.cifar import cifar10
from poprisk_lab.data.idx import idx_split

KIND = "operator sections"
_WRONG, _PILOT = 0.2, 4


@dataclass(frozen=True)
class Task:
    """A training whose operators are read."""

    name: str
    seconds: float
    """Limit of the readings."""
    steps: int
    batch: int = 100
    rate: float = 1e-3
    examples: int = 5000
    test_examples: int = 1000
    width: int = 64


TASKS = {
    "mnist": Task("mnist", seconds=45.0, steps=250, width=256),
    "resnet": Task("resnet", seconds=100.0, steps=117, batch=128),
}
TINY = {
    "mnist": Task("mnist", 2.0, steps=12, batch=20, examples=60, test_examples=10, width=8),
    "resnet": Task("resnet", 2.0, steps=4, batch=5, examples=10, test_examples=5, width=1),
}


def mlp(width: int) -> nn.Module:
    """784 - width - width / 2 - 10."""
    hidden = nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width // 2), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(width // 2, 10))


def resnet(width: int) -> nn.Module:
    """With batch normalization in training mode: 11.2 M weights at width 64."""
    return ResNet18(10, width)


NETWORKS: dict[str, Callable[[int], nn.Module]] = {"mnist": mlp, "resnet": resnet}


def images(task: Task, folder: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; random ones without a folder."""
    n, m = task.examples, task.test_examples
    if folder is None:
        random = torch.Generator().manual_seed(0)
        shape = (784,) if task.name == "mnist" else (3, 8, 8)
        x, y = torch.randn(n + m, *shape, generator=random), torch.randint(10, (n + m,), generator=random)
        return x[:n], y[:n], x[n:], y[n:]
    if task.name == "mnist":
        split = idx_split(folder / "mnist")
        return split.train_inputs[:n], split.train_labels[:n], split.test_inputs[:m], split.test_labels[:m]
    found = cifar10(folder / "cifar10")
    scaled = [x.float() / 127.5 - 1 for x in (found.train_images[:n], found.test_images[:m])]
    return scaled[0], found.train_labels[:n], scaled[1], found.test_labels[:m]


class Clock:
    """Seconds by the clock and of all threads of the processor, once the device is done."""

    def __init__(self, device: str) -> None:
        self.device, self.figures = device, {}

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """What the work returns; its seconds are kept under the name."""
        self.wait()
        wall, processor = time.perf_counter(), time.process_time()
        found = work()
        self.wait()
        spent = {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}
        self.figures[name] = {key: round(value, 2) for key, value in spent.items()}
        print(name, self.figures[name], flush=True)
        return found

    def wait(self) -> None:
        """For the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def recorded(task: Task, folder: Path | None, device: str) -> tuple[Run, Tensor]:
    """The training, and the labels before some were made wrong."""
    x, y, test, test_labels = images(task, folder)
    given = replace_labels(y, _WRONG, 10, torch.Generator().manual_seed(0)).labels
    make = partial(NETWORKS[task.name], task.width)
    problem = Problem(make, "cross_entropy", x, given, test=(test, test_labels)).to(device)
    rule = partial(torch.optim.AdamW, lr=task.rate)
    return train(problem, rule, task.steps, batch_size=task.batch, progress=False), y.to(device)


def measure(task: Task, folder: Path | None, device: str) -> dict[str, Any]:
    """Times, memory, and what the sections say."""
    clock = Clock(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run, clean = clock.timed("training", lambda: recorded(task, folder, device))
    assert run.problem.test is not None
    test = take_examples(run.problem.test[0], slice(0, QUERIES)), run.problem.test[1][:QUERIES]
    assert isinstance(test[0], Tensor)

    def read(plan: Plan) -> Any:
        return readings(run, plan, evaluation_of(run, torch.float32, start=plan.start), clean, test, None)

    length = min(_PILOT, longest_stretch(run))
    pilot = Plan(run.num_steps - length, length, 0.0, 0.0)
    clock.timed("pilot", lambda: read(pilot))
    slower = clock.figures["pilot"]["seconds"] / (length * step_seconds(run, [length])[0])
    plan = plan_readings(run, task.seconds / ALLOWANCE / slower)
    evaluation = clock.timed("evaluation form", lambda: evaluation_of(run, torch.float32, start=plan.start))
    found = clock.timed("readings", lambda: readings(run, plan, evaluation, clean, test, None))
    drift = clock.timed(
        "drift and diffusion", lambda: drift_curve(run, evaluation, test[0], plan.start, task.seconds / ALLOWANCE)
    )
    true, said = torch.tensor(found.measured), torch.tensor(found.predicted)
    count = run.num_steps - plan.start
    sections = sum(clock.figures[name]["seconds"] for name in ("evaluation form", "readings", "drift and diffusion"))
    return {
        "outputs": run.num_examples * 10,
        "weights": run.num_weights,
        "steps": run.num_steps,
        "batch_losses": [run.losses[0].item(), run.losses[-1].item()],
        "steps_read": count,
        "stretch": plan.stretch,
        "stages": clock.figures,
        "sections_seconds": round(sections, 2),
        "whole_run_seconds": round(sections * run.num_steps / count, 2),
        "measured_over_planned": slower,
        "peak_bytes": _peak(device),
        "form": evaluation.note,
        "beyond_form": evaluation.share,
        "left": {name: pairs[-1] for name, pairs in found.left.items()},
        "dissipated": found.dissipated,
        "directions": found.directions,
        "terms": found.terms,
        "test_losses": found.losses,
        "displacement_error": ((said - true).norm() / true.norm()).item(),
        "drift": None if drift is None else {name: values[-1] for name, values in drift.parts.items()},
        "drift_closure": None if drift is None else drift.closure,
        "drift_errors": drift.errors and {name: values[-1] for name, values in drift.errors.items()} if drift else None,
    }


def _peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure from the command line; a task that fails leaves its error in the result, and the other figures stand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with mnist/ (idx files) and cifar10/ (cifar10.npz)")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=math.inf, help="limit of each task's readings")
    parser.add_argument("--threads", type=int, default=2, help="threads on the CPU")
    parser.add_argument("--tiny", action="store_true", help="random images at a tiny size")
    given = parser.parse_args(arguments)
    if given.data is None and not given.tiny:
        parser.error("--data is needed without --tiny")
    torch.set_num_threads(given.threads)
    sizes = TINY if given.tiny else TASKS
    result: dict[str, Any] = {"device": given.device, "threads": given.threads, "tasks": {}}
    if given.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    for name in given.only:
        task = sizes[name]
        if math.isfinite(given.seconds):
            task = Task(**{**asdict(task), "seconds": given.seconds})
        try:
            result["tasks"][name] = measure(task, given.data, given.device)
        except Exception:
            result["tasks"][name] = {"error": traceback.format_exc(limit=-8)}
        config = {"tiny": given.tiny, **{key: asdict(sizes[key]) for key in given.only}}
        print(f"Wrote {save_result(given.output, KIND, config, result)}", flush=True)
    if any("error" in found for found in result["tasks"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
