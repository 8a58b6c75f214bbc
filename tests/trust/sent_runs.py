"""Runs as someone else would send them: recorded here, then changed by hand and given valid hashes again."""

import hashlib
import json
import pickle
import shutil
import zipfile
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


def payloads(folder: Path, mark: Path, *, plant: bool = True) -> dict[str, dict]:
    """Sources of a problem that would create ``mark`` if they were imported or called; the files they need."""
    if plant:
        _plant(folder, EVIL.format(mark=str(mark)))
    return {**_calls(folder, mark), **_scripts(folder), **_modules()}


def _plant(folder: Path, script: str) -> None:
    """Files that a sender can put beside the run, in it, and where Python looks for modules."""
    for place in ("run/evil.py", "beside.py", "evil_module.py", "hubconf.py", "~/evil.py", "evil_package/__init__.py"):
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script)
    (folder / "evil_space").mkdir()
    (folder / "evil_space" / "inner.py").write_text(script)
    with zipfile.ZipFile(folder / "evil.zip", "w") as archive:
        archive.writestr("evil_zipped.py", script)
    (folder / "link.py").symlink_to(folder / "beside.py")
    (folder / "pickled").write_bytes(pickle.dumps(_Touch(script)))
    torch.save(_Touch(script), folder / "saved.pt")


class _Touch:
    """Executes a script when it is unpickled."""

    def __init__(self, script: str) -> None:
        self.script = script

    def __reduce__(self):
        return exec, (self.script, {})


def _calls(folder: Path, mark: Path) -> dict[str, dict]:
    """Functions that are installed everywhere, with arguments that make them a weapon."""
    code, hub = f"open({str(mark)!r}, 'w')", {"repo_or_dir": str(folder), "model": "make", "source": "local"}
    factory = {"factory": "os:system", "command": f"touch {mark}"}
    logged = {"version": 1, "handlers": {"x": {"()": "os.mkdir", "path": str(mark)}}, "root": {"handlers": ["x"]}}
    calls: dict[str, tuple[str, dict]] = {
        "system": ("os:system", {"command": f"touch {mark}"}),
        "mkdir": ("os:mkdir", {"path": str(mark)}),
        "makedirs through another module": ("pathlib:os.makedirs", {"name": str(mark)}),
        "popen": ("subprocess:Popen", {"args": ["touch", str(mark)]}),
        "run": ("subprocess:run", {"args": ["touch", str(mark)]}),
        "check call": ("subprocess:check_call", {"args": f"touch {mark}", "shell": True}),
        "get output": ("subprocess:getoutput", {"cmd": f"touch {mark}"}),
        "async": ("asyncio:create_subprocess_shell", {"cmd": f"touch {mark}"}),
        "run path": ("runpy:run_path", {"path_name": str(folder / "beside.py")}),
        "run module": ("runpy:run_module", {"mod_name": "evil_module"}),
        "import module": ("importlib:import_module", {"name": "evil_module"}),
        "the import function": ("builtins:__import__", {"name": "evil_module"}),
        "resolve a name": ("pkgutil:resolve_name", {"name": "evil_module:make"}),
        "timed": ("timeit:timeit", {"stmt": code, "number": 1}),
        "profiled": ("cProfile:run", {"statement": code}),
        "logging": ("logging.config:dictConfig", {"config": logged}),
        "hub": ("torch.hub:load", hub),
        "our own builder": ("poprisk.runs:Problem.build", factory),
        "our own resolver": ("poprisk._core.store:resolve", {"path": "evil_module:make"}),
        "our own loader": ("poprisk._core.store.script:load_script", {"file": str(folder / "beside.py")}),
        "torch pickle": ("torch:load", {"f": str(folder / "saved.pt"), "weights_only": False}),
        "numpy pickle": ("numpy:load", {"file": str(folder / "pickled"), "allow_pickle": True}),
        "pandas pickle": ("pandas:read_pickle", {"filepath_or_buffer": str(folder / "pickled")}),
        "open a file": ("builtins:open", {"file": str(mark), "mode": "w"}),
        "copy": ("shutil:copy", {"src": str(folder / "beside.py"), "dst": str(mark)}),
        "move": ("shutil:move", {"src": str(folder / "hubconf.py"), "dst": str(mark)}),
        "unpack": ("shutil:unpack_archive", {"filename": str(folder / "evil.zip"), "extract_dir": str(mark)}),
        "save": ("torch:save", {"obj": 1, "f": str(mark)}),
        "download": ("urllib.request:urlretrieve", {"url": f"file://{folder}/beside.py", "filename": str(mark)}),
    }
    return {name: {"path": path, "arguments": arguments} for name, (path, arguments) in calls.items()}


def _scripts(folder: Path) -> dict[str, dict]:
    return {
        "script in the run": {"path": "evil.py:make", "folder": "."},
        "script beside": {"path": "beside.py:make", "folder": ".."},
        "absolute folder": {"path": "beside.py:make", "folder": str(folder)},
        "absolute script": {"path": f"{folder}/beside.py:make"},
        "script through ..": {"path": "../beside.py:make", "folder": "."},
        "script through a link": {"path": "link.py:make", "folder": ".."},
        "script of the current directory": {"path": "evil.py:make"},
        "script without a folder": {"path": "run/evil.py:make", "folder": None},
        "script at home": {"path": "~/evil.py:make"},
        "name in a script": {"path": "beside.py:Path.mkdir", "folder": ".."},
        "script that is not there": {"path": "gone.py:make", "folder": ".."},
    }


def _modules() -> dict[str, dict]:
    return {
        "module in the path": {"path": "evil_module:make"},
        "package in the path": {"path": "evil_package:make"},
        "package without a file": {"path": "evil_space.inner:make"},
        "module in an archive": {"path": "evil_zipped:make"},
        "module with a folder": {"path": "evil_module:make", "folder": "."},
        "folder before a module": {"path": "evil_package:make", "folder": "evil_package"},
        "our command": {"path": "poprisk.__main__:main"},
        "no function": {"path": "evil_module:"},
        "no path": {"path": "evil_module"},
        "colons": {"path": "evil_module:make:make"},
    }
