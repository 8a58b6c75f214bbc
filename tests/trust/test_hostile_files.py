"""Files that anyone may have made: links, pipes, devices, names that lead out, deep JSON, sizes that lie."""

import json
import os
import signal
from contextlib import contextmanager

import pytest
from cli_calls import call
from sent_runs import manifest_of, recorded, sent, sign

from poprisk import Run
from poprisk._core.store import TensorFile, read_json, read_tensors, write_tensors
from poprisk.errors import DataError, PopRiskError
from poprisk.report import KeptAnalysis


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def run(whole, tmp_path):
    return sent(whole, tmp_path)


@contextmanager
def within(seconds):
    """Fail if the block hangs."""

    def late(*_):
        raise AssertionError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


NAMES = ["manifest.json", "start.safetensors", "segment-00000005.safetensors", "kept.safetensors"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["link", "pipe", "/dev/zero", "folder", "dangling"])
def test_only_regular_files_are_read(run, tmp_path, name, kind, capsys):
    file = run / name
    file.rename(tmp_path / "aside")
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to({"link": tmp_path / "aside", "dangling": tmp_path / "none"}.get(kind, kind))
    with within(20):
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            Run.load(run).verify()
        code, out, err = call(capsys, "analyze", run)
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "analysis/x.safetensors", "", ".", "..", "a\0b"]
)
def test_a_name_does_not_lead_out_of_the_directory(run, name):
    (run / "segment-00000005.safetensors").rename(run.parent / "other.safetensors")
    manifest = manifest_of(run)
    manifest["segments"][1]["file"]["name"] = name
    sign(run, manifest)
    with pytest.raises(DataError):
        Run.load(run)
    about = {"size": 3, "sha256": "0" * 64}
    with pytest.raises(DataError, match="not one of its own"):
        read_tensors(run, TensorFile(name, **about))


def test_an_analysis_is_not_written_through_a_link(run, tmp_path, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "index.json").write_text("precious")
    (run / "analysis").symlink_to(outside)
    code, _, err = call(capsys, "analyze", run, "--budget", 1)
    assert (code, err.count("\n")) == (2, 1)
    assert (outside / "index.json").read_text() == "precious"
    (run / "analysis").unlink()
    (run / "analysis").mkdir()
    (run / "analysis" / "index.json").symlink_to(outside / "index.json")
    (run / "analysis" / "curves.safetensors").symlink_to(outside / "index.json")
    code, _, err = call(capsys, "analyze", run, "--budget", 1)
    assert code == 0, err
    assert (outside / "index.json").read_text() == "precious"
    assert not (run / "analysis" / "curves.safetensors").is_symlink()


def test_a_run_is_not_continued_through_a_link(run, tmp_path):
    (tmp_path / "precious").write_text("precious")
    for name in ("segment-00000012.safetensors", ".x.tmp"):
        (run / name).symlink_to(tmp_path / "precious")
    write_tensors(run / "segment-00000012.safetensors", {})
    assert (tmp_path / "precious").read_text() == "precious"


def test_deep_json_is_refused(run, tmp_path):
    for text in ("[" * 100_000, "[" * 900 + "]" * 900, '{"a":' * 200 + "1" + "}" * 200):
        (tmp_path / "deep.json").write_text(text)
        with pytest.raises(DataError, match=r"deep|not JSON"):
            read_json(tmp_path / "deep.json")
    manifest = manifest_of(run)
    manifest["training"] = json.loads("[" * 100 + "]" * 100)
    sign(run, manifest)
    with pytest.raises(DataError, match="deep"):
        Run.load(run)


def test_sizes_are_checked_before_memory_is_used(run):
    """A file that claims to be, and is, larger than the machine's memory; no block of it is on the disk."""
    manifest = manifest_of(run)
    record = manifest["segments"][1]["file"]
    record["size"] = 2**43
    os.truncate(run / record["name"], 2**43)
    sign(run, manifest)
    opened = Run.load(run)
    with within(20), pytest.raises(DataError, match="more than"):
        opened.verify()
    os.truncate(run / "manifest.json", 2**33)
    with within(20), pytest.raises(DataError, match="more than"):
        Run.load(run)


def test_huge_layouts_are_refused(run):
    manifest = manifest_of(run)
    manifest["layout"]["shapes"][0] = [2**40, 2**40]
    sign(run, manifest)
    with pytest.raises(DataError, match="do not fit"):
        Run.load(run)


@pytest.mark.parametrize(
    "edit",
    [
        lambda s: s[::-1],
        lambda s: [s[0], s[0], *s[1:]],
        lambda s: [s[0], s[2]],
        lambda s: [s[0], {**s[1], "start": 3}, s[2]],
        lambda s: [s[0], {**s[1], "stop": 11}, {**s[2], "start": 11}],
        lambda s: [{**s[0], "file": s[1]["file"]}, {**s[1], "file": s[0]["file"]}, s[2]],
        lambda s: s[:2],
    ],
    ids=["reversed", "duplicated", "gap", "overlapping", "other bounds", "exchanged files", "too few"],
)
def test_segments_must_follow_each_other(run, edit):
    manifest = manifest_of(run)
    manifest["segments"] = edit(manifest["segments"])
    sign(run, manifest)
    with pytest.raises(DataError):
        Run.load(run).verify()


def test_an_index_that_was_changed_is_not_used(run, capsys):
    assert call(capsys, "analyze", run, "--budget", 1)[0] == 0
    index = run / "analysis" / "index.json"
    assert KeptAnalysis(Run.load(run)).budget == 1.0
    index.write_text(index.read_text().replace('"budget": 1.0', '"budget": 9.0'))
    assert KeptAnalysis(Run.load(run)).finished == []
    with pytest.raises(PopRiskError):
        KeptAnalysis(Run.load(run / "analysis"))
