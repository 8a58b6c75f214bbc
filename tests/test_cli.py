"""The command line: a demo from end to end, and one line for whatever goes wrong."""

import importlib
import inspect
import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from poprisk import __version__, cli
from poprisk.errors import DataError, HyperparameterError, MissingExtraError
from poprisk.experiments.demo import MAX_NOISE, DemoConfig
from poprisk.experiments.label_tasks import FASHION
from poprisk.experiments.labels import LabelsConfig
from poprisk.problems.cifar import cifar10, human_labels
from poprisk.problems.digits import TRAIN_SIZES
from poprisk.problems.llama_weights import load_llama
from poprisk.problems.preferences import load_preferences
from poprisk.report.reproductions import Files, Reproduction, known, reproduction
from poprisk.report.terminal import demo_lines
from poprisk.store import load_result, save_result, write_text


def start(*arguments, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    return subprocess.Popen([sys.executable, "-W", "error", "-m", "poprisk.cli", *arguments], **pipes, **options)


def call(capsys, *arguments):
    """Exit code, stdout, stderr of a call in this process."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_demo_end_to_end_without_a_terminal(tmp_path):
    output = tmp_path / "new" / "demo"
    process = start("demo", "--seeds", "2", "--size", "100", "--steps", "4", "--output", str(output))
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert sorted(p.name for p in output.iterdir()) == ["demo.png", "result.json"]
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    saved = load_result(output / "result.json", "demo")
    assert saved["config"]["seeds"] == 2
    assert saved["result"]["wrong_share"] == pytest.approx(0.4)
    assert "\x1b" not in out + err
    assert "AdamW: step 4 of 4" in err
    headline = saved["result"]["summary"]["headline"]
    assert headline in " ".join(out.split())
    assert str(output) in out
    for row in saved["result"]["summary"]["rows"]:
        assert f"{100 * row['last']['value']:.1f} ± " in out


def test_narrow_terminals_get_a_list_with_the_same_numbers():
    mean = {"value": 0.5, "standard_error": 0.01, "count": 2}
    row = {"label": "AdamW at its usual lr 1e-3", "last": mean, "best": mean, "memorized": None}
    summary = {"rows": [row], "headline": "H.", "sensitivity_line": "S."}
    saved = {"config": {"seeds": 2}, "result": {"wrong_share": 0.4, "summary": summary}}
    for width in (30, 100):
        console = Console(width=width, record=True, file=io.StringIO())
        for line in demo_lines(saved, width):
            console.print(line)
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= width
        assert text.count("50.0 ± 1.0") == 2
        assert "–" in text


def test_interrupt_is_one_line_and_130(tmp_path):
    process = start("demo", "--seeds", "1", "--size", "100", "--steps", "100", "--output", str(tmp_path))
    assert process.stderr is not None
    try:
        first = process.stderr.readline()  # after the first tenth of the steps
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    assert re.match(r"AdamW: step \d+ of 100", first)
    assert process.returncode == 130
    assert rest.splitlines()[-1] == "poprisk: interrupted; nothing was written"
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


def test_version_and_help(capsys):
    assert call(capsys, "--version") == (0, f"poprisk {__version__}\n", "")
    code, out, _ = call(capsys, "demo", "--help")
    assert code == 0
    words = re.sub(r"[\s│]+", " ", out)
    for option, default in (("--seeds", "5"), ("--noise", "0.4"), ("--size", "1000"), ("--output", "poprisk-demo")):
        assert option in words
        assert f"[default: {default}]" in words
    assert "Noise level" in words


def test_no_arguments_show_the_help(capsys):
    code, out, err = call(capsys)
    assert code == 2
    assert "demo" in out + err
    assert "error" not in err


def test_help_needs_no_torch():
    code = "import sys; from poprisk import cli; cli._run(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_defaults_and_limits_are_the_experiments(capsys):
    given = {name: p.default for name, p in inspect.signature(cli.demo).parameters.items()}
    assert Path("poprisk-demo") == given.pop("output")
    assert DemoConfig(given["seeds"], given["noise"], given["size"], given["steps"]) == DemoConfig()
    words = call(capsys, "demo", "--help")[1]
    assert f"0.0…{MAX_NOISE}" in words
    assert f"…{TRAIN_SIZES[1]}" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--seeds", "many"], "'--seeds': expected a whole number from 1 to 100, got many"),
        (["demo", "--seeds", "0"], "'--seeds': expected .* got 0"),
        (["demo", "--noise", "0.95"], "'--noise'.*0.95"),
        (["demo", "--noise", "-0.1"], "'--noise'.*-0.1"),
        (["demo", "--noise", "nan"], "'--noise': expected a number from 0.0 to 0.9, got nan"),
        (["demo", "--size", "1797"], "'--size'.*1797"),
        (["demo", "--steps", "0"], "'--steps'.*0"),
        (["demo", "--steps", "1.5"], "whole number .* got 1.5"),
        (["demo", "--speed", "9"], "--speed"),
        (["demo", "extra"], "extra"),
        (["demo", "--seeds"], "--seeds"),
        (["dance"], "dance"),
    ],
)
def test_wrong_arguments_are_one_line_and_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"poprisk: error: .*{message}.*\n", err)


def test_output_that_cannot_be_written(capsys, tmp_path):
    occupied = write_text(tmp_path / "taken", "x")
    for path in (occupied, occupied / "below"):
        code, out, err = call(capsys, "demo", "--output", str(path))
        assert (code, out) == (2, "")
        assert re.fullmatch(r"poprisk: error: .*choose another.*\n", err)
    assert occupied.read_text() == "x"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (HyperparameterError("lr must be positive,\ngot -1"), "lr must be positive, got -1"),
        (MissingExtraError("scikit-learn", "data", "the digits data"), "pip install 'poprisk[data]'"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_errors_from_inside_are_one_line_and_2(error, message, capsys, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr("poprisk.experiments.demo.run_demo", fail)
    code, out, err = call(capsys, "demo", "--output", str(tmp_path))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err


READS = {"dpo": "smollm2", "labels": "fashion", "cifar": "cifar10", "sft": "smollm2", "default_choice": "fashion"}


def put_files(files, data, choice=0):
    """Empty files where an experiment looks for its own; of names that stand for each other, one."""
    for names, _ in files.wanted:
        path = data / files.folder / names[min(choice, len(names) - 1)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_which_experiments_read_files_is_known():
    found = {name: reproduction(name) for name in known()}
    assert {name: one.files.folder for name, one in found.items() if one.files is not None} == READS
    for name, one in found.items():
        assert (one.with_data is not None) == (name in READS)
        assert ("needs --data" in known()[name]) == (name in READS)


@pytest.mark.parametrize("name", READS)
def test_missing_data_are_one_line_before_anything_slow(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"poprisk.experiments.{name}.run", None)
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
    monkeypatch.setattr(f"poprisk.experiments.{name}.run", seen)
    for data in ("elsewhere", "data"):
        files = reproduction(name).files
        assert files is not None
        put_files(files, tmp_path / data)
        arguments = [] if data == "data" else ["--data", data]
        code, _, err = call(capsys, "reproduce", name, "--output", "out", *arguments)
        assert (code, err) == (2, "poprisk: error: enough\n")
    first, second = given
    assert type(first) is type(importlib.import_module(f"poprisk.experiments.{name}").SMOKE)
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
        with pytest.raises(DataError, match=r"damaged|cannot be read|should be JSON|no whole"):
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
        monkeypatch.setattr(cli, "chosen_names", lambda name: list(experiments))
        monkeypatch.setattr(cli, "reproduction", experiments.__getitem__)

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
    kept = f"; what is finished is kept in {tmp_path}/two/two.parts and will be used again"
    assert code == 130
    assert err == f"poprisk: interrupted; one can be found in {tmp_path}{kept if resumable else ''}\n"
    toys({"two": toy(interrupted)})
    _, _, err = call(capsys, "reproduce", "all", "--output", str(tmp_path / "new"))
    assert ("nothing was written" in err) != resumable


def test_an_interrupted_comparison_keeps_what_is_finished_and_goes_on_from_there(tmp_path):
    """The tuning of the first study is on disk when its report begins; it is not done again."""
    command = ["reproduce", "labels", "--smoke", "--output", str(tmp_path)]
    process = start(*command)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "digits-0, report" in line:
                break
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    parts = tmp_path / "labels.parts"
    assert process.returncode == 130
    kept = f"what is finished is kept in {parts} and will be used again"
    assert rest.splitlines()[-1] == f"poprisk: interrupted; {kept}"
    assert "Traceback" not in rest
    assert [path.name for path in tmp_path.iterdir()] == ["labels.parts"]
    assert len(list(parts.glob("*.json"))) >= 1
    again = start(*command)
    _, err = again.communicate(timeout=100)
    assert again.returncode == 0, err
    assert "digits-0, tuning" not in err
    assert "digits-40, tuning" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.json", "labels.pdf", "labels.png"]
