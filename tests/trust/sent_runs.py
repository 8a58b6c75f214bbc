"""Runs as someone else would send them: recorded here, then changed by hand and given valid hashes again."""

import hashlib
import json
import shutil
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn

from poprisk import Problem, train

EVIL = "from pathlib import Path\nPath({mark!r}).touch()\ndef make(**_):\n    Path({mark!r}).touch()\n"


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def problem():
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    return Problem(network, "cross_entropy", x, (x[:, 0] > 0).long(), name="sent")


@cache
def recorded(folder: Path) -> Path:
    """A run of twelve steps in three files, with held-back examples."""
    options = {"batch_size": 4, "segment_steps": 5, "hold_back": 0.1, "progress": False}
    train(Problem.build(problem), partial(torch.optim.SGD, lr=0.1), 12, path=folder, **options)
    return folder


def manifest_of(run: Path) -> dict:
    return json.loads((run / "manifest.json").read_text())


def sign(run: Path, manifest: dict) -> None:
    """Write a manifest with the hash of its content."""
    manifest.pop("sha256", None)
    text = json.dumps(manifest, sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (run / "manifest.json").write_text(json.dumps(manifest))


def sent(recorded_run: Path, folder: Path, source: dict | None = None) -> Path:
    """A copy of the run in ``folder/run``, whose manifest names another source of its problem."""
    shutil.copytree(recorded_run, folder / "run")
    if source is not None:
        manifest = manifest_of(folder / "run")
        manifest["problem"]["source"] = {"reason": None, "arguments": {}, **source}
        sign(folder / "run", manifest)
    return folder / "run"


def payloads(folder: Path, mark: Path) -> dict[str, dict]:
    """Sources of a problem that would create ``mark`` if they were imported or called."""
    script = EVIL.format(mark=str(mark))
    (folder / "run").mkdir(parents=True, exist_ok=True)
    for place in (folder / "run" / "evil.py", folder / "beside.py", folder / "evil_module.py"):
        place.write_text(script)
    package = folder / "evil_package"
    package.mkdir()
    (package / "__init__.py").write_text(script)
    (folder / "hubconf.py").write_text(script)
    hub = {"repo_or_dir": str(folder), "model": "make", "source": "local"}
    return {
        "system": {"path": "os:system", "arguments": {"command": f"touch {mark}"}},
        "mkdir": {"path": "os:mkdir", "arguments": {"path": str(mark)}},
        "popen": {"path": "subprocess:Popen", "arguments": {"args": ["touch", str(mark)]}},
        "check call": {"path": "subprocess:check_call", "arguments": {"args": f"touch {mark}", "shell": True}},
        "run path": {"path": "runpy:run_path", "arguments": {"path_name": str(folder / "beside.py")}},
        "run module": {"path": "runpy:run_module", "arguments": {"mod_name": "evil_module"}},
        "import module": {"path": "importlib:import_module", "arguments": {"name": "evil_module"}},
        "script in the run": {"path": "evil.py:make", "folder": "."},
        "script beside": {"path": "beside.py:make", "folder": ".."},
        "absolute folder": {"path": "beside.py:make", "folder": str(folder)},
        "absolute script": {"path": f"{folder}/beside.py:make"},
        "script through ..": {"path": "../beside.py:make", "folder": "."},
        "module in the path": {"path": "evil_module:make"},
        "package in the path": {"path": "evil_package:make"},
        "hub": {"path": "torch.hub:load", "arguments": hub},
        "our own builder": {
            "path": "poprisk.runs:Problem.build",
            "arguments": {"factory": "os:system", "command": f"touch {mark}"},
        },
        "our own resolver": {"path": "poprisk._core.store:resolve", "arguments": {"path": "evil_module:make"}},
        "open a file": {"path": "builtins:open", "arguments": {"file": str(mark), "mode": "w"}},
        "copy": {"path": "shutil:copy", "arguments": {"src": str(folder / "beside.py"), "dst": str(mark)}},
        "save": {"path": "torch:save", "arguments": {"obj": 1, "f": str(mark)}},
    }
