"""Time of one optimizer step over the time of torch's fused AdamW, in the same run.

The last line printed is one JSON object; its ``ratio`` maps each case to the median of interleaved ratios.

    python benchmarks/optimizer_step.py --device cpu --output lab/results/optimizer_step_cpu.json
    python benchmarks/optimizer_step.py --device cuda --output lab/results/optimizer_step_cuda.json
    python benchmarks/optimizer_step.py --device cuda --only "default gate" --blocks normalized=1
"""

import argparse
import json
import statistics
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from poprisk._core.store.envelope import environment
from poprisk._core.store.files import write_json
from poprisk.cli._step_time import interleaved, step_parameters, timed
from poprisk.optim import Gate, PopRiskAdamW, TailAverage

QWEN = {"vocabulary": 151_936, "width": 896, "layers": 24, "key_value": 128, "hidden": 4864}


def qwen_shapes() -> list[tuple[int, ...]]:
    """The 290 tensors of a Qwen2.5-0.5B-shaped model (tied embedding): 494 M parameters."""
    width, hidden, key_value = QWEN["width"], QWEN["hidden"], QWEN["key_value"]
    layer = [
        (width, width),
        (width,),
        (key_value, width),
        (key_value,),
        (key_value, width),
        (key_value,),
        (width, width),
    ]
    layer += [(hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    return [(QWEN["vocabulary"], width), *(layer * QWEN["layers"]), (width,)]


@dataclass(frozen=True)
class Case:
    """Shapes of the parameters and options of our optimizer, with or without a tail average of the weights."""

    shapes: list[tuple[int, ...]]
    options: dict[str, Any] = field(default_factory=lambda: {"gate": LITERAL})
    average: bool = False


LITERAL = Gate.paper(normalize=False)
"""The gate of Algorithm 1 as it is, for cases that name no other."""


def variants(name: str, shapes: list[tuple[int, ...]]) -> dict[str, Case]:
    """The cases of one set of parameters: gates, averages and precisions."""
    default, low = {"gate": Gate(normalize=True)}, {"state_dtype": torch.bfloat16}
    return {
        name: Case(shapes),
        f"{name}, default gate": Case(shapes, default),
        f"{name}, no gate, average": Case(shapes, {"gate": None, "fused": True}, average=True),
        f"{name}, default gate, average": Case(shapes, default, average=True),
        f"{name}, v and s bf16": Case(shapes, {"gate": LITERAL, **low}),
        f"{name}, default gate, v and s bf16": Case(shapes, {**default, **low}),
    }


def cases(device: str) -> dict[str, Case]:
    """Cases by name; those without a word on the gate have the one of Algorithm 1."""
    shared = {"state": "shared", "betas": (0.95, 0.95), "gate": replace(LITERAL, rho=0.95)}
    if device == "cpu":
        one = [(20_000_000,)]
        return {
            **variants("20M, 1 tensor", one),
            **variants("20M, 300 tensors", [(66_667,)] * 300),
            **variants("1.5M, 300 tensors", [(5_000,)] * 300),
            "20M, 1 tensor, shared state": Case(one, shared),
        }
    one = [(494_032_768,)]
    return {
        **variants("494M, 1 tensor", one),
        **variants("Qwen2.5-0.5B, 290 tensors", qwen_shapes()),
        "494M, 1 tensor, s bf16": Case(one, {"gate": LITERAL, "state_dtype": {"s": torch.bfloat16}}),
        "494M, 1 tensor, shared state": Case(one, shared),
    }


def compare(case: Case, device: str, rounds: int, repeats: int) -> dict:
    """Interleaved rounds of both optimizers on the same parameters and gradients."""
    params = step_parameters(case.shapes, device)
    baseline = torch.optim.AdamW(params, fused=True)
    ours = PopRiskAdamW(params, **{"fused": True if device == "cuda" else None, **case.options})
    if case.average:
        TailAverage(torch.nn.ParameterList(params), ours)
    for optimizer in (baseline, ours, baseline, ours, ours):
        optimizer.step()
    rows = interleaved({"adamw": baseline.step, "ours": ours.step}, rounds, repeats, device)
    pairs = [(row["adamw"], row["ours"]) for row in rows]
    result = {
        "adamw_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "ours_ms": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
        "ratios": [round(b / a, 4) for a, b in pairs],
    }
    result |= traffic(params, ours, result["ours_ms"], case.average)
    if device == "cuda":
        result["extra_bytes_per_parameter"] = temporaries(ours, sum(p.numel() for p in params))
    return result


def traffic(params: list[torch.nn.Parameter], optimizer: PopRiskAdamW, milliseconds: float, average: bool) -> dict:
    """Bytes the step must move (weights, states and averages read and written, gradients read), and the bandwidth."""
    moved = 0
    for p in params:
        states = [x for name, x in optimizer.state[p].items() if name.startswith("exp_")]
        moved += p.numel() * (3 * p.element_size() + 2 * sum(x.element_size() for x in states) + 8 * average)
    return {"bytes": moved, "gigabytes_per_second": moved / milliseconds / 1e6}


def temporaries(optimizer: PopRiskAdamW, count: int) -> float:
    """Peak device memory of one step beyond what was there before, per parameter."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / count


def copy_bandwidth(device: str) -> float:
    """Gigabytes per second of a large copy, read and written bytes counted: what the memory can do."""
    source = torch.randn(494_032_768 if device == "cuda" else 40_000_000, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = statistics.median(timed(lambda: target.copy_(source), 5, device) for _ in range(9))
    return 2 * source.numel() * 4 / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds, at least 5")
    parser.add_argument("--repeats", type=int, default=None, help="steps per timing")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--output", type=Path, default=None, help="also write the result to this file")
    parser.add_argument("--blocks", default="", help="blocks per CUDA program, such as many=4,normalized=1")
    parser.add_argument("--commit", default=None, help="the commit measured, where git cannot tell")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.blocks:
        from poprisk.optim.backends import _cuda as cuda

        cuda.BLOCKS.update({kind: int(n) for kind, n in (each.split("=") for each in args.blocks.split(","))})
    repeats = args.repeats or (10 if args.device == "cuda" else 3)
    bandwidth = copy_bandwidth(args.device)
    results = {}
    for name, case in cases(args.device).items():
        if args.only not in name:
            continue
        results[name] = compare(case, args.device, max(5, args.rounds), repeats)
        results[name]["share_of_copy_bandwidth"] = results[name]["gigabytes_per_second"] / bandwidth
        row = results[name]
        print(
            f"{name:45s} {row['ours_ms']:8.3f} ms  AdamW {row['adamw_ms']:8.3f} ms  ratio {row['ratio']:.3f}",
            flush=True,
        )
        if args.device == "cuda":
            torch.cuda.empty_cache()
    summary = {
        "benchmark": "optimizer_step",
        "device": args.device,
        "ratio": {name: round(r["ratio"], 4) for name, r in results.items()},
        "copy_gigabytes_per_second": round(bandwidth, 1),
        "cases": results,
        "environment": environment() | ({"commit": args.commit} if args.commit else {}),
    }
    if args.output:
        write_json(args.output, summary)
    print(json.dumps({k: v for k, v in summary.items() if k not in ("cases", "environment")}))


if __name__ == "__main__":
    main()
