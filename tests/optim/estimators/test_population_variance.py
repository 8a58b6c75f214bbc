"""The two variance sources against loops over examples and micro-batches, and the ways of a training loop."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from oracles.population import mean_variance_loop, sum_variance_loop
from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.types import VarianceSource
from poprisk.errors import DataError, GradientError, HyperparameterError
from poprisk.optim._estimators.variance import MicrobatchVariance, PerExampleVariance


def _network(dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def _data(b: int = 7, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    return draw(b, 3), draw(b, 2)


def _flat(tensors) -> torch.Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _rows(module, x, y) -> torch.Tensor:
    model = FlatModel(module, "squared")
    return model.per_example_gradients(model.weights, x, y)


def _squared(u, y):
    return (u - y).square().sum() / 2


def test_both_are_variance_sources():
    module = _network()
    assert isinstance(PerExampleVariance(module, "squared"), VarianceSource)
    with MicrobatchVariance(module.parameters()) as source:
        assert isinstance(source, VarianceSource)


# --- from examples


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 32])
def test_per_example_variance_is_the_paper_s(chunk_size):
    module, (x, y) = _network(), _data()
    source, params = PerExampleVariance(module, "squared", chunk_size=chunk_size), list(module.parameters())
    loss = source.observe(x, y, set_grad=True)
    G = _rows(module, x, y)
    assert_close(loss, _squared(module(x), y).detach() / 7)
    assert_close(_flat(p.grad for p in params), G.mean(dim=0))
    assert_close(_flat(source.variances(params)), mean_variance_loop(G))
    assert source.variances(params) == [None] * 4


def test_observing_alone_leaves_gradients_alone():
    module, (x, y) = _network(), _data()
    source = PerExampleVariance(module, "squared")
    source.observe(x, y)
    assert all(p.grad is None for p in module.parameters())
    assert all(
        v is not None and v.shape == p.shape
        for v, p in zip(source.variances(list(module.parameters())), module.parameters(), strict=True)
    )


def test_the_last_observation_counts_and_strangers_are_unknown():
    module, (x, y) = _network(), _data()
    source = PerExampleVariance(module, "squared")
    source.observe(x, 10 * y)
    source.observe(x, y)
    stranger = nn.Parameter(torch.zeros(2))
    bias, unknown = source.variances([module[2].bias, stranger])
    assert_close(bias, mean_variance_loop(_rows(module, x, y))[-2:])
    assert unknown is None


def test_large_means_do_not_drown_the_variance():
    module = nn.Linear(1, 1, bias=False)
    x = 1e4 + torch.tensor([[0.0], [1.0], [2.0], [3.0]])  # float32: squares of the mean have no room for the variance
    source = PerExampleVariance(module, lambda u, y: u.sum(), chunk_size=2)
    source.observe(x, x)
    assert_close(source.variances([module.weight])[0], torch.tensor([[5.0 / 12]]))


@pytest.mark.parametrize("factor", [0.25, 7.0])
def test_the_variance_follows_a_rescaled_gradient(factor):
    module, (x, y) = _network(), _data()
    source, params = PerExampleVariance(module, "squared"), list(module.parameters())
    source.observe(x, y)
    _squared(factor * module(x), factor * y).div(7 * factor).backward()  # factor × the mean gradient
    assert_close(_flat(source.variances(params)), factor**2 * mean_variance_loop(_rows(module, x, y)))


def test_half_precision_weights_have_float32_variances():
    module, (x, y) = _network(torch.bfloat16), _data(dtype=torch.bfloat16)
    source = PerExampleVariance(module, "squared")
    source.observe(x, y, set_grad=True)
    found = source.variances(list(module.parameters()))
    assert all(v.dtype == torch.float32 for v in found)
    assert all(p.grad.dtype == torch.bfloat16 for p in module.parameters())
    assert_close(_flat(found), mean_variance_loop(_rows(module, x, y).float()), rtol=0.02, atol=1e-4)  # bf16 clip ratio


def test_per_example_refusals():
    module, (x, y) = _network(), _data()
    with pytest.raises(DataError, match="at least 2 examples, got 1"):
        PerExampleVariance(module, "squared").observe(x[:1], y[:1])
    with pytest.raises(HyperparameterError, match="chunk_size"):
        PerExampleVariance(module, "squared", chunk_size=0)
    with pytest.raises(DataError, match="training mode"):
        PerExampleVariance(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double(), "squared").observe(x, y)


# --- from micro-batches


def _accumulate(module, x, y, sizes, scale=1.0) -> torch.Tensor:
    """One backward per micro-batch; returns the micro-batch gradients as rows."""
    params, rows = list(module.parameters()), []
    for part_x, part_y in zip(x.split(sizes), y.split(sizes), strict=True):
        loss = scale * _squared(module(part_x), part_y)
        rows.append(_flat(torch.autograd.grad(loss, params, retain_graph=True)))
        loss.backward()
    return torch.stack(rows)


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=2, max_size=5), scale=st.sampled_from([1.0, 0.2, 1e4]))
def test_micro_batch_variance_is_that_of_the_sum(sizes, scale):
    module = _network()
    x, y = _data(sum(sizes))
    params = list(module.parameters())
    with MicrobatchVariance(params) as source:
        X = _accumulate(module, x, y, sizes, scale)
        found = _flat(source.variances(params))
    assert_close(_flat(p.grad for p in params), X.sum(dim=0))
    assert_close(found, sum_variance_loop(X), rtol=1e-10, atol=1e-10 * scale**2)


def test_single_examples_give_the_per_example_variance():
    module, (x, y) = _network(), _data()
    params = list(module.parameters())
    with MicrobatchVariance(params) as source:
        _accumulate(module, x, y, [1] * 7, scale=1 / 7)
        assert_close(_flat(source.variances(params)), mean_variance_loop(_rows(module, x, y)))


def test_one_micro_batch_has_no_variance_and_steps_do_not_mix():
    module, (x, y) = _network(), _data(8)
    params = list(module.parameters())
    with MicrobatchVariance(params) as source:
        assert source.variances(params) == [None] * 4
        _accumulate(module, x, y, [8])
        assert source.variances(params) == [None] * 4
        module.zero_grad()
        X = _accumulate(module, x, y, [4, 4])
        assert_close(_flat(source.variances(params)), sum_variance_loop(X))
        assert source.variances(params) == [None] * 4


@pytest.mark.parametrize("set_to_none", [True, False])
def test_cleared_gradients_start_anew(set_to_none):
    module, (x, y) = _network(), _data(8)
    optimizer = torch.optim.SGD(module.parameters())
    params = list(module.parameters())
    with MicrobatchVariance(params) as source:
        _accumulate(module, 5 * x, y, [2, 2, 4])
        optimizer.zero_grad(set_to_none=set_to_none)  # no step: an overflow, say
        X = _accumulate(module, x, y, [4, 4])
        assert_close(_flat(source.variances(params)), sum_variance_loop(X))
        optimizer.zero_grad(set_to_none=set_to_none)
        X = _accumulate(module, x, y, [2, 3, 3])
        assert_close(_flat(source.variances(params)), sum_variance_loop(X))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_cleared_after_one_micro_batch(set_to_none):
    module, (x, y) = _network(), _data(8)
    with MicrobatchVariance(module.parameters()) as source:
        _accumulate(module, x, y, [8])
        for p in module.parameters():
            p.grad = None if set_to_none else torch.zeros_like(p)
        _accumulate(module, x, y, [8])
        assert source.variances(list(module.parameters())) == [None] * 4


@pytest.mark.parametrize("rescale", ["clip", "multiply", "replace", "data"])
def test_the_variance_follows_clipping(rescale):
    module, (x, y) = _network(), _data(8)
    params = list(module.parameters())
    with MicrobatchVariance(params) as source:
        X = _accumulate(module, x, y, [2, 3, 3])
        before = torch.linalg.vector_norm(X.sum(dim=0))
        if rescale == "clip":
            torch.nn.utils.clip_grad_norm_(params, 0.1)
        for p in params:
            if rescale == "multiply":
                p.grad.mul_(0.3)
            elif rescale == "replace":
                p.grad = p.grad / 5
            elif rescale == "data":
                p.grad.data.mul_(3)
        factor = torch.linalg.vector_norm(_flat(p.grad for p in params)) / before
        assert_close(_flat(source.variances(params)), factor**2 * sum_variance_loop(X))


def test_the_variance_follows_a_rescaling_between_micro_batches():
    module, (x, y) = _network(), _data(8)
    params = list(module.parameters())
    with MicrobatchVariance(params) as source:
        X = _accumulate(module, x[:5], y[:5], [2, 3])
        for p in params:
            p.grad.mul_(0.5)
        X = torch.cat([0.5 * X, _accumulate(module, x[5:], y[5:], [2, 1])])
        assert_close(_flat(source.variances(params)), sum_variance_loop(X))


def test_unscaling_a_scaled_loss():
    module, (x, y) = _network(torch.float32), _data(8, torch.float32)
    params = list(module.parameters())
    optimizer = torch.optim.SGD(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    with MicrobatchVariance(params) as source:
        for part_x, part_y in zip(x.split(4), y.split(4), strict=True):
            scaler.scale(_squared(module(part_x), part_y)).backward()
        scaler.unscale_(optimizer)
        found = _flat(source.variances(params))
        module.zero_grad()
        X = _accumulate(module, x, y, [4, 4])
    assert_close(found, sum_variance_loop(X), rtol=1e-3, atol=1e-5)  # the oracle subtracts squares in float32


def test_an_unused_parameter_had_a_zero_gradient():
    a, b = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    with MicrobatchVariance([a, b]) as source:
        for j, use_b in enumerate([True, False, True, False]):
            (a.sum() * j + (b.sum() * (j + 1.0) if use_b else 0.0)).backward()
        found = source.variances([a, b])
    assert_close(found[0], sum_variance_loop(torch.tensor([0.0, 1, 2, 3], dtype=torch.float64)[:, None]).expand(2))
    assert_close(found[1], sum_variance_loop(torch.tensor([1.0, 0, 3, 0], dtype=torch.float64)[:, None]).expand(2))


def test_zero_gradients_have_zero_variance():
    w = nn.Parameter(torch.ones(3))
    with MicrobatchVariance([w]) as source:
        for _ in range(3):
            (0 * w).sum().backward()
        assert_close(source.variances([w])[0], torch.zeros(3))


def test_equal_micro_batches_have_exactly_no_variance():
    w = nn.Parameter(torch.ones(3))
    with MicrobatchVariance([w]) as source:
        for _ in range(4):
            (1000.0 * w).sum().backward()
        assert_close(source.variances([w])[0], torch.zeros(3), rtol=0, atol=0)


def test_large_means_do_not_drown_the_micro_batch_variance():
    w = nn.Parameter(torch.ones(1))
    with MicrobatchVariance([w]) as source:
        for j in range(4):
            ((1e4 + j) * w).sum().backward()
        assert_close(source.variances([w])[0], torch.tensor([20.0 / 3]))


def test_gradients_taken_without_accumulation_do_not_count():
    module, (x, y) = _network(), _data(8)
    params = list(module.parameters())
    with MicrobatchVariance(params) as source:
        torch.autograd.grad(_squared(module(x), y), params)
        assert source.variances(params) == [None] * 4
        torch.autograd.grad(_squared(module(x), y), params)
        X = _accumulate(module, x, y, [4, 4])  # takes them too, before each backward
        torch.autograd.grad(_squared(module(x), y), params)
        assert_close(_flat(source.variances(params)), sum_variance_loop(X))


def test_shared_weights_are_one_parameter():
    w = nn.Parameter(torch.ones(2, dtype=torch.float64))
    with MicrobatchVariance([w, w]) as source:
        for j in (1.0, 2.0, 4.0):
            (j * w + w * w).sum().backward()
        X = torch.tensor([[3.0], [4.0], [6.0]], dtype=torch.float64).expand(3, 2)
        assert_close(source.variances([w])[0], sum_variance_loop(X))


def test_half_precision_gradients_are_tallied_in_float32():
    w = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with MicrobatchVariance([w]) as source:
        for j in (1.0, 2.0, 3.0):
            (j * w).sum().backward()
        assert_close(source.variances([w])[0], torch.full((2,), 3.0))


def test_leftover_gradients_are_refused():
    w = nn.Parameter(torch.ones(2))
    w.grad = torch.ones(2)
    with MicrobatchVariance([w]) as source:
        for _ in range(2):
            w.sum().backward()
        with pytest.raises(GradientError, match="zero_grad"):
            source.variances([w])
        w.grad = torch.zeros(2)
        for _ in range(2):
            w.sum().backward()
        assert_close(source.variances([w])[0], torch.zeros(2))


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 2, sparse=True)
    with MicrobatchVariance(table.parameters()), pytest.raises(GradientError, match="sparse=False"):
        table(torch.tensor([1])).sum().backward()


def test_nothing_to_watch_is_refused():
    with pytest.raises(DataError, match="requires a gradient"):
        MicrobatchVariance([torch.zeros(2)])


def test_frozen_and_complex_parameters_are_left_to_the_stream():
    w, z = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with MicrobatchVariance([w, z, torch.zeros(2)]) as source:
        for _ in range(2):
            (w.sum() + z.abs().sum()).backward()
        found = source.variances([w, z])
    assert_close(found[0], torch.zeros(2))
    assert found[1] is None


def test_closing_takes_the_hooks_off():
    w = nn.Parameter(torch.ones(2))
    source = MicrobatchVariance([w])
    source.close()
    for _ in range(2):
        w.sum().backward()
    assert source.variances([w]) == [None]
    source.close()


def test_hooks_do_not_keep_the_source_alive():
    w = nn.Parameter(torch.ones(2))
    source = weakref.ref(MicrobatchVariance([w]))
    gc.collect()
    assert source() is None
    w.sum().backward()
    assert_close(w.grad, torch.ones(2))


def test_memory_is_given_back():
    w = nn.Parameter(torch.ones(2))
    with MicrobatchVariance([w]) as source:
        for _ in range(3):
            w.sum().backward()
        buffers = [source._tallies[w].spread]
        assert len(source._arriving) == 0
        assert buffers[0].shape == w.shape
        source.variances([w])
        assert source._tallies == {}
