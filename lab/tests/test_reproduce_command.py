"""``poprisk reproduce``: data where they are said to be, all in turn, and what an interrupt leaves."""

import importlib
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cli_calls import call
from matplotlib.figure import Figure

from poprisk._core.progress import Progress
from poprisk._core.store.envelope import save_result
from poprisk._core.store.files import write_text
from poprisk.errors import DataError
from poprisk_lab import reproduce as command_module
from poprisk_lab.data.cifar import cifar10, human_labels
from poprisk_lab.data.llama_weights import load_llama
from poprisk_lab.data.preferences import load_preferences
from poprisk_lab.paper.labels.study import LabelsConfig
from poprisk_lab.paper.labels.task import FASHION
from poprisk_lab.reproductions import Files, Reproduction, known, reproduction

READS = {
    "dpo": "smollm2",
    "labels": "fashion",
    "cifar": "cifar10",
    "sft": "smollm2",
    "default_choice": "fashion",
    "gate_variants": "fashion",
}


def study_module(name):
    return "poprisk_lab.gates.plan" if name == "gate_variants" else f"poprisk_lab.paper.{name}.study"


def put_files(files, data, choice=0):
    """Empty files where an experiment looks for its own; of names that stand for each other, one."""
    for names, _ in files.wanted:
        path = data / files.folder / names[min(choice, len(names) - 1)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_the_lab_can_be_imported_before_the_command_line():
    """``poprisk.cli`` takes commands from the lab, whose command takes its options from ``poprisk.cli``."""
    code = "import poprisk_lab.reproduce; from poprisk import cli; cli.main(['reproduce', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "poprisk reproduce coupling" in done.stdout


def test_which_experiments_read_files_is_known():
    found = {name: reproduction(name) for name in known()}
    assert {name: one.files.folder for name, one in found.items() if one.files is not None} == READS
    for name, one in found.items():
        assert (one.with_data is not None) == (name in READS)
        assert ("needs --data" in known()[name]) == (name in READS)


@pytest.mark.parametrize("name", READS)
def test_missing_data_are_one_line_before_anything_slow(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"{study_module(name)}.run", None)
    for arguments, place in (([], "data"), (["--data", "elsewhere"], "elsewhere")):
        code, out, err = call(capsys, "reproduce", name, *arguments)
        assert (code, out) == (2, "")
        assert re.fullmatch(rf"poprisk: error: {place}/{READS[name]} has no .*: put .* with --data\n", err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", READS)
def test_data_are_read_where_they_are_said_to_be(name, capsys, tmp_path, monkeypatch):
    given = []

    def seen(config, *_):
        given.append(config)
        raise DataError("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"{study_module(name)}.run", seen)
    for data in ("elsewhere", "data"):
        files = reproduction(name).files
        assert files is not None
        put_files(files, tmp_path / data)
        arguments = [] if data == "data" else ["--data", data]
        code, _, err = call(capsys, "reproduce", name, "--output", "out", *arguments)
        assert (code, err) == (2, "poprisk: error: enough\n")
    first, second = given
    assert type(first) is type(importlib.import_module(study_module(name)).SMOKE)
    assert "elsewhere" in str(first)
    assert str(first).replace("elsewhere", "data") == str(second)


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_the_files_looked_for_are_those_the_readers_open(choice, tmp_path):
    """An empty file of each name gets past 'is not there', to 'is damaged' where it is opened."""
    for name in ("labels", "cifar", "dpo"):
        files = reproduction(name).files
        assert files is not None
        assert files.missing(tmp_path) is not None
        put_files(files, tmp_path, choice)
        assert files.missing(tmp_path) is None
    LabelsConfig(folder=str(tmp_path)).task(FASHION, 0.0).require_data()
    readers = (
        (cifar10, "cifar10"),
        (lambda folder: human_labels(folder, torch.zeros(1, dtype=torch.int64)), "cifar10"),
        (load_llama, "smollm2"),
        (lambda folder: load_preferences(folder / "preferences.safetensors"), "smollm2"),
    )
    for read, folder in readers:
        with pytest.raises(DataError, match=r"damaged|cannot be read|should be JSON|not a whole"):
            read(tmp_path / folder)
    (tmp_path / "smollm2" / "model.safetensors").unlink()
    assert "no model.safetensors" in str(reproduction("sft").files.missing(tmp_path))  # type: ignore[union-attr]


def test_data_for_an_experiment_that_reads_none(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (["pinn"], ["coupling", "--smoke"]):
        code, out, err = call(capsys, "reproduce", *arguments, "--data", "files")
        assert (code, out) == (2, "")
        assert err == f"poprisk: error: {arguments[0]} reads no data, got --data files: leave it out\n"
    assert list(tmp_path.iterdir()) == []


class Outcome:
    def save(self, path):
        return save_result(path, "toy", {}, {"value": 1})


def toy(run, files=None):
    """An experiment that takes no time."""
    return Reproduction(
        kind="toy",
        full="full",
        smoke="smoke",
        run=run,
        draw=lambda saved: Figure(),
        lines=lambda saved: ["a line"],
        resumable=True,
        with_data=None if files is None else lambda config, folder: folder,
        files=files,
    )


def succeed(*_):
    return Outcome()


@pytest.fixture
def toys(monkeypatch):
    """Puts experiments in place of those there are."""

    def put(experiments):
        monkeypatch.setattr(command_module, "chosen_names", lambda name: list(experiments))
        monkeypatch.setattr(command_module, "reproduction", experiments.__getitem__)

    return put


def test_all_goes_on_without_the_data_that_are_missing(toys, capsys, tmp_path):
    needs = Files("images", ((("a.npz",), "the images"),))
    seen = []

    def look(config, *_):
        seen.append(config)
        return Outcome()

    toys({"one": toy(succeed), "two": toy(look, needs), "three": toy(succeed)})
    command = ["reproduce", "all", "--output", str(tmp_path / "out"), "--data", str(tmp_path / "data")]
    code, out, err = call(capsys, *command)
    assert code == 0
    assert err == f"poprisk: skipped two: {tmp_path}/data/images has no a.npz: put the images there\n"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["one", "three"]
    assert out.count("a line") == 2
    assert sorted(path.name for path in (tmp_path / "out" / "one").iterdir()) == ["one.json", "one.pdf", "one.png"]
    assert call(capsys, *command, "--smoke")[0] == 0
    put_files(needs, tmp_path / "data")
    code, _, err = call(capsys, *command)
    assert (code, err) == (0, "")
    assert seen == ["smoke", f"{tmp_path}/data"]


def test_all_goes_on_after_a_failure_and_ends_with_2(toys, capsys, tmp_path):
    def fail(*_):
        raise DataError("the file\nis damaged")

    toys({"one": toy(fail), "two": toy(succeed)})
    code, out, err = call(capsys, "reproduce", "all", "--output", str(tmp_path))
    assert (code, err) == (2, "poprisk: error: one: the file is damaged\n")
    assert f"Wrote {tmp_path / 'two'}" in out


def test_all_with_an_output_that_cannot_be_written_is_one_line(toys, capsys, tmp_path):
    occupied = write_text(tmp_path / "taken", "x")
    toys({"one": toy(succeed), "two": toy(succeed)})
    code, out, err = call(capsys, "reproduce", "all", "--output", str(occupied))
    assert (code, out) == (2, "")
    assert re.fullmatch(r"poprisk: error: .*choose another.*\n", err)


@pytest.mark.parametrize("resumable", [True, False])
def test_an_interrupt_of_all_says_what_there_is(resumable, toys, capsys, tmp_path):
    def interrupted(config, report, parts):
        if resumable:
            parts.mkdir()
            write_text(parts / "row.json", "{}")
        raise KeyboardInterrupt

    toys({"one": toy(succeed), "two": toy(interrupted), "three": toy(succeed)})
    code, _, err = call(capsys, "reproduce", "all", "--output", str(tmp_path))
    kept = f"; finished parts are kept in {tmp_path}/two/two.parts; run the same command to continue"
    assert code == 130
    assert err == f"poprisk: interrupted; one can be found in {tmp_path}{kept if resumable else ''}\n"
    toys({"two": toy(interrupted)})
    _, _, err = call(capsys, "reproduce", "all", "--output", str(tmp_path / "new"))
    assert ("nothing was written" in err) != resumable


def test_an_interrupted_comparison_keeps_what_is_finished_and_goes_on_from_there(toys, capsys, tmp_path, monkeypatch):
    """The tuning of the first study is on disk when its report begins; it is not done again."""
    labels = reproduction("labels")
    size = replace(labels.smoke.digits, steps=6, evaluations=2)
    toys({"labels": replace(labels, smoke=replace(labels.smoke, arms=labels.smoke.arms[:2], digits=size))})
    usual, stop_at = Progress.update, "digits-0, report"

    def with_a_signal(self, done, *arguments, doing="", **options):
        usual(self, done, *arguments, doing=doing, **options)
        if stop_at and stop_at in doing:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Progress, "update", with_a_signal)
    command, parts = ["reproduce", "labels", "--smoke", "--output", tmp_path], tmp_path / "labels.parts"
    code, out, err = call(capsys, *command)
    assert (code, out) == (130, "")
    kept = f"finished parts are kept in {parts}; run the same command to continue"
    assert err.splitlines()[-1] == f"poprisk: interrupted; {kept}"
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["labels.parts"]
    assert len(list(parts.glob("*.json"))) >= 1
    stop_at = ""
    code, out, err = call(capsys, *command, "--json")
    assert code == 0, err
    assert "digits-0, tuning" not in err
    assert "digits-40, tuning" in err
    written = ["labels.json", "labels.png", "labels.pdf"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)
    files = [(tmp_path / name).as_posix() for name in written]
    assert json.loads(out) == {"name": "labels", "smoke": True, "files": files}
