"""``python -m poprisk_lab.gates``: some tasks at a time, so that several processes share the work.

Each process keeps its rows in the ledger's folder; a last one without ``--only`` finds them there and writes the
result.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from poprisk.errors import DataError
from poprisk_lab.gates.plan import SMOKE, GateVariantsConfig, images_in, run


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, run, save."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.gates", description=__doc__)
    parser.add_argument("--only", nargs="*", default=(), help="names of tasks; all if left out")
    parser.add_argument("--ledger", type=Path, default=Path("results/gate_variants.parts"), help="folder of done rows")
    parser.add_argument("--output", type=Path, default=None, help="where the whole result goes")
    parser.add_argument("--data", default="data", help="folder that holds the folder fashion with its idx files")
    parser.add_argument("--device", default=None, help="of the rows in the ledger; here, unless told otherwise")
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="paired repetitions, if not the usual ones")
    parser.add_argument("--smoke", action="store_true", help="a few seconds at a tiny size")
    options = parser.parse_args(arguments)
    config = SMOKE if options.smoke else with_data(GateVariantsConfig(), options.data)
    if options.seeds is not None:
        config = replace(config, seeds=tuple(options.seeds))
    device = None if options.device is None else torch.device(options.device)
    result = run(replace(config, only=tuple(options.only)), _print, options.ledger, device)
    if options.output is not None:
        print(f"Wrote {result.save(options.output)}")


def with_data(config: GateVariantsConfig, folder: str) -> GateVariantsConfig:
    """The configuration with its images in this folder, or without Fashion-MNIST where its files are missing."""
    there = images_in(config, folder)
    try:
        if there.fashion is not None:
            there.fashion.require_data()
    except DataError as missing:
        print(f"Without Fashion-MNIST: {missing}")
        return replace(config, fashion=None)
    return there


def _print(done: int, total: int, words: str) -> None:
    print(f"{done}/{total} {words}", flush=True)


if __name__ == "__main__":
    main()
