"""What the library's tests share (suite.py), and one smoke run of each experiment for all tests."""

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from poprisk import cli
from poprisk._core.store.envelope import load_result
from poprisk_lab.reproductions import reproduction
from suite import *  # noqa: F403
from suite import _isolated  # noqa: F401


@dataclass(frozen=True)
class Smoke:
    """What ``poprisk reproduce NAME --smoke`` wrote and said, and the processor time it took."""

    directory: Path
    out: str
    err: str
    seconds: float


class Once:
    """A function whose answer is kept, and its failure too: what failed for one test is not tried for the next."""

    def __init__(self, make: Callable[..., Smoke]) -> None:
        self._make, self._made, self._failed = make, {}, {}

    def __call__(self, *names: str) -> Smoke:
        if names in self._failed:
            pytest.fail(f"failed for an earlier test: {self._failed[names]}", pytrace=False)
        if names not in self._made:
            self._failed[names] = "interrupted"
            try:
                self._made[names] = self._make(*names)
            except BaseException as error:
                self._failed[names] = str(error) or repr(error)
                raise
            del self._failed[names]
        return self._made[names]


def _reproduce(name: str, directory: Path) -> Smoke:
    out, err = io.StringIO(), io.StringIO()
    began = time.process_time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        with pytest.raises(SystemExit) as caught:
            cli.main(["reproduce", name, "--smoke", "--output", str(directory)])
    assert caught.value.code == 0, err.getvalue()
    return Smoke(directory, out.getvalue(), err.getvalue(), time.process_time() - began)


@pytest.fixture(scope="session")
def everything(tmp_path_factory) -> Callable[[], Smoke]:
    """``poprisk reproduce all --smoke``, made when first asked for."""
    return Once(lambda: _reproduce("all", tmp_path_factory.mktemp("all") / "new"))


@pytest.fixture(scope="session")
def smoke_of(request, everything, tmp_path_factory) -> Callable[[str], Smoke]:
    """The smoke run of one experiment by its name.

    Where the test of ``reproduce all`` is among the chosen tests, its one run of everything serves them all; otherwise
    an experiment is made by itself, so that one file of tests stays quick.
    """
    all_at_once = any(item.path.name == "test_reproduce_all.py" for item in request.session.items)

    def one(name: str) -> Smoke:
        if not all_at_once:
            made = _reproduce(name, tmp_path_factory.mktemp(name) / "new")
            directory = made.directory
        else:
            made = everything()
            directory = made.directory / name
        told = "".join(line for line in made.err.splitlines(keepends=True) if line.startswith(f"{name}: "))
        return Smoke(directory, made.out, told, made.seconds)

    return Once(one)


@pytest.fixture(scope="session")
def smoke_result(smoke_of) -> Callable[[str], Any]:
    """The stored result of a smoke run, read from disk anew each time: who changes it changes a copy."""
    return lambda name: load_result(smoke_of(name).directory / f"{name}.json", reproduction(name).kind)
