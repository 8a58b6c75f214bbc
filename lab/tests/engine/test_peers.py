"""Peer rules against naive loops, torch's AdamW, their identities, and one member at a time."""

import pytest
import torch
from torch.testing import assert_close

import oracles.peers as oracle
from poprisk.optim.rules._gates import snr_gate
from poprisk_lab.engine import peers
from poprisk_lab.engine.peers import PEERS
from poprisk_lab.gates.variants import VARIANTS

ELSEWHERE = {"magma", "schedule_free", "rm3", "sam"}  # read more than a gradient: see test_peers_in_a_stack.py
NAMES = [
    name for name in PEERS if name not in {*VARIANTS, *ELSEWHERE}
]  # importing the variants' arms adds to the table
DIRECTIONS = {name: PEERS[name].direction for name in NAMES}
try:
    from beartype import beartype
    from jaxtyping import jaxtyped

    DIRECTIONS = {name: jaxtyped(typechecker=beartype)(rule) for name, rule in DIRECTIONS.items()}
except ImportError:  # the shapes in the signatures are then not executed
    pass

STEPS, MEMBERS, D = 30, 3, 7
KNOBS = {
    "beta1": [0.9, 0.8, 0.95],
    "beta2": [0.999, 0.9, 0.98],
    "eps": [1e-8, 1e-3, 1e-16],
    "alpha_ema": [0.98, 0.5, 0.9],
    "lamb": [2.0, 5.0, 0.5],
}


def gradients(dtype=torch.float64, steps=STEPS):
    """Coordinates from pure noise to almost pure signal, and one that never has a gradient."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(steps, MEMBERS, D, generator=generator, dtype=torch.float64)
    g = noise + torch.linspace(-4, 4, D, dtype=torch.float64)
    g[..., 2] = 0.0
    return g.to(dtype)


def knobs(name, member=None, dtype=torch.float64):
    """One member's knobs as numbers, or everybody's as columns."""
    if member is not None:
        return {knob: KNOBS[knob][member] for knob in PEERS[name].knobs}
    return {knob: torch.tensor(KNOBS[knob], dtype=dtype)[:, None] for knob in PEERS[name].knobs}


def path(name, g, h, as_time=lambda t: t):
    """The directions of all steps, and the last state."""
    state = {key: torch.zeros_like(g[0]) for key in PEERS[name].states}
    directions = []
    for t, g_t in enumerate(g, start=1):
        u, state = DIRECTIONS[name](g_t, state, h, as_time(t))
        directions.append(u)
    return torch.stack(directions), state


@pytest.mark.parametrize("name", NAMES)
def test_naive_loops(name):
    g = gradients()
    u, state = path(name, g, knobs(name))
    assert set(state) == set(PEERS[name].states)
    for member in range(MEMBERS):
        for t in (1, 2, 3, 10, STEPS):
            histories = [g[:t, member, k].tolist() for k in range(D)]
            expected = getattr(oracle, name)(histories, **knobs(name, member))
            assert_close(u[t - 1, member], torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_float32_stays_float32_and_close(name):
    g = gradients(torch.float32)
    exact, _ = path(name, g.double(), knobs(name))
    u, state = path(name, g, knobs(name), as_time=lambda t: torch.tensor(float(t), dtype=torch.float64))
    assert {u.dtype, *(x.dtype for x in state.values())} == {torch.float32}
    assert_close(u.double(), exact, rtol=2e-5, atol=2e-6)  # (v - m²) of M-SVAG cancels; the others hold 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_members_one_at_a_time(name):
    g = gradients(torch.float32)
    together, _ = path(name, g, knobs(name))
    for member in range(MEMBERS):
        alone, _ = path(name, g[:, member : member + 1], knobs(name, member))
        assert_close(together[:, member], alone[:, 0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_time_as_a_tensor(name, dtype):
    g = gradients(torch.float32)
    for h in (knobs(name), knobs(name, 0)):
        number, _ = path(name, g, h)
        tensor, _ = path(name, g, h, as_time=lambda t: torch.tensor(float(t), dtype=dtype))
        assert_close(number, tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_alone_and_nothing_is_not_a_number(name):
    peer, g = PEERS[name], gradients()[0]
    g[0] = 0.0  # a member without any gradient
    state = {key: torch.zeros_like(g) for key in peer.states}
    before = g.clone()
    for t in (1, 2):
        kept = {key: value.clone() for key, value in state.items()}
        u, new = peer.direction(g, state, knobs(name), t)
        assert_close(g, before, rtol=0, atol=0)
        for key, value in kept.items():
            assert_close(state[key], value, rtol=0, atol=0)
        assert u.isfinite().all()
        assert (u[0] == 0).all()
        state = new


def test_adamw_is_torchs():
    lr, weight_decay, steps = 3e-3, 0.1, 50
    h = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    g = gradients(torch.float32, steps)
    w = torch.linspace(-1, 1, MEMBERS * D).reshape(MEMBERS, D)
    theirs = torch.nn.Parameter(w.clone())
    optimizer = torch.optim.AdamW([theirs], lr, (0.9, 0.999), 1e-8, weight_decay)
    state = {"m": torch.zeros_like(w), "v": torch.zeros_like(w)}
    for t, g_t in enumerate(g, start=1):
        u, state = peers.adamw(g_t, state, h, t)
        w = w - lr * u - lr * weight_decay * w
        theirs.grad = g_t.clone()
        optimizer.step()
        assert_close(w, theirs.detach(), rtol=1e-6, atol=1e-6)


def test_adabeliefs_state_is_the_gates_own_times_beta1_squared():
    g, beta1, beta2 = gradients(), 0.9, 0.99
    _, state = path("adabelief", g, {"beta1": beta1, "beta2": beta2, "eps": 0.0})
    m, s = torch.zeros_like(g[0]), torch.zeros_like(g[0])
    for g_t in g:
        s = beta2 * s + (1 - beta2) * (g_t - m).square()  # the paper's: deviation from the mean before the step
        m = beta1 * m + (1 - beta1) * g_t
    assert_close(state["s"], beta1**2 * s, rtol=1e-12, atol=1e-15)


def test_msvag_shrinks_noise_and_keeps_signal():
    g = gradients(steps=400)
    u, state = path("msvag", g, {"beta1": 0.9})
    m_hat = state["m"] / (1 - 0.9**400)
    factor = u[-1] / torch.where(m_hat == 0, 1.0, m_hat)
    assert ((factor >= 0) & (factor <= 1)).all()
    assert (factor[:, [0, -1]] > 0.98).all()  # |mean| = 4, unit noise
    noise = torch.randn(2000, 1, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pure, state = path("msvag", noise, {"beta1": 0.9})
    assert (pure[-1] / state["m"]).mean() < 0.5


def test_msvag_without_momentum_is_the_plain_gradient():
    g = gradients()
    u, _ = path("msvag", g, {"beta1": 0.0})
    assert_close(u, g)


def test_cautious_never_points_against_the_gradient_and_keeps_the_mean_scale():
    g = gradients(steps=60)
    u, _ = path("cautious", g, knobs("cautious"))
    plain, _ = path("adamw", g, knobs("adamw"))
    assert (u * g >= 0).all()
    kept = plain * g > 0
    assert not kept[1:].all(dim=(0, 1))[[3, 4]].any()  # noisy coordinates do get masked
    scale = D / (kept.sum(-1, keepdim=True) + 1)
    assert_close(u, torch.where(kept, plain * scale, 0.0))


def test_grokfast_without_amplification_is_adamw():
    g, h = gradients(), knobs("grokfast")
    u, _ = path("grokfast", g, {**h, "lamb": 0.0})
    assert_close(u, path("adamw", g, knobs("adamw"))[0], rtol=0, atol=0)


def test_cubed_is_an_snr_gate_when_all_averages_share_one_rate():
    g, beta, late = gradients(), 0.9, 1e9  # so late that no average is debiased
    m, s = torch.zeros_like(g[0]), torch.zeros_like(g[0])
    for g_t in g:
        s = beta * s + (1 - beta) * (g_t - m).square()
        m = beta * m + (1 - beta) * g_t
    h = {"beta1": beta, "beta2": beta, "eps": 1e-30}
    u, state = path("cubed", g, h, as_time=lambda t: late)
    ratio, _ = path("adamw", g, h, as_time=lambda t: late)
    assert_close(u[-1], snr_gate(m, s, strength=beta) * ratio[-1], rtol=1e-10, atol=1e-12)
    assert_close(state["v"] - m * m, beta * s, rtol=1e-10, atol=1e-12)
