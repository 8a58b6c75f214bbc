# type: ignore
"""The pages say what was measured, and their code runs."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from poprisk.cli import app
from readme_code import blocks, run_block

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/optimizer.md", "docs/recorded_runs.md", "docs/learning_rate.md")
SNIPPETS = [block for page in PAGES for block in blocks((ROOT / page).read_text())]


def test_measured_sections_come_from_the_results():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "poprisk_lab.pages",
            "--check",
            "README.md",
            "docs/optimizer.md",
            "docs/learning_rate.md",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_stored_demo_is_the_one_the_command_runs():
    from poprisk.cli._demonstration.study import DemoConfig

    stored = json.loads((ROOT / "lab/results/demo/result.json").read_text())["config"]
    assert stored == json.loads(json.dumps(asdict(DemoConfig())))


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_runs(snippet, capsys):
    assert run_block(snippet)["optimizer"].step() is None


def test_the_page_on_operators_runs_from_top_to_bottom(capsys):
    """Each block goes on where the one before it ended."""
    names: dict[str, object] = {}
    found = blocks((ROOT / "docs/operators.md").read_text())
    assert len(found) == 9
    for block in found:
        exec(block, names)
    assert len(capsys.readouterr().out.splitlines()) > 10  # the bounds


def test_the_quickstart_runs(tmp_path, monkeypatch, capsys):
    """Its commands in a new folder, on its task, with fewer epochs; and its last block."""
    task, _, in_python = blocks(page := (ROOT / "docs/quickstart.md").read_text())  # the second is for a trainer
    (tmp_path / "task.py").write_text(task)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ poprisk (train|report|audit) (.*)$", page, flags=re.MULTILINE)
    assert [name for name, _ in commands] == ["train", "report", "train", "audit"]
    for name, options in commands[:2]:
        result = CliRunner().invoke(app, [name, *options.replace("--epochs 100", "--epochs 4").split()])
        assert result.exit_code == 0, result.output
    assert (tmp_path / "report.html").stat().st_size > 10_000
    names: dict[str, object] = {}
    exec(in_python, names)
    assert len(names["corrected"]) == 200
    assert "valid" in capsys.readouterr().out


def test_the_page_on_comparisons_runs_from_top_to_bottom(capsys):
    names: dict[str, object] = {"__name__": "page"}
    found = blocks((ROOT / "lab/docs/comparisons.md").read_text())
    assert len(found) == 2
    for block in found:
        exec(compile(block, "comparisons.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "PopRiskAdamW, defaults" in printed
    assert printed.count("AdamW, lr 1e-2") == 1
