"""Runs that ended too early are said to have, first and everywhere; finished, noisy and memorizing runs are not."""

import html
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from poprisk import Problem, analyze, audit, population_risk, train, write_report
from poprisk.cli import app
from poprisk.report import summary_lines
from poprisk.risk._under_training import STILL_FALLING, under_training
from poprisk.risk._verdict import RiskEstimate

WIDTH = 16


def network(width=WIDTH):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def blobs(noise=0.0, n=120):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator)
    y = x[:, :3].argmax(1)
    y = torch.where(torch.rand(n, generator=generator) < noise, torch.randint(3, (n,), generator=generator), y)
    return Problem(network, "cross_entropy", x, y)


@cache
def trained(steps, lr=3e-3, noise=0.0, batch_size=40):
    return train(blobs(noise), partial(torch.optim.AdamW, lr=lr), steps, batch_size=batch_size, progress=False)


def test_a_run_that_ended_too_early():
    run = trained(48, 2e-3)
    said = under_training(run)
    assert said.startswith("the loss is still falling by ")
    assert said.endswith("% per pass: train longer; the figures below describe an unfinished run")
    rate = float(said.split("by ")[1].split("%")[0])
    losses = run.losses
    assert rate == pytest.approx(100 * (1 - losses[-6:].mean() / losses[-12:-6].mean()) / 2, rel=0.25)


def test_a_learning_rate_that_came_to_its_end_lowers_the_loss_by_itself():
    def ended(factor):
        rule = partial(torch.optim.AdamW, lr=2e-3)
        return train(blobs(), rule, 48, batch_size=40, schedule=factor, progress=False)

    assert under_training(ended(lambda k: 1 - k / 96)).startswith(STILL_FALLING)
    assert under_training(ended(lambda k: 1.0 if k < 44 else 0.05)) == ""


def test_it_is_said_first_in_the_estimate():
    risk = population_risk(trained(48, 2e-3))
    assert risk.valid
    assert risk.reason.startswith(STILL_FALLING)
    assert "real deletions" in risk.reason
    assert population_risk(trained(48, 2e-3), "k_fold", 3).reason.startswith(STILL_FALLING)


def test_it_is_said_first_in_the_audit_the_analysis_and_the_report(tmp_path):
    run = train(blobs(), partial(torch.optim.AdamW, lr=2e-3), 48, batch_size=40, progress=False)
    assert audit(run, tier="any", progress=False).notes[0].startswith(STILL_FALLING)
    found = analyze(run, budget=0.01, progress=False)
    first = summary_lines(found)[0]
    assert first.startswith("The loss is still falling by ")
    page = html.unescape(write_report(found, tmp_path / "report.html").read_text())
    assert page.index("The loss is still falling by") < page.index(summary_lines(found)[1][:40])


def test_the_command_line_says_it_first(tmp_path):
    script = tmp_path / "task.py"
    script.write_text(
        "import torch\nfrom poprisk import Problem\n\n\ndef network():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))\n\n\n"
        "def task():\n    x = torch.randn(120, 6, generator=torch.Generator().manual_seed(0))\n"
        '    return Problem(network, "cross_entropy", x, x[:, :3].argmax(1))\n'
    )
    problem = Problem.build(f"{script}:task")
    train(problem, partial(torch.optim.AdamW, lr=2e-3), 48, batch_size=40, path=tmp_path / "run", progress=False)
    for command, options in (("audit", ["--tier", "any"]), ("analyze", ["--budget", "0.1"])):
        out = CliRunner().invoke(app, [command, str(tmp_path / "run"), *options]).stdout.split()
        assert " ".join(out).startswith("The loss is still falling by"), command


@pytest.mark.parametrize(
    ("steps", "lr"),
    [(900, 1e-2), (600, 3e-2), (8, 1e-3)],
    ids=["finished", "finished early", "too short to tell"],
)
def test_finished_runs_are_not_flagged(steps, lr):
    assert under_training(trained(steps, lr)) == ""


@pytest.mark.parametrize("seed", range(6))
def test_noise_about_a_level_is_not_a_fall(seed):
    """A linear model at its minimum, with batches of five: the losses scatter by half of their size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(100, 4, generator=generator)
    y = x[:, :1] + torch.randn(100, 1, generator=generator)
    problem = Problem(nn.Linear, "squared", x, y, arguments={"in_features": 4, "out_features": 1})
    run = train(problem, partial(torch.optim.SGD, lr=0.02), 400, batch_size=5, seed=seed, progress=False)
    assert under_training(run) == ""


def test_memorizing_runs_are_not_told_to_train_longer():
    """Labels that are mostly noise: the training loss falls, and every step raises the risk."""
    run = trained(120, 1e-2, noise=1.0)
    assert (run.losses[-15:].mean() < 0.98 * run.losses[-30:-15].mean()).item()
    risk = population_risk(run, "k_fold", 5)
    assert float(risk.value) > 1.2  # above chance, 1.1
    assert STILL_FALLING not in risk.reason
    assert under_training(run, replace(risk, valid=True)) == ""


def test_a_held_back_curve_that_rose():
    falling, moment = trained(48, 2e-3), SimpleNamespace(risk=SimpleNamespace(step=30))
    assert under_training(falling)
    before = SimpleNamespace(losses=falling.losses, kept=moment, num_steps=48)
    assert under_training(before) == ""


def test_the_gap_decides_where_the_risk_is_known():
    run = trained(48, 2e-3)
    loss = run.losses[-6:].mean().item()
    near, far = (RiskEstimate(loss * f, 0.1, training_loss=loss) for f in (1.1, 1.5))
    assert under_training(run, near).startswith(STILL_FALLING)
    assert under_training(run, far) == ""
