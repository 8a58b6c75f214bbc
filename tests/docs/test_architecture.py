"""The page on the architecture is that of the tree: rooms, contract, and walks along real imports."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src/poprisk"
WALKS = tomllib.loads((ROOT / "docs/architecture.toml").read_text(encoding="utf-8"))["walk"]


def imported(file: str) -> set[str]:
    """Dotted names that a file imports from this package, modules and what is in them."""
    found = set()
    for node in ast.walk(ast.parse((SOURCE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("poprisk"):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def dotted(file: str) -> str:
    return ".".join(["poprisk", *Path(file).with_suffix("").parts]).removesuffix(".__init__")


def reaches(file: str, target: str) -> bool:
    """Whether a file imports another: the module itself, or a name that a facade above the target takes from it."""
    names, wanted = imported(file), dotted(target)
    if wanted in names:
        return True
    given = {
        f"{dotted(str(folder))}.{alias.name}"
        for folder in list(Path(target).parents)[:-1]
        for node in ast.walk(ast.parse((SOURCE / folder / "__init__.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == wanted
        for alias in node.names
    }
    return bool(names & given)


def test_the_page_is_made_from_the_tree():
    command = [sys.executable, str(ROOT / "tools/architecture.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("walk", WALKS, ids=[walk["title"] for walk in WALKS])
def test_a_walk_goes_along_imports(walk):
    """Each file is imported by one that comes before it: the value can really go that way."""
    files = walk["files"]
    assert len(set(files)) == len(files) >= 3
    assert len(files) <= walk["most"]
    for place, file in enumerate(files[1:], start=1):
        assert any(reaches(earlier, file) for earlier in files[:place]), f"nothing before {file} imports it"
