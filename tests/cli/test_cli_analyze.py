# type: ignore
"""``poprisk analyze``: what is found is kept with the run, used again while it belongs, and gone on with."""

import html
import json
import re
import signal
from functools import partial

import numpy as np
import pytest
import torch
from cli_calls import call
from torch import nn

from poprisk import PopRiskAdamW, Run
from poprisk.errors import RunError
from poprisk.report import KeptAnalysis, analyze
from poprisk.report._analysis.analyze import PARTS
from poprisk.report._analysis.curves import LossCurves
from poprisk.report._drawing.page import report_page
from poprisk.risk import Part
from poprisk.runs._problem import Problem
from poprisk.runs._training import train


def make_task():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator)
    y = x[:, :1] + 0.3 * torch.randn(20, 1, generator=generator)
    q = torch.randn(6, 3, generator=generator)
    return Problem(
        nn.Linear, "squared", x, y, name="line", arguments={"in_features": 3, "out_features": 1}, test=(q, q[:, :1])
    )


@pytest.fixture
def run(tmp_path):
    train(
        Problem.build(make_task), partial(PopRiskAdamW, lr=0.1), 6, batch_size=5, path=tmp_path / "run", progress=False
    )
    return tmp_path / "run"


def told(err):
    return re.findall(r"^analysis: .*; next: (\w+)$", err, re.M)


def test_an_analysis_is_kept_and_the_report_is_the_same_as_without_it(run, capsys, tmp_path, monkeypatch):
    code, out, err = call(capsys, "analyze", run, "--json")
    assert code == 0, err
    assert told(err) == list(PARTS)
    found, fresh = json.loads(out), analyze(Run.load(run), progress=False)
    assert found["risk"]["value"] == pytest.approx(float(fresh.risk.value))
    assert found["curves"]["train"] == pytest.approx(fresh.curves.train)
    assert found["memorization"]["share"] == pytest.approx(fresh.memorization.share)
    assert found["operators"]["signal_rank"] == fresh.window.dense.rank
    assert found["left_out"] == fresh.left_out == {}
    assert found["kept"] == (run / "analysis").as_posix()
    assert sorted(p.name for p in (run / "analysis").iterdir()) == sorted(
        ["index.json", *(f"{p}.safetensors" for p in PARTS)]
    )

    opened = Run.load(run)
    kept = KeptAnalysis(opened)
    computed = []
    again = analyze(opened, kept=kept, progress=computed.append)
    assert computed == []
    assert report_page(again, command="c") == report_page(fresh, command="c")  # to the last digit

    monkeypatch.setattr("poprisk.report._analysis.analyze.audit", None)  # whatever is computed now fails
    code, out, err = call(capsys, "report", run, "--output", tmp_path / "page.html", "--json")
    assert code == 0, err
    assert told(err) == []
    assert "using the parts kept in" in err
    page = tmp_path / "page.html"
    assert json.loads(out)["bytes"] == page.stat().st_size
    assert "Population risk" in page.read_text()
    code, out, err = call(capsys, "analyze", run)
    assert (code, told(err)) == (0, [])
    assert "of the drop in training loss" in out
    assert f"poprisk report {run}" in out.splitlines()[-1]


def test_an_interrupted_analysis_goes_on_from_there(run, capsys, monkeypatch):
    def stop(*_, **__):
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("poprisk.report._analysis.analyze.window_facts", stop)
        code, out, err = call(capsys, "analyze", run)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == (
        f"poprisk: interrupted; finished parts are kept in {run / 'analysis'} and will be used again"
    )
    assert KeptAnalysis(Run.load(run)).finished == ["examples", "curves", "risk", "memorization", "gates"]
    code, out, err = call(capsys, "analyze", run)
    assert code == 0, err
    assert told(err) == ["operators", "kernel", "neighbours"]
    with monkeypatch.context() as patch:
        patch.setattr("poprisk.report._analysis.analyze.audit", stop)
        code, out, err = call(capsys, "analyze", run, "--again")
    assert (code, told(err)) == (130, ["examples"])
    assert "nothing was written" in err


def kept_of(run, **options):
    return KeptAnalysis(Run.load(run), **options)


def test_what_no_longer_belongs_is_not_used(run, monkeypatch):
    curves = LossCurves([0, 6], [2.0, 1.0], None, None, None)
    kept_of(run, budget=5.0, retrain=3).put("curves", Part(curves))
    assert kept_of(run).get("curves").value == curves
    assert (kept_of(run).budget, kept_of(run).retrain) == (5.0, 3)  # as kept
    assert kept_of(run, budget=6.0).get("curves") is None
    assert kept_of(run, retrain=0).get("curves") is None
    other = make_task()
    other.test = (other.test[0], other.test[1] + 1)
    assert KeptAnalysis(Run.load(run, problem=other)).get("curves") is None
    with monkeypatch.context() as patch:
        patch.setattr("poprisk.risk._audit.kept.__version__", "0.0.1")
        assert kept_of(run).finished == []
    problem = Problem.build(make_task)
    train(problem, partial(PopRiskAdamW, lr=0.1), 7, batch_size=5, path=run, resume=True, progress=False)
    assert kept_of(run).finished == []
    assert kept_of(run).budget == 30.0


def test_parts_of_another_model_are_not_kept_as_missing(tmp_path, capsys):
    def recorded(width):
        return Problem(partial(nn.Linear, 3, width), "squared", torch.eye(3), torch.zeros(3, 2), name="eye")

    made = train(recorded(2), torch.optim.SGD, 3, path=tmp_path / "run", progress=False)
    other = recorded(2)
    other.make_model = partial(nn.Linear, 3, 1)
    found = analyze(Run.load(made.path, problem=other), kept=KeptAnalysis(made), progress=False)
    assert "builds a model that differs from the recorded one" in found.left_out["curves"]
    again = analyze(Run.load(made.path, problem=recorded(2)), kept=KeptAnalysis(made), progress=False)
    assert "curves" not in again.left_out
    assert again.curves.steps[-1] == 3


def test_damaged_parts_are_computed_again(run):
    kept = kept_of(run, budget=5.0)
    kept.put("curves", Part(LossCurves([0], [1.0], None, None, None)))
    kept.put("gates", Part(None, "why not"))
    (run / "analysis" / "curves.safetensors").write_bytes(b"x")
    again = kept_of(run)
    assert again.get("curves") is None
    assert again.get("gates") == Part(None, "why not")
    (run / "analysis" / "index.json").write_text("{")
    assert kept_of(run).finished == []
    with pytest.raises(RunError, match=r"this one is in memory: save it with run\.save\(path\)"):
        KeptAnalysis(train(make_task(), torch.optim.SGD, 2, progress=False))


def test_clean_targets_are_part_of_what_it_belongs_to(run, capsys, tmp_path):
    problem = make_task()
    np.savez(tmp_path / "clean.npz", train=problem.inputs[:, :1].numpy(), test=problem.test[1].numpy())
    code, out, err = call(capsys, "analyze", run, "--clean", tmp_path / "clean.npz", "--json")
    assert code == 0, err
    assert json.loads(out)["operators"]["cells"] is not None
    code, _, err = call(capsys, "report", run, "--output", tmp_path / "page.html")  # the cells are there without it
    assert (code, told(err)) == (0, [])
    assert "label noise in the signal channel" in html.unescape((tmp_path / "page.html").read_text())


def test_a_run_without_its_problem_says_how(tmp_path, capsys):
    train(make_task(), partial(PopRiskAdamW, lr=0.1), 4, batch_size=5, path=tmp_path / "run", progress=False)
    code, out, err = call(capsys, "analyze", tmp_path / "run")
    assert code == 0, err
    assert "pass --problem script.py:function" in out
    assert not (tmp_path / "run" / "analysis").exists()
