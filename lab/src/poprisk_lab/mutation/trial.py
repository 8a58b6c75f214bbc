"""One trial: break one function in a process of its own, run tests there, and see which of them notice.

The tests are collected once; every trial is a fork of the process that did, so that nothing is imported again, nothing
is written to the repository, and no result that a test cached before can hide that a function is broken. A function is
broken by exchanging its code object: whoever has imported it calls the broken one.
"""

import contextlib
import functools
import importlib
import inspect
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from poprisk_lab.mutation.broken import WATCH, Changes, broken, broken_value

ROOT = Path(__file__).resolve().parents[4]
_PATIENCE = 60.0
"""A trial that has not used the processor for so many seconds will never end."""
ORIGINALS: list[Any] = []
"""What the broken functions call; their code finds it here."""


@dataclass(frozen=True)
class Job:
    """A trial: what to break, how, and the tests of one file to run."""

    functions: tuple[str, ...]
    mutation: str
    """WATCH: nothing is broken, and calls of the functions are noted."""
    tests: tuple[str, ...]
    """They share the fixtures of their module."""
    parameters: int
    """How many of the parameters of each test are tried, evenly spread; 0 for all."""
    limit: int
    """Processor seconds; tests that have not ended by then have noticed."""


@dataclass(frozen=True)
class Outcome:
    """What the tests said."""

    said: dict[str, str] = field(default_factory=dict)
    """"passed", "failed", "skipped", "timeout", "hung" or "crashed", for each test; the last two say nothing."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the processor, for each test; the first of a file pays for the fixtures that they share."""
    changes: int = 0
    """How often a result was changed."""
    asked: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The watched functions that each test called, or a fixture before it; what a cache spared it is not seen."""
    modules: tuple[str, ...] = ()
    """What the tests imported on their way."""
    error: str = ""
    """What went wrong with the trial itself."""


class Server:
    """Tests of the library or of the lab, collected once in a process that then forks for each trial.

    With ``once`` it is that process that does the one trial there is: JAX has threads and cannot be forked.
    """

    def __init__(self, folder: str, tests: Sequence[str], *, once: bool = False) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(folder, tests, other, once))
        self._process.start()

    def run(self, job: Job) -> Outcome:
        """Do one trial."""
        self._pipe.send(job)
        outcome = self._pipe.recv()
        if outcome.error:
            raise RuntimeError(f"{job}: {outcome.error}")
        return outcome

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def _serve(folder: str, tests: Sequence[str], pipe: Any, once: bool) -> None:
    prefix = folder.removesuffix("tests/")
    os.chdir(ROOT / prefix)
    chosen = [test.removeprefix(prefix) for test in tests]
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0", "--no-header", "-qq"]
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        pytest.main([*chosen, *options], plugins=[_Trials(prefix, pipe, once)])


class _Trials:
    """The plugin: instead of one run over all tests, a fork for each trial that is asked for."""

    def __init__(self, prefix: str, pipe: Any, once: bool) -> None:
        self.prefix, self.pipe, self.once = prefix, pipe, once
        self.said: dict[str, str] = {}
        self.asked: dict[str, set[str]] = {}
        self.by_fixture: dict[str, set[str]] = {}
        self.fixtures: tuple[str, ...] = ()

    def pytest_runtestloop(self, session: Any) -> bool:
        """Take jobs until there are no more."""
        while (job := self.pipe.recv()) is not None:
            trial = self._broken if self.once else self._forked
            self.pipe.send(outcome := trial(job, session.items))
            _import(outcome.modules)  # so that the next trials need not
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        """Note what a fixture calls: for every test that has the fixture, and for no other."""
        before = set(Changes.asked)
        Changes.asked.clear()
        try:
            return (yield)
        finally:
            self.by_fixture.setdefault(fixturedef.argname, set()).update(Changes.asked)
            Changes.asked.update(before)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note the outcome of a test, its parameters together."""
        name = self._name(report.nodeid)
        by_fixtures = (self.by_fixture.get(fixture, ()) for fixture in self.fixtures)
        self.asked.setdefault(name, set()).update(Changes.asked, *by_fixtures)
        Changes.asked.clear()
        if report.failed:
            self.said[name] = "failed"
        elif report.skipped:
            self.said.setdefault(name, "skipped")
        elif report.when == "call" and self.said.get(name) != "failed":
            self.said[name] = "passed"

    def _name(self, nodeid: str) -> str:
        return self.prefix + nodeid.partition("[")[0]

    def _forked(self, job: Job, items: Sequence[Any]) -> Outcome:
        receive, send = multiprocessing.Pipe(duplex=False)
        process = os.fork()
        if not process:
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (time_used() + job.limit, time_used() + job.limit + 5))
                send.send(self._broken(job, items))
            finally:
                os._exit(0)
        send.close()
        outcome, hung = None, False
        with contextlib.suppress(EOFError):  # killed at the limit, or crashed
            if not (hung := not _ends(process, receive)):
                outcome = receive.recv()
        if hung:  # a lock that was held when the process was forked
            os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        return outcome or Outcome(dict.fromkeys(job.tests, "hung" if hung else _how_it_ended(status)))

    def _broken(self, job: Job, items: Sequence[Any]) -> Outcome:
        try:
            for name in job.functions:
                break_name(name, WATCH + name if job.mutation == WATCH else job.mutation)
            return self._run(job, items)
        except Exception:
            return Outcome(error=traceback.format_exc())

    def _run(self, job: Job, items: Sequence[Any]) -> Outcome:
        before, seconds = set(sys.modules), dict.fromkeys(job.tests, 0.0)
        chosen = [each for test in job.tests for each in _some(self._items(items, test), job.parameters)]
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            if self.said.get(name := self._name(item.nodeid)) != "failed":
                began, self.fixtures = time.process_time(), tuple(item.fixturenames)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                seconds[name] += time.process_time() - began
        said = {test: self.said.get(test, "skipped") for test in job.tests}
        modules = tuple(set(sys.modules) - before)
        asked = {test: tuple(sorted(self.asked.get(test, ()))) for test in job.tests}
        return Outcome(said, seconds, Changes.count, asked, modules)

    def _items(self, items: Sequence[Any], test: str) -> list[Any]:
        return [item for item in items if self._name(item.nodeid) == test]


def _ends(process: int, pipe: Any) -> bool:
    """Wait for what a process says; False where it stands still, however busy the machine is."""
    used = -1.0
    while not pipe.poll(_PATIENCE):
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        if (now := float(fields[11]) + float(fields[12])) <= used:
            return False
        used = now
    return True


def _how_it_ended(status: int) -> str:
    """A process that said nothing: at its limit, or by something else, which no test noticed."""
    return "timeout" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU else "crashed"


def _import(names: Sequence[str]) -> None:
    for name in sorted(names):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def time_used() -> int:
    """Processor seconds of this process so far."""
    return int(time.process_time()) + 1


def _some(items: list[Any], count: int) -> list[Any]:
    """That many of the items, evenly spread, the first and the last among them."""
    if not count or len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def break_name(name: str, how: str) -> None:
    """Break what a dotted name stands for, wherever it has been imported."""
    found = resolve(name)
    if isinstance(found, type):
        broken(how)(found)
        return
    inner = getattr(found, "fget", None) or getattr(found, "func", None) or getattr(found, "__func__", None) or found
    inner = inspect.unwrap(inner) if callable(inner) else inner
    if not isinstance(inner, types.FunctionType):
        if how.startswith(WATCH):
            Changes.asked.add(how.removeprefix(WATCH))  # whoever reads it cannot be seen: all that follow
        else:
            _exchange_value(found, broken_value(found, how))
        return
    arguments = (inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)
    original = types.FunctionType(*arguments)
    original.__kwdefaults__ = inner.__kwdefaults__
    ORIGINALS.append(broken(how)(original))
    source = f"lambda *a, **k: __import__('sys').modules[{__name__!r}].ORIGINALS[{len(ORIGINALS) - 1}](*a, **k)"
    code = eval(source).__code__  # the code must not need the globals of this module
    inner.__code__ = code.replace(co_freevars=inner.__code__.co_freevars)
    inner.__defaults__ = inner.__kwdefaults__ = None


def resolve(name: str) -> Any:
    """The object of a dotted name, as it stands in its class."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:depth]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(inspect.getattr_static, parts[depth:], found)
    raise ModuleNotFoundError(name)


def _exchange_value(old: Any, new: Any) -> None:
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] in ("poprisk", "poprisk_lab")]:
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)
