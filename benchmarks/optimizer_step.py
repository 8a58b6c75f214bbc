"""Time of one optimizer step over the time of torch's fused AdamW, in the same run.

The last line printed is one JSON object; its ``ratio`` maps each case to the median of interleaved ratios.

    python benchmarks/optimizer_step.py --device cpu
    python benchmarks/optimizer_step.py --device cuda --output results/optimizer_step_cuda.json
"""

import argparse
import json
import statistics
import warnings
from pathlib import Path

import torch
from torch import Tensor

from poprisk._core.store.envelope import environment
from poprisk._core.store.files import write_json
from poprisk.cli._step_time import interleaved, step_parameters, timed
from poprisk.optim import join_gate
from poprisk.optim._adamw import PopRiskAdamW

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


def cases(device: str) -> dict[str, tuple[list[tuple[int, ...]], dict]]:
    """Name -> shapes and options of our optimizer, whose gate is the soft one unless another is named."""
    if device == "cpu":
        one, many = [(20_000_000,)], [(66_667,)] * 300
        return {
            "20M, 1 tensor": (one, {}),
            "20M, 300 tensors": (many, {}),
            "20M, 1 tensor, v and s bf16": (one, {"state_dtype": torch.bfloat16}),
            "20M, 1 tensor, shared state": (one, {"state": "shared", "betas": (0.95, 0.95), "rho": 0.95}),
        }
    big, qwen = [(494_032_768,)], qwen_shapes()
    return {
        "494M, 1 tensor": (big, {}),
        "Qwen2.5-0.5B, 290 tensors": (qwen, {}),
        "494M, 1 tensor, s bf16": (big, {"state_dtype": {"s": torch.bfloat16}}),
        "494M, 1 tensor, v and s bf16": (big, {"state_dtype": torch.bfloat16}),
        "Qwen2.5-0.5B, 290 tensors, v and s bf16": (qwen, {"state_dtype": torch.bfloat16}),
        "494M, 1 tensor, shared state": (big, {"state": "shared", "betas": (0.95, 0.95), "rho": 0.95}),
        "494M, 1 tensor, hard": (big, {"gate": "hard"}),
        "494M, 1 tensor, snr": (big, {"gate": "snr"}),
    }


def compare(shapes: list[tuple[int, ...]], options: dict, device: str, rounds: int, repeats: int) -> dict:
    """Interleaved rounds of both optimizers on the same parameters and gradients."""
    params = step_parameters(shapes, device)
    baseline = torch.optim.AdamW(params, fused=True)
    ours = PopRiskAdamW(params, fused=True, **join_gate({"gate": "soft", **options}))
    for optimizer in (baseline, ours, baseline, ours):
        optimizer.step()
    rows = interleaved({"adamw": baseline.step, "ours": ours.step}, rounds, repeats, device)
    pairs = [(row["adamw"], row["ours"]) for row in rows]
    result = {
        "adamw_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "ours_ms": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
        "ratios": [round(b / a, 4) for a, b in pairs],
    }
    result |= traffic(params, ours, result["ours_ms"])
    if device == "cuda":
        result["extra_bytes_per_parameter"] = temporaries(ours, sum(p.numel() for p in params))
    return result


def traffic(params: list[Tensor], optimizer: PopRiskAdamW, milliseconds: float) -> dict:
    """Bytes the step must move (weights and states read and written, gradients read) and the bandwidth that makes."""
    moved = 0
    for p in params:
        states = [x for name, x in optimizer.state[p].items() if name.startswith("exp_")]
        moved += p.numel() * (3 * p.element_size() + 2 * sum(x.element_size() for x in states))
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
    parser.add_argument("--commit", default=None, help="the commit measured, where git cannot tell")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    repeats = args.repeats or (10 if args.device == "cuda" else 3)
    bandwidth = copy_bandwidth(args.device)
    results = {}
    for name, (shapes, options) in cases(args.device).items():
        if args.only not in name:
            continue
        results[name] = compare(shapes, options, args.device, max(5, args.rounds), repeats)
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
