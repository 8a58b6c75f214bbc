"""``python -m poprisk_lab.mutation.survey``: break every function that docs/paper_to_code.md cites, run what it cites.

For each row of the page two things are asked: whether some cited test notices each mutation of each cited function, and
whether each cited test notices at least one of them. What every trial said is kept in a log, so that a survey can be
interrupted, continued, and made again in part (``--only``) after a test was changed.
"""

import argparse
import json
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poprisk._core.store import environment, write_json
from poprisk_lab.mutation.broken import MUTATIONS
from poprisk_lab.mutation.trial import ROOT, Job, Outcome, Server


@dataclass(frozen=True)
class Row:
    """A row of the page."""

    label: str
    functions: tuple[str, ...]
    tests: tuple[str, ...]


def rows() -> list[Row]:
    """The rows of the page that cite code."""
    data = tomllib.loads((ROOT / "docs/paper_to_code.toml").read_text(encoding="utf-8"))
    cited = [e for e in data["entry"] if e.get("functions") and e.get("tests")]
    return [Row(e["label"], tuple(e["functions"]), tuple(e["tests"])) for e in cited]


class Log:
    """What every trial said, a line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: dict[tuple[str, str, str], dict[str, Any]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        self.said[line["function"], line["mutation"], line["test"]] = line

    def add(self, job: Job, outcome: Outcome) -> None:
        """Write what a trial said."""
        line = {"function": job.function, "mutation": job.mutation, "test": job.test, **vars(outcome)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._take(line)

    def has(self, function: str, how: str, test: str) -> bool:
        """Whether this was tried."""
        return (function, how, test) in self.said

    def noticed(self, function: str, how: str, test: str) -> bool:
        """Whether the test was tried and failed."""
        return self.said.get((function, how, test), {"said": ""})["said"] in ("failed", "timeout")

    def changed(self, function: str, how: str, tests: Sequence[str]) -> bool:
        """Whether any of the tests asked the broken function for a result that the mutation changes."""
        return any(self.said.get((function, how, test), {"changes": 0})["changes"] for test in tests)

    def forget(self, names: set[str]) -> None:
        """Forget the trials of these tests or functions."""
        self.said = {key: line for key, line in self.said.items() if key[0] not in names and key[2] not in names}


class Bench:
    """The two collections of tests, of the library and of the lab."""

    def __init__(self, tests: Sequence[str]) -> None:
        chosen = {folder: [t for t in tests if t.startswith(folder)] for folder in ("tests/", "lab/tests/")}
        self._servers = {folder: Server(folder, each) for folder, each in chosen.items() if each}

    def run(self, job: Job) -> Outcome:
        """Do a trial."""
        return next(server for folder, server in self._servers.items() if job.test.startswith(folder)).run(job)

    def close(self) -> None:
        """End their processes."""
        for server in self._servers.values():
            server.close()


def baseline(bench: Bench, log: Log, tests: Sequence[str], parameters: int) -> dict[str, float]:
    """Processor seconds of each test when nothing is broken; tests that do not pass cannot be asked.

    It runs in the process that trials are forked from, so that they find what tests have cached.
    """
    found = {}
    for test in tests:
        job = Job("", "none", test, parameters)
        outcome = bench.run(job)
        log.add(job, outcome)
        if outcome.said == "passed":
            found[test] = outcome.seconds
        else:
            print(f"{outcome.said} with nothing broken: {test}", flush=True)
    return found


def survey(log: Log, chosen: list[Row], longest: float, parameters: int) -> None:
    """Do the trials that the log does not have yet and that can tell something new."""
    tests = sorted({test for row in chosen for test in row.tests})
    bench = Bench(tests)
    try:
        seconds = {t: s for t, s in baseline(bench, log, tests, parameters).items() if s <= longest}
        for how in MUTATIONS:
            for function in dict.fromkeys(f for row in chosen for f in row.functions):
                cited = {t for row in chosen if function in row.functions for t in row.tests}
                for test in sorted(cited & seconds.keys(), key=seconds.__getitem__):
                    if not log.has(function, how, test) and _is_open(log, chosen, function, how, test):
                        job = Job(function, how, test, parameters, int(20 + 4 * seconds[test]))
                        log.add(job, bench.run(job))
                print(f"{how} {function}", flush=True)
    finally:
        bench.close()


def _is_open(log: Log, chosen: list[Row], function: str, how: str, test: str) -> bool:
    """Whether some row does not know yet that this mutation, or this test, is of use."""
    rows = [row for row in chosen if function in row.functions and test in row.tests]
    return any(
        not any(log.noticed(function, how, each) for each in row.tests) or test in idle_tests(log, row) for row in rows
    )


def unnoticed(log: Log, row: Row) -> list[tuple[str, str]]:
    """The mutations that were tried and that no cited test of the row notices, if they change a result at all."""
    found = []
    for function in row.functions:
        for how in MUTATIONS:
            tried = [t for t in row.tests if log.has(function, how, t)]
            missed = tried and not any(log.noticed(function, how, t) for t in tried)
            if missed and (how == MUTATIONS[0] or log.changed(function, how, tried)):
                found.append((function, how))
    return found


def idle_tests(log: Log, row: Row) -> list[str]:
    """The cited tests that notice no mutation of any cited function of the row that was tried."""
    pairs = [(function, how) for function in row.functions for how in MUTATIONS]
    return [test for test in row.tests if not any(log.noticed(f, how, test) for f, how in pairs)]


def summary(log: Log, chosen: list[Row]) -> dict[str, Any]:
    """The result to store."""
    tried = [key for key in log.said if key[0]]
    listed = [
        {
            "label": row.label,
            "functions": list(row.functions),
            "tests": list(row.tests),
            "unnoticed": [{"function": function, "mutation": how} for function, how in unnoticed(log, row)],
            "idle_tests": [t for t in idle_tests(log, row) if any(log.has(f, MUTATIONS[0], t) for f in row.functions)],
            "not_tried": [t for t in row.tests if not any(log.has(f, MUTATIONS[0], t) for f in row.functions)],
        }
        for row in chosen
    ]
    return {
        "kind": "mutation",
        "environment": environment(),
        "mutations": list(MUTATIONS),
        "counts": {
            "rows": len(chosen),
            "functions": len({f for row in chosen for f in row.functions}),
            "tests": len({t for row in chosen for t in row.tests}),
            "broken": len({key[:2] for key in tried}),
            "trials": len(tried),
            "unnoticed": sum(len(each["unnoticed"]) for each in listed),
            "rows_with_unnoticed": sum(bool(each["unnoticed"]) for each in listed),
            "idle_tests": sum(len(each["idle_tests"]) for each in listed),
            "rows_with_idle_tests": sum(bool(each["idle_tests"]) for each in listed),
            "tests_not_tried": len({t for each in listed for t in each["not_tried"]}),
        },
        "rows": listed,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Break every function that the page cites, and run what it cites.")
    parser.add_argument("--log", type=Path, help="what every trial said; continued if it exists")
    parser.add_argument("--output", type=Path, help="where to write the result (lab/results/mutation.json)")
    parser.add_argument("--only", nargs="*", help="labels of rows; default: all")
    parser.add_argument("--again", nargs="*", default=[], help="tests or functions whose trials are made again")
    parser.add_argument("--longest", type=float, default=10.0, help="leave out tests that take more seconds")
    parser.add_argument("--parameters", type=int, default=1, help="parameters tried of each test; 0 for all")
    parser.add_argument("--show", action="store_true", help="show what is in the log and try nothing")
    args = parser.parse_args()
    log, all_rows = Log(args.log or Path(tempfile.mkdtemp()) / "log.jsonl"), rows()
    chosen = [row for row in all_rows if not args.only or row.label in args.only]
    log.forget(set(args.again))
    if not args.show:
        survey(log, chosen, args.longest, args.parameters)
    result = summary(log, chosen)
    for row in result["rows"]:
        for each in row["unnoticed"]:
            print(f"{row['label']}: no test notices {each['function']} {each['mutation']}")
        for test in row["idle_tests"]:
            print(f"{row['label']}: notices nothing: {test}")
    print(json.dumps(result["counts"], indent=1))
    if args.output is not None:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
