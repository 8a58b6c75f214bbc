"""How well calls announce what they cost: estimate over actual time, peak memory under a limit, the longest silence.

A perceptron with 5 M weights is trained for a few steps on 5,000 examples; then each call runs in a process of its own,
whose stderr is read as it comes. The last line printed is one JSON object.

    python benchmarks/announced_costs.py
    python benchmarks/announced_costs.py --calls population_risk --memory 3 --steps 20
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

CALLS = {
    "population_risk": "from poprisk import population_risk; print(population_risk(run, memory=memory))",
    "audit": "from poprisk import audit; print(audit(run, memory=memory))",
    "analyze": "from poprisk import analyze; print(analyze(run, memory=memory).left_out)",
    "write_report": "from poprisk import write_report; print(write_report(run, page, memory=memory))",
}
_PREPARED = """
import sys, torch
from poprisk import Run
sys.path.insert(0, {folder!r})
from announced_costs import problem
run, page, memory = Run.load({run!r}, problem=problem({examples}, {width})), {page!r}, {memory}
print("ready", file=sys.stderr, flush=True)
{call}
"""


def problem(examples: int, width: int) -> Any:
    """Ten classes of random directions with noise, a tenth of the labels wrong, and a perceptron."""
    import torch
    from torch import nn

    from poprisk import Problem

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (examples + 200,), generator=generator)
    centres = torch.randn(10, 784, generator=generator)
    inputs = centres[labels] + 4 * torch.randn(len(labels), 784, generator=generator)
    wrong = torch.rand(len(labels), generator=generator) < 0.1
    labels = torch.where(wrong, torch.randint(10, labels.shape, generator=generator), labels)

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Linear(784, width), nn.GELU(), nn.Linear(width, 4 * width // 5), nn.GELU(), nn.Linear(4 * width // 5, 10)
        )

    rest = inputs[:examples], labels[:examples]
    return Problem(network, "cross_entropy", *rest, test=(inputs[examples:], labels[examples:]))


def measured(name: str, run: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run one call in a process, and read what it says and when."""
    about = {"folder": str(Path(__file__).parent), "run": str(run), "page": str(run.parent / "page.html")}
    code = _PREPARED.format(
        **about, examples=args.examples, width=args.width, memory=args.memory * 10**9, call=CALLS[name]
    )
    started = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert started.stderr is not None
    killer = threading.Timer(args.limit_s, started.kill)
    killer.start()
    lines: list[tuple[float, str]] = []
    for line in started.stderr:
        lines.append((time.perf_counter(), line.rstrip()))
        print(f"  {line.rstrip()}", file=sys.stderr, flush=True)
    _, status, usage = os.wait4(started.pid, 0)
    ended = time.perf_counter()
    killer.cancel()
    begun = next((place for place, (_, line) in enumerate(lines) if line == "ready"), None)
    if begun is None:
        return {"call": name, "failed": lines[-1][1] if lines else status}
    lines = lines[begun:]
    times = [when for when, _ in lines] + [ended]
    seconds, rows = ended - times[0], []
    for (when, line), (after, _) in zip(lines, [*lines[1:], (ended, "")], strict=True):
        if found := re.match(r"([^:]+): about ([\d.]+) (s|h) and ([\d.]+) GB", line):
            rows.append(
                {"work": found[1], "at": when - times[0], "left": float(found[2]) * (3600 if found[3] == "h" else 1)}
            )
        elif rows and line.startswith(rows[-1]["work"]):
            rows[-1]["until"] = after - times[0]
    for row in rows:  # a stage ends with its last line; a beat of another one comes at most a few seconds later
        row["took"] = max(row.get("until", row["at"]) - row["at"], 1e-9)
        row["ratio"] = row["left"] / row["took"]
    told = sum(row["left"] for row in rows) + seconds - sum(row["took"] for row in rows)
    return {
        "call": name,
        **({"killed": True} if status else {}),
        "seconds": seconds,
        "announced": rows,
        "estimate": told,
        "ratio": told / seconds,
        "peak_gb": usage.ru_maxrss * 1024 / 1e9,
        "limit_gb": args.memory,
        "silence": max(b - a for a, b in itertools.pairwise(times)),
        "lines": [f"{when - times[0]:.1f} {line}" for when, line in lines][-40:],
    }


def main() -> None:
    """Measure, and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", nargs="+", default=list(CALLS), choices=list(CALLS))
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--width", type=int, default=2048, help="2048 gives 5 M weights")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--memory", type=float, default=4.0, help="limit in GB")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds after which a call is killed")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch

    from poprisk import train

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        make = getattr(torch.optim, args.optimizer)
        optimizer = lambda p: make(p, lr=1e-3)  # noqa: E731
        given = problem(args.examples, args.width)
        run = train(given, optimizer, args.steps, batch_size=args.batch, path=path, progress=False)
        weights = run.num_weights
        del run, given
        rows = [measured(name, path, args) for name in args.calls]
    found = {"weights": weights, "threads": torch.get_num_threads(), **vars(args), "calls": rows}
    found["output"] = None if args.output is None else str(args.output)
    print(json.dumps(found, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
