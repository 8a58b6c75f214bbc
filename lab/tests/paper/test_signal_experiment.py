"""The signal channel at its smoke size: what is stored against dense formulas, the command, its figure and its page."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from poprisk._core.store.envelope import load_result
from poprisk.errors import HyperparameterError
from poprisk.operators._window import Window
from poprisk.runs._training import train
from poprisk_lab.pages.registry import chosen_pages
from poprisk_lab.paper.signal import study as experiment
from poprisk_lab.paper.signal.groups import LITERAL, REGISTERED, SCORES, DigitsConfig
from poprisk_lab.paper.signal.numbers import BAR
from poprisk_lab.paper.signal.study import SMOKE, SignalConfig, measure_moons, moons_problem, two_moons

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(smoke_result):
    return smoke_result("signal")


def test_command_writes_result_and_figure_and_says_where(smoke_of, saved):
    made = smoke_of("signal")
    directory, out, err = made.directory, made.out, made.err
    assert sorted(p.name for p in directory.iterdir()) == ["signal.json", "signal.pdf", "signal.png"]
    assert f"Wrote {directory}" in out
    assert err.splitlines()[0] == "signal: 0 of 2 runs; next: moons, seed 0"
    assert saved["config"] == json.loads(json.dumps(asdict(SMOKE)))
    assert list(saved["result"]["digits"][0]["auc"]) == list(SCORES)


def naive_laplacian(points, k):
    distances = torch.cdist(points, points)
    n = len(points)
    A = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in distances[i].argsort()[1 : k + 1].tolist():
            A[i, j] = A[j, i] = 1.0
    d = A.sum(1)
    return torch.eye(n, dtype=torch.float64) - A / (d[:, None] * d).sqrt()


def area(scores, wrong):
    """The share of pairs of a wrong and a right label that the scores put in order."""
    pairs = [(a > b) + 0.5 * (a == b) for a, w in zip(scores, wrong, strict=True) if w
             for b, v in zip(scores, wrong, strict=True) if not v]  # fmt: skip
    return sum(pairs) / len(pairs)


def test_stored_numbers_are_those_of_dense_formulas(saved):
    """Everything once more from W, G, g and a graph made by hand."""
    run = saved["result"]["runs"][0]
    problem, wrong = moons_problem(SMOKE, 0)
    recorded = train(
        problem, lambda p: torch.optim.Adam(p, lr=SMOKE.lr), SMOKE.steps, dtype=torch.float64, progress=False
    )
    ops = Window.of_run(recorded, dense=True).dense_operators()
    W, G, g = ops.factor.T @ ops.factor, ops.test_transfer, ops.output_gradient
    n = SMOKE.examples
    values, vectors = torch.linalg.eigh(
        torch.eye(n, dtype=torch.float64) + SMOKE.gamma * naive_laplacian(problem.inputs, SMOKE.neighbours)
    )
    root, inverse = (vectors * values**power @ vectors.T for power in (0.5, -0.5))
    lam, phi = (x.flip(-1) for x in torch.linalg.eigh(inverse @ W @ inverse))
    np.testing.assert_allclose(run["per_complexity"], lam, rtol=1e-4, atol=1e-9 * lam[0].item())
    np.testing.assert_allclose(run["dissipation"], torch.linalg.eigvalsh(W).flip(0), rtol=1e-4, atol=1e-9 * lam[0])
    assert run["signal_rank"] == pytest.approx((lam.sum() ** 2 / lam.square().sum()).item(), rel=1e-6)
    visibility = torch.linalg.svdvals(torch.linalg.lstsq(ops.factor.T, G.T).solution)[0].item() ** 2
    assert run["visibility_norm"] == pytest.approx(visibility, rel=1e-4)
    np.testing.assert_allclose(run["bound"][:4], run["visibility_norm"] * lam[:4], rtol=1e-9)
    for r in range(4):
        lost = G @ inverse @ (torch.eye(n, dtype=torch.float64) - phi[:, :r] @ phi[:, :r].T)
        assert run["realized"][r] == pytest.approx(torch.linalg.matrix_norm(lost, 2).item() ** 2, rel=1e-5)
    kept = math.ceil(run["signal_rank"])
    Q = phi[:, :kept] @ phi[:, :kept].T
    np.testing.assert_allclose(run["energy"], Q.diagonal(), rtol=1e-4, atol=1e-8)
    assert run["energy_auc"] == pytest.approx(area(Q.diagonal().tolist(), wrong.tolist()))
    assert run["tail_auc"] == pytest.approx(area((g - inverse @ Q @ root @ g).abs().tolist(), wrong.tolist()))


def test_bound_is_attained_and_the_run_stays_below(saved):
    run = saved["result"]["runs"][0]
    bound, attained, realized = (np.array(run[name]) for name in ("bound", "attained", "realized"))
    np.testing.assert_allclose(attained, bound, rtol=1e-10, atol=1e-12 * bound[0])
    assert (realized <= bound * (1 + 1e-5) + 1e-12 * bound[0]).all()
    assert realized[0] > 0
    assert run["bounds_held"] == run["bounds_checked"] == SMOKE.examples + 2
    assert sum(run["wrong"]) == round(SMOKE.noise * SMOKE.examples)


def test_moons_and_their_wrong_labels():
    points, labels = two_moons(200, 0.0, torch.Generator().manual_seed(0))
    upper, lower = points[labels == 0], points[labels == 1]
    torch.testing.assert_close(upper.norm(dim=1), torch.ones(100, dtype=torch.float64))
    centre = torch.tensor([1.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close((lower - centre).norm(dim=1), torch.ones(100, dtype=torch.float64))
    problem, wrong = moons_problem(SMOKE, 0)
    assert (problem.targets[:, 0] != torch.arange(SMOKE.examples) % 2).tolist() == wrong.tolist()
    assert (problem.test[1][:, 0] == torch.arange(SMOKE.test_examples) % 2).all()


def test_seeds_differ_and_repeat():
    small = replace(SMOKE, examples=12, steps=2, width=3)
    first, again, other = measure_moons(small, 0), measure_moons(small, 0), measure_moons(small, 1)
    assert first.bound == again.bound
    assert first.bound != other.bound


def test_figure_shows_the_stored_numbers(saved):
    from poprisk_lab.paper.signal.figure import draw

    run = saved["result"]["runs"][0]
    losses, spectra, lost, data, *_ = draw(saved).axes
    np.testing.assert_array_equal(losses.lines[0].get_ydata(), run["test_losses"])
    np.testing.assert_array_equal(losses.lines[1].get_ydata(), run["train_losses"])
    scaled = np.array(run["per_complexity"]) / run["per_complexity"][0]
    np.testing.assert_allclose(spectra.lines[2].get_ydata(), scaled)
    known = np.array(run["bound"]) > 0
    for line, name in zip(lost.lines, ("bound", "attained", "realized"), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), np.array(run[name])[known])
    rings = data.collections[-1].get_offsets()
    np.testing.assert_allclose(rings, np.array(run["inputs"])[np.array(run["wrong"])])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"neighbours": 64}, "neighbours must lie between 1 and examples - 1, got 64"),
        ({"noise": 0.0}, "noise must make at least 2 labels wrong"),
    ],
)
def test_wrong_configurations_are_refused(wrong, message):
    with pytest.raises(HyperparameterError, match=message):
        SignalConfig(**wrong)
    with pytest.raises(HyperparameterError, match="at least one seed"):
        DigitsConfig(steps=0)


@pytest.fixture(scope="module")
def stored():
    return load_result(ROOT / "results/signal.json", experiment.KIND)


def test_page_comes_from_the_stored_result(stored):
    [page] = chosen_pages(["docs/signal.md"])
    assert not page.is_stale(ROOT / "results")
    assert stored["config"] == json.loads(json.dumps(asdict(SignalConfig())))
    assert (ROOT / "docs/signal.png").is_file()


def test_stored_result_says_what_is_claimed(stored):
    found = stored["result"]["summary"]
    assert found["bounds_held"] == found["bounds_checked"] > 0
    assert found["worst_attained_error"] < 1e-10
    assert found["test_loss_end"]["value"] > 1.5 * found["test_loss_best"]["value"]
    assert len(stored["result"]["digits"]) >= 5
    assert all(run["auc"][REGISTERED] >= BAR for run in stored["result"]["digits"])
    assert found["digits"][LITERAL]["value"] < 0.6  # the literal reading is said to be no better than chance
