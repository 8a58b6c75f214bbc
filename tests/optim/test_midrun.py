"""What changes in the middle of a run: options, schedulers, scalers, copies."""

import copy

import pytest
import torch
from streams import start, stream, train
from torch import nn
from torch.testing import assert_close

from poprisk.errors import DataError, HyperparameterError
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._estimators.variance import MicrobatchVariance


@pytest.mark.parametrize(("name", "value"), [("gate", "foo"), ("alpha", float("nan")), ("rho", 1.0), ("fused", "x")])
def test_an_option_set_in_the_middle_is_checked_before_anything_moves(name, value):
    params = start()
    optimizer = PopRiskAdamW(params)
    train(optimizer, params, stream(3))
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0][name] = value
    with pytest.raises(HyperparameterError, match=name):
        train(optimizer, params, stream(1))
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_a_state_dtype_set_in_the_middle_is_used_for_new_states():
    params = start(dtype=torch.float32)
    optimizer = PopRiskAdamW(params, gate=None)
    train(optimizer, params, stream(2, dtype=torch.float32))
    optimizer.param_groups[0].update(state_dtype=torch.bfloat16, gate="soft")
    train(optimizer, params, stream(2, dtype=torch.float32))
    assert optimizer.state[params[0]]["exp_var"].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_s_stands_still_without_a_gate(dtype, options):
    params = start(dtype=dtype)
    optimizer = PopRiskAdamW(params, **options)
    train(optimizer, params, stream(2, dtype=dtype))
    s = optimizer.state[params[0]]["exp_var"].clone()
    optimizer.param_groups[0]["gate"] = None
    train(optimizer, params, stream(5, dtype=dtype))
    assert optimizer.state[params[0]]["var_step"].item() == 2
    assert optimizer.state[params[0]]["step"].item() == 7
    assert torch.equal(optimizer.state[params[0]]["exp_var"], s)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_linearize_speaks_of_the_step_that_was_taken_not_of_the_next(tensor_lr):
    params = start()
    optimizer = PopRiskAdamW(params, lr=torch.tensor(0.1, dtype=torch.float64) if tensor_lr else 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    train(optimizer, params, stream(5))
    before = [p.detach().clone() for p in params]
    train(optimizer, params, stream(1, seed=7))
    scheduler.step()
    for p, w in zip(params, before, strict=True):
        lin = optimizer.linearize()[p]
        m = optimizer.state[p]["exp_avg"]
        assert_close(p.detach() - w, -lin.preconditioner * m - lin.decay * w, rtol=1e-9, atol=1e-14)


def test_a_gradient_scaler_does_not_close_the_gate_of_a_variance_source():
    torch.manual_seed(1)
    x, y = torch.randn(32, 5), torch.randn(32, 1)
    gates = []
    for scaled in (False, True):
        torch.manual_seed(2)
        model = nn.Linear(5, 1)
        source = MicrobatchVariance(model.parameters())
        optimizer = PopRiskAdamW(model.parameters(), variance=source, gate=Gate(strength=1.0), fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for _ in range(5):
            optimizer.zero_grad()
            for rows in torch.arange(32).split(8):
                scaler.scale((model(x[rows]) - y[rows]).square().mean() / 4).backward()
            scaler.step(optimizer)
            scaler.update()
        gates.append(optimizer.diagnostics()[0].mean_gate)
    assert gates[0] > 0.01
    assert_close(gates[1], gates[0], rtol=1e-4, atol=1e-6)


def test_rates_are_not_guessed_with_a_variance_source():
    model = nn.Linear(3, 1)
    optimizer = PopRiskAdamW(model.parameters(), variance=MicrobatchVariance(model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    model(torch.randn(4, 3)).sum().backward()
    assert optimizer.diagnostics()[0].training_rate.isnan()


def test_a_source_hooked_to_parameters_refuses_to_be_copied():
    model = nn.Linear(3, 1)
    optimizer = PopRiskAdamW(model.parameters(), variance=MicrobatchVariance(model.parameters()))
    with pytest.raises(DataError, match="cannot be copied or pickled"):
        copy.deepcopy((model, optimizer))


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("gate", ["soft", "hard", "snr"])
def test_no_epsilon_and_no_gradient_make_no_nan(gate, options):
    params = start(dtype=torch.float32)
    optimizer = PopRiskAdamW(params, gate=gate, eps=0.0, weight_decay=0.0, **options)
    before = [p.detach().clone() for p in params]
    train(optimizer, params, [[torch.zeros_like(p) for p in params]] * 3)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_channels_last_states_draw_the_bits_of_their_place_in_memory():
    runs = []
    for options in ({"foreach": False}, {"fused": True}):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last))
        optimizer = PopRiskAdamW([p], state_dtype=torch.bfloat16, **options)
        for _ in range(20):
            p.grad = torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last)
            optimizer.step()
        runs.append((p.detach(), optimizer.state[p]["exp_avg_sq"].float()))
    assert_close(runs[0][0], runs[1][0], rtol=1e-5, atol=1e-6)
    assert (runs[0][1] != runs[1][1]).sum() <= 1


def test_threads_share_the_work_of_a_large_tensor():
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            params = [nn.Parameter(torch.randn(n)) for n in (70_001, 5, 40_000)]
            optimizer = PopRiskAdamW(params, fused=True)
            for _ in range(4):
                for p in params:
                    p.grad = torch.randn_like(p)
                optimizer.step()
            results.append([p.detach() for p in params])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_numbers_of_any_kind_are_taken():
    import numpy as np

    optimizer = PopRiskAdamW(start(), lr=np.float32(0.25), gate=Gate(alpha=np.float64(0.5)), eps=0)
    group = optimizer.param_groups[0]
    assert [type(group[name]) for name in ("lr", "alpha", "eps")] == [float] * 3
