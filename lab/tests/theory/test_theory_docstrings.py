"""Every example in a docstring of the lab's theory runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

from poprisk_lab import theory

MODULES = sorted(m.name for m in pkgutil.iter_modules(theory.__path__, "poprisk_lab.theory."))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
    assert result.attempted > 0 or name.endswith(("power_law", "operator_readings"))
