# type: ignore  # the project checks the types of src and lab/src
"""Functions of scripts: loaded as Python would run the file, named so that another process and place finds them."""

import sys
from pathlib import Path

import pytest

from poprisk._core.store.import_paths import described, importable, located, resolve
from poprisk._core.store.script import where
from poprisk.errors import DataError

SCRIPT = """
from json import dumps

COUNT = []


def make(n=1):
    COUNT.append(n)
    return n


def outer():
    return lambda: None
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "some" / "mine.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    yield path
    sys.path[:] = [entry for entry in sys.path if entry != str(path.parent)]


def test_a_function_is_found_and_described_by_its_file(script):
    make = resolve(f"{script}:make")
    assert make(3) == 3
    assert resolve(f"{script}:make") is make  # loaded once
    assert make.__globals__["COUNT"] == [3]
    for found in (importable(make, {"n": 2}), described(f"{script}:make", {"n": 2})):
        assert (found.path, found.folder, found.arguments) == ("mine.py:make", str(script.parent), {"n": 2})
        assert "folder" not in found.as_json()
    elsewhere = described(f"{script}:dumps")  # imported into the script: that is where it was asked for
    assert (elsewhere.path, elsewhere.folder) == ("mine.py:dumps", str(script.parent))
    assert importable(make.__globals__["dumps"]).path == "json:dumps"
    assert importable(resolve(f"{script}:outer")()).path is None
    assert "not JSON values" in described(f"{script}:make", {"n": object()}).reason


def test_a_changed_script_is_loaded_again(script):
    first = resolve(f"{script}:make")
    script.write_text(SCRIPT.replace("return n", "return 2 * n"))
    assert resolve(f"{script}:make")(3) == 6
    assert first(3) == 3


def test_relative_paths_and_homes(script, monkeypatch):
    monkeypatch.chdir(script.parent.parent)
    monkeypatch.setenv("HOME", str(script.parent))
    assert resolve("some/mine.py:make") is resolve(f"{script}:make") is resolve("~/mine.py:make")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = 1\nraise ValueError('no\\nmore')", r"mine\.py, line 2: ValueError: no; correct"),
        ("import nowhere_to_be_found", r"mine\.py, line 1: ModuleNotFoundError: No module named"),
        ("def f(:", r"mine\.py, line 1: SyntaxError"),
        ("import sys\nsys.exit()", r"mine\.py, line 2: SystemExit; put code that exits the process under if __name__"),
        ("x = 1", "has no 'make': it defines no function"),
    ],
)
def test_scripts_that_fail_say_where(script, content, message):
    script.write_text(content)
    with pytest.raises(DataError, match=message):
        resolve(f"{script}:make")
    with pytest.raises(DataError, match=message):  # a broken module is not kept
        resolve(f"{script}:make")


def test_the_place_of_an_error_is_in_the_script_where_it_passed_through_it(script):
    script.write_text("import json\n\ndef make():\n    json.loads('{')\n")
    with pytest.raises(ValueError) as caught:
        resolve(f"{script}:make")()
    assert where(caught.value).startswith(f"{script}, line 4: JSONDecodeError: ")


def test_folders_follow_what_they_are_kept_in(tmp_path):
    source = {"path": "mine.py:make", "folder": str(tmp_path / "some")}
    kept = located(source, None, tmp_path / "runs" / "a")
    assert kept["folder"] == "../../some"
    assert located(kept, tmp_path / "runs" / "a", tmp_path / "b")["folder"] == "../some"
    assert located(kept, tmp_path / "runs" / "a", None) == source
    assert located({"path": "json:dumps"}, None, tmp_path) == {"path": "json:dumps"}
    (tmp_path / "far").mkdir()
    Path(tmp_path / "near").symlink_to(tmp_path / "far")
    through = located(source, None, tmp_path / "near")  # the same by its link and by its own name
    assert located(through, tmp_path / "far", None) == source
