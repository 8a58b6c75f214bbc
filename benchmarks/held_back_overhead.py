"""Time of a training with KeepBest over the time of the same training without it, in alternation.

The last line printed is one JSON object; its ``ratio`` is the median over the rounds. On the CPU it trains the demo's
network on digits; on a GPU, a language model with the 494 M parameters of Qwen2.5-0.5B, in bfloat16.

    python benchmarks/held_back_overhead.py --device cpu
    python benchmarks/held_back_overhead.py --device cuda --output held_back_overhead_cuda.json
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from poprisk import KeepBest, TailAverage, hold_back
from poprisk._core.store.envelope import environment
from poprisk._core.store.files import write_json

SIZES = {
    "full": {"vocabulary": 151_936, "width": 896, "layers": 24, "heads": 14, "shared": 2, "hidden": 4864},
    "tiny": {"vocabulary": 64, "width": 32, "layers": 2, "heads": 4, "shared": 2, "hidden": 64},
}


class Layer(nn.Module):
    """Grouped-query attention and a gated perceptron."""

    def __init__(self, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, shared * self.size) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        y = self.first(x)
        q, k, v = (part(y).unflatten(2, (-1, self.size)).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    """A decoder with tied embeddings, of the shapes of Qwen2.5-0.5B."""

    def __init__(self, vocabulary: int, width: int, layers: int, **sizes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.Sequential(*(Layer(width, **sizes) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        return functional.linear(self.norm(self.layers(self.embed(tokens))), self.embed.weight)


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def demo(seed: int = 0) -> tuple[Callable[[], nn.Module], TensorDataset, Callable, int, float]:
    """The demo's network and 1,000 digits, 40% of the labels wrong."""
    from poprisk.runs import digits_split, replace_labels

    split = digits_split(seed, 1000)
    labels = replace_labels(split.train_labels, 0.4, 10, torch.Generator().manual_seed(seed)).labels
    sizes = (64, 512, 512, 10)

    def make() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2]), nn.ReLU(), nn.Linear(*sizes[2:])
        )

    return make, TensorDataset(split.train_inputs.float(), labels), functional.cross_entropy, 100, 0.05


def language(size: str, device: str) -> tuple[Callable[[], nn.Module], TensorDataset, Callable, int, float]:
    """Random tokens: the time does not depend on them."""
    shape, length = SIZES[size], 1024 if size == "full" else 16
    tokens = torch.randint(shape["vocabulary"], (640, length + 1), generator=torch.Generator().manual_seed(0))

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Language(**shape).to(device)

    return make, TensorDataset(tokens[:, :-1], tokens[:, 1:]), token_loss, 8, 0.05


class Training:
    """One of the two trainings: with or without KeepBest."""

    def __init__(self, task: tuple, device: str, recipe: str) -> None:
        make, data, self.loss, self.batch, share = task
        (x, y), held = hold_back(data.tensors, share)
        self.x, self.y, self.device = x.to(device), y.to(device), device
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=device == "cuda" or None)
        self.keeper = None
        if recipe == "keep best":
            self.keeper = KeepBest(self.model, self.optimizer, held, self.loss)
        elif recipe == "average":
            TailAverage(self.model, self.optimizer)
        self.generator = torch.Generator().manual_seed(0)

    def advance(self, steps: int) -> float:
        """Seconds for a number of steps; on the CPU, of this process, whatever else the machine does."""
        clock = time.perf_counter if self.device == "cuda" else time.process_time
        self._wait()
        begin = clock()
        for _ in range(steps):
            index = torch.randint(len(self.x), (self.batch,), generator=self.generator).to(self.device)
            self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext():
                loss = self.loss(self.model(self.x[index]), self.y[index])
            loss.backward()
            self.optimizer.step()
        self._wait()
        return clock() - begin

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--task", choices=["demo", "full", "tiny"], default=None, help="default: demo on CPU, full on CUDA"
    )
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None, help="steps of each training in a round")
    parser.add_argument("--output", type=Path, default=None, help="also write the result to this file")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    name = args.task or ("full" if cuda else "demo")
    rounds, steps = args.rounds or (5 if cuda else 15), args.steps or (80 if cuda else 100)
    task = demo() if name == "demo" else language(name, args.device)
    trainings = {recipe: Training(task, args.device, recipe) for recipe in ("plain", "average", "keep best")}
    for each in trainings.values():
        each.advance(3)
    rows = []
    for i in range(rounds):
        order = list(trainings) if i % 2 == 0 else list(trainings)[::-1]
        times = {recipe: trainings[recipe].advance(steps) / steps for recipe in order}
        rows.append(times)
        print({recipe: f"{1e3 * seconds:.3f} ms" for recipe, seconds in times.items()}, flush=True)
    ratios = {
        recipe: statistics.median(row[recipe] / row["plain"] for row in rows) for recipe in ("average", "keep best")
    }
    keeper = trainings["keep best"].keeper
    result = {
        "task": name,
        "parameters": sum(p.numel() for p in trainings["plain"].model.parameters()),
        "milliseconds": {recipe: 1e3 * statistics.median(row[recipe] for row in rows) for recipe in trainings},
        "ratio": ratios["keep best"],
        "ratio_of_the_average_alone": ratios["average"],
        "ratios": [round(row["keep best"] / row["plain"], 4) for row in rows],
        "measurements": len(keeper.curve.moments),
        "steps": keeper.steps,
        "environment": environment(),
    }
    if args.output is not None:
        write_json(args.output, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
