"""``python -m poprisk_lab.recipes.public --output FILE``: KeepBest, its refit and the swap, by the public functions.

Small tasks of the study are trained one by one with plain PyTorch loops, as a user would (``RULE.md``, third part).
Rows that are in the file already are not trained again.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from poprisk import Gate, KeepBest, PopRiskAdamW, TailAverage, hold_back
from poprisk._core.store import environment, write_json
from poprisk_lab.engine.task import StackedTask
from poprisk_lab.paper.labels.task import LabelTask, label_data
from poprisk_lab.paper.lorenz.task import LorenzTask, reported_states, true_states
from poprisk_lab.paper.teacher.task import TeacherTask
from poprisk_lab.recipes.study_tasks import study_tasks

KIND = "recipe_public"
FAMILIES = ("digits", "teacher", "lorenz", "fashion")
LAST, KEPT, REFIT = "last", "kept", "refit"
GATES = {"snr": Gate(), "soft": Gate("soft"), "hard": Gate("hard")}
"""The default gate, and the other two kinds at their defaults."""
RATES = (1e-4, 1e-3, 1e-2)
_DECAY = 1e-2
Data = tuple[Tensor, Tensor]
Maker = Callable[[Any], Optimizer]


class Residual(nn.Sequential):
    """x + f(x)."""

    def forward(self, input: Tensor) -> Tensor:
        """The input plus what the layers make of it."""
        return input + super().forward(input)


@dataclass(frozen=True)
class PlainTask:
    """A task of one seed as plain tensors and a network.

    Attributes:
        train: Training inputs and targets, as noisy as they are.
        test: Test inputs and targets.
        loss: Loss of outputs and targets.
        make: Makes the network with the seed's initial weights.
        steps: Number of steps.
        batch_size: Number of examples per step.
    """

    train: Data
    test: Data
    loss: Callable[..., Tensor]
    make: Callable[[], nn.Module]
    steps: int
    batch_size: int

    @torch.no_grad()
    def measure(self, model: nn.Module) -> float:
        """Test accuracy for classes, else the mean squared error."""
        outputs = model.eval()(self.test[0])
        model.train()
        if self.loss is F.cross_entropy:
            return float((outputs.argmax(1) == self.test[1]).double().mean())
        return float((outputs - self.test[1]).square().mean())


def plain(task: StackedTask, seed: int) -> PlainTask:
    """The data and the initial weights of a seed, as the study has them.

    >>> one = plain(TeacherTask(train_size=50, test_size=20, width=8, batch_size=10), seed=0)
    >>> one.train[0].shape, len(list(one.make().parameters()))
    (torch.Size([50, 40]), 6)
    """
    initial = task.initial(seed)
    if isinstance(task, LorenzTask):
        noisy, true = reported_states(task, [seed])[0], true_states(task, [seed])[0]
        data = (noisy[:-1], noisy[1:]), (true[:-1], true[1:])
        return PlainTask(*data, F.mse_loss, lambda: _network(initial, nn.SiLU, Residual), task.steps, task.batch_size)
    if isinstance(task, LabelTask):
        found = label_data(task, [seed])
        data = (
            (found.train_pool[found.train_rows[0]], found.given[0]),
            (found.test_pool[found.test_rows[0]], found.test_labels[0]),
        )
    else:
        assert isinstance(task, TeacherTask)
        own = task.data(seed)
        data = (own.inputs, own.labels), (own.test_inputs, own.test_labels)
    return PlainTask(*data, F.cross_entropy, lambda: _network(initial, nn.ReLU), task.steps, task.batch_size)


def _network(
    initial: dict[str, Tensor], activation: type[nn.Module], kind: type[nn.Sequential] = nn.Sequential
) -> nn.Module:
    """Linear layers with the given weights and biases, in the order of their names."""
    layers: list[nn.Module] = []
    for weight, bias in _pairs(initial):
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": bias})
        layers += [linear, activation()]
    return kind(*layers[:-1])


def _pairs(initial: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for layer in dict.fromkeys(name.rsplit(".", 1)[0] for name in initial):
        yield initial[f"{layer}.weight"], initial[f"{layer}.bias"]


def batches(data: Data, batch_size: int, steps: int, seed: int) -> Iterator[Data]:
    """Passes over shuffled examples, each in whole batches, until there were ``steps`` batches."""
    generator, count = torch.Generator().manual_seed(seed), 0
    while True:
        order = torch.randperm(len(data[0]), generator=generator)
        for first, end in pairwise(range(0, len(order) + 1, batch_size)):
            if count == steps:
                return
            yield data[0][order[first:end]], data[1][order[first:end]]
            count += 1


def train(
    one: PlainTask, seed: int, make: Maker, data: Data, steps: int, follow: Callable[[nn.Module, Optimizer], Any]
) -> tuple[nn.Module, Any]:
    """A plain loop; ``follow`` is called once with the network and its optimizer, before the first step."""
    model = one.make()
    optimizer = make(model.parameters())
    follower = follow(model, optimizer)
    for x, y in batches(data, one.batch_size, steps, seed):
        optimizer.zero_grad()
        one.loss(model(x), y).backward()
        optimizer.step()
    return model, follower


def adamw(lr: float = 1e-3) -> Maker:
    """AdamW at a rate."""
    return lambda parameters: AdamW(parameters, lr=lr, weight_decay=_DECAY)


def last(one: PlainTask, seed: int, make: Maker) -> float:
    """The last step of a training on all examples."""
    return one.measure(train(one, seed, make, one.train, one.steps, lambda *_: None)[0])


def kept_and_refit(one: PlainTask, seed: int) -> dict[str, Any]:
    """What KeepBest ends with, and what a second training on all examples, as long as it chose, ends with."""
    kept_data, held = hold_back(one.train, seed=seed)
    model, keeper = train(one, seed, adamw(), kept_data, one.steps, lambda m, o: KeepBest(m, o, held, one.loss))
    risk = keeper.finish()
    found: dict[str, Any] = {
        KEPT: one.measure(model),
        "step": risk.step,
        "held_risk": [risk.value, risk.standard_error],
    }
    steps = max(1, round(risk.step * len(one.train[0]) / len(kept_data[0])))
    model, average = train(one, seed, adamw(), one.train, steps, lambda m, o: TailAverage(m, o, risk.tail or 0.2))
    average.copy_to_model()
    return found | {REFIT: one.measure(model), "refit_steps": steps}


def rows_of(task: StackedTask, seeds: int, swap: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Each training of a task by its name: ``kept/seed`` or ``swap/gate/rate/seed``."""
    for seed in range(seeds):
        yield (
            f"{KEPT}/{seed}",
            lambda s=seed: {LAST: last(plain(task, s), s, adamw())} | kept_and_refit(plain(task, s), s),
        )
    if not swap:
        return
    for lr in RATES:
        makers: dict[str, Maker] = {"adamw": adamw(lr)}
        for name, gate in GATES.items():
            makers[name] = lambda p, g=gate, rate=lr: PopRiskAdamW(p, lr=rate, weight_decay=_DECAY, gate=g)
        for name, make in makers.items():
            for seed in range(min(seeds, 3)):
                yield f"swap/{name}/{lr:g}/{seed}", lambda s=seed, m=make: {LAST: last(plain(task, s), s, m)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what the file lacks."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.recipes.public", description=__doc__)
    parser.add_argument("--output", required=True, type=Path, help="file to write, row by row")
    parser.add_argument("--data", default="data", help="folder with Fashion-MNIST in fashion/")
    parser.add_argument("--only", nargs="*", help="names of tasks, such as digits-20")
    parser.add_argument("--families", nargs="*", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--no-swap", action="store_true", help="leave the swap test out")
    parser.add_argument("--small", action="store_true", help="seconds, for tests")
    given = parser.parse_args(arguments)
    stored = json.loads(given.output.read_text()) if given.output.exists() else {"kind": KIND, "tasks": {}}
    every = study_tasks(given.data, small=given.small)
    for one in (one for family in given.families for one in every.get(family, [])):
        name, task = one.task.name, one.task
        if given.only is not None and name not in given.only:
            continue
        entry = stored["tasks"].setdefault(name, {"task": _facts(task), "rows": {}})
        for row, make in rows_of(task, given.seeds, not given.no_swap):
            if row not in entry["rows"]:
                began = time.perf_counter()
                entry["rows"][row] = make() | {"seconds": round(time.perf_counter() - began, 1)}
                stored["environment"] = environment()
                write_json(given.output, stored)
                print(name, row, entry["rows"][row], flush=True)


def _facts(task: StackedTask) -> dict[str, Any]:
    return {name: value for name, value in asdict(task).items() if name != "folder"}  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
