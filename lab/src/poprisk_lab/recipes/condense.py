"""``python -m poprisk_lab.recipes.condense FILE ... --output lab/results/recipes.json``: results of the study, small.

The files that :mod:`poprisk_lab.recipes.study` writes have every curve. The stored result keeps, for each row, the test
metric at the end of every recipe: each mean at the last step and at each moment that the held-back block chooses.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poprisk._core.store import write_text
from poprisk_lab.recipes.stored_tasks import condensed, read


def condensed_study(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tasks of several results as one, without their curves."""
    tasks = {}
    for part in parts:
        for name, task in part["tasks"].items():
            rows = [condensed(row, task["metric"], task["higher_is_better"]) for row in task["rows"]]
            tasks[name] = {**task, "rows": rows}
    facts = {name: value for name, value in parts[0].items() if name != "tasks"}
    return {**facts, "tasks": tasks}


def main(arguments: Sequence[str] | None = None) -> None:
    """Condense result files from the command line."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.recipes.condense", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="results of the study, .json or .json.gz")
    parser.add_argument("--output", required=True, type=Path, help="file to write")
    given = parser.parse_args(arguments)
    found = condensed_study([read(path.with_suffix("") if path.suffix == ".gz" else path) for path in given.files])
    print(f"Wrote {write_text(given.output, json.dumps(found, separators=(',', ':')) + chr(10))}")


if __name__ == "__main__":
    main()
