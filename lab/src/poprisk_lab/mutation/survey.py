"""``python -m poprisk_lab.mutation.survey``: break every function that docs/paper_to_code.md cites, run what it cites.

For each row of the page two things are asked: whether some cited test notices that a cited function is broken, and
whether each cited test notices at least one of them. What every trial said is kept in a log, so that a survey can be
interrupted, continued, and made again in part (``--only``) after a test was changed.
"""

import argparse
import ast
import hashlib
import json
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from poprisk._core.store import environment, write_json
from poprisk_lab.mutation.broken import MUTATIONS, WATCH
from poprisk_lab.mutation.trial import ROOT, Job, Outcome, Server

FOLDERS = ("tests/", "lab/tests/")


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


@cache
def digest(name: str) -> str:
    """Of the module of a function, or of a test and what its file has beside other tests; empty where there is none."""
    file, _, test = name.partition("::")
    parts = name.split(".")
    paths = [f"{top}/{'/'.join(parts[:k])}.py" for k in range(len(parts), 0, -1) for top in ("src", "lab/src")]
    found = next((path for path in ([file] if test else paths) if (ROOT / path).is_file()), None)
    if found is None:
        return ""
    text = (ROOT / found).read_text(encoding="utf-8")
    return hashlib.sha256((_without_other_tests(text, test) if test else text).encode()).hexdigest()[:12]


def _without_other_tests(text: str, test: str) -> str:
    lines, others = text.splitlines(), set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.name != test:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            others |= set(range(first - 1, node.end_lineno or first))
    return "\n".join(line for number, line in enumerate(lines) if line and number not in others)


class Log:
    """What every trial said, a line each.

    A line counts for as long as its test and the module of its function are what they were, and what a test did not
    notice with fewer parameters than are asked for now is tried again.
    """

    def __init__(self, path: Path, parameters: int = 1) -> None:
        self.path, self.parameters = path, parameters
        self.said: dict[tuple[str, str, str], dict[str, Any]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        unlike = line["digests"] != [digest(line["test"]), digest(line["function"])]
        few = line["parameters"] and not 0 < self.parameters <= line["parameters"]
        if not unlike and not (few and line["said"] == "passed"):
            self.said[line["function"], line["mutation"], line["test"]] = line

    def add(self, job: Job, outcome: Outcome) -> None:
        """Write what a trial said, a line for each of its tests."""
        watched = list(job.functions) if job.mutation == WATCH else []
        by_any = sorted({function for asked in outcome.asked.values() for function in asked})
        for test, said in outcome.said.items():
            line = {"function": "" if watched else job.functions[0], "mutation": job.mutation, "test": test}
            line |= {"said": said, "seconds": round(outcome.seconds.get(test, 0.0), 3), "changes": outcome.changes}
            line |= {"parameters": job.parameters, "digests": [digest(test), digest(line["function"])]}
            if watched:
                line |= {"watched": watched, "asked": by_any, "own": list(outcome.asked.get(test, ()))}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._take(line)

    def has(self, function: str, how: str, test: str) -> bool:
        """Whether this was tried."""
        return (function, how, test) in self.said

    def asks(self, test: str) -> dict[str, Any]:
        """What the test said with nothing broken, and which functions the tests of its file called, and it itself."""
        none = {"said": "", "watched": [], "asked": [], "own": [], "seconds": 0.0}
        return none | self.said.get(("", WATCH, test), {})

    def noticed(self, function: str, how: str, test: str) -> bool:
        """Whether the test was tried and failed."""
        return self.said.get((function, how, test), {"said": ""})["said"] in ("failed", "timeout")

    def changed(self, function: str, how: str, tests: Sequence[str]) -> bool:
        """Whether any of the tests asked the broken function for a result that the mutation changes."""
        return any(self.said.get((function, how, test), {}).get("changes", 0) for test in tests)

    def forget(self, names: set[str]) -> None:
        """Forget the trials of these tests or functions."""
        self.said = {key: line for key, line in self.said.items() if key[0] not in names and key[2] not in names}


class Bench:
    """The collections of tests: of the library, of the lab, and those that need a process of their own."""

    def __init__(self, tests: Sequence[str]) -> None:
        together = [test for test in tests if not _uses_jax(test)]
        chosen = {folder: [t for t in together if t.startswith(folder)] for folder in FOLDERS}
        self._servers = {folder: Server(folder, each) for folder, each in chosen.items() if each}

    def run(self, job: Job) -> Outcome:
        """Do a trial."""
        folder = next(folder for folder in FOLDERS if job.tests[0].startswith(folder))
        if not _uses_jax(job.tests[0]):
            return self._servers[folder].run(job)
        server = Server(folder, job.tests, once=True)
        try:
            return server.run(job)
        finally:
            server.close()

    def close(self) -> None:
        """End their processes."""
        for server in self._servers.values():
            server.close()


def _uses_jax(test: str) -> bool:
    return "import jax" in (ROOT / test.partition("::")[0]).read_text(encoding="utf-8")


def survey(log: Log, chosen: Sequence[Row]) -> None:
    """Do the trials that the log does not have yet and that can tell something new, row by row.

    Tests that noticed nothing so far are tried first, those of a file together, for they have to be tried with some
    function. Where none of them notices this one, the others follow, the quickest first, until one does. Tests that did
    not call the function themselves, but may have found what it returned in a cache, are tried last.
    """
    every_row = rows()
    bench = Bench(sorted({test for row in chosen for test in row.tests}))
    try:
        for row in chosen:
            if not is_whole(log, row):
                watch(bench, log, row, every_row)
                for how in MUTATIONS:
                    for themselves in (True, False):
                        for function in row.functions:
                            _try(bench, log, row, function, how, themselves=themselves)
            print(f"{'finished' if is_whole(log, row) else 'not finished'} {row.label}", flush=True)
    finally:
        bench.close()


def watch(bench: Bench, log: Log, row: Row, every_row: Sequence[Row]) -> None:
    """Run its tests with nothing broken, and note what their files call: nothing else can they notice."""
    for tests in by_file(row.tests):
        functions = {f for other in every_row if set(tests) & set(other.tests) for f in other.functions}
        known = [log.asks(test) for test in tests]
        if not all(each["said"] == "passed" and set(each["watched"]) >= functions for each in known):
            job = Job(tuple(sorted(functions)), WATCH, tests, log.parameters, 600)
            log.add(job, outcome := bench.run(job))
            for test, said in outcome.said.items():
                if said != "passed":
                    print(f"{said} with nothing broken: {test}", flush=True)


def by_file(tests: Iterable[str]) -> list[tuple[str, ...]]:
    """The tests, those of a file together."""
    found: dict[str, dict[str, None]] = {}
    for test in tests:
        found.setdefault(test.partition("::")[0], {})[test] = None
    return [tuple(each) for each in found.values()]


def _try(bench: Bench, log: Log, row: Row, function: str, how: str, *, themselves: bool) -> None:
    told = "own" if themselves else "asked"
    asking = [t for t in row.tests if log.asks(t)["said"] == "passed" and function in log.asks(t)[told]]
    asking.sort(key=lambda test: (log.asks(test)["seconds"], test))
    idle = [test for test in asking if test in idle_tests(log, row)]
    for tests in (*by_file(idle), *((test,) for test in asking if test not in idle)):
        open_tests = tuple(test for test in tests if _is_open(log, row, function, how, test))
        if open_tests:
            limit = int(20 + 3 * sum(log.asks(test)["seconds"] for test in open_tests))
            _attempt(bench, log, Job((function,), how, open_tests, log.parameters, limit))


def _attempt(bench: Bench, log: Log, job: Job) -> None:
    """One trial for all its tests; each alone where they did not end, for one of them may have stopped the others."""
    outcome = bench.run(job)
    if len(job.tests) > 1 and not {"timeout", "hung", "crashed"}.isdisjoint(outcome.said.values()):
        for test in job.tests:
            _attempt(bench, log, replace(job, tests=(test,)))
    else:
        log.add(job, outcome)


def _is_open(log: Log, row: Row, function: str, how: str, test: str) -> bool:
    """Whether this was not tried and the row does not know yet that this mutation, or this test, is of use."""
    milder = MUTATIONS[: MUTATIONS.index(how)]
    return not _is_settled(log, row, function, how, test) and bool(
        test in idle_tests(log, row)
        or (_missed(log, row, function, how) and not any(log.changed(function, h, row.tests) for h in milder))
    )


def _is_settled(log: Log, row: Row, function: str, how: str, test: str) -> bool:
    """Whether this was tried, or a test of the row that calls the function showed that the mutation changes nothing."""
    return log.has(function, how, test) or any(
        function in log.asks(other)["own"] and not log.changed(function, how, [other])
        for other in row.tests
        if log.has(function, how, other)
    )


def _missed(log: Log, row: Row, function: str, last: str) -> list[str]:
    """The mutations, up to the last one to try, of which one must be noticed and none was.

    The mildest that changes a result counts. Of a yes or no, or of whole numbers, a factor of 1.1 changes nothing.
    """
    missed: list[str] = []
    for how in MUTATIONS[: MUTATIONS.index(last) + 1]:
        if any(log.noticed(function, how, test) for test in row.tests):
            return missed if any(log.changed(function, h, row.tests) for h in missed) else []
        missed.append(how)
    return missed


def unnoticed(log: Log, row: Row) -> list[str]:
    """The cited functions of which no cited test of the row notices the mildest mutation that changes a result."""
    return [function for function in row.functions if _missed(log, row, function, MUTATIONS[-1])]


def idle_tests(log: Log, row: Row) -> list[str]:
    """The cited tests that notice no mutation of any cited function of the row."""
    pairs = [(function, how) for function in row.functions for how in MUTATIONS]
    return [test for test in row.tests if not any(log.noticed(f, how, test) for f, how in pairs)]


def was_tried(log: Log, row: Row, function: str) -> bool:
    """Whether all trials of a function were made that can find that a cited test of the row notices it."""
    last = next((how for how in MUTATIONS if log.changed(function, how, row.tests)), MUTATIONS[-1])
    if not _missed(log, row, function, last):
        return True
    tests = [test for test in row.tests if function in log.asks(test)["asked"]]
    watched = all(function in log.asks(test)["watched"] for test in row.tests)
    return watched and all(
        _is_settled(log, row, function, how, t) for how in MUTATIONS[: MUTATIONS.index(last) + 1] for t in tests
    )


def is_whole(log: Log, row: Row) -> bool:
    """Whether the survey of a row is finished: all is noticed, or was tried in every way."""
    if not all(was_tried(log, row, function) for function in row.functions):
        return False
    asked = {test: set(log.asks(test)["asked"]) & set(row.functions) for test in idle_tests(log, row)}
    return all(set(log.asks(t)["watched"]) >= set(row.functions) for t in asked) and all(
        _is_settled(log, row, function, how, test)
        for test, called in asked.items()
        for function in called
        for how in MUTATIONS
    )


def summary(log: Log, chosen: Sequence[Row], stored: dict[str, Any] | None = None) -> dict[str, Any]:
    """The result to store: what the log says of the chosen rows, and of the others what is stored already."""
    found, before = environment(), {row["label"]: row for row in (stored or {"rows": []})["rows"]}
    surveyed = {row.label: _answer(log, row) | {"commit": found["commit"]} for row in chosen}
    labels = [row.label for row in (rows() if stored else chosen)]
    listed = [(before | surveyed)[label] for label in labels if label in before or label in surveyed]
    return {
        "kind": "mutation",
        "environment": found,
        "mutations": list(MUTATIONS),
        "counts": {
            "rows": len(listed),
            "functions": len({function for row in listed for function in row["functions"]}),
            "tests": len({test for row in listed for test in row["tests"]}),
            "whole": sum(row["whole"] for row in listed),
            "unnoticed": sum(len(row["unnoticed"]) for row in listed),
            "idle_tests": sum(len(row["idle_tests"]) for row in listed),
        },
        "rows": listed,
    }


def _answer(log: Log, row: Row) -> dict[str, Any]:
    whole = is_whole(log, row)
    return {
        "label": row.label,
        "functions": list(row.functions),
        "tests": list(row.tests),
        "whole": whole,
        "unnoticed": [f for f in unnoticed(log, row) if was_tried(log, row, f)],
        "idle_tests": idle_tests(log, row) if whole else [],
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Break every function that the page cites, and run what it cites.")
    parser.add_argument("--log", type=Path, help="what every trial said; continued if it exists")
    parser.add_argument("--output", type=Path, help="the result, lab/results/mutation.json; other rows in it stay")
    parser.add_argument("--only", nargs="*", help="labels of rows; default: all")
    parser.add_argument("--again", nargs="*", default=[], help="tests or functions whose trials are made again")
    parser.add_argument("--parameters", type=int, default=1, help="parameters tried of each test; 0 for all")
    parser.add_argument("--show", action="store_true", help="show what is in the log and try nothing")
    args = parser.parse_args()
    log, all_rows = Log(args.log or Path(tempfile.mkdtemp()) / "log.jsonl", args.parameters), rows()
    chosen = [row for row in all_rows if not args.only or row.label in args.only]
    log.forget(set(args.again))
    if not args.show:
        survey(log, chosen)
    stored = args.output is not None and args.output.exists() and json.loads(args.output.read_text(encoding="utf-8"))
    result = summary(log, chosen, stored or None)
    for row in result["rows"]:
        for function in row["unnoticed"]:
            print(f"{row['label']}: no test notices {function}")
        for test in row["idle_tests"]:
            print(f"{row['label']}: notices nothing: {test}")
    print(json.dumps(result["counts"], indent=1))
    if args.output is not None:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
