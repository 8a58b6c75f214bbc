"""The table on its own: rows in order, files that are whole, and one line for what goes wrong."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from audit_problems import clustered, clusters, make_mlp
from rich.console import Console
from torch.optim import SGD

from poprisk import cli
from poprisk.cli._audit import audit_lines
from poprisk.errors import DataError, MissingExtraError
from poprisk.risk._audit.run_audit import audit
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

FAST = partial(SGD, lr=0.1, momentum=0.9)
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("audit") / "run"
    problem = Problem.build("audit_problems:clustered")
    train(problem, FAST, 60, batch_size=20, path=path, progress=False)
    return path


@pytest.fixture(scope="module")
def table():
    return audit(train(clustered(), FAST, 60, batch_size=20, progress=False), tier="any", progress=False)


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_worst_rows_are_in_order(table):
    rows = table.worst(10)
    values = [row["suspicion"] for row in rows]
    assert values == sorted(values, reverse=True)
    assert values[0] == float(table["suspicion"].max())
    by_loss = table.worst(5, by="loss")
    assert [row["example"] for row in by_loss] == table["loss"].argsort(descending=True)[:5].tolist()
    assert table.worst(0) == []
    assert len(table.worst(10_000)) == len(table) == 120
    for bad, message in ((lambda: table.worst(-1), "negative"), (lambda: table["speed"], "speed")):
        with pytest.raises(DataError, match=message):
            bad()


def test_suspects_come_first_by_suspicion_then_the_others(table):
    suspect = torch.zeros(120, dtype=torch.bool)
    suspect[table.order("suspicion")[[2, 30, 100]]] = True
    found = replace(table, columns=table.columns | {"is_suspect": suspect})
    rows = found.worst(120)
    assert [row["is_suspect"] for row in rows] == [True] * 3 + [False] * 117
    for part in (rows[:3], rows[3:]):
        values = [row["suspicion"] for row in part]
        assert values == sorted(values, reverse=True)
    assert [row["suspicion"] for row in found.worst(120, by="suspicion")] == sorted(
        table["suspicion"].tolist(), reverse=True
    )
    shown = Console(width=100)
    with shown.capture() as printed:
        shown.print(*audit_lines(found, 3, 100))
    assert printed.get().count(" yes ") == 3
    assert "The 3 most suspicious examples, suspects first" in printed.get()


def test_csv_and_parquet_have_every_row_and_column(table, tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert list(frame.columns) == list(table.columns)
    with open(table.save(tmp_path / "new" / "table.csv"), encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120
    assert [float(row["suspicion"]) for row in rows] == table["suspicion"].tolist()
    assert {row["is_suspect"] for row in rows} == {"True", "False"}
    pandas.testing.assert_frame_equal(pandas.read_parquet(table.save(tmp_path / "table.parquet")), frame)
    with pytest.raises(DataError, match="ending"):
        table.save(tmp_path / "table.xlsx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "table.parquet"]


def test_missing_packages_are_named(table, tmp_path, monkeypatch):
    for package in ("pandas", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"pandas.*poprisk\[data\]"):
        table.to_pandas()
    with pytest.raises(MissingExtraError, match=r"pyarrow.*poprisk\[data\]"):
        table.save(tmp_path / "table.parquet")
    assert table.save(tmp_path / "table.csv").exists()  # needs neither


def test_cleaned_targets_by_position_and_mask(table):
    mask = torch.zeros(120, dtype=torch.bool)
    mask[[3, 7]] = True
    torch.testing.assert_close(table.cleaned_targets([3, 7]), table.cleaned_targets(mask))
    changed = table.cleaned_targets([3, 7]) != table.targets
    assert changed.nonzero().flatten().tolist() == [3, 7]
    torch.testing.assert_close(table.cleaned_targets([]), table.targets)
    for bad, message in (([120], "0 … 119"), (torch.tensor([True]), "mask")):
        with pytest.raises(DataError, match=message):
            table.cleaned_targets(bad)


def test_command_end_to_end(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = call(capsys, "audit", str(folder), "--output", str(tmp_path / "t.csv"), "--top", "5")
    assert code == 0, err
    assert "labels are estimated to be wrong" in out
    assert "The 5 most suspicious" in out
    assert "Wrote" in out
    assert "audit: step" in err
    with open(tmp_path / "t.csv", encoding="utf-8") as file:
        assert sum(1 for _ in file) == 121
    monkeypatch.setenv("COLUMNS", "50")
    code, out, _ = call(capsys, "audit", str(folder), "--top", "2", "--tier", "any")
    assert (code, out.count("suspicion")) == (0, 2)


def test_json_is_one_line(folder, capsys):
    code, out, _ = call(capsys, "audit", str(folder), "--json", "--top", "3", "--tier", "any", "--moments", "5")
    found = json.loads(out)
    assert (code, len(out.splitlines())) == (0, 1)
    assert (found["examples"], len(found["worst"]), found["kind"]) == (120, 3, "classes")
    assert found["wrong_labels"]["standard_error"] >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "RUN"),
        (["nowhere"], "is not a recorded run"),
        (["RUN", "--output", "table.xlsx"], "ending"),
        (["RUN", "--tier", "quick"], "tier must be"),
        (["RUN", "--top", "-1"], "--top"),
        (["RUN", "--problem", "nonsense"], "import path"),
    ],
)
def test_mistakes_are_one_line(arguments, message, folder, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "audit", *(str(folder) if a == "RUN" else a for a in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_run_that_needs_its_problem_says_how(tmp_path, capsys):
    train(clustered(), FAST, 20, batch_size=20, path=tmp_path / "run", progress=False)
    code, _, err = call(capsys, "audit", str(tmp_path / "run"))
    assert code == 2
    assert "--problem script.py:function" in err
    code, out, err = call(capsys, "audit", str(tmp_path / "run"), "--problem", "audit_problems:clustered", "--json")
    assert code == 0, err
    assert json.loads(out)["examples"] == 120


def test_the_command_without_a_terminal(folder):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "poprisk", "audit", str(folder), "--tier", "any", "--trust"],
        capture_output=True, text=True, timeout=600, check=False, env=None, cwd=HERE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_groups_by_signal_direction_are_columns(table):
    """From the window of a run to columns of its audit."""
    from poprisk.operators._window import Window
    from poprisk.theory.directions import signal_directions_of
    from poprisk.theory.graph import graph_metric
    from poprisk.theory.groups import example_groups

    inputs, labels, _ = clusters(n=24, wrong=3)
    problem = Problem(make_mlp, "cross_entropy", inputs, labels)
    run = train(problem, FAST, 4, progress=False)
    window = Window.of_run(run)
    p = window.num_outputs // len(problem)
    directions = signal_directions_of(window, graph_metric(inputs.double(), 10.0, outputs=p))
    groups = example_groups(directions, len(problem), p, gradient=window.output_gradient)
    plain = audit(run, tier="any", progress=False)
    found = plain.with_groups(groups)
    assert {"group", "group_captured", "tail_norm"} <= set(found.columns)
    assert "group" not in plain.columns
    assert [row["tail_norm"] for row in found.worst(3, by="tail_norm")] == groups.tail_norm.topk(3).values.tolist()
    with pytest.raises(DataError, match="120 examples, got 24"):
        table.with_groups(groups)
