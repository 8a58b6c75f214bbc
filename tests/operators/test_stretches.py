"""Operators followed in stretches: those of the window at one step a time, and what they say about a run's labels."""

from functools import partial

import pytest
import torch
from torch import nn

from poprisk import Problem, Window, train
from poprisk.operators import RunPath, StretchedWindow, drift_diffusion, loss_terms, loss_weights, probe_operators

N, M, STEPS = 24, 6, 16
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
}


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def recorded(optimizer="adamw", loss="cross_entropy", **options):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(N + M, 4, generator=random, dtype=torch.float64)
    y = x[:, :3].argmax(1) if loss == "cross_entropy" else x[:, :3].sin()
    problem = Problem(network, loss, x[:N], y[:N], test=(x[N:], y[N:]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return train(
            problem, OPTIMIZERS[optimizer], STEPS, batch_size=6, dtype=torch.float64, progress=False, **options
        )


def path_of(run, start=0):
    inputs, targets = run.problem.batch(dtype=torch.float64)
    return RunPath.read(run, run.model(torch.float64), inputs, targets, run.problem.test[0], start=start)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("start", [0, 5])
def test_stretches_of_one_step_are_the_window(optimizer, start):
    run = recorded(optimizer)
    window = Window.of_run(run, start=start, nodes=2)
    ops = window.dense_operators()
    stretched = StretchedWindow(path_of(run, start), 1, nodes=2)
    H = torch.randn(window.num_outputs, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    swept = stretched.forward(H, source=True)
    near = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    near(swept.gradient[:, :2], ops.propagator @ H)
    near(swept.train[:, :2], ops.train_transfer @ H)
    near(swept.test[:, :2], ops.test_transfer @ H)
    near(-swept.test[:, 2], ops.sources.test)
    near(-swept.train[:, 2], ops.sources.train)
    near(stretched.dissipate(H), ops.dissipation_gramian @ H)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("length", [3, STEPS])
def test_displacements_are_exact_whatever_the_length_of_a_stretch(optimizer, length):
    path = path_of(recorded(optimizer))
    swept = StretchedWindow(path, length).forward(path.output_gradient[:, None], source=True)
    moved = (path.test_outputs(-1) - path.test_outputs(0)).reshape(-1)
    torch.testing.assert_close(-swept.test.sum(1), moved, rtol=1e-10, atol=1e-11)


def test_w_of_long_stretches_is_the_gramian_of_its_own_sweep():
    path = path_of(recorded("nesterov"))
    window = StretchedWindow(path, 5)
    H = torch.randn(N * 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gramian = torch.zeros(4, 4, dtype=torch.float64)

    def add(j, F, rows):
        gramian.add_(F.T @ (window.effective_preconditioners[j][:, None] * F))

    window.forward(H, watch=add)
    torch.testing.assert_close(H.T @ window.dissipation_gramian.matmat(H), gramian)


def test_readings_are_those_of_the_dense_operators_within_their_errors():
    run = recorded()
    path, ops = path_of(run), Window.of_run(run).dense_operators()
    clean = path.targets.clone()
    clean[:4] = (clean[:4] + 1) % 3
    g = path.gradient_for(clean)
    H = torch.stack([g, ops.output_gradient - g], dim=1)
    found = probe_operators(path, H, 2, probes=24)
    assert found.steps == [0, 4, 8, 12, 16]
    left = (H * (ops.propagator @ H)).sum(0) / H.square().sum(0)
    assert bool(((found.left[-1] - left).abs() <= found.left_error[-1]).all())
    torch.testing.assert_close(found.left[0], torch.ones(2, dtype=torch.float64))
    gramian = H.T @ ops.dissipation_gramian @ H
    shares = gramian.sum(1) / gramian.sum()
    assert bool(((found.dissipated - shares).abs() <= found.dissipated_error).all())
    assert found.dissipated_error.max() < 0.05
    apart = torch.eye(3, dtype=torch.float64) - 1 / 3  # what a gradient of cross-entropy can be
    W = torch.block_diag(*[apart] * N) @ ops.dissipation_gramian @ torch.block_diag(*[apart] * N)
    number = (W.trace().square() / W.square().sum()).item()
    assert found.directions_least <= number
    assert found.directions == pytest.approx(number, rel=0.3)
    assert found.directions_least > number / 3
    torch.testing.assert_close(found.source - found.test.sum(1), ops.test_displacement, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
def test_terms_of_the_loss_add_up_to_its_change(loss):
    run = recorded(loss=loss)
    path, targets = path_of(run), run.problem.test[1]
    before, after = path.test_outputs(0), path.test_outputs(-1)
    weights = loss_weights(path.model.loss, before, after, targets)
    parts = {"half": (after - before).reshape(-1) / 2, "rest": (after - before).reshape(-1) / 2}
    score = torch.func.vmap(path.model.loss)
    change = (score(after, targets) - score(before, targets)).mean().item()
    assert sum(loss_terms(weights, parts).values()) == pytest.approx(change, rel=1e-10)


def test_sampled_means_err_by_what_they_say():
    run = recorded()
    model, (inputs, targets) = run.model(torch.float64), run.problem.batch(dtype=torch.float64)
    given = (run, model, inputs, targets, run.problem.test[0])
    exact = drift_diffusion(*given)
    assert exact.spread_steps is None
    missed, said = 0.0, 0.0
    for seed in range(12):
        found = drift_diffusion(*given, sample=4, generator=torch.Generator().manual_seed(seed))
        assert found.closure < 1e-12
        torch.testing.assert_close(found.drift + found.diffusion, exact.drift + exact.diffusion)
        missed += (found.drift - exact.drift).square().sum().item() / 12
        said += found.spread_steps.sum(0).square().sum().item() / 12
    assert 0.4 < said / missed < 2.5
    all_of_them = drift_diffusion(*given, sample=N // 2)
    torch.testing.assert_close(all_of_them.drift, exact.drift)


def test_held_back_examples_belong_to_no_pool():
    run = recorded(hold_back=0.25)
    model, (inputs, targets) = run.model(torch.float64), run.problem.batch(dtype=torch.float64)
    given = (run, model, inputs, targets, run.problem.test[0])
    moved = drift_diffusion(*given, sampling="epochs")  # 18 examples in batches of 6: three steps an epoch
    changed = targets.clone()
    changed[run.kept.held] = (changed[run.kept.held] + 1) % 3
    again = drift_diffusion(run, model, inputs, changed, run.problem.test[0], sampling="epochs")
    torch.testing.assert_close(again.drift, moved.drift)
