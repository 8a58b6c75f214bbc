"""Properties every gate must have, on numbers hypothesis chooses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poprisk.optim.rules._gates import evaluate_gate

GATES = ("soft", "hard", "snr")
magnitude = st.floats(1e-6, 1e6)
positive = st.floats(1e-3, 1e3)


def q(kind, m, s, alpha=1.0, strength=1.0, gate_eps=0.0, dtype=torch.float64):
    return evaluate_gate(
        kind, torch.tensor([m], dtype=dtype), torch.tensor([s], dtype=dtype), alpha, strength, gate_eps
    ).item()


@pytest.mark.parametrize("kind", GATES)
@given(m=st.floats(-1e6, 1e6), s=st.floats(0, 1e12), alpha=st.floats(0, 10), strength=st.floats(0, 1e3))
@settings(max_examples=200, deadline=None)
def test_between_zero_and_one_and_even(kind, m, s, alpha, strength):
    value = q(kind, m, s, alpha, strength)
    assert 0.0 <= value <= 1.0
    assert value == q(kind, -m, s, alpha, strength)


@pytest.mark.parametrize("kind", GATES)
@given(m=magnitude, grow=st.floats(1.0, 10.0), s=st.floats(1e-12, 1e12), alpha=st.floats(0, 10), strength=positive)
@settings(max_examples=200, deadline=None)
def test_monotone_in_signal_and_antitone_in_noise(kind, m, grow, s, alpha, strength):
    here = q(kind, m, s, alpha, strength)
    assert q(kind, m * grow, s, alpha, strength) >= here - 1e-12
    assert q(kind, m, s * grow, alpha, strength) <= here + 1e-12


@pytest.mark.parametrize("kind", GATES)
@given(m=magnitude, s=st.floats(1e-12, 1e12), power=st.integers(-30, 30), alpha=st.floats(0, 10), strength=positive)
@settings(max_examples=200, deadline=None)
def test_unchanged_by_the_scale_of_the_gradients(kind, m, s, power, alpha, strength):
    scale = 2.0**power  # exact in binary, so that even a hard gate at its cutoff cannot tell
    assert q(kind, m * scale, s * scale**2, alpha, strength) == q(kind, m, s, alpha, strength)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_gradient_ever_means_closed_and_no_noise_means_open(kind, dtype):
    assert q(kind, 0.0, 0.0, dtype=dtype) == 0.0
    assert q(kind, 1e-10, 0.0, dtype=dtype) == 1.0


@given(m=magnitude, s=st.floats(1e-12, 1e12))
@settings(max_examples=100, deadline=None)
def test_limits_connect_the_gates(m, s):
    assert q("soft", m, s, alpha=1.0, strength=0.0) == q("hard", m, s, alpha=1.0)
    assert q("soft", m, s, alpha=0.0, strength=2.0) == q("snr", m, s, strength=2.0)


@pytest.mark.parametrize("kind", GATES)
def test_moments_of_two_shapes_are_refused_by_the_hints(kind):
    """So the hints are executed here: torch alone would broadcast."""
    pytest.importorskip("beartype")
    from jaxtyping import TypeCheckError

    with pytest.raises(TypeCheckError):
        evaluate_gate(kind, torch.ones(3), torch.ones(1), 1.0, 1.0)
