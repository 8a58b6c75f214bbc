"""What a sparse recording adds to a training step, and what a dense one does, in one process by turns.

The last line printed is one JSON object. ``overhead`` maps each case to (recorded - plain) / plain in processor time of
all threads, the one that writes included, over interleaved rounds; ``wall_overhead`` is the same by the clock, which on
a shared machine measures the neighbours too.

    python benchmarks/recorder.py
    python benchmarks/recorder.py --output results/recorder.json
"""

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from poprisk._core.store.envelope import environment
from poprisk._core.store.files import write_json
from poprisk.errors import ClosedGateWarning
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.runs._recorder import Recorder

EXAMPLES, CLASSES = 4096, 10
EVERY, BLOCK = 100, 20


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES))


class Loop:
    """A training loop as users write it, with or without a recorder, with or without clipping."""

    def __init__(self, width: int, batch: int, make: type, *, clip: bool) -> None:
        torch.manual_seed(0)
        self.model = perceptron(width)
        self.optimizer = make(self.model.parameters(), lr=1e-3)
        self.inputs, self.labels = torch.randn(EXAMPLES, 64), torch.randint(CLASSES, (EXAMPLES,))
        self.batch, self.clip = batch, clip
        self.recorder: Recorder | None = None

    def advance(self, steps: int) -> tuple[float, float]:
        """Seconds per step, of processor time and by the clock."""
        begin, begin_wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            index = torch.randint(EXAMPLES, (self.batch,))
            if self.recorder is None:
                self._step(index)
            else:
                with self.recorder.step(index) as step:
                    step.loss = self._step(index)
        return (time.process_time() - begin) / steps, (time.perf_counter() - begin_wall) / steps

    def _step(self, index: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.inputs[index]), self.labels[index])
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss


def overhead(
    folder: Path, width: int, batch: int, make: type, every: int, rounds: int, *, clip: bool
) -> dict[str, float]:
    plain, recorded = (Loop(width, batch, make, clip=clip) for _ in range(2))
    name = f"{width}-{batch}-{make.__name__}-{every}-{clip}"
    recorded.recorder = Recorder(
        folder / name, recorded.model, recorded.optimizer, loss="cross_entropy", examples=EXAMPLES, every=every
    )
    for loop in (plain, recorded):
        loop.advance(EVERY)
    totals = {loop: [0.0, 0.0] for loop in (plain, recorded)}
    for _ in range(rounds * EVERY // BLOCK):  # short turns, whole segments in all: noise and writes fall on both alike
        for loop, total in totals.items():
            for i, seconds in enumerate(loop.advance(BLOCK)):
                total[i] += seconds
    recorded.recorder.close()
    (base, wall), (with_recorder, with_wall) = totals.values()
    step_ms = 1e3 * base / (rounds * EVERY // BLOCK)
    return {"overhead": with_recorder / base - 1, "wall_overhead": with_wall / wall - 1, "step_ms": step_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cases = {
        "25k weights, batch 128, AdamW, sparse": (128, 128, torch.optim.AdamW, EVERY, False),
        "25k weights, batch 128, AdamW, clipped, sparse": (128, 128, torch.optim.AdamW, EVERY, True),
        "301k weights, batch 256, SGD, sparse": (512, 256, torch.optim.SGD, EVERY, False),
        "301k weights, batch 256, AdamW, sparse": (512, 256, torch.optim.AdamW, EVERY, False),
        "301k weights, batch 256, PopRiskAdamW, sparse": (512, 256, PopRiskAdamW, EVERY, False),
        "25k weights, batch 128, AdamW, dense": (128, 128, torch.optim.AdamW, 1, False),
    }
    warnings.simplefilter("ignore", ClosedGateWarning)  # labels are noise here, so the gate is right to close
    measured = {}
    for name, (width, batch, make, every, clip) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            measured[name] = overhead(Path(folder), width, batch, make, every, arguments.rounds, clip=clip)
        print(f"{name}: step {measured[name]['step_ms']:.2f} ms, overhead {measured[name]['overhead']:+.1%}")
    result = {
        "benchmark": "recorder",
        "every": EVERY,
        **{key: {name: round(m[key], 4) for name, m in measured.items()} for key in measured[next(iter(cases))]},
        "environment": environment(),
    }
    if arguments.output is not None:
        write_json(arguments.output, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
