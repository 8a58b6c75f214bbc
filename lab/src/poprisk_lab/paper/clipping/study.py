"""What clipping the gradient's norm does to the gate: always active, sometimes, never."""

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from poprisk._core.statistics import mean_over_seeds
from poprisk.errors import ClosedGateWarning
from poprisk_lab.data.char_lm import help_topics
from poprisk_lab.engine.run_ledger import Ledger
from poprisk_lab.paper.clean_lm import study as clean_lm
from poprisk_lab.paper.clipping.task import SMOKE, ClippingConfig, mlp, train_digits

__all__ = ["ClippingConfig", "KIND", "SMOKE", "main", "mlp", "run", "train_digits"]

KIND = "clipping"


def run(config: ClippingConfig, output: Path) -> dict[str, Any]:
    """Measure what the output file does not hold yet, then summarize task by task."""
    text = help_topics()
    ledger = Ledger(output, KIND, asdict(config) | {"text_sha256": text.sha256})
    cells = [(name, max_norm) for name in config.lrs for max_norm in config.max_norms]
    gated = [cell for cell in cells if cell[0] != "AdamW"]

    def language_model(name: str, max_norm: float | None, seed: int) -> dict[str, Any]:
        return asdict(clean_lm.train(config.lm, text, name, config.lrs[name], seed, max_norm=max_norm))

    def digits(name: str, max_norm: float | None, seed: int) -> dict[str, Any]:
        return train_digits(config.digits, name, config.lrs[name], seed, max_norm)

    tasks = {"noisy digits": (digits, cells, config.digits.seeds), "clean LM": (language_model, gated, config.lm_seeds)}
    for task, (experiment, chosen, seeds) in tasks.items():
        for name, max_norm in chosen:
            for seed in range(seeds):
                key = {"task": task, "optimizer": name, "max_norm": max_norm, "seed": seed}
                ledger.measure(key, partial(experiment, name, max_norm, seed))
    summary = [_summary_row(ledger, task, *cell) for task, (_, chosen, _) in tasks.items() for cell in chosen]
    ledger.finish({"summary": summary})
    return {"summary": summary}


def _summary_row(ledger: Ledger, task: str, name: str, max_norm: float | None) -> dict[str, Any]:
    runs = ledger.select(task=task, optimizer=name, max_norm=max_norm)
    row: dict[str, Any] = {"task": task, "optimizer": name, "max_norm": max_norm}
    for quantity in ("clipped_share", "mean_gate", "accuracy", "memorized", "loss"):
        values = [r[quantity] for r in runs if r.get(quantity) is not None]
        row[quantity] = asdict(mean_over_seeds(values)) if values else None
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m poprisk_lab.paper.clipping.study --output results/clipping.json``."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.paper.clipping.study", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("results/clipping.json"))
    parser.add_argument("--smoke", action="store_true", help="a few seconds at a tiny size")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", ClosedGateWarning)  # the mean gate is among the results
    for row in run(SMOKE if options.smoke else ClippingConfig(), options.output)["summary"]:
        measured = [f"{k} {v['value']:.4f}" for k, v in row.items() if isinstance(v, dict)]
        print(f"{row['task']}, {row['optimizer']}, max_norm {row['max_norm']}: {', '.join(measured)}")
    print(f"Wrote {options.output}")


if __name__ == "__main__":
    main()
