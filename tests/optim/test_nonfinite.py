"""A NaN, infinite or overflowing gradient entry costs its coordinate one step, and nothing else."""

import warnings

import pytest
import torch
from optimizer_table import BACKENDS, GATES
from streams import SHAPES, start, stream, train
from torch.testing import assert_close

from poprisk.errors import NonFiniteGradientWarning
from poprisk.optim import Gate, join_gate
from poprisk.optim._adamw import PopRiskAdamW

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::poprisk.errors.BackendWarning"),
]
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
EVERY_GATE = pytest.mark.parametrize("gate", GATES)
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "square overflows": 1e30}
EXTRA = {
    "full": {},
    "shared": {"state": "shared", "betas": (0.9, 0.9), "rho": 0.9},
    "calibrated": {"alpha": "calibrated", "centering": "corrected"},
    "low precision": {"state_dtype": torch.bfloat16},
    "batch": {"signal": "batch"},
}


def spoil(row, value):
    """The first entry of the matrix, the scalar, and every seventh entry of the vector."""
    row = [g.clone() for g in row]
    row[0][0, 0], row[1], row[2][::7] = value, torch.full_like(row[1], value), value
    return row


def moments(optimizer, p):
    return {k: v.clone() for k, v in optimizer.state[p].items() if k.startswith("exp_")}


@pytest.mark.parametrize(
    ("extra", "bad"),
    [(EXTRA[e], BAD[b]) for e in EXTRA for b in BAD if e == "full" or b == "nan"],
    ids=[f"{e}-{b}" for e in EXTRA for b in BAD if e == "full" or b == "nan"],
)
@EVERY_GATE
@EVERY_BACKEND
def test_exactly_the_bad_coordinates_sit_the_step_out(backend, gate, extra, bad):
    params, clean = (start(dtype=torch.float32) for _ in range(2))
    options = join_gate({"gate": gate, **extra, **backend})
    optimizer, other = PopRiskAdamW(params, **options), PopRiskAdamW(clean, **options)
    gradients = stream(8, dtype=torch.float32)
    train(optimizer, params, gradients[:5])
    train(other, clean, gradients[:5])
    before = [(p.detach().clone(), moments(optimizer, p)) for p in params]
    with pytest.warns(NonFiniteGradientWarning, match="at least 21 gradient entries"):
        train(optimizer, params, [spoil(gradients[5], bad)])
    train(other, clean, [gradients[5]])
    out = [torch.isnan(g) for g in spoil(gradients[5], float("nan"))]
    for p, q, hit, (w, old) in zip(params, clean, out, before, strict=True):
        assert torch.equal(p[hit], w[hit])
        # foreach forms a mask and multiplies with it: equal to rounding
        assert_close(p[~hit], q[~hit], rtol=1e-6, atol=1e-7)
        for name, value in moments(optimizer, p).items():
            assert torch.equal(value[hit], old[name][hit]), name
            assert_close(value[~hit], other.state[q][name][~hit], rtol=1e-6, atol=1e-12)
    train(optimizer, params, gradients[6:])  # warned once, and goes on
    assert all(torch.isfinite(p).all() for p in params)
    assert not torch.equal(params[0][0, 0], before[0][0][0, 0])


@pytest.mark.parametrize("bad", [BAD["nan"], BAD["inf"]], ids=["nan", "inf"])
@pytest.mark.parametrize("steps", [0, 5], ids=["first step", "later"])
@EVERY_GATE
@EVERY_BACKEND
def test_let_through_it_is_loud(backend, gate, steps, bad):
    """skip_nonfinite=False is AdamW's behaviour, also where a closed gate multiplies the step with zero."""
    params = start(dtype=torch.float32)
    optimizer = PopRiskAdamW(params, gate=gate, skip_nonfinite=False, **backend)
    gradients = stream(steps + 1, dtype=torch.float32)
    train(optimizer, params, gradients[:steps])
    train(optimizer, params, [spoil(gradients[-1], bad)])
    for p, hit in zip(params, spoil(gradients[-1], float("nan")), strict=True):
        assert torch.equal(torch.isnan(p), torch.isnan(hit))


@pytest.mark.parametrize(
    "options", [{"granularity": "row"}, {"granularity": "tensor"}, {"normalize_gate": True}], ids=str
)
@pytest.mark.parametrize("signal", ["ema", "batch"])
@EVERY_GATE
@EVERY_BACKEND
def test_pooled_gates_do_not_spread_it(backend, gate, signal, options):
    """Coordinates that share a gate with a bad one move on, by what is known of the others."""
    params, clean = (start(dtype=torch.float32) for _ in range(2))
    options = join_gate({"gate": gate, "signal": signal, "alpha": 0.1, **options, **backend})
    optimizer, other = PopRiskAdamW(params, **options), PopRiskAdamW(clean, **options)
    gradients = stream(10, dtype=torch.float32)
    train(optimizer, params, gradients[:5])
    train(other, clean, gradients[:6])
    before = [p.detach().clone() for p in params]
    with pytest.warns(NonFiniteGradientWarning):
        train(optimizer, params, [spoil(gradients[5], float("nan"))])
    assert torch.equal(params[0][0, 0], before[0][0, 0])
    assert all(torch.isfinite(p).all() for p in params)
    if options.get("granularity") == "row":  # the other rows, and one-dimensional tensors, do not notice
        assert_close(params[0][1:], clean[0][1:], rtol=1e-6, atol=1e-7)
        assert_close(params[2][1:7], clean[2][1:7], rtol=1e-6, atol=1e-7)
    train(optimizer, params, gradients[6:])
    assert all(torch.isfinite(p).all() for p in params)


@EVERY_BACKEND
def test_a_variance_from_outside_may_be_nan_where_the_gradient_is(backend):
    class Given:
        def variances(self, parameters):
            return [torch.where(torch.isfinite(p.grad), 0.25, float("nan")) for p in parameters]

    params = start(dtype=torch.float32)
    optimizer = PopRiskAdamW(params, variance=Given(), **backend)
    gradients = stream(4, dtype=torch.float32)
    train(optimizer, params, gradients[:2])
    with pytest.warns(NonFiniteGradientWarning):
        train(optimizer, params, [spoil(gradients[2], float("nan")), gradients[3]])
    assert all(torch.isfinite(optimizer.state[p]["exp_var"]).all() for p in params)
    assert all(torch.isfinite(p).all() for p in params)


@EVERY_BACKEND
def test_each_optimizer_warns_once(backend):
    gradients = [spoil(row, float("nan")) for row in stream(4, dtype=torch.float32)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            params = start(dtype=torch.float32)
            train(PopRiskAdamW(params, **backend), params, gradients)
    assert [w.category for w in caught] == [NonFiniteGradientWarning] * 2
    assert "skip_nonfinite=False" in str(caught[0].message)


@pytest.mark.parametrize("backend", [{"foreach": False}, {"foreach": True}], ids=["forloop", "foreach"])
def test_without_a_gate_it_passes_as_in_adamw(backend):
    params, theirs = (start(dtype=torch.float32) for _ in range(2))
    rows = [spoil(row, float("nan")) for row in stream(2, dtype=torch.float32)]
    options = {"lr": 1e-2, "weight_decay": 1e-2, **backend}
    train(PopRiskAdamW(params, gate=None, **options), params, rows)
    train(torch.optim.AdamW(theirs, **options), theirs, rows)
    for p, q in zip(params, theirs, strict=True):
        assert_close(p, q, rtol=0, atol=0, equal_nan=True)
    assert torch.isnan(params[0][0, 0])


def test_the_largest_usable_gradient_is_used():
    """Just under the limit no square overflows, in any backend; just at it the coordinate sits out."""
    for backend in BACKENDS.values():
        for dtype, limit in ((torch.float32, 2.0**62), (torch.float64, 2.0**510)):
            params = start(shapes=SHAPES, dtype=dtype)
            optimizer = PopRiskAdamW(params, gate=Gate(alpha=0.1), **backend)
            train(
                optimizer, params, [[torch.full_like(p, s * limit * (1 - 2**-20)) for p in params] for s in (1, -1, -1)]
            )
            state = optimizer.state[params[0]]
            assert all(torch.isfinite(state[name]).all() for name in ("exp_avg", "exp_avg_sq", "exp_var"))
            assert torch.isfinite(params[0]).all()
            with pytest.warns(NonFiniteGradientWarning):
                train(optimizer, params, [[torch.full_like(p, limit) for p in params]])


def test_let_through_it_stays_in_its_coordinate():
    """A mean of the gates that is NaN is as unknown as one of 0, in every backend."""
    weights = []
    for options in BACKENDS.values():
        p = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        optimizer = PopRiskAdamW([p], skip_nonfinite=False, **options)
        generator = torch.Generator().manual_seed(0)
        for step in range(4):
            p.grad = torch.randn(4, generator=generator, dtype=torch.float64)
            if step == 1:
                p.grad[0] = torch.nan
            optimizer.step()
        assert torch.isfinite(p[1:]).all()
        weights.append(p.detach()[1:])
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-12, atol=0)
