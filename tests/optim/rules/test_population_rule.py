"""The pure rule against the naive oracle, identities, limits, and its linearization."""

import pytest
import torch
from torch.testing import assert_close

from oracles.algorithm1 import algorithm1
from poprisk.errors import HyperparameterError
from poprisk.optim.rules._coefficients import Hyper
from poprisk.optim.rules._population import current_gate, initial_state, linearize, population_step
from poprisk.optim.rules._threshold import calibrated_alpha, loo_coefficient

try:
    from beartype import beartype
    from jaxtyping import jaxtyped

    population_step = jaxtyped(typechecker=beartype)(population_step)
    linearize = jaxtyped(typechecker=beartype)(linearize)
except ImportError:  # the shapes in the signatures are then not executed
    pass

STEPS = 60
OPTIONS = {
    "algorithm 1": {},
    "alpha below one": {"alpha": 0.3, "strength": 2.0, "gate_eps": 1e-2},
    "calibrated": {"alpha": "calibrated"},
    "corrected": {"centering": "corrected"},
    "corrected calibrated": {"centering": "corrected", "alpha": "calibrated"},
    "warm-up": {"warmup_steps": 5},
    "normalized": {"normalize_gate": True},
    "gated decay": {"gated_decay": True, "weight_decay": 0.5},
    "batch signal": {"signal": "batch", "alpha": 0.5},
    "other rates": {"betas": (0.8, 0.95), "rho": 0.7, "eps": 1e-3},
}


def gradients(steps=STEPS, d=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = torch.linspace(-2, 2, d, dtype=torch.float64)
    return [mean + torch.randn(d, generator=generator, dtype=torch.float64) for _ in range(steps)]


def run(hyper, stream, w=None, variances=None):
    w = torch.linspace(-1, 1, 12, dtype=torch.float64) if w is None else w
    state, path = initial_state(w, hyper), []
    for t, g in enumerate(stream):
        w, state = population_step(w, g.reshape(w.shape), state, hyper, None if variances is None else variances[t])
        path.append(w)
    return path, state


@pytest.mark.parametrize("gate", ["soft", "hard", "snr", None])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_rule_equals_the_paper_line_by_line(gate, options):
    stream = gradients()
    path, _ = run(Hyper(gate=gate, **options), stream)
    renamed = {k: v for k, v in options.items() if k != "normalize_gate" or gate is not None}
    oracle = algorithm1(
        torch.linspace(-1, 1, 12, dtype=torch.float64).tolist(), [g.tolist() for g in stream], gate_kind=gate, **renamed
    )
    assert_close(torch.stack(path), torch.tensor(oracle, dtype=torch.float64), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_line_1_is_zero(dtype, kept):
    """All that is remembered, in float32 or better; stochastic rounding begins with key 0."""
    w = torch.ones(2, 3, dtype=dtype)
    for hyper in (Hyper(), Hyper(normalize_gate=True), Hyper(gate=None)):
        state = initial_state(w, hyper)
        moments = [state.m, state.v] if hyper.gate is None else [state.m, state.v, state.s]
        assert all(torch.equal(x, torch.zeros(2, 3)) and x.dtype == kept for x in moments)
        assert len({x.data_ptr() for x in moments}) == len(moments)
        assert (state.s is None) == (hyper.gate is None)
        assert (state.step, state.var_step, state.gain, state.key) == (0.0, 0.0, 0.0, 0)
        assert not state.observed
        assert (state.scale is not None) == hyper.in_adamw_units


@pytest.mark.parametrize(("granularity", "row_length"), [("row", 4), ("tensor", 12)])
@pytest.mark.parametrize("gate", ["soft", "hard", "snr"])
def test_pooled_gates(gate, granularity, row_length):
    stream, w = gradients(), torch.linspace(-1, 1, 12, dtype=torch.float64)
    path, _ = run(Hyper(gate=gate, granularity=granularity), stream, w.reshape(3, 4))
    oracle = algorithm1(w.tolist(), [g.tolist() for g in stream], gate_kind=gate, row_length=row_length)
    assert_close(torch.stack(path).flatten(1), torch.tensor(oracle, dtype=torch.float64), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rho", [0.0, 0.9])
@pytest.mark.parametrize("signal", ["ema", "batch"])
def test_variance_from_outside_replaces_the_deviation(rho, signal):
    stream, given = gradients(), [g.abs() for g in gradients(seed=5)]
    path, _ = run(Hyper(rho=rho, signal=signal), stream, variances=given)
    oracle = algorithm1(
        torch.linspace(-1, 1, 12, dtype=torch.float64).tolist(), [g.tolist() for g in stream], rho=rho, signal=signal,
        variances=[x.tolist() for x in given],
    )  # fmt: skip
    assert_close(torch.stack(path), torch.tensor(oracle, dtype=torch.float64), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("gate", ["soft", "hard", "snr"])
def test_shared_state_is_the_same_rule_without_s(gate):
    same = dict(gate=gate, betas=(0.9, 0.9), rho=0.9)
    kept, full = run(Hyper(**same), gradients())
    derived, shared = run(Hyper(**same, shared_state=True), gradients())
    assert shared.s is None
    assert_close(derived[-1], kept[-1], rtol=1e-10, atol=1e-12)
    assert_close((shared.v - shared.m**2) / 0.9, full.s, rtol=1e-10, atol=1e-12)


def test_constant_gradient_opens_as_published_and_at_once_when_corrected():
    stream = [torch.ones(1, dtype=torch.float64)] * 50
    for centering, expected in {"paper": {1: 0.0, 10: 0.55, 50: 0.91}, "corrected": {1: 0.0, 2: 1.0, 50: 1.0}}.items():
        hyper = Hyper(centering=centering)
        for steps, q in expected.items():
            _, state = run(hyper, stream[:steps], torch.ones(1, dtype=torch.float64))
            assert_close(current_gate(state, hyper).item(), q, atol=5e-3, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate", ["soft", "hard"])
def test_first_step_is_closed_by_definition_and_not_by_rounding(dtype, gate):
    w = torch.randn(10_000, dtype=dtype)
    new, _ = population_step(
        w, torch.randn(10_000, dtype=dtype), initial_state(w, Hyper()), Hyper(gate=gate, weight_decay=0.0)
    )
    assert torch.equal(new, w)


def test_break_even_threshold():
    assert_close(calibrated_alpha(0.9, 0.99, 1), 1.0)
    assert_close(calibrated_alpha(0.9, 0.99, 4000), 0.05, rtol=1e-9, atol=0)
    generator = torch.Generator().manual_seed(0)
    hyper = Hyper(betas=(0.9, 0.999), rho=0.99)
    noise = torch.randn(40, 200_000, generator=generator, dtype=torch.float64)
    w = torch.zeros(200_000, dtype=torch.float64)
    state = initial_state(w, hyper)
    for g in noise:
        w, state = population_step(w, g, state, hyper)
    m_hat, s_hat = state.m / (1 - 0.9**40), state.s / (1 - 0.99**40)
    assert_close((m_hat.square().mean() / s_hat.mean()).item(), calibrated_alpha(0.9, 0.99, 40), rtol=1e-2, atol=0)


def test_loo_coefficient():
    assert loo_coefficient(32) == 1.0
    assert_close(loo_coefficient(32, 96), 0.5)
    for b, n in ((32, 32), (33, 32), (0, 10)):
        with pytest.raises(HyperparameterError, match="batch_size must be"):
            loo_coefficient(b, n)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_linearization_is_the_step_that_was_taken(options):
    if options.get("signal") == "batch":
        with pytest.raises(HyperparameterError, match="signal"):
            linearize(run(Hyper(**options), gradients())[1], Hyper(**options))
        return
    hyper, stream = Hyper(**options), gradients()
    for steps in (1, 2, 7, STEPS):
        path, state = run(hyper, stream[:steps])
        before = path[-2] if steps > 1 else torch.linspace(-1, 1, 12, dtype=torch.float64)
        lin = linearize(state, hyper)
        moved = -lin.preconditioner * state.m - lin.decay * before + lin.source
        assert_close(path[-1] - before, moved, rtol=1e-10, atol=1e-15)
        assert lin.momentum == hyper.betas[0]


def test_nonfinite_coordinates_sit_the_step_out():
    hyper, stream = Hyper(), gradients()
    w, state = run(hyper, stream[:20])
    g = stream[20].clone()
    g[3], g[5] = float("nan"), float("inf")
    w_new, new = population_step(w[-1], g, state, hyper)
    for k in (3, 5):
        assert w_new[k] == w[-1][k]
        assert (new.m[k], new.v[k], new.s[k]) == (state.m[k], state.v[k], state.s[k])
    others = [k for k in range(12) if k not in (3, 5)]
    clean, _ = population_step(w[-1], stream[20], state, hyper)
    assert_close(w_new[others], clean[others])
