"""A training loop by hand, watched: meters and histograms go to a file, to TensorBoard or to Weights & Biases."""

import argparse
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from poprisk import PopRiskAdamW
from poprisk.integrations.loggers import watch
from poprisk.integrations.sinks import JsonLinesSink, TensorBoardSink, WandbSink
from poprisk.optim import Gate

INPUTS = 5


def points(count: int, wrong: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of two classes, inside and outside a ball of three dimensions; a share of the labels is wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator)
    right = x[:, :3].square().sum(1) > 2.4
    return x, (right ^ (torch.rand(count, generator=generator) < wrong)).long()


def train(alpha: float | Literal["calibrated"], steps: int, sink: JsonLinesSink | TensorBoardSink | WandbSink) -> float:
    """The accuracy on clean labels after training on noisy ones."""
    torch.manual_seed(0)
    x, y = points(1000, wrong=0.3, seed=1)
    model = nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = PopRiskAdamW.paper(
        model.parameters(), lr=1e-2, gate=Gate.paper(alpha=alpha)
    )  # Algorithm 1, whose gate can close
    with watch(optimizer, sink, model=model, every=50):  # the only line that is not about training
        for _ in range(steps):
            batch = torch.randint(len(x), (64,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    x, y = points(4000, wrong=0.0, seed=2)
    return (model(x).argmax(1) == y).float().mean().item()


def cutoff(text: str) -> float | str:
    return text if text == "calibrated" else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sink", choices=("jsonl", "tensorboard", "wandb"), default="jsonl")
    parser.add_argument("--output", type=Path, default=Path("poprisk-logs"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--alpha", type=cutoff, default="calibrated", help="of the gate: calibrated, or a number")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.sink == "wandb":
        sink = WandbSink(mode="offline", dir=options.output, project="poprisk")  # without mode= it is uploaded
        accuracy = train(options.alpha, options.steps, sink)
        sink.close()
        print(f"upload it, if you like: wandb sync {options.output}/wandb/offline-run-*")
    elif options.sink == "tensorboard":
        sink = TensorBoardSink(options.output)
        accuracy = train(options.alpha, options.steps, sink)
        sink.close()
        print(f"look at it: tensorboard --logdir {options.output}")
    else:
        path = options.output / "meters.jsonl"
        path.unlink(missing_ok=True)  # this run begins anew; a resumed one would append
        accuracy = train(options.alpha, options.steps, JsonLinesSink(path))
        show(path)
    print(f"clean test accuracy {100 * accuracy:.1f}%")


def show(path: Path) -> None:
    """The file read back: the meters over time."""
    names = ("mean_gate", "active_fraction", "noise_scale", "population_rate", "training_rate", "self_fit")
    print(f"{path}\n" + " ".join(f"{name:>15}" for name in ("step", *names)))
    for line in JsonLinesSink.read(path)[3::4]:
        values = (line.get(f"poprisk/{name}", float("nan")) for name in names)
        print(" ".join([f"{line['step']:>15}", *(f"{value:>15.4g}" for value in values)]))


if __name__ == "__main__":
    main()
