"""The optimizer with a variance from outside: the corollary's one-batch test, and micro-batches."""

import pytest
import torch
from optimizer_table import BACKENDS
from torch import nn
from torch.testing import assert_close

from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._estimators.variance import MicrobatchVariance, PerExampleVariance

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
B = 8


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def data(b=B):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(b, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(dim=1, keepdim=True) + torch.randn(b, 1, generator=generator, dtype=torch.float64)


def example_gradients(model, x, y):
    """One backward per example: rows of gradients for each parameter."""
    rows = []
    for k in range(len(x)):
        loss = (model(x[k : k + 1]) - y[k : k + 1]).square().sum() / 2
        rows.append(torch.autograd.grad(loss, list(model.parameters())))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def variance_of_mean(G):
    """(Σ_B)_kk / (b - 1), by its definition."""
    b = len(G)
    return (G - G.mean(dim=0)).square().sum(dim=0) / b / (b - 1)


@EVERY_BACKEND
def test_the_corollary_s_one_batch_test(backend):
    """Exactly the coordinates with ḡ² > (Σ_B)_kk/(b-1) move, at the first step and at the next."""
    model, (x, y) = network(), data()
    source = PerExampleVariance(model, "squared")
    optimizer = PopRiskAdamW(
        model.parameters(),
        gate=Gate("hard", rho=0.0, signal="batch", alpha=1.0, normalize=False),
        weight_decay=0.0,
        variance=source,
        **backend,
    )
    for step in range(3):
        columns = example_gradients(model, x, y)
        before = [p.detach().clone() for p in model.parameters()]
        source.observe(x, y, set_grad=True)
        optimizer.step()
        expected = [G.mean(dim=0).square() > variance_of_mean(G) for G in columns]
        share = torch.cat([e.flatten() for e in expected]).double().mean()
        assert 0.1 < share < 0.9
        for p, w, moves, G in zip(model.parameters(), before, expected, columns, strict=True):
            assert torch.equal(p.detach() != w, moves)
            if step == 0:  # AdamW's first step: the learning rate, against the sign of the gradient
                assert_close(
                    p.detach() - w, -optimizer.defaults["lr"] * moves * G.mean(dim=0).sign(), rtol=1e-4, atol=0
                )


@EVERY_BACKEND
def test_s_averages_the_given_variance(backend):
    model, (x, y) = network(), data()
    source = PerExampleVariance(model, "squared")
    optimizer = PopRiskAdamW(model.parameters(), variance=source, **backend)
    s = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(4):
        columns = example_gradients(model, x, y)
        source.observe(x, y, set_grad=True)
        optimizer.step()
        s = [0.99 * old + 0.01 * variance_of_mean(G) for old, G in zip(s, columns, strict=True)]
    for p, expected in zip(model.parameters(), s, strict=True):
        assert_close(optimizer.state[p]["exp_var"], expected, rtol=1e-10, atol=1e-14)
        assert optimizer.state[p]["var_step"].item() == 4


def accumulate(model, x, y, k=4):
    """One backward per micro-batch, losses divided by their number; gives the micro-batch means by hand."""
    means = []
    for xs, ys in zip(x.chunk(k), y.chunk(k), strict=True):
        means.append([G.mean(dim=0) for G in example_gradients(model, xs, ys)])
        loss = (model(xs) - ys).square().sum(dim=1).mean() / 2
        (loss / k).backward()
    return [torch.stack(column) for column in zip(*means, strict=True)]


@EVERY_BACKEND
@pytest.mark.parametrize("clip", [None, 0.1], ids=["", "clipped"])
def test_micro_batches_give_the_variance_of_their_mean(backend, clip):
    model, (x, y) = network(), data()
    with MicrobatchVariance(model.parameters()) as source:
        optimizer = PopRiskAdamW(model.parameters(), variance=source, **backend)
        columns = accumulate(model, x, y)
        factor = 1.0
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            factor = (clip / (norm + 1e-6)).item()
            assert factor < 0.9
        optimizer.step()
    for p, X in zip(model.parameters(), columns, strict=True):
        assert_close(p.grad, X.mean(dim=0) * factor, rtol=1e-8, atol=1e-12)
        assert_close(optimizer.state[p]["exp_var"], 0.01 * factor**2 * variance_of_mean(X), rtol=1e-8, atol=1e-14)


def test_without_micro_batches_the_stream_is_used():
    """One backward between two steps has no variance of its own: the run is that of the plain optimizer."""
    models = [network(), network()]
    (x, y) = data()
    with MicrobatchVariance(models[0].parameters()) as source:
        for model, variance in zip(models, (source, None), strict=True):
            optimizer = PopRiskAdamW(model.parameters(), variance=variance)
            for k in range(4):
                optimizer.zero_grad()
                (model(x[k:]) - y[k:]).square().mean().backward()
                optimizer.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_source_serves_the_gated_and_the_ungated_group():
    """A group without a gate has no s; its parameters are asked for and the answer is not used."""
    model, (x, y) = network(), data()
    first, last = model[0], model[2]
    source = PerExampleVariance(model, "squared")
    groups = [{"params": first.parameters(), "gate": None}, {"params": last.parameters()}]
    optimizer = PopRiskAdamW(groups, variance=source)
    columns = example_gradients(model, x, y)
    source.observe(x, y, set_grad=True)
    optimizer.step()
    assert set(optimizer.state[first.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert_close(optimizer.state[last.weight]["exp_var"], 0.01 * variance_of_mean(columns[2]), rtol=1e-10, atol=1e-14)
