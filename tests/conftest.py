"""Shapes in type hints are executed under test, where beartype is there; GPU tests skip without a device."""

import os

import pytest
import torch

# Not the modules that torch.compile or Triton trace. The rule itself, called a hundred thousand times, is checked where
# it is tested (tests/rules), so that the rest of the suite does not measure the checker.
CHECKED = (
    "poprisk.rules.gates",
    "poprisk.autodiff",
    "poprisk.linalg",
    "poprisk.population",
    "poprisk.problems",
    "poprisk.kernels",
    "poprisk.operators",
)

try:
    import beartype  # noqa: F401
    from jaxtyping import install_import_hook

    install_import_hook(CHECKED, "beartype.beartype")
except ImportError:
    pass


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _isolated(tmp_path_factory, monkeypatch):
    """Every test starts from one seed, and warnings given once per process are given again."""
    torch.manual_seed(0)
    from poprisk.optim import backends

    backends.fall_back.cache_clear()
    monkeypatch.setenv("POPRISK_CACHE_DIR", os.environ.get("POPRISK_CACHE_DIR") or str(_cache(tmp_path_factory)))


_folder = []


def _cache(factory):
    if not _folder:
        _folder.append(factory.mktemp("kernels"))
    return _folder[0]
