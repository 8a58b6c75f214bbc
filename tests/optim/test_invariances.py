"""What must hold whatever the numbers are: zero gradients, scale, tensor learning rates, autograd, defaults."""

import dataclasses
import importlib

import pytest
import torch
from optimizer_table import ALGORITHM1, BACKENDS, GATES, INPUTS
from streams import relative_error, start, stream, train
from torch import nn
from torch.testing import assert_close

from oracles.algorithm1 import algorithm1
from poprisk.errors import HyperparameterError
from poprisk.optim import Gate, join_gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._defaults import DEFAULTS, PAPER, RULE_OPTIONS, Defaults
from poprisk.optim.rules._coefficients import Hyper

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::poprisk.errors.BackendWarning"),
]
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
LASTING = ("defaults", "corrected and calibrated", "warm-up", "gated decay", "shared state", "batch signal", "row")
EVERY_GATE = pytest.mark.parametrize("gate", [*GATES, None])


def assert_finite(optimizer, params):
    for p in params:
        assert torch.isfinite(p).all()
        for name, value in optimizer.state[p].items():
            assert torch.isfinite(value).all(), name


# --- zero gradients


@EVERY_GATE
@EVERY_BACKEND
@pytest.mark.parametrize("row", INPUTS, ids=lambda r: r.name)
def test_zero_gradients_and_no_learning_rate_only_make_the_state(backend, gate, row):
    """How checkpointing of sharded models brings states into being."""
    params, before = start(dtype=torch.float32), start(dtype=torch.float32)
    optimizer = PopRiskAdamW(params, **join_gate({**row.options, "lr": 0.0, "gate": gate}), **backend)
    train(optimizer, params, [[torch.zeros_like(p) for p in params]])
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert_finite(optimizer, params)
    moments = [v for p in params for name, v in optimizer.state[p].items() if name.startswith("exp_")]
    assert len(moments) >= 6
    assert not any(m.any() for m in moments)


@EVERY_GATE
@EVERY_BACKEND
@pytest.mark.parametrize("row", [r for r in INPUTS if r.name in LASTING], ids=lambda r: r.name)
def test_zero_gradients_for_ever_are_decay_and_nothing_else(backend, gate, row):
    params = start(dtype=torch.float32)
    optimizer = PopRiskAdamW(params, **join_gate({**row.options, "gate": gate}), **backend)
    group = optimizer.param_groups[0]
    for _ in range(20):
        train(optimizer, params, [[torch.zeros_like(p) for p in params]])
    assert_finite(optimizer, params)
    meters = optimizer.diagnostics()[0].to_floats()
    closed = gate is not None and group["gated_decay"]
    steps = group["warmup_steps"] if closed else 20
    factor = (1 - group["lr"] * group["weight_decay"]) ** steps
    for p, q in zip(params, start(dtype=torch.float32), strict=True):
        assert_close(p.detach(), q.detach() * factor, rtol=1e-5, atol=1e-6)
    least = 0.5 if group["normalize_gate"] else 0.0
    assert meters["mean_gate"] == (1.0 if gate is None else least)
    assert meters["active_fraction"] == (1.0 if gate is None else 0.0)


@EVERY_BACKEND
def test_signal_after_silence_is_followed(backend):
    """A coordinate whose gradient was zero for 50 steps wakes up."""
    params = start(dtype=torch.float32)
    optimizer = PopRiskAdamW.paper(params, lr=1e-2, weight_decay=0.0, gate=Gate.paper(rho=0.9), **backend)
    train(optimizer, params, [[torch.zeros_like(p) for p in params]] * 50)
    train(optimizer, params, [[torch.ones_like(p) for p in params]] * 100)
    moved = [(q - p).min().item() for p, q in zip(params, start(dtype=torch.float32), strict=True)]
    assert min(moved) > 0.1
    assert_finite(optimizer, params)


# --- scale


@pytest.mark.parametrize("factor", [1024.0, 1 / 1024, 2.0**30, 2.0**-30])
@EVERY_GATE
@pytest.mark.parametrize("backend", ["forloop", "foreach", "fused"])
def test_the_scale_of_the_gradients_does_not_matter(backend, gate, factor):
    """Powers of two change no bit of the trajectory."""
    params, scaled = (start(dtype=torch.float32) for _ in range(2))
    gradients = stream(80, dtype=torch.float32)
    options = join_gate({**ALGORITHM1, "gate": gate, "eps": 0.0, **BACKENDS[backend]})
    train(PopRiskAdamW(params, **options), params, gradients)
    train(PopRiskAdamW(scaled, **options), scaled, [[g * factor for g in row] for row in gradients])
    assert relative_error(params, start(dtype=torch.float32)) > 0.01
    assert all(torch.equal(p, q) for p, q in zip(params, scaled, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_paper_s_epsilon_breaks_scale_invariance(backend):
    """The contrast: with gate_eps the trajectory does depend on the scale."""
    params, scaled = start(), start()
    options = join_gate({**ALGORITHM1, "gate": "soft", "eps": 0.0, "gate_eps": 1e-3, **BACKENDS[backend]})
    train(PopRiskAdamW(params, **options), params, stream(50))
    train(PopRiskAdamW(scaled, **options), scaled, [[g / 1024 for g in row] for row in stream(50)])
    assert relative_error(params, scaled) > 1e-3
    weights, *rows = (torch.cat([x.detach().flatten() for x in row]).tolist() for row in (start(), *stream(50)))
    expected = torch.tensor(algorithm1(weights, rows, eps=0.0, gate_eps=1e-3)[-1], dtype=torch.float64)
    assert_close(torch.cat([p.detach().flatten() for p in params]), expected, rtol=1e-10, atol=1e-12)


# --- learning rates as tensors, capturable


@pytest.mark.parametrize("shape", [(), (1,)])
@EVERY_GATE
@pytest.mark.parametrize(
    "mode",
    [{"foreach": False}, {"fused": True}, {"foreach": True, "capturable": True}],
    ids=["forloop", "fused", "foreach"],
)
def test_a_tensor_learning_rate_changed_in_place_takes_effect(mode, gate, shape):
    if gate is None and mode.get("capturable"):
        pytest.skip("torch's own AdamW has no capturable on the CPU")
    lr = torch.full(shape, 0.01, dtype=torch.float64)
    params, plain = start(), start()
    optimizer, other = PopRiskAdamW(params, lr=lr, gate=gate, **mode), PopRiskAdamW(plain, gate=gate, foreach=False)
    for t, row in enumerate(stream(12)):
        value = 0.01 / (1 + t)
        lr.fill_(value)
        other.param_groups[0]["lr"] = value
        train(optimizer, params, [row])
        train(other, plain, [row])
    assert optimizer.param_groups[0]["lr"] is lr
    assert relative_error(params, plain) <= 1e-12


@EVERY_BACKEND
@pytest.mark.parametrize(
    "extra", [{}, {"gate": Gate(alpha="calibrated")}, {"gate": Gate(centering="corrected")}], ids=str
)
def test_capturable_on_the_cpu_is_the_plain_path(backend, extra):
    params, plain = start(), start()
    train(PopRiskAdamW(params, capturable=True, **extra, **backend), params, stream(20))
    train(PopRiskAdamW(plain, **extra, **backend), plain, stream(20))
    assert all(torch.equal(p, q) for p, q in zip(params, plain, strict=True))


# --- autograd through the step


@pytest.mark.parametrize("gate", ["soft", "snr", None])
def test_autograd_runs_through_three_steps(gate):
    """d(final weights)/d(initial scale, learning rate) against central differences."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(5, generator=generator, dtype=torch.float64)
    mean = 3 + torch.randn(5, generator=generator, dtype=torch.float64)

    def final(theta, lr):
        w = (theta * base).clone().requires_grad_(True) if not theta.requires_grad else (theta * base).clone()
        options = join_gate({"gate": gate, "alpha": 0.1, "strength": 1.0, "weight_decay": 0.1})
        optimizer = PopRiskAdamW([w], lr=lr, differentiable=True, **options)
        for k in range(3):
            w.grad = (mean + 0.1 * k) * (w if theta.requires_grad else w.detach())
            optimizer.step()
        return w.square().sum()

    theta = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    lr = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    exact = torch.autograd.grad(final(theta, lr), (theta, lr))
    h = 1e-6

    def value(a, b):
        a = torch.tensor(a, dtype=torch.float64, requires_grad=True)
        return final(a, torch.tensor(b, dtype=torch.float64)).item()

    slopes = [
        (value(1.3 + h, 0.05) - value(1.3 - h, 0.05)) / (2 * h),
        (value(1.3, 0.05 + h) - value(1.3, 0.05 - h)) / (2 * h),
    ]
    assert all(abs(e) > 1e-2 for e in exact)
    assert_close(torch.stack(exact), torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mode", ["fused", "foreach"])
def test_fast_paths_do_not_claim_to_be_differentiable(mode):
    with pytest.raises(HyperparameterError, match=f"`{mode}` does not support `differentiable`"):
        PopRiskAdamW([nn.Parameter(torch.ones(2))], differentiable=True, **{mode: True})


# --- defaults


def test_defaults_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULTS.lr = 1.0
    other = {name for name, value in PAPER.items() if DEFAULTS.as_dict()[name] != value}
    assert other == {"gate", "strength", "normalize_gate"}


def test_the_rule_alone_is_algorithm_1():
    assert {name: getattr(Hyper(), name) for name in RULE_OPTIONS if name != "lr"} == {
        name: PAPER[name] for name in RULE_OPTIONS if name != "lr"
    }


@EVERY_GATE
@EVERY_BACKEND
def test_the_paper_s_constructor_is_algorithm_1(backend, gate):
    """Against explicit loops written from the paper, in every backend."""
    shapes = ((3, 2),)
    params = start(shapes=shapes)
    gradients = stream(40, shapes=shapes)
    optimizer = PopRiskAdamW.paper(params, gate=gate, **backend)
    train(optimizer, params, gradients)
    rows = [row[0].flatten().tolist() for row in gradients]
    expected = algorithm1(start(shapes=shapes)[0].detach().flatten().tolist(), rows, lr=1e-3, gate_kind=gate)[-1]
    assert_close(params[0].detach().flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_the_paper_s_constructor_does_not_follow_the_library_s_defaults(monkeypatch):
    other = Defaults(lr=0.5, gate="hard", alpha=0.1, strength=9.0, rho=0.5, gate_eps=1.0, centering="corrected")
    module = importlib.import_module("poprisk.optim._adamw")
    monkeypatch.setattr(module, "DEFAULTS", other)
    monkeypatch.setattr(
        PopRiskAdamW.__init__, "__kwdefaults__", {**PopRiskAdamW.__init__.__kwdefaults__, "gate": "hard"}
    )
    p = nn.Parameter(torch.ones(2))
    assert PopRiskAdamW([p]).defaults["gate"] == "hard"
    defaults = PopRiskAdamW.paper([p]).defaults
    assert (defaults["lr"], defaults["gate"], defaults["alpha"], defaults["strength"]) == (1e-3, "soft", 1.0, 1.0)
    assert (defaults["rho"], defaults["gate_eps"], defaults["centering"]) == (0.99, 0.0, "paper")
    assert PopRiskAdamW.paper([p], gate=Gate.paper(alpha=0.5)).defaults["alpha"] == 0.5
