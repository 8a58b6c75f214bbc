"""The problem and the writer of the runs stored under data/: one dense, one with checkpoints, of each format there was.

    python tests/runs/stored_run.py tests/runs/data/format_N

writes those of the present format, once, when the format has changed; what is stored already is never written again.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

from poprisk import PopRiskAdamW, Problem, Run, train
from poprisk.optim import Gate

STEPS, BATCH, EVERY = 40, 8, 15


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def problem():
    """Three classes of points on a line each, two labels wrong; whole numbers, so that no version draws others."""
    rows = [[(7 * i + 3 * j) % 11 - 5 + 16 * (i % 3 == j) for j in range(3)] for i in range(24)]
    inputs, right = torch.tensor(rows, dtype=torch.float64) / 8, torch.tensor([i % 3 for i in range(24)])
    labels = right.clone()
    labels[4], labels[9] = 0, 2
    return Problem(network, "cross_entropy", inputs, labels, name="stored", test=(inputs, right))


def write(folder: Path) -> list[Run]:
    """Two optimizers, clipping, accumulation, a schedule: what a format has to hold."""
    made = Problem.build("stored_run:problem")
    options = {"batch_size": BATCH, "accumulate": 2, "clip_norm": 1.0, "dtype": torch.float64, "progress": False}
    gated, plain = (
        partial(PopRiskAdamW, gate=Gate("soft", strength=1.0), weight_decay=0.01, lr=0.3),
        partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.01),
    )
    return [
        train(made, gated, STEPS, path=folder / "dense", **options),
        train(made, plain, STEPS, path=folder / "sparse", every=EVERY, schedule=lambda k: 1 / (1 + k), **options),
    ]


if __name__ == "__main__":
    for run in write(Path(sys.argv[1])):
        print(run)
