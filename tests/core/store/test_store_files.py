"""Files are whole or not there."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch

from poprisk._core.store.envelope import FORMAT_VERSION, environment, load_result, save_result
from poprisk._core.store.files import (
    atomic_file,
    writable_directory,
    writable_file,
    write_bytes,
    write_figure,
    write_json,
    write_text,
)
from poprisk.errors import DataError


def test_write_makes_parents_and_leaves_only_the_file(tmp_path):
    path = write_text(tmp_path / "a" / "b.txt", "αβ\n")
    assert path.read_bytes() == "αβ\n".encode()
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_exception_in_the_middle_keeps_the_old_file(tmp_path):
    path = write_text(tmp_path / "kept.txt", "old")

    def write_half():
        with atomic_file(path) as file:
            file.write(b"ne")
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_failing_rename_keeps_the_old_file_and_no_rest(tmp_path, monkeypatch):
    path = write_text(tmp_path / "kept.txt", "old")

    def refuse(*_):
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk gone"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_kill_in_the_middle_keeps_the_old_file(tmp_path):
    path = write_text(tmp_path / "kept.txt", "old")
    code = """
        import os, signal, sys
        from poprisk._core.store.files import atomic_file
        with atomic_file(sys.argv[1]) as file:
            file.write(b"new, but not all of it")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_link_is_replaced_and_directory_refused(tmp_path):
    real = write_text(tmp_path / "real.txt", "old")
    link = tmp_path / "link.txt"
    link.symlink_to(real)
    write_bytes(link, b"new")
    assert not link.is_symlink()
    assert (link.read_text(), real.read_text()) == ("new", "old")
    with pytest.raises(IsADirectoryError, match=r"must be a file, but .* is a directory; name a file"):
        write_text(tmp_path, "no")


def test_a_pipe_or_a_device_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for write in (partial(write_text, text="no"), writable_file):
        with pytest.raises(FileExistsError, match=r"must be a file, but .*pipe is a pipe or a device; choose"):
            write(tmp_path / "pipe")
    assert [each.is_fifo() for each in tmp_path.iterdir()] == [True]


def test_a_file_of_a_run_is_no_output(tmp_path):
    manifest = write_text(tmp_path / "manifest.json", "{}")
    with pytest.raises(FileExistsError, match=r"would replace .*manifest\.json, a file of a recorded run; choose"):
        writable_file(manifest)
    writable_file(tmp_path / "report.html")
    assert [each.name for each in tmp_path.iterdir()] == ["manifest.json"]


def test_mode_follows_umask(tmp_path):
    old = os.umask(0o027)
    try:
        path = write_text(tmp_path / "x", "y")
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640


def test_json_round_trip_and_what_json_cannot_say(tmp_path):
    value = {"name": "q", "rows": [[1, 2.5], [True, None]], "empty": [], "none": {}, "nested": [{"a": (1, 2)}]}
    text = write_json(tmp_path / "v.json", value).read_text()
    assert json.loads(text) == json.loads(json.dumps(value))
    assert "[1, 2.5]" in text
    assert json.loads(write_json(tmp_path / "n.json", [float("nan"), float("inf")]).read_text()) == [None, None]


def test_figure_gives_the_same_bytes_twice(tmp_path):
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure()
    figure.subplots().plot([1, 2])
    first, second = (write_figure(tmp_path / f"{i}.png", figure, dpi=30).read_bytes() for i in range(2))
    assert first == second
    assert first.startswith(b"\x89PNG")


def test_writable_directory(tmp_path):
    assert writable_directory(tmp_path / "new" / "dir").is_dir()
    assert list((tmp_path / "new" / "dir").iterdir()) == []
    occupied = write_text(tmp_path / "file", "x")
    with pytest.raises(NotADirectoryError, match="is a file; choose another name"):
        writable_directory(occupied)
    with pytest.raises(OSError, match="choose another one"):
        writable_directory(occupied / "below")


def test_envelope_round_trip(tmp_path):
    path = save_result(tmp_path / "r.json", "trial", {"lr": (1, 2)}, {"value": 0.5})
    saved = load_result(path, "trial")
    assert saved["format_version"] == FORMAT_VERSION
    assert saved["config"] == {"lr": [1, 2]}
    assert saved["result"] == {"value": 0.5}
    assert saved["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "its kind is None"),
        ('{"kind": "other"}', "its kind is 'other'"),
        ('{"kind": "trial", "format_version": 999}', "format_version 999"),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, message):
    path = write_text(tmp_path / "r.json", content)
    with pytest.raises(DataError, match=message):
        load_result(path, "trial")


def test_environment_names_versions_and_not_the_machine():
    found = environment()
    assert {"python", "torch", "numpy", "platform", "threads", "cpu", "commit"} <= found.keys()
    words = json.dumps(found)
    assert os.uname().nodename not in words
    assert os.path.expanduser("~") not in words or os.path.expanduser("~") == "/"
    assert os.getcwd() not in words
