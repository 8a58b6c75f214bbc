"""The floor plan holds: rooms, facades and sizes; names in strings lead downwards and exist; moved names are found."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import poprisk
from poprisk import _moved

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/poprisk"
ORDER = ("errors", "_core", "optim", "runs", "operators", "theory", "risk", "report", "jobs", "integrations", "cli")
"""Bottom first, as in the contract."""
FACADES = ("optim", "optim.rules", "runs", "operators", "theory", "risk", "report", "jobs")
_NAME = re.compile(r"poprisk(\.\w+)+(:\w+)?")


@cache
def modules() -> dict[str, Path]:
    """Every module of the library by its dotted name."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = ["poprisk", *path.relative_to(SOURCE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def strings_of(path: Path) -> list[str]:
    """String constants that are a dotted name of this package and nothing else; docstrings are prose."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    values = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [value for value in values if _NAME.fullmatch(value)]


def exists(name: str) -> bool:
    """Whether a dotted name, of a module or of something in one, can be had."""
    module, _, attribute = name.partition(":")
    parts = module.split(".")
    for cut in range(len(parts), 0, -1):
        place = ".".join(parts[:cut])
        if place in modules():
            value = importlib.import_module(place)
            rest = [*parts[cut:], *([attribute] if attribute else [])]
            for each in rest:
                if not hasattr(value, each):
                    return False
                value = getattr(value, each)
            return True
    return False


NAMED = sorted(
    {(name, string) for name, path in modules().items() if name != "poprisk._moved" for string in strings_of(path)}
)


@pytest.mark.parametrize(("module", "string"), NAMED)
def test_a_name_in_a_string_exists_and_leads_downwards(module, string):
    """Registries name what they load by strings, which no linter of imports sees."""
    assert exists(string), f"{module} names {string}"
    here, there = room_of(module), room_of(string)
    if here in ORDER and there in ORDER and string.count(".") > 0 and there != here:
        assert ORDER.index(there) < ORDER.index(here), f"{module} names {string}, which is above it"


def test_there_are_names_in_strings():
    assert len(NAMED) > 10


def test_rooms_are_those_of_the_contract():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    listed = [re.sub(r"[()]", "", name) for layer in contract["layers"] for name in layer.split(" | ")]
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(listed) == rooms - {"__init__"}
    assert [name for name in reversed(listed) if name in ORDER and name not in ("integrations", "cli")] == [
        name for name in ORDER if name not in ("integrations", "cli")
    ]


def test_few_doors():
    """Public is what a facade lists in ``__all__``."""
    public = {f"poprisk.{room}.{n}" for room in FACADES for n in importlib.import_module(f"poprisk.{room}").__all__}
    assert len(poprisk.__all__) <= 45
    assert len(public) <= 140
    rooms = [importlib.import_module(f"poprisk.{room}") for room in FACADES]
    assert all(any(hasattr(room, name) for room in rooms) for name in poprisk.__all__ if name != "Estimate")


@pytest.mark.parametrize("room", FACADES)
def test_every_public_name_of_a_room_resolves(room):
    facade = importlib.import_module(f"poprisk.{room}")
    assert all(hasattr(facade, name) for name in facade.__all__)
    assert sorted(set(facade.__all__)) == list(facade.__all__)


def test_the_library_stays_small():
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in modules().values()) <= 50_765


def test_no_function_shares_the_name_of_a_package():
    packages = {path.parent.name for path in SOURCE.rglob("__init__.py")}
    names = {*poprisk.__all__, *(n for room in FACADES for n in importlib.import_module(f"poprisk.{room}").__all__)}
    assert not names & packages


@pytest.mark.parametrize("old", sorted(_moved.MODULES))
def test_moved_names_are_found_with_a_warning(old):
    for place, names in _moved.MODULES[old].items():
        for name, new in _moved.renamed(names).items():
            with pytest.warns(DeprecationWarning, match=re.escape(f"{old}.{name} is now {place}.{new}")):
                found = _moved.moved_attribute(old, name)
            assert found is getattr(importlib.import_module(place), new)


def test_old_modules_give_every_name_that_left_them():
    """As a user takes them, from the module; in a process of their own, since old modules stay in ``sys.modules``."""
    code = """
import importlib, warnings
from poprisk import _moved
warnings.simplefilter("ignore", DeprecationWarning)
for old, places in _moved.MODULES.items():
    module = importlib.import_module(old)
    for place, names in places.items():
        for name, new in _moved.renamed(names).items():
            assert getattr(module, name) is getattr(importlib.import_module(place), new), (old, name)
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.parametrize("name", sorted(_moved.ROOT_NAMES))
def test_names_that_left_the_root_are_found_with_a_warning(name):
    with pytest.warns(DeprecationWarning, match=f"poprisk.{name} is now {_moved.ROOT_NAMES[name]}.{name}"):
        assert getattr(poprisk, name) is getattr(importlib.import_module(_moved.ROOT_NAMES[name]), name)


def test_old_imports_work_as_statements():
    """In a process of their own: what is imported here by its old name stays in ``sys.modules``."""
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from poprisk.audit import audit
    from poprisk.kernels import train_kernel
    from poprisk.influence import population_risk
    import poprisk, poprisk.operators
    assert callable(poprisk.audit) and audit is poprisk.risk.audit
    assert train_kernel is poprisk.operators.train_kernel
assert len([c for c in caught if c.category is DeprecationWarning and "is now" in str(c.message)]) == 3, caught
assert all(c.filename == "<string>" for c in caught), [c.filename for c in caught]
try:
    from poprisk.kernels import nothing
except ImportError:
    print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.strip() == "done", done.stderr


def test_what_moved_to_the_lab_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "poprisk_lab", None)
    old = next(old for old, places in _moved.MODULES.items() if any(p.startswith("poprisk_lab") for p in places))
    place = next(place for place in _moved.MODULES[old] if place.startswith("poprisk_lab"))
    monkeypatch.setitem(sys.modules, place, None)
    name = next(iter(_moved.renamed(_moved.MODULES[old][place])))
    with pytest.warns(DeprecationWarning, match="is now"), pytest.raises(ImportError, match=r"pip install ./lab"):
        _moved.moved_attribute(old, name)


def test_pages_name_no_private_module():
    """Guides, examples and the README show public names only."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.*")]
    private = re.compile(r"poprisk(?:\.\w+)*\._\w+")
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in pages
        if path.suffix in {".md", ".py"} and path.name not in {"paper_to_code.md", "architecture.md"}
        for match in private.finditer(path.read_text(encoding="utf-8"))
    }
    assert not found
