"""What swapping AdamW for PopRiskAdamW does to a clean language model, at an unchanged learning rate and at others."""

import argparse
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poprisk._core.statistics import mean_over_seeds
from poprisk.errors import ClosedGateWarning
from poprisk.optim import PopRiskAdamW
from poprisk_lab.data.char_lm import (
    CharText,
    CharTransformer,
    help_topics,
    next_character_loss,
    random_windows,
)
from poprisk_lab.engine.run_ledger import Ledger
from poprisk_lab.paper.clean_lm.task import GATES, SMOKE, CleanLMConfig, ModelConfig, held_out_loss, make_optimizer

__all__ = [
    "CleanLMConfig",
    "GATES",
    "KIND",
    "LMRun",
    "ModelConfig",
    "SMOKE",
    "held_out_loss",
    "main",
    "make_optimizer",
    "run",
    "train",
]

KIND = "clean_lm"


@dataclass(frozen=True)
class LMRun:
    """One training: the held-out loss in nats at its last step, the mean gate, and what clipping did."""

    loss: float
    mean_gate: float | None
    clipped_share: float | None


def run(config: CleanLMConfig, output: Path) -> dict[str, Any]:
    """Train whatever the output file does not hold yet, writing after each run; then summarize.

    Returns:
        The summary, one entry for each optimizer and learning rate.
    """
    text = help_topics()
    ledger = Ledger(output, KIND, asdict(config) | {"text_sha256": text.sha256})
    cells = [("AdamW", lr) for lr in config.adamw_lrs]
    cells += [(gate, lr) for gate in config.gates for lr in config.poprisk_lrs]
    for seed in range(config.seeds):
        for name, lr in cells:
            key = {"optimizer": name, "lr": lr, "seed": seed}
            ledger.measure(key, partial(_measure, config.model, text, name, lr, seed))
    summary = [_summary_row(ledger, name, lr) for name, lr in cells]
    ledger.finish({"summary": summary})
    return {"summary": summary}


def train(
    config: ModelConfig, text: CharText, optimizer_name: str, lr: float, seed: int, *, max_norm: float | None = None
) -> LMRun:
    """One training from the seed's weights on the seed's batches, the same for every optimizer.

    Args:
        config: Model and length.
        text: What to learn.
        optimizer_name: ``AdamW`` or a key of :data:`GATES`.
        lr: Learning rate, constant.
        seed: Decides weights and batches.
        max_norm: Clip the gradient of each step to this norm, if given.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CharTransformer(len(text.vocabulary), config.width, config.heads, config.layers, config.context)
    optimizer = make_optimizer(optimizer_name, model, lr)
    generator = torch.Generator().manual_seed(10_000 + seed)
    gates, clipped = [], 0
    for step in range(config.steps):
        loss = next_character_loss(model, random_windows(text.train, config.batch_size, config.context, generator))
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            clipped += int(nn.utils.clip_grad_norm_(model.parameters(), max_norm) > max_norm)
        optimizer.step()
        if isinstance(optimizer, PopRiskAdamW) and (step + 1) % config.gate_every == 0:
            gates.append(optimizer.diagnostics()[0].mean_gate.item())
    return LMRun(
        loss=held_out_loss(model, text, config.context),
        mean_gate=math.fsum(gates) / len(gates) if gates else None,
        clipped_share=None if max_norm is None else clipped / config.steps,
    )


def _measure(config: ModelConfig, text: CharText, name: str, lr: float, seed: int) -> dict[str, Any]:
    return asdict(train(config, text, name, lr, seed))


def _summary_row(ledger: Ledger, name: str, lr: float) -> dict[str, Any]:
    runs = ledger.select(optimizer=name, lr=lr)
    gates = [r["mean_gate"] for r in runs if r["mean_gate"] is not None]
    return {
        "optimizer": name,
        "lr": lr,
        "loss": asdict(mean_over_seeds([r["loss"] for r in runs])),
        "mean_gate": asdict(mean_over_seeds(gates)) if gates else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m poprisk_lab.paper.clean_lm.study --output results/clean_lm.json``."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.paper.clean_lm.study", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("results/clean_lm.json"))
    parser.add_argument("--seeds", type=int, default=CleanLMConfig().seeds, help="how many paired repetitions")
    parser.add_argument("--smoke", action="store_true", help="a few seconds at a tiny size")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", ClosedGateWarning)  # the mean gate is among the results
    config = SMOKE if options.smoke else replace(CleanLMConfig(), seeds=options.seeds)
    for row in run(config, options.output)["summary"]:
        gate = "" if row["mean_gate"] is None else f", mean gate {row['mean_gate']['value']:.4f}"
        error = row["loss"]["standard_error"]
        margin = "" if error is None else f" ± {error:.3f}"
        print(f"{row['optimizer']:<10} lr {row['lr']:g}: {row['loss']['value']:.3f}{margin} nats{gate}")
    print(f"Wrote {options.output}")


if __name__ == "__main__":
    main()
