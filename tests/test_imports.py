"""What an import costs and what it brings along, measured in a process that has imported torch and nothing else."""

import json
import os
import subprocess
import sys

import pytest

import poprisk

MODULES = ("poprisk", "poprisk.optim", "poprisk.optim.rules")
HEAVY = {"scipy", "sklearn", "matplotlib", "triton", "typer", "rich", "pandas"}
CODE = """
import gc, json, os, sys, time, importlib
start = time.process_time()
import torch
torch_seconds = time.process_time() - start
gc.freeze()  # a collection in a child would look through all of torch
def child(name):
    read, write = os.pipe()
    if os.fork() == 0:
        had, start = set(sys.modules), time.process_time()
        importlib.import_module(name)
        taken = time.process_time() - start
        os.write(write, json.dumps([taken, sorted({m.split(".")[0] for m in set(sys.modules) - had})]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        result = json.load(answer)
    os.wait()
    return result
print(json.dumps({"torch": torch_seconds, **{name: [child(name) for _ in range(5)] for name in sys.argv[1:]}}))
"""


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, timeout=600, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def imports():
    """For each module five imports in processes of their own: processor time, and the packages that came with it."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    return json.loads(run(CODE, *MODULES))


def test_the_optimizer_costs_a_tenth_of_a_second_beside_torch(imports):
    """Processor time, best of five; where torch itself takes more than two seconds the machine is slow, and a
    twentieth of that is allowed."""
    assert min(seconds for seconds, _ in imports["poprisk.optim"]) <= max(0.1, imports["torch"] / 20)


@pytest.mark.parametrize("module", MODULES)
def test_an_import_brings_nothing_heavy_along(imports, module):
    brought = set(imports[module][0][1])
    assert "poprisk" in brought
    assert not brought & HEAVY


def test_the_package_itself_does_not_import_torch():
    assert run("import sys, poprisk; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("name", poprisk.__all__)
def test_every_public_name_resolves(name):
    assert getattr(poprisk, name).__name__ == name
    assert name in dir(poprisk)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'poprisk' has no attribute 'PopRiskAdam'"):
        poprisk.PopRiskAdam
    with pytest.raises(ImportError):
        exec("from poprisk import PopRiskAdam")
