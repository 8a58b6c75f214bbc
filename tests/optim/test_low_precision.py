"""bfloat16 averages: rounded stochastically they keep their mean, rounded to nearest they would freeze or read high."""

import pytest
import torch
from streams import train
from torch import nn

from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim.rules._rounding import round_stochastically, rounding_bits, rounding_seed

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::poprisk.errors.ClosedGateWarning"),  # pure noise is meant here
]
BACKEND = pytest.mark.parametrize("backend", [{"foreach": False}, {"fused": True}], ids=["forloop", "fused"])
N = 4096


def standard_errors(sample, expected):
    """How many standard errors the mean of a sample is away from what it should be."""
    sample = sample.double().flatten()
    return abs(sample.mean() - expected).item() / (sample.std() / sample.numel() ** 0.5).item()


@pytest.mark.parametrize("high", [False, True], ids=["low bits (v)", "high bits (s)"])
@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.9])
def test_rounding_is_unbiased_over_elements_steps_and_tensors(fraction, high):
    """Over each of the three counters alone, and over all of them."""
    x = 1 + fraction * 2**-7
    draws = []
    for step in range(30):
        for key in range(1, 31):
            bits = rounding_bits(rounding_seed(step, key), torch.empty(64))
            draws.append(round_stochastically(torch.full((64,), x), bits >> 16 if high else bits & 0xFFFF))
    ups = (torch.stack(draws).view(30, 30, 64) > 1).double()
    assert standard_errors(ups, fraction) < 4
    for kept in (0, 1, 2):  # the mean over the other two counters scatters as independent draws would
        means = ups.movedim(kept, 0).flatten(1).mean(dim=1)
        wanted = (fraction * (1 - fraction) / (ups.numel() / ups.shape[kept])) ** 0.5
        assert 0.6 * wanted < means.std() < 1.5 * wanted


@BACKEND
def test_v_decays_at_the_right_rate_where_nearest_rounding_would_freeze_it(backend):
    p = nn.Parameter(torch.zeros(N))
    optimizer = PopRiskAdamW([p], state_dtype=torch.bfloat16, weight_decay=0.0, **backend)
    train(optimizer, [p], [[torch.linspace(0.5, 1.5, N)]])
    first = optimizer.state[p]["exp_avg_sq"].double()
    nearest = optimizer.state[p]["exp_avg_sq"].clone()
    zero = torch.zeros(N)
    for _ in range(2000):
        p.grad = zero
        optimizer.step()
        nearest = (0.999 * nearest.float()).bfloat16()
    ratio = optimizer.state[p]["exp_avg_sq"].double() / first
    assert optimizer.state[p]["exp_avg_sq"].dtype == torch.bfloat16
    assert standard_errors(ratio, 0.999**2000) < 4
    assert abs(ratio.mean() / 0.999**2000 - 1) < 0.02
    assert torch.equal(nearest.double(), first)  # frozen: the decay is under half a unit in the last place


@BACKEND
def test_s_has_the_right_mean_where_nearest_rounding_reads_high(backend):
    """Against float32 on the same stream of unit noise, over the last 100 of 600 steps."""
    low, full = (nn.Parameter(torch.zeros(N)) for _ in range(2))
    one = PopRiskAdamW([low], state_dtype={"s": torch.bfloat16}, **backend)
    two = PopRiskAdamW([full], **backend)
    nearest, m = torch.zeros(N, dtype=torch.bfloat16), torch.zeros(N)
    totals = torch.zeros(3, dtype=torch.float64)
    for step in range(600):
        g = torch.randn(N)
        nearest = (0.99 * nearest.float() + 0.01 * (g - m).square()).bfloat16()
        m = m + 0.1 * (g - m)
        train(one, [low], [[g]])
        train(two, [full], [[g]])
        if step >= 500:
            states = one.state[low]["exp_var"], two.state[full]["exp_var"], nearest
            totals += torch.stack([x.double().mean() for x in states])
    right, high = totals[0] / totals[1], totals[2] / totals[1]
    assert abs(right - 1) < 0.01
    assert high > 1.03


@BACKEND
def test_low_precision_states_stay_finite_and_positive(backend):
    """Gradients from the smallest to the largest that a square can hold, zeros between them."""
    scales = torch.logspace(-22, 18, N)
    p = nn.Parameter(torch.ones(N))
    optimizer = PopRiskAdamW([p], state_dtype=torch.bfloat16, gate="snr", **backend)
    for step in range(60):
        p.grad = torch.randn(N) * scales * (step % 3 > 0)
        optimizer.step()
        for name in ("exp_avg_sq", "exp_var"):
            state = optimizer.state[p][name]
            assert torch.isfinite(state).all()
            assert (state >= 0).all()
    assert torch.isfinite(p).all()
