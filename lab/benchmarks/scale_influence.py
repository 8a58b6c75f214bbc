"""Influence of 500 queries on a GPU and on two cores, and ten trainings at once over one."""

import os
import statistics
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from scale_recorder import Recorder, parts, synchronize, timed
from torch import Tensor, nn
from torch.nn import functional as F

from poprisk.risk._influence import linearized_run
from poprisk.risk._influence.matrix import influence_on
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._k_fold import k_fold
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import retrain
from poprisk.runs._problem import Problem
from poprisk.runs._run import Run
from poprisk.runs._training import train


def perceptron(inputs: int, hidden: list[int], outputs: int = 10) -> nn.Module:
    sizes, layers = [inputs, *hidden], []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def clusters(n: int, inputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images around ten centres, a fifth of the labels drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.rand(10, inputs, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(10, (n,), generator=generator)
    x = (centres[labels] + 0.4 * torch.randn(n, inputs, generator=generator)).clamp(0, 1)
    wrong = torch.rand(n, generator=generator) < 0.2
    return x, torch.where(wrong, torch.randint(10, (n,), generator=generator), labels)


OPTIMIZERS = {
    "SGD, ReLU": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adam, ReLU": partial(torch.optim.Adam, lr=1e-3),
}


def recorded(device: str, name: str, smoke: bool, hidden: list[int] | None = None, batch: int = 64) -> Run:
    """The run of the influence benchmark: 5 000 images, 784-128-64-10, three epochs of batches of 64."""
    n, inputs = (192, 20) if smoke else (5000, 784)
    x, y = clusters(n, inputs, 0)
    arguments = {"inputs": inputs, "hidden": hidden or ([8, 6] if smoke else [128, 64])}
    problem = Problem(perceptron, "cross_entropy", x, y, arguments=arguments).to(device)
    steps = 3 * (n // batch) or 3
    return train(problem, OPTIMIZERS[name], steps, batch_size=min(batch, n), dtype=torch.float32, progress=False)


def load(r: Recorder) -> None:
    """What a first training and its analysis load (modules, CUDA's libraries) is no part of any figure."""
    synchronize(r.device)
    r.reached("the device is there")
    run = recorded(r.device, "SGD, ReLU", smoke=True)
    r.reached("a small run was recorded")
    unrolled = Unrolled(run)
    influence_on(unrolled, unrolled.inputs[:4], unrolled.targets[:4])
    r.reached("and analysed")


def adjoint(r: Recorder) -> None:
    """All 500 queries through the whole run, captured; then without graphs; and as it was before, on fewer steps."""
    queries = 12 if r.smoke else 500
    x, y = clusters(queries, 20 if r.smoke else 784, 1)
    x, y = x.to(r.device), y.to(r.device)
    load(r)
    runs: dict[str, Run] = {}
    found: dict[str, Tensor] = {}

    def note(name: str, **figures: Any) -> None:
        r.note(**{name: r.figures.get(name, {}) | figures})

    def captured(name: str) -> None:
        recording, run = timed(lambda: recorded(r.device, name, r.smoke), r.device)
        r.reached(f"{name}: recorded in {recording:.2f} s")
        runs[name] = run
        seconds, _ = timed(lambda: influence_on(Unrolled(run, stop=3), x[:4], y[:4]), r.device)  # loads what it loads
        r.reached(f"{name}: three steps for four queries in {seconds:.2f} s")
        note(name, queries=queries, steps=run.num_steps, weights=run.num_weights, recording_seconds=recording)
        every: list[float] = []
        for _ in range(2):
            seconds, found[name] = timed(lambda: influence_on(Unrolled(run), x, y), r.device)
            every.append(seconds)
            note(name, seconds=min(every), all_seconds=every)
            r.reached(f"{name}: all queries in {seconds:.2f} s")

    def plain(name: str) -> None:
        run = runs[name]
        seconds, matrix = timed(lambda: influence_on(Unrolled(run, graphs=False), x, y), r.device)
        r.reached(f"{name}: without graphs in {seconds:.2f} s")
        difference = float((found[name] - matrix).abs().max() / matrix.abs().max())
        note(name, without_graphs_seconds=seconds, difference_of_graphs=difference)

    def before(name: str) -> None:
        run = runs[name]
        steps = min(24, run.num_steps - 1)
        usual, linearized_run._GPU_BYTES = linearized_run._GPU_BYTES, linearized_run._CACHE_BYTES
        try:
            window = Unrolled(run, graphs=False, start=run.num_steps - steps)
            window.step(run.num_steps - 1)
            seconds, _ = timed(lambda: influence_on(window, x, y), r.device)
        finally:
            linearized_run._GPU_BYTES = usual
        r.reached(f"{name}: {steps} steps as before in {seconds:.2f} s")
        note(name, before_seconds=seconds * run.num_steps / steps, before_steps=steps)

    parts(r, [(f"{name}, captured", 6, partial(captured, name)) for name in OPTIMIZERS])
    parts(r, [(f"{name}, without graphs", 6, partial(plain, name)) for name in found])
    parts(r, [(f"{name}, before", 4, partial(before, name)) for name in found])


def adjoint_cpu(r: Recorder) -> None:
    """The same on two cores, the last steps only, scaled to all of them."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(2)
    queries = 12 if r.smoke else 500
    x, y = clusters(queries, 20 if r.smoke else 784, 1)

    def one(name: str) -> None:
        run = recorded("cpu", name, r.smoke)
        steps = 3 if r.smoke else 12
        window = Unrolled(run, start=run.num_steps - steps)
        window.step(run.num_steps - 1)  # optimizer states are there
        influence_on(Unrolled(run, start=run.num_steps - 1), x[:20], y[:20])
        seconds, _ = timed(lambda: influence_on(window, x, y), "cpu")
        figures = {"cores": len(cores), "threads": torch.get_num_threads(), "queries": queries, "timed_steps": steps}
        r.note(**{name: figures | {"timed_seconds": seconds, "seconds": seconds * run.num_steps / steps}})

    parts(r, [(name, 8, partial(one, name)) for name in OPTIMIZERS])


def ten_folds(r: Recorder) -> None:
    """Ten trainings stacked, over one: by the same code, as `train` records it, and as a bare loop."""
    sizes = {"784-128-64-10, batch 64": ([128, 64], 64), "784-1024-1024-10, batch 128": ([1024, 1024], 128)}
    load(r)
    if r.smoke:
        sizes = {"20-8-6-10, batch 32": ([8, 6], 32)}

    def one(name: str, hidden: list[int], batch: int) -> None:
        recording, run = timed(lambda: recorded(r.device, "SGD, ReLU", r.smoke, hidden, batch), r.device)
        r.reached(f"{name}: recorded in {recording:.2f} s")
        n = run.num_examples
        ones = torch.ones(1, n)
        folds = torch.ones(10, n)
        folds[torch.arange(n) % 10, torch.arange(n)] = 0
        options = {"progress": False, "memory": 2**33}
        warm, _ = timed(lambda: retrain(run, Members(folds), stop=5, **options), r.device)
        r.reached(f"{name}: five steps of ten members in {warm:.2f} s")
        figures: dict[str, Any] = {"steps": run.num_steps, "weights": run.num_weights, "recording_seconds": recording}
        rows = []
        while len(rows) < 3 and (not rows or r.left() > 2 * sum(rows[-1])):
            ten, _ = timed(lambda: retrain(run, Members(folds), **options), r.device)
            r.reached(f"{name}: ten members in {ten:.2f} s")
            single, _ = timed(lambda: retrain(run, Members(ones), **options), r.device)
            bare, _ = timed(lambda: bare_loop(run, batch, r.device), r.device)
            r.reached(f"{name}: one in {single:.2f} s, a bare loop in {bare:.2f} s")
            rows.append((ten, single, bare))
            ten, single, bare = (statistics.median(column) for column in zip(*rows, strict=True))
            figures |= {"rounds": len(rows), "ten_seconds": ten, "one_seconds": single, "bare_loop_seconds": bare}
            figures |= {"ratio_to_one": ten / single, "ratio_to_bare_loop": ten / bare, "reached": ten <= 3 * single}
            r.note(**{name: figures})
        validated, _ = timed(lambda: k_fold(run, 10, **options), r.device)
        r.note(**{name: figures | {"k_fold_seconds": validated, "k_fold_to_one": validated / figures["one_seconds"]}})

    parts(r, [(name, 6, partial(one, name, *size)) for name, size in sizes.items()])


def bare_loop(run: Run, batch: int, device: str) -> None:
    """The same training as anybody would write it."""
    problem = run.problem
    module = run.module()
    optimizer = OPTIMIZERS["SGD, ReLU"](module.parameters())
    assert isinstance(problem.inputs, Tensor)
    batches = [run.batch(k).to(device) for k in range(run.num_steps)]
    for index in batches:
        optimizer.zero_grad()
        F.cross_entropy(module(problem.inputs[index]), problem.targets[index]).backward()
        optimizer.step()
