"""Meters of the gate against the rule, against streams of known signal and noise, and without optimism."""

import copy
import math

import pytest
import torch
from optimizer_table import BACKENDS, GATES
from streams import start, stream, train
from torch import nn
from torch.testing import assert_close

from poprisk.errors import HyperparameterError
from poprisk.optim import Gate, join_gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim.rules._gates import hard_gate, snr_gate, soft_gate

pytestmark = pytest.mark.usefixtures("one_thread")
RATES = ("population_rate", "training_rate", "self_fit")


def give(params, row):
    for p, g in zip(params, row, strict=True):
        p.grad = g.clone()


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("normalize", [False, True], ids=["literal", "AdamW's units"])
def test_mean_gate_and_active_fraction_are_the_last_step_s(normalize, gate, backend):
    """From the state and the formulas of the gates, not from the library's own reading of it."""
    params = start()
    optimizer = PopRiskAdamW(params, gate=Gate(gate, alpha=0.3, strength=2.0, normalize=normalize), **backend)
    train(optimizer, params, stream(25))
    q, literal = [], []
    for p in params:
        state = optimizer.state[p]
        m_hat, s_hat = state["exp_avg"] / (1 - 0.9**25), state["exp_var"] / (1 - 0.99**25)
        gates = {
            "soft": lambda m=m_hat, s=s_hat: soft_gate(m, s, 0.3, 2.0),
            "hard": lambda m=m_hat, s=s_hat: hard_gate(m, s, 0.3),
            "snr": lambda m=m_hat, s=s_hat: snr_gate(m, s, 2.0),
        }
        q.append(gates[gate]().flatten())
        literal.append(q[-1])
        if normalize:
            reference = state["gate_scale"][1]
            q[-1] = (1 + ((q[-1] / reference).clamp(max=1) if reference else (q[-1] > 0).double())) / 2
    q, literal = torch.cat(q), torch.cat(literal)
    meters = optimizer.diagnostics()[0]
    assert 0.1 < q.mean() < 0.9
    assert_close(meters.mean_gate, q.mean(), rtol=1e-12, atol=1e-12)
    assert_close(meters.active_fraction, (literal > 0).double().mean(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [{}, {"centering": "corrected"}, {"alpha": "calibrated"}, {"state": "shared", "betas": (0.95, 0.95), "rho": 0.95}],
    ids=["paper", "corrected", "calibrated", "shared"],
)
def test_the_noise_scale_is_that_of_the_stream(options):
    """σ² = 4 on every coordinate, μ² = 1/2 on half of them: tr Cov / |μ|² = 16."""
    n = 20_000
    mean = torch.where(torch.arange(n) % 2 == 0, 0.5**0.5, 0.0)
    p = nn.Parameter(torch.zeros(n))
    optimizer = PopRiskAdamW([p], fused=True, **join_gate(options))
    for _ in range(150):
        p.grad = mean + 2 * torch.randn(n)
        optimizer.step()
    assert abs(optimizer.diagnostics()[0].noise_scale.item() / 16 - 1) < 0.1


def test_the_noise_scale_of_a_given_variance_is_not_corrected_for_an_average_s_noise():
    class Given:
        def variances(self, parameters):
            return [torch.full_like(p, 4.0) for p in parameters]

    p = nn.Parameter(torch.zeros(10_000))
    optimizer = PopRiskAdamW([p], fused=True, variance=Given(), betas=(0.5, 0.999))
    for _ in range(40):
        p.grad = 1 + 2 * torch.randn(10_000)
        optimizer.step()
    assert abs(optimizer.diagnostics()[0].noise_scale.item() / 4 - 1) < 0.1


@pytest.mark.parametrize("gate", ["snr", "hard"])
def test_on_pure_noise_the_lagged_rate_is_zero_and_the_training_rate_is_not(gate):
    p = nn.Parameter(torch.zeros(2000))
    optimizer = PopRiskAdamW([p], gate=Gate(gate, alpha=0.1), fused=True)
    rates = []
    for step in range(200):
        p.grad = torch.randn(2000)
        if step >= 20:
            rates.append(optimizer.diagnostics()[0].to_floats())
        optimizer.step()
    population, training = (torch.tensor([r[name] for r in rates]) for name in RATES[:2])
    error = population.std() / len(rates) ** 0.5
    assert population.mean().abs() < 4 * error
    assert training.mean() > 20 * error
    assert training.min() > 0


@pytest.mark.parametrize("gate", [*GATES, None])
def test_on_pure_signal_the_two_rates_agree(gate):
    p = nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = PopRiskAdamW([p], gate=None if gate is None else Gate(gate, centering="corrected"), lr=0.1)
    g = torch.randn(50, dtype=torch.float64)
    for _ in range(10):
        p.grad = g.clone()
        optimizer.step()
    p.grad = g.clone()
    meters = optimizer.diagnostics()[0].to_floats()
    assert math.isclose(meters["population_rate"], 0.1 * g.abs().sum().item(), rel_tol=1e-6)
    assert math.isclose(meters["training_rate"], meters["population_rate"], rel_tol=1e-9)
    assert abs(meters["self_fit"]) < 1e-9


def test_the_rates_are_first_order_changes_of_the_loss():
    """On a linear loss the training rate is exactly what the coming step takes off it; ascending counts as gain."""
    for maximize in (False, True):
        params = start()
        optimizer = PopRiskAdamW(params, gate="snr", weight_decay=0.0, maximize=maximize)
        gradients = stream(6)
        train(optimizer, params, gradients[:5])
        give(params, gradients[5])
        rate = optimizer.diagnostics()[0].training_rate
        before = [p.detach().clone() for p in params]
        optimizer.step()
        change = sum(((b - p) * g).sum() for p, b, g in zip(params, before, gradients[5], strict=True))
        assert_close(rate, (-change if maximize else change).detach(), rtol=1e-10, atol=1e-12)
        assert rate > 0


def test_rates_need_gradients_that_no_step_has_used():
    params = start()
    optimizer = PopRiskAdamW(params)
    gradients = stream(6)

    def seen():
        meters = optimizer.diagnostics()[0].to_floats()
        return [not math.isnan(meters[name]) for name in RATES]

    give(params, gradients[0])
    assert not any(seen())  # no step yet, so no direction to score
    train(optimizer, params, gradients[:3])
    assert not any(seen())  # used
    optimizer.zero_grad()
    assert not any(seen())  # none
    give(params, gradients[3])
    assert all(seen())
    optimizer.step()
    assert not any(seen())
    for p, g in zip(params, gradients[4], strict=True):
        p.grad.zero_().add_(g)  # as zero_grad(set_to_none=False) and backward do
    assert all(seen())
    optimizer.step()
    optimizer.state_dict()
    assert not any(seen())


def test_rates_after_backward():
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    optimizer = PopRiskAdamW(model.parameters(), gate="snr")
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        assert math.isnan(optimizer.diagnostics()[0].population_rate.item())
    optimizer.zero_grad()
    model(x).square().mean().backward()
    assert optimizer.diagnostics()[0].population_rate.item() > 0


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_looking_changes_nothing(backend):
    params, plain = (start(dtype=torch.float32) for _ in range(2))
    options = {"gate": Gate(alpha="calibrated"), "state_dtype": torch.bfloat16, **backend}
    watched, other = PopRiskAdamW(params, **options), PopRiskAdamW(plain, **options)
    for row in stream(10, dtype=torch.float32):
        give(params, row)
        give(plain, row)
        before = copy.deepcopy(watched.state_dict())
        watched.diagnostics()
        watched.linearize()
        after = watched.state_dict()
        assert before["state"].keys() == after["state"].keys()
        for index, entry in before["state"].items():
            assert all(torch.equal(after["state"][index][k], v) for k, v in entry.items())
        watched.step()
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(params, plain, strict=True))


def test_a_group_without_a_gate_and_one_without_gradients():
    params = start()
    optimizer = PopRiskAdamW(
        [
            {"params": params[:1], "gate": None},
            {"params": params[1:2], "gate": Gate(normalize=False)},
            {"params": params[2:]},
        ]
    )
    train(optimizer, params, [[row[0], row[1], None] for row in stream(5)])
    open_, gated, idle = (m.to_floats() for m in optimizer.diagnostics())
    assert (open_["active_fraction"], open_["mean_gate"]) == (1.0, 1.0)
    assert math.isnan(open_["noise_scale"])
    assert gated["mean_gate"] < 1.0
    assert idle["mean_gate"] == 0.0
    assert set(gated) == {"active_fraction", "mean_gate", "noise_scale", *RATES}
    assert all(isinstance(v, float) for v in gated.values())


# --- the last step as an affine map


def test_linearize_reproduces_the_last_step_of_every_group():
    shapes = ((4, 3),) * 7
    options = [
        {"gate": "soft", "alpha": 0.1},
        {"gate": "hard", "alpha": 0.1, "weight_decay": 0.3},
        {"gate": "snr", "maximize": True},
        {"gate": "soft", "gated_decay": True, "alpha": "calibrated", "weight_decay": 0.3},
        {"gate": None, "weight_decay": 0.1},
        {"gate": "snr", "state": "shared", "betas": (0.9, 0.9), "rho": 0.9},
        {"gate": "hard", "granularity": "row", "normalize_gate": True, "warmup_steps": 3, "alpha": 0.1},
    ]
    params = start(shapes=shapes)
    optimizer = PopRiskAdamW([{"params": [p], **join_gate(o)} for p, o in zip(params, options, strict=True)], lr=0.05)
    for row in stream(12, shapes=shapes):
        before = [p.detach().clone() for p in params]
        train(optimizer, params, [row])
        steps = optimizer.linearize()
        for p, w, group in zip(params, before, optimizer.param_groups, strict=True):
            momentum = optimizer.state[p]["exp_avg"] * (-1 if group["maximize"] else 1)  # that of the gradient itself
            lin = steps[p]
            assert lin.momentum == group["betas"][0]
            change = -lin.preconditioner * momentum - lin.decay * w + lin.source
            assert_close(p.detach() - w, change, rtol=0, atol=1e-10)


def test_linearize_knows_that_the_variance_came_from_outside():
    """With a given variance the gate is not closed by definition at t = 1."""

    class Given:
        def variances(self, parameters):
            return [torch.full_like(p, 0.25) for p in parameters]

    params = start()
    before = [p.detach().clone() for p in params]
    optimizer = PopRiskAdamW(params, variance=Given(), weight_decay=0.0)
    train(optimizer, params, stream(1))
    for p, w in zip(params, before, strict=True):
        change = -optimizer.linearize()[p].preconditioner * optimizer.state[p]["exp_avg"]
        assert_close(p.detach() - w, change, rtol=0, atol=1e-10)
    assert optimizer.diagnostics()[0].active_fraction > 0.5


def test_linearize_needs_the_averaged_signal():
    params = start()
    optimizer = PopRiskAdamW(params, gate=Gate(signal="batch"))
    train(optimizer, params, stream(2))
    with pytest.raises(HyperparameterError, match='signal="ema"'):
        optimizer.linearize()
    assert math.isnan(optimizer.diagnostics()[0].population_rate.item())


def test_before_the_first_step_after_an_adamw_checkpoint_there_is_nothing_to_read():
    """The moments are there, s is not: meters say so instead of failing, and all is there after the step."""
    p = nn.Parameter(torch.ones(3))
    adamw = torch.optim.AdamW([p])
    p.grad = torch.ones(3)
    adamw.step()
    optimizer = PopRiskAdamW([p])
    optimizer.load_state_dict(adamw.state_dict())
    p.grad = torch.ones(3)
    assert optimizer.gates() == {}
    assert optimizer.linearize() == {}
    assert math.isnan(optimizer.diagnostics()[0].population_rate)
    assert math.isnan(optimizer.overall_diagnostics().population_rate)
    optimizer.step()
    assert list(optimizer.gates()) == [p]


def test_overall_meters_are_those_of_one_big_group():
    params, other = start(), start()
    split = PopRiskAdamW([{"params": params[:1]}, {"params": params[1:]}], gate=Gate(alpha=0.3))
    whole = PopRiskAdamW(other, gate=Gate(alpha=0.3))
    train(split, params, stream(20))
    train(whole, other, stream(20))
    give(params, stream(21)[-1])
    give(other, stream(21)[-1])
    ours, theirs = split.overall_diagnostics().to_floats(), whole.diagnostics()[0].to_floats()
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert not any(math.isnan(v) for v in ours.values())


def test_overall_meters_leave_out_groups_without_a_gate_but_count_their_progress():
    params = start()
    optimizer = PopRiskAdamW([{"params": params[:1]}, {"params": params[1:], "gate": None}], gate=Gate(alpha=0.3))
    train(optimizer, params, stream(20))
    give(params, stream(21)[-1])
    overall, (gated, plain) = optimizer.overall_diagnostics(), optimizer.diagnostics()
    for name in ("mean_gate", "active_fraction", "noise_scale"):
        assert_close(getattr(overall, name), getattr(gated, name), rtol=0, atol=0)
    assert_close(overall.population_rate, gated.population_rate + plain.population_rate, rtol=1e-12, atol=0)


@pytest.mark.parametrize("gate", GATES)
def test_gates_are_the_last_step_s(gate):
    params = start()
    optimizer = PopRiskAdamW(params, gate=Gate(gate, alpha=0.3))
    train(optimizer, params, stream(12))
    gates = optimizer.gates()
    assert [q.shape for q in gates.values()] == [p.shape for p in params]
    mean = torch.cat([q.flatten() for q in gates.values()]).double().mean()
    assert_close(optimizer.diagnostics()[0].mean_gate, mean, rtol=1e-12, atol=0)


def test_scaled_gradients_are_read_as_the_step_will_read_them():
    """A fused step unscales on its own, so GradScaler leaves the scale on the optimizer."""
    params = start()
    optimizer = PopRiskAdamW(params, gate=Gate(alpha=0.3), fused=True)
    train(optimizer, params, stream(12))
    give(params, stream(13)[-1])
    plain = optimizer.overall_diagnostics().to_floats()
    give(params, [g * 1024 for g in stream(13)[-1]])
    optimizer.grad_scale = torch.tensor(1024.0)
    assert optimizer.overall_diagnostics().to_floats() == pytest.approx(plain, rel=1e-12)
