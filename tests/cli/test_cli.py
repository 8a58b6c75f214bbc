"""The command line: a demo from end to end, one voice in every command, and one line for whatever goes wrong."""

import errno
import inspect
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from cli_calls import call, start
from rich.console import Console

from poprisk import __version__, cli
from poprisk._core.store.envelope import load_result
from poprisk._core.store.files import write_text
from poprisk.cli import _demo, _outcome
from poprisk.cli._demo import demo_lines
from poprisk.cli._demonstration.study import MAX_NOISE, DemoConfig
from poprisk.errors import HyperparameterError, MissingExtraError
from poprisk.runs._digits import TRAIN_SIZES

COMMANDS = ("demo", "train", "analyze", "report", "audit", "compare", "runs", "explore", "reproduce", "bench")


def test_demo_end_to_end_without_a_terminal(tmp_path):
    output = tmp_path / "new" / "demo"
    process = start("demo", "--seeds", "2", "--size", "100", "--steps", "4", "--output", str(output))
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert sorted(p.name for p in output.iterdir()) == ["demo.png", "report.html", "result.json", "run"]
    assert f"open in your browser: {output / 'report.html'}" in " ".join(out.split())
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "digits with wrong labels" in page
    assert "Population risk" in page
    assert f"poprisk report {output}/run --output {output}/report.html --budget 0.12 --retrain 5" in page
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    saved = load_result(output / "result.json", "demo")
    assert saved["config"]["seeds"] == 2
    assert saved["result"]["wrong_share"] == pytest.approx(0.4)
    assert "\x1b" not in out + err
    assert "AdamW: step 4 of 4" in err
    headline = saved["result"]["summary"]["headline"]
    assert headline in " ".join(out.split())
    assert f"Wrote {output}: result.json, demo.png, report.html" in out
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
        _, rest = process.communicate(timeout=600)
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
    heavy = "any(name in sys.modules for name in ('torch', 'numpy', 'matplotlib'))"
    code = f"import sys; from poprisk import cli; cli.run(cli.app, ['train', '--help']); print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_defaults_and_limits_are_the_experiments(capsys):
    given = {name: p.default for name, p in inspect.signature(_demo.demo).parameters.items()}
    assert Path("poprisk-demo") == given.pop("output")
    assert DemoConfig(given["seeds"], given["noise"], given["size"], given["steps"]) == DemoConfig()
    words = call(capsys, "demo", "--help")[1]
    assert f"0.0…{MAX_NOISE}" in words
    assert f"…{TRAIN_SIZES[1]}" in words


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_and_json(name, capsys):
    code, out, _ = call(capsys, name, "--help")
    words = re.sub(r"[\s│]+", " ", out)
    assert code == 0
    assert f"Examples: $ poprisk {name}" in words
    assert "--json" in words
    assert set(COMMANDS) == set(typer.main.get_group(cli.app).commands) - {"jobs"}


def test_without_the_lab_reproduce_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setattr("poprisk.cli._lab.entry_points", lambda group: [])
    code, out, err = call(capsys, "reproduce", "coupling", "--smoke")
    assert (code, out) == (2, "")
    assert "pip install ./lab" in err
    assert "reproduce" in call(capsys, "--help")[1]


def test_json_of_a_demo_is_alone_on_stdout(capsys, tmp_path):
    code, out, err = call(
        capsys, "demo", "--seeds", 1, "--size", 100, "--steps", 2, "--output", tmp_path, "--no-report", "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert out.count("\n") == 1
    assert found["files"] == [(tmp_path / name).as_posix() for name in ("result.json", "demo.png")]
    saved = load_result(tmp_path / "result.json", "demo")["result"]["summary"]
    assert found["headline"] == saved["headline"]
    assert [row["label"] for row in found["rows"]] == [row["label"] for row in saved["rows"]]
    assert "step 2 of 2" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo.png", "result.json"]


def test_a_demo_writes_over_no_other_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("poprisk.cli._demonstration.study.run_demo", None)  # refused before anything slow
    write_text(tmp_path / "run" / "manifest.json", json.dumps({"kind": "run", "problem": {"name": "mine"}}))
    code, out, err = call(capsys, "demo", "--output", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "does not contain a run of the demo" in err
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


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
        (["bench", "--device", "abacus"], "device must be cpu, or cuda if available, got abacus"),
        (["analyze", "nowhere"], "nowhere is not a recorded run"),
        (["train"], "TASK"),
    ],
)
def test_wrong_arguments_are_one_line_and_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"poprisk: error: .*{message}.*\n", err)


def test_a_terminal_that_shows_little_gets_what_it_can(tmp_path):
    (tmp_path / "ä").mkdir()
    odd = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "COLUMNS": "0"}
    line = [sys.executable, "-m", "poprisk", "runs", "ä"]
    done = subprocess.run(line, cwd=tmp_path, env=odd, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "No recorded runs in ?" in done.stdout


@pytest.mark.parametrize("stderr", ["closed", "/dev/full"])
def test_a_training_goes_on_when_nobody_can_read_its_progress(stderr, tmp_path):
    (tmp_path / "task.py").write_text(
        "import torch\nfrom poprisk import Problem\n"
        "def task(): return Problem(torch.nn.Linear(2, 1), 'squared', torch.eye(2), torch.eye(2)[:, :1])\n"
    )
    to = "2>&-" if stderr == "closed" else f"2>{stderr}"
    line = f"{shlex.quote(sys.executable)} -m poprisk train task.py:task --steps 3 --batch-size 1 {to}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert "3 steps" in done.stdout


def test_a_full_disk_is_one_line():
    assert _outcome._of_path(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) == (
        "a file must be read or written, but that failed: No space left on device; check the free space and limits"
    )


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

    monkeypatch.setattr("poprisk.cli._demonstration.study.run_demo", fail)
    code, out, err = call(capsys, "demo", "--output", str(tmp_path))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
