"""What the tests of the library and of the lab share: shapes in type hints are executed, each test starts afresh.

Both ``conftest.py`` files take everything from here. GPU tests skip without a device.
"""

import os
import signal
from functools import cache
from pathlib import Path

import pytest
import torch

# Not the modules that torch.compile or Triton trace. The rule and its gates, called a hundred thousand times, are
# checked where they are tested (tests/rules), so that the rest of the suite does not measure the checker.
CHECKED = (
    "poprisk._core.autodiff",
    "poprisk._core.linalg",
    "poprisk.optim._estimators",
    "poprisk.operators",
    "poprisk.runs._problem",
)

SHARING = {"tests/operators/": "", "tests/paper/": "smoke_of"}
"""Folders of files that share what is slow to make, and a word that the sharing files contain: all of them in the first
(``recorded_runs.py``), those that read smoke runs in the second, which belongs to the lab."""
EVERYTHING = "test_reproduce_all.py"  # has the time to make what the rest of its folder reads

# A shell starts background jobs with Ctrl-C ignored, and their children inherit that; tests of interruption need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    import beartype  # noqa: F401
    from jaxtyping import install_import_hook

    install_import_hook(CHECKED, "beartype.beartype")
except ImportError:
    pass


def _scope(root: Path, file: str) -> str:
    """What must run in one process: a file, or the files of a folder that share what is slow to make."""
    folder = file.rpartition("/")[0] + "/"
    shares = folder in SHARING and SHARING[folder] in (root / file).read_text(encoding="utf-8")
    return folder if shares else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """``--dist loadfile``, but for the folders that share."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    scope_of = cache(_scope)

    class LoadScopes(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(config.rootpath, super()._split_scope(nodeid))

    return LoadScopes(config, log)


def pytest_collection_modifyitems(items):
    """The folders come first: begun last, they would keep one core waiting for the other."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=lambda item: (not item.nodeid.startswith(tuple(SHARING)), item.path.name != EVERYTHING))  # stable


@pytest.fixture(autouse=True)
def _isolated(tmp_path_factory, monkeypatch):
    """Every test starts from one seed, warnings given once per process are given again, and no clock makes words."""
    torch.manual_seed(0)
    from poprisk._core import progress_faces
    from poprisk.optim import backends

    monkeypatch.setattr(progress_faces, "BEAT", float("inf"))

    backends.fall_back.cache_clear()
    monkeypatch.setenv("POPRISK_CACHE_DIR", os.environ.get("POPRISK_CACHE_DIR") or str(_cache(tmp_path_factory)))
    monkeypatch.setenv("POPRISK_STATE_DIR", str(_cache(tmp_path_factory).parent / "state"))


_folder = []


def _cache(factory):
    if not _folder:
        _folder.append(factory.mktemp("kernels"))
    return _folder[0]
