"""CIFAR-10N with augmentation: trainings in which every mean of the weights is measured along the way.

``python -m poprisk_lab.recipes.cifar_run DATA OUTPUT``, with CIFAR-10 and CIFAR-10N in ``DATA``
(:mod:`poprisk_lab.data.cifar`), writes the trainings of :func:`plan` to ``lab/results/recipe_cifar.json``, with
``--plan arms`` those of :func:`arms` to ``lab/results/recipe_cifar_arms.json``: about half an hour each on an H200.
``--workers 12`` trains side by side. It can be interrupted: trainings that are in the file are not repeated.
"""

import argparse
import json
import math
import multiprocessing
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from poprisk._core.store import write_json
from poprisk.errors import HyperparameterError
from poprisk.optim import TailAverage, hold_back
from poprisk_lab.data.cifar import cifar10, human_labels
from poprisk_lab.recipes.openings import OPENINGS, OpenedAdamW

TAILS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
Blocks = dict[str, tuple[Tensor, Tensor]]
Curves = dict[str, list[list[float]]]
_MEAN, _SPREAD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class CifarRun:
    """Settings of one training; ``share`` of the training images is held back, ``evaluations`` are per epoch."""

    labels: str = "worse"
    seed: int = 0
    size: int = 17_500
    net: str = "small"
    epochs: int = 40
    lr: float = 1e-3
    schedule: str = "constant"
    share: float = 0.05
    batch: int = 128
    wd: float = 1e-2
    evaluations: int = 2
    optimizer: str = "adamw"
    """``adamw``, or an opening of :class:`poprisk_lab.recipes.openings.OpenedAdamW`."""
    tails: tuple[float, ...] = TAILS


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch normalization, and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside))
        self.second = nn.Sequential(nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside))
        changed = inside != outside or stride != 1
        short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        self.shortcut = short if changed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of the block."""
        return functional.relu(self.second(functional.relu(self.first(x))) + self.shortcut(x))


def residual_network(blocks: Sequence[int], width: int = 64) -> nn.Sequential:
    """A ResNet for 32 x 32 images; ``(2, 2, 2, 2)`` is ResNet-18, ``(1, 1, 1)`` the small one."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inside = width
    for stage, count in enumerate(blocks):
        for place in range(count):
            layers.append(Block(inside, width * 2**stage, 2 if stage and not place else 1))
            inside = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 10))


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirrored at random, and shifted by up to four pixels."""
    count, device = len(images), images.device
    mirrored = torch.rand(count, device=device, generator=generator) < 0.5
    images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    padded = functional.pad(images, (4, 4, 4, 4))
    across, down = (torch.randint(9, (count, 1), device=device, generator=generator) for _ in range(2))
    side = torch.arange(32, device=device)
    rows = torch.arange(count, device=device)[:, None, None]
    return padded[rows, :, (down + side)[:, :, None], (across + side)[:, None, :]].permute(0, 3, 1, 2)


def measured(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and correctness of each image, in evaluation mode."""
    model.eval()
    with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16):
        outputs = torch.cat([model(part).float() for part in images.split(2000)])
    model.train()
    return functional.cross_entropy(outputs, labels, reduction="none"), (outputs.argmax(1) == labels).float()


def make_optimizer(config: CifarRun, params: Iterator[nn.Parameter], device: str) -> torch.optim.Optimizer:
    """The optimizer of a training.

    Raises:
        HyperparameterError: its name is unknown.
    """
    if config.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=config.lr, weight_decay=config.wd, fused=device == "cuda")
    if config.optimizer not in OPENINGS:
        raise HyperparameterError(f"optimizer must be 'adamw' or one of {OPENINGS}, got {config.optimizer!r}")
    return OpenedAdamW(params, config.lr, config.optimizer, weight_decay=config.wd, seed=config.seed)


def run(config: CifarRun, folder: str, device: str) -> dict[str, Any]:
    """Train once and return the curves of the weights and of every mean."""
    began, data = time.perf_counter(), cifar10(folder)
    given = human_labels(folder, data.train_labels)[config.labels]
    order = torch.randperm(len(given), generator=torch.Generator().manual_seed(1000 + config.seed))[: config.size]
    (kept, kept_labels), (held, held_labels) = hold_back((order, given[order]), config.share, seed=config.seed)
    scale = [torch.tensor(x, device=device).view(1, 3, 1, 1) for x in (_MEAN, _SPREAD)]

    def pixels(images: Tensor) -> Tensor:
        plain = (images.to(device).float() / 255 - scale[0]) / scale[1]
        return plain.to(memory_format=torch.channels_last)

    inputs, labels = pixels(data.train_images[kept]), kept_labels.to(device)
    blocks = {"held": (pixels(data.train_images[held]), held_labels.to(device))}
    blocks["test"] = (pixels(data.test_images), data.test_labels.to(device))
    torch.manual_seed(config.seed)
    model = residual_network((1, 1, 1) if config.net == "small" else (2, 2, 2, 2)).to(device)
    model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = make_optimizer(config, model.parameters(), device)
    average = TailAverage(model, optimizer, tail=config.tails)
    generator = torch.Generator(device).manual_seed(config.seed)
    per_epoch = len(inputs) // config.batch
    total = config.epochs * per_epoch
    marks = {round(per_epoch * k / config.evaluations) for k in range(1, config.epochs * config.evaluations + 1)}
    curves: Curves = {f"{name}_{kind}": [] for name in (*blocks, "half_held") for kind in ("loss", "accuracy")}
    step = 0
    for _ in range(config.epochs):
        for index in torch.randperm(len(inputs), device=device, generator=generator).split(config.batch)[:per_epoch]:
            if config.schedule == "cosine":
                for group in optimizer.param_groups:
                    group["lr"] = config.lr * (1 + math.cos(math.pi * step / total)) / 2
            with torch.autocast(device, torch.bfloat16):
                outputs = model(augmented(inputs[index], generator).contiguous(memory_format=torch.channels_last))
                loss = functional.cross_entropy(outputs.float(), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step in marks:
                _look(model, average, blocks, curves)
    facts = {"labels": f"{config.labels}_label", "held": len(held_labels), "steps": sorted(marks)}
    return {**asdict(config), **facts, **curves, "seconds": round(time.perf_counter() - began, 1)}


def _look(
    model: nn.Module,
    average: TailAverage,
    blocks: dict[str, tuple[Tensor, Tensor]],
    curves: dict[str, list[list[float]]],
) -> None:
    """Append one moment to the curves: the weights themselves, then each mean."""
    rows: dict[str, list[float]] = {name: [] for name in curves}
    for which in (None, *range(len(average.tails))):
        if which is None:
            _measure(model, blocks, rows)
        else:
            with average.swapped(which):
                _measure(model, blocks, rows)
    for name, row in rows.items():
        curves[name].append(row)


def _measure(model: nn.Module, blocks: Blocks, rows: dict[str, list[float]]) -> None:
    found = {name: measured(model, images, labels) for name, (images, labels) in blocks.items()}
    found["half_held"] = (found["held"][0][::2], found["held"][1][::2])
    for name, (losses, correct) in found.items():
        rows[f"{name}_loss"].append(round(losses.mean().item(), 4))
        rows[f"{name}_accuracy"].append(round(correct.mean().item(), 4))


def plan() -> list[CifarRun]:
    """The trainings of RULE.md: a small ResNet on four label sets, ResNet-18 on all images of two.

    >>> len(plan()), plan()[0].labels
    (38, 'worse')
    """
    sets, large = (
        ("worse", "clean", "random1", "aggre"),
        CifarRun(net="resnet18", size=50_000, epochs=30, evaluations=1),
    )
    runs = [CifarRun(labels, seed) for seed in range(3) for labels in sets]
    runs += [CifarRun(labels, seed, schedule="cosine", evaluations=1) for seed in range(3) for labels in sets]
    runs += [CifarRun(labels, lr=lr, evaluations=1) for labels in sets for lr in (3e-4, 3e-3)]
    runs += [replace(large, labels=labels, seed=seed) for seed in range(2) for labels in ("worse", "clean")]
    return runs + [replace(large, labels=labels, schedule="cosine") for labels in ("clean", "worse")]


FEW = (0.1, 0.2, 0.5)
"""The means measured where the first trainings have shown which of them matter."""


def arms() -> list[CifarRun]:
    """Further trainings: gates and their controls, a tuned AdamW with cosine, and longer ones of ResNet-18.

    >>> sorted({each.optimizer for each in arms()})
    ['adamw', 'gate', 'mean', 'random', 'relative', 'shuffled']
    """
    small = CifarRun(evaluations=1, tails=FEW)
    large = replace(small, net="resnet18", size=50_000, epochs=45)
    kinds = ("worse", "clean")
    runs = [replace(large, labels=labels, seed=seed) for seed in range(2) for labels in kinds]
    runs += [replace(large, labels="clean", seed=seed, schedule="cosine", tails=(0.2,)) for seed in range(2)]
    literal = replace(small, lr=0.06, wd=5e-3)
    runs += [
        replace(literal, labels="worse", seed=seed, optimizer=opening)
        for seed in range(3)
        for opening in ("gate", "mean", "shuffled", "random")
    ]
    runs += [replace(literal, labels="clean", seed=seed, optimizer="gate") for seed in range(3)]
    runs += [replace(small, labels=labels, seed=seed, optimizer="relative") for seed in range(3) for labels in kinds]
    settings = ((3e-4, 0.1), (1e-3, 0.1), (3e-3, 0.1), (1e-3, 1.0))
    for labels in kinds:
        runs += [
            replace(small, labels=labels, seed=100, lr=lr, wd=wd, schedule="cosine", tails=(0.2,))
            for lr, wd in settings
        ]
    return runs


PLANS = {"means": plan, "arms": arms}


def main() -> None:
    """All trainings of a plan, stored one by one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("output", type=Path)
    parser.add_argument("--plan", choices=sorted(PLANS), default="means")
    parser.add_argument("--workers", type=int, default=1, help="number of trainings side by side")
    parser.add_argument("--first", type=int, default=0, help="index of the first training of the plan")
    parser.add_argument("--last", type=int, help="index after the last training of the plan")
    given = parser.parse_args()
    runs = json.loads(given.output.read_text(encoding="utf-8"))["runs"] if given.output.exists() else []
    done = [_key(each) for each in runs]
    wanted = [
        config
        for config in PLANS[given.plan]()[given.first : given.last]
        if _key({**asdict(config), "labels": f"{config.labels}_label"}) not in done
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(run, config, given.data, device): config for config in wanted}
        for place, finished in enumerate(as_completed(waiting), start=1):
            runs.append(finished.result())
            print(f"training {place} of {len(wanted)}: {waiting[finished]}", flush=True)
            write_json(given.output, {"versions": versions(), "runs": runs})


def versions() -> dict[str, str]:
    """What the trainings ran on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"torch": torch.__version__, "python": platform.python_version(), "device": device}


def _key(run: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("labels", "seed", "size", "net", "epochs", "lr", "schedule", "share")
    later = {"wd": 1e-2, "optimizer": "adamw"}
    return (*(run[name] for name in names), *(run.get(name, usual) for name, usual in later.items()))


if __name__ == "__main__":
    main()
