"""The library speaks through ``logging`` and warnings; only command lines and progress write by themselves."""

import ast
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import poprisk
from poprisk.errors import PopRiskWarning
from poprisk.runs import _disk_use as disk_use

SOURCE = Path(poprisk.__file__).parent


def may_write(path):
    """The command line, modules that are programs, and the progress that was asked for."""
    inside = path.relative_to(SOURCE)
    return inside.parts[0] in ("cli", "cli.py") or path.name == "__main__.py" or path.stem.startswith("progress")


def calls(path):
    """Every call in a file with the names of the functions around it."""

    def walk(node, around):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield child, around
            inner = (*around, child.name) if isinstance(child, ast.FunctionDef) else around
            yield from walk(child, inner)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), ())


def prints(path):
    """Calls of print outside of a module's own command line, its function main."""
    for call, around in calls(path):
        if isinstance(call.func, ast.Name) and call.func.id == "print" and "main" not in around:
            yield f"{path.relative_to(SOURCE)}:{call.lineno}"


def test_nothing_is_printed():
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100
    suspects = [path for path in files if not may_write(path) and "print(" in path.read_text(encoding="utf-8")]
    assert [line for path in suspects for line in prints(path)] == []


def test_the_look_for_prints_finds_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "a.py").write_text("def f():\n    print(1)\ndef main():\n    print(2)\n")
    assert list(prints(tmp_path / "a.py")) == ["a.py:2"]


def test_standard_streams_are_left_alone():
    streams = ("sys.stderr", "sys.stdout")
    found = [p for p in SOURCE.rglob("*.py") if any(name in p.read_text(encoding="utf-8") for name in streams)]
    assert found
    assert [path for path in found if not may_write(path)] == []


def test_the_logger_is_silent_until_someone_listens(caplog):
    code = "import logging, poprisk; logging.getLogger('poprisk.runs').error('unheard')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("poprisk").handlers)
    with caplog.at_level(logging.INFO, "poprisk"):
        disk_use.announce(Path("somewhere"), 2**20, 10)
    assert "recording into somewhere: about 1.0 MiB for 10 steps" in caplog.text


def test_a_large_recording_is_warned_of_whoever_listens():
    with pytest.warns(PopRiskWarning, match=r"about 3.0 GiB .*a larger every= needs less"):
        disk_use.announce(Path("somewhere"), 3 * 2**30, None)
