"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import poprisk

NEEDS_TRITON = {"poprisk.optim.backends._cuda_kernel"}
MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages(poprisk.__path__, "poprisk.")
    if m.name not in NEEDS_TRITON and not m.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = sum(bool(t.examples) for name in MODULES for t in finder.find(importlib.import_module(name)))
    assert found >= 15
