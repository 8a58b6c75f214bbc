"""``python -m poprisk_lab.recipes.condense FILE ... --output lab/results/recipes.json``: results of the study, small.

The files that :mod:`poprisk_lab.recipes.study` writes have every curve. The stored result keeps, for each row, the test
metric at the end of every recipe: each mean at the last step and at each moment that the held-back block chooses.
Without files the study is run first; its curves stay beside the output, in a file that is continued if it exists.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poprisk._core.store import write_text
from poprisk_lab.recipes import study
from poprisk_lab.recipes.stored_tasks import condensed, examples_of, read


def condensed_study(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tasks of several results as one, without their curves."""
    tasks = {}
    for part in parts:
        for name, task in part["tasks"].items():
            facts = task["metric"], task["higher_is_better"], examples_of(task)
            rows = [condensed(row, *facts) for row in task["rows"]]
            tasks[name] = {**task, "rows": rows}
    return {**{name: value for name, value in parts[0].items() if name != "tasks"}, "tasks": tasks}


def main(arguments: Sequence[str] | None = None) -> None:
    """Condense result files from the command line."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.recipes.condense", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="results of the study, .json or .json.gz; default: run it")
    parser.add_argument("--data", default="data", help="folder with the data, to run the study")
    parser.add_argument("--smoke", action="store_true", help="run the study at tiny sizes, without files")
    parser.add_argument("--output", required=True, type=Path, help="file to write")
    given = parser.parse_args(arguments)
    files = given.files or [given.output.with_name(f"{given.output.stem}_curves.json.gz")]
    if not given.files:
        study.main(["--data", given.data, "--output", str(files[0]), *["--smoke"] * given.smoke])
    found = condensed_study([read(path.with_suffix("") if path.suffix == ".gz" else path) for path in files])
    print(f"Wrote {write_text(given.output, json.dumps(found, separators=(',', ':')) + chr(10))}")


if __name__ == "__main__":
    main()
