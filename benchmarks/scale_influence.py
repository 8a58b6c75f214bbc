"""Influence of 500 queries on a GPU and on two cores, and ten trainings at once over one."""

import os
import statistics
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poprisk.ensembles import Members, retrain
from poprisk.influence import Unrolled, influence_on, k_fold, sensitivity
from poprisk.problems import Problem
from poprisk.runs import Run, train
from scale_recorder import Recorder, parts, timed


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


def adjoint(r: Recorder) -> None:
    """All 500 queries through the whole run, captured; without graphs; and as it was before, on fewer steps."""
    queries = 12 if r.smoke else 500
    x, y = clusters(queries, 20 if r.smoke else 784, 1)
    x, y = x.to(r.device), y.to(r.device)

    def one(name: str) -> None:
        run = recorded(r.device, name, r.smoke)
        influence_on(Unrolled(run, stop=3), x[:4], y[:4])  # loads what the first call loads
        figures: dict[str, Any] = {"queries": queries, "steps": run.num_steps, "weights": run.num_weights}

        def whole(graphs: bool | None) -> Tensor:
            return influence_on(Unrolled(run, graphs=graphs), x, y)

        captured = [timed(lambda: whole(None), r.device) for _ in range(2)]
        figures["seconds"] = min(seconds for seconds, _ in captured)
        figures["all_seconds"] = [seconds for seconds, _ in captured]
        figures["without_graphs_seconds"], plain = timed(lambda: whole(False), r.device)
        figures["difference_of_graphs"] = float((captured[0][1] - plain).abs().max() / plain.abs().max())
        steps = min(24, run.num_steps - 1)
        usual, sensitivity._GPU_BYTES = sensitivity._GPU_BYTES, sensitivity._CACHE_BYTES
        try:
            window = Unrolled(run, graphs=False, start=run.num_steps - steps)
            window.step(run.num_steps - 1)
            seconds, _ = timed(lambda: influence_on(window, x, y), r.device)
        finally:
            sensitivity._GPU_BYTES = usual
        figures["before_seconds"], figures["before_steps"] = seconds * run.num_steps / steps, steps
        r.note(**{name: figures})

    parts(r, [(name, 8, partial(one, name)) for name in OPTIMIZERS])


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
    if r.smoke:
        sizes = {"20-8-6-10, batch 32": ([8, 6], 32)}

    def one(name: str, hidden: list[int], batch: int) -> None:
        recording, run = timed(lambda: recorded(r.device, "SGD, ReLU", r.smoke, hidden, batch), r.device)
        n = run.num_examples
        ones = torch.ones(1, n)
        folds = torch.ones(10, n)
        folds[torch.arange(n) % 10, torch.arange(n)] = 0
        options = {"progress": False, "memory": 2**33}
        retrain(run, Members(folds), stop=3, **options)  # warm
        rows = []
        for _ in range(3):
            ten, _ = timed(lambda: retrain(run, Members(folds), **options), r.device)
            single, _ = timed(lambda: retrain(run, Members(ones), **options), r.device)
            bare, _ = timed(lambda: bare_loop(run, batch, r.device), r.device)
            rows.append((ten, single, bare))
        ten, single, bare = (statistics.median(column) for column in zip(*rows, strict=True))
        validated, _ = timed(lambda: k_fold(run, 10, **options), r.device)
        figures = {"steps": run.num_steps, "weights": run.num_weights, "ten_seconds": ten, "one_seconds": single}
        figures |= {"bare_loop_seconds": bare, "recording_seconds": recording, "k_fold_seconds": validated}
        figures |= {"ratio_to_one": ten / single, "ratio_to_bare_loop": ten / bare, "k_fold_to_one": validated / single}
        r.note(**{name: figures})

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
