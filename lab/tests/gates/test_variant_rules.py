"""Variants of the gate in float64: each is AdamW or the strict gate in the limits its docstring states."""

import math

import pytest
import torch

from poprisk.optim.rules._coefficients import Hyper
from poprisk.optim.rules._population import initial_state, population_direction
from poprisk_lab.engine.peers import adamw
from poprisk_lab.gates import variants
from poprisk_lab.gates.variants import BLOCK, NEED_HALVES, VARIANTS, break_even, passes

NEVER, ALWAYS = 1e9, 1e-9  # steps in a pass: one that never ends, and one that is over at once
H = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "rho": 0.99, "alpha": 1.0, "strength": 1.0, "gate_warmup": NEVER}
WIDTH = 2 * BLOCK + 5
PLAIN = [name for name in VARIANTS if name not in NEED_HALVES]


def noise(steps, members=3, width=WIDTH, mean=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return mean + torch.randn(steps, members, width, dtype=torch.float64, generator=generator)


def run(name, gradients, **knobs):
    """Every direction of a rule on a stream of gradients, and its last state."""
    rule, state = VARIANTS[name], {k: torch.zeros_like(gradients[0]) for k in VARIANTS[name].states}
    seen = []
    for t, g in enumerate(gradients, 1):
        u, state = rule.direction(g, state, {**H, **knobs}, t)
        assert set(state) == set(rule.states)
        seen.append(u)
    return torch.stack(seen), state


def adam_steps(gradients):
    state, seen = {k: torch.zeros_like(gradients[0]) for k in ("m", "v")}, []
    for t, g in enumerate(gradients, 1):
        u, state = adamw(g, state, H, t)
        seen.append(u)
    return torch.stack(seen)


def soft_steps(gradients, **hyper):
    """Algorithm 1 itself."""
    rule = Hyper(**hyper)
    state, seen = initial_state(gradients[0], rule), []
    for g in gradients:
        moved = population_direction(g, state, rule, work=torch.float64)
        state = moved.state
        seen.append(moved.update)
    return torch.stack(seen)


def in_halves(a, b):
    """What a rule that compares halves is given."""
    return torch.cat([(a + b) / 2, b / 2], dim=-1)


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_are_trainings_of_their_own_and_knobs_may_be_columns(name):
    twice = 2 if name in NEED_HALVES else 1
    gradients = noise(7, width=twice * WIDTH, mean=0.3)
    together, _ = run(name, gradients, alpha=torch.tensor([[0.5], [1.0], [2.0]]), gate_warmup=torch.full((3, 1), 2.0))
    for row, alpha in enumerate((0.5, 1.0, 2.0)):
        alone, _ = run(name, gradients[:, row : row + 1], alpha=alpha, gate_warmup=2.0)
        torch.testing.assert_close(together[:, row : row + 1], alone, rtol=1e-9, atol=1e-12)
    device_step = [torch.tensor(float(t), dtype=torch.float64) for t in range(1, 8)]
    u, state = gradients[0], {k: torch.zeros_like(gradients[0]) for k in VARIANTS[name].states}
    for t, g in zip(device_step, gradients, strict=True):
        u, state = VARIANTS[name].direction(g, state, {**H, "gate_warmup": 2.0}, t)
    torch.testing.assert_close(u, run(name, gradients, gate_warmup=2.0)[0][-1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_scale_of_gradients_does_not_matter_and_float32_stays_float32(name):
    twice = 2 if name in NEED_HALVES else 1
    gradients = noise(12, width=twice * WIDTH, mean=0.4)
    small, _ = run(name, gradients, eps=1e-30, gate_warmup=4.0)
    large, _ = run(name, 1e6 * gradients, eps=1e-30, gate_warmup=4.0)
    torch.testing.assert_close(large, small, rtol=1e-6, atol=1e-9)
    u, state = run(name, gradients.float(), gate_warmup=torch.full((3, 1), 4.0, dtype=torch.float64))
    assert u.dtype == torch.float32
    assert {value.dtype for value in state.values()} == {torch.float32}


FRESH_FIRST = ["agreement_after_first_pass", "fading_agreement", "latched_agreement"]


@pytest.mark.parametrize(
    "name", ["open_first_pass", "closing_with_replay", "replayed_strength", "pass_agreement", *FRESH_FIRST]
)
def test_on_the_first_pass_it_is_adamw(name):
    gradients = noise(20)
    torch.testing.assert_close(run(name, gradients)[0], adam_steps(gradients))
    assert not torch.allclose(run(name, gradients, gate_warmup=10.0)[0], adam_steps(gradients))


@pytest.mark.parametrize("name", ["replayed_alpha", "open_first_pass", "closing_with_replay", "fading_agreement"])
def test_after_many_passes_it_is_the_strict_gate(name):
    gradients = noise(60, mean=1.5)
    strict = soft_steps(gradients)
    assert (strict[-1] != 0).any()
    assert (strict[-1] == 0).any()
    torch.testing.assert_close(run(name, gradients, gate_warmup=ALWAYS)[0][1:], strict[1:], rtol=1e-7, atol=1e-7)


def test_alpha_counts_the_passes():
    assert [passes({"gate_warmup": 3.0}, t) for t in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]
    gradients = noise(400, mean=0.5)
    fresh, calibrated = run("replayed_alpha", gradients)[0][-1], soft_steps(gradients, alpha="calibrated")[-1]
    torch.testing.assert_close(fresh, calibrated, rtol=0.02, atol=1e-3)  # up to the memory of s in the threshold
    third = soft_steps(gradients, alpha=3 * break_even(0.9, 400))[-1]
    torch.testing.assert_close(run("replayed_alpha", gradients, gate_warmup=150.0)[0][-1], third)
    later = soft_steps(gradients, alpha=break_even(0.9, 400) + 1 / 150)[-1]
    torch.testing.assert_close(run("replayed_alpha_falling", gradients, gate_warmup=150.0)[0][-1], later)
    torch.testing.assert_close(run("replayed_alpha_falling", gradients)[0], soft_steps(gradients), rtol=1e-7, atol=1e-7)
    snr = soft_steps(gradients, gate="snr", strength=2.0)[-1]
    torch.testing.assert_close(run("replayed_strength", gradients, gate_warmup=150.0)[0][-1], snr)


def test_break_even_is_where_the_average_of_noise_lies():
    last = run("replayed_alpha", noise(600, members=10, width=500))[1]
    m_hat, s_hat = last["m"] / (1 - 0.9**600), last["s"] / (1 - 0.99**600)
    assert (m_hat.square().mean() / s_hat.mean()).item() == pytest.approx(break_even(0.9, 600), rel=0.03)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("sign_agreement", 1),
        ("tolerant_agreement", 1),
        ("agreement_or_calm", 1),
        ("lagged_agreement", 2),
        ("lagged_agreement_blocks", 2),
        ("agreement_over_blocks", 2),
    ],
)
def test_a_gradient_without_noise_is_adamws(name, first):
    gradients = (1 + noise(1).abs()).expand(12, -1, -1)
    torch.testing.assert_close(run(name, gradients)[0][first - 1 :], adam_steps(gradients)[first - 1 :])


def test_differences_of_neighbours_do_not_see_a_drift():
    steps = torch.arange(1, 301, dtype=torch.float64)[:, None, None]
    drifting = noise(300) + 0.05 * steps
    _, by_differences = run("successive_differences", drifting)
    _, still = run("successive_differences", noise(300))
    paper = torch.zeros_like(drifting[0])
    m = torch.zeros_like(paper)
    for g in drifting:
        paper, m = 0.99 * paper + 0.01 * (g - m).square(), 0.9 * m + 0.1 * g
    assert by_differences["s"].mean().item() == pytest.approx(still["s"].mean().item(), rel=0.01)
    assert still["s"].mean().item() == pytest.approx(1 - 0.99**299, rel=0.1)
    assert paper.mean() > 1.2 * by_differences["s"].mean()  # the average lags behind by half a unit
    constant = (1 + noise(1).abs()).expand(12, -1, -1)
    torch.testing.assert_close(run("successive_differences", constant)[0][1:], adam_steps(constant)[1:])


def test_halves_give_the_variance_of_the_batch_mean_whatever_the_drift():
    a, b = noise(400, seed=1), noise(400, seed=2)
    drift = 0.5 * torch.arange(400, dtype=torch.float64)[:, None, None]
    u, state = run("halves_variance", in_halves(a + drift, b + drift))
    s = state["s"][..., :WIDTH] / (1 - 0.99**400)
    assert s.mean().item() == pytest.approx(0.5, rel=0.05)  # of the mean of two numbers of unit variance
    assert not u[..., WIDTH:].any()
    assert not state["m"][..., WIDTH:].any()
    equal = noise(10)
    torch.testing.assert_close(run("halves_variance", in_halves(equal, equal))[0][1:, :, :WIDTH], adam_steps(equal)[1:])


def test_slow_evidence_with_the_fast_memory_is_the_strict_gate(monkeypatch):
    gradients = noise(80, mean=1.2)
    weak = noise(600, mean=0.4)
    assert run("slow_evidence", weak)[0][-1].abs().mean() > 3 * soft_steps(weak)[-1].abs().mean()
    assert (run("slow_evidence", noise(600))[0][-1] != 0).double().mean() < 0.01  # the level is kept
    monkeypatch.setattr(variants.over_time, "SLOW", 0.9)
    torch.testing.assert_close(run("slow_evidence", gradients)[0], soft_steps(gradients), rtol=1e-7, atol=1e-7)


def test_the_last_pass_is_remembered():
    gradients = noise(9)
    _, state = run("pass_agreement", gradients, gate_warmup=4.0)
    torch.testing.assert_close(state["pass"], gradients[4:8].mean(0))
    torch.testing.assert_close(state["total"], gradients[8])
    signal = (1 + noise(1).abs()).expand(400, -1, -1)
    opposed = torch.cat([signal[:8], -signal[:300]])
    assert not run("pass_agreement", opposed, gate_warmup=100.0)[0][150:160].isnan().any()
    torch.testing.assert_close(
        run("pass_agreement", signal, gate_warmup=10.0)[0][-1], adam_steps(signal)[-1], rtol=0.02, atol=0
    )


def test_blocks_of_noise_stay_closed_and_blocks_with_signal_open():
    mean = torch.zeros(4 * BLOCK, dtype=torch.float64)
    mean[BLOCK : 2 * BLOCK] = 0.4
    gradients = noise(300, members=20, width=4 * BLOCK) + mean
    u, _ = run("pooled_blocks", gradients)
    opened = (u[-1].reshape(20, 4, BLOCK) != 0).any(-1).double().mean(0)
    assert opened[1] == 1
    assert opened[[0, 2, 3]].mean() < 0.1
    strict = soft_steps(gradients)[-1].reshape(20, 4, BLOCK).abs().mean((0, 2))
    assert u[-1].reshape(20, 4, BLOCK).abs().mean((0, 2))[1] > 5 * strict[1]


def test_shrinkage_in_blocks_of_one_is_the_soft_gate(monkeypatch):
    monkeypatch.setattr(variants.shared, "BLOCK", 1)
    gradients, a = noise(50, mean=0.5), break_even(0.9, 50)
    expected = soft_steps(gradients, alpha=a, strength=0.7 * a)[-1]
    torch.testing.assert_close(run("shrunk_blocks", gradients, strength=0.7)[0][-1], expected)


def test_the_whole_opens_with_signal_and_closes_without():
    strong, pure = noise(150, width=3000, mean=2.0), noise(150, width=3000)
    torch.testing.assert_close(run("pooled_whole", strong)[0][-1], adam_steps(strong)[-1], rtol=0.05, atol=0.02)
    opened = run("pooled_whole", pure)[0][-1].norm() / adam_steps(pure)[-1].norm()
    assert opened < 0.1
    replayed = run("pooled_whole", pure, gate_warmup=10.0)[0][-1]  # b/n takes away what is left
    torch.testing.assert_close(replayed, soft_steps(pure)[-1])


def memorizing(steps, examples=20, batch=2, width=400, shared=0.0, seed=0):
    """Gradients of batches of examples that pull each in a direction of its own, plus one they share."""
    own = noise(1, members=examples, width=width, seed=seed)[0] + shared
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(examples, generator=generator).split(batch):
            yield own[chosen]
            steps -= 1
            if not steps:
                return


def test_agreement_is_the_leave_one_out_rate_of_the_data_set():
    batches = list(memorizing(800))
    own = noise(1, members=20, width=400)[0]
    a, b = (torch.stack([batch[i] for batch in batches])[:, None] for i in (0, 1))
    halves = in_halves(a, b)
    _, state = run("halves_agreement", halves, beta2=0.0, eps=1e9)  # a constant preconditioner, 1/ε
    gram = own @ own.T
    rate = (gram.sum() - gram.trace()) / (20 * 19) / 1e9
    spread = math.sqrt((0.01 / 1.99) * (gram - gram.diag().diag()).square().sum().item() / (20 * 19)) / 1e9
    assert state["gain"][0, 0].item() == pytest.approx(rate.item(), abs=3 * spread)


@pytest.mark.parametrize("name", ["lagged_agreement", "halves_agreement"])
def test_shared_directions_open_and_private_ones_do_not(name):
    def opened(shared):
        pairs = torch.stack(list(memorizing(600, examples=300, width=100, shared=shared)))
        mean = pairs.mean(1, keepdim=True)
        gradients = in_halves(pairs[:, :1], pairs[:, 1:]) if name in NEED_HALVES else mean
        u = run(name, gradients)[0][-1, :, : mean.shape[-1]]
        return (u.norm() / adam_steps(mean)[-1].norm()).item()

    assert opened(shared=0.5) == pytest.approx(1, abs=1e-6)
    assert opened(shared=0.0) < 0.5


def test_blocks_and_elements_agree_for_themselves():
    mean = torch.zeros(2 * BLOCK, dtype=torch.float64)
    mean[:BLOCK] = 0.3
    for name in ("lagged_agreement_blocks", "lagged_agreement_elements", "halves_agreement_blocks"):
        a, b = (noise(500, members=10, width=2 * BLOCK, seed=i) + mean for i in (0, 1))
        gradients = in_halves(a, b) if name in NEED_HALVES else (a + b) / 2
        q = run(name, gradients)[0][-1, :, : 2 * BLOCK] / adam_steps((a + b) / 2)[-1]
        assert q[:, :BLOCK].mean() > 0.85
        assert q[:, BLOCK:].mean() < 0.3


def test_after_many_passes_agreement_alone_opens():
    gradients = noise(80, mean=0.3)
    alone = run("lagged_agreement_blocks", gradients)[0]
    torch.testing.assert_close(run("agreement_after_first_pass", gradients, gate_warmup=ALWAYS)[0][1:], alone[1:])
    between = run("agreement_after_first_pass", gradients, gate_warmup=40.0)[0][60]  # E = 1: half of it is fresh
    torch.testing.assert_close(between, (alone[60] + adam_steps(gradients)[60]) / 2)


def test_a_latch_that_has_closed_does_not_open_again():
    signal = torch.ones(60, 1, BLOCK, dtype=torch.float64)
    swings = 5 * signal
    swings[1::2] *= -1  # each batch disagrees with the one before
    turned = torch.cat([signal[:10], swings, signal.repeat(6, 1, 1)])
    shut, state = run("latched_agreement", turned, gate_warmup=ALWAYS)
    torch.testing.assert_close(shut[2:10], adam_steps(turned)[2:10], rtol=1e-7, atol=1e-7)
    assert state["shut"].eq(1).all()
    strict = soft_steps(turned)
    torch.testing.assert_close(shut[70:], strict[70:], rtol=1e-7, atol=1e-7)
    open_again, _ = run("agreement_after_first_pass", turned, gate_warmup=ALWAYS)
    assert not torch.allclose(open_again[70:], strict[70:])


def test_without_agreement_blocks_take_over(monkeypatch):
    monkeypatch.setattr(variants.shared, "SURE", 1e12)
    gradients = noise(100, mean=0.6)
    torch.testing.assert_close(
        run("agreement_over_blocks", gradients)[0][2:], run("pooled_blocks", gradients)[0][2:], rtol=1e-6, atol=1e-9
    )


def test_tolerance_is_a_share_of_the_gain_on_the_own_batch():
    gradients = noise(300, width=50, mean=0.2, seed=7)
    u, _ = run("tolerant_agreement", gradients)
    adam, strict = adam_steps(gradients), soft_steps(gradients)
    for row in range(3):
        other = own = 0.0
        for t in range(300):
            g, before = gradients[t, row], adam[t - 1, row] if t else torch.zeros(50, dtype=torch.float64)
            other, own = 0.99 * other + 0.01 * float(g @ before), 0.99 * own + 0.01 * float(g @ adam[t, row])
        agreed = min(1.0, max(0.0, 1 + other / own / 0.1))
        expected = strict[-1, row] + agreed * (adam[-1, row] - strict[-1, row])
        torch.testing.assert_close(u[-1, row], expected)
    swinging = noise(1, width=50).expand(60, -1, -1) * (-1.0) ** torch.arange(60)[:, None, None]
    torch.testing.assert_close(
        run("tolerant_agreement", swinging)[0][-1], soft_steps(swinging)[-1], rtol=1e-6, atol=1e-9
    )


def test_gradients_that_fall_open_and_those_that_grow_do_not():
    swinging = noise(1, width=50).expand(300, -1, -1) * (-1.0) ** torch.arange(300)[:, None, None]
    size = 0.99 ** torch.arange(300, dtype=torch.float64)[:, None, None]
    falling, growing = swinging * size, swinging / size
    torch.testing.assert_close(run("agreement_or_calm", falling)[0][-1], adam_steps(falling)[-1])
    expected = run("tolerant_agreement", growing)[0][-1]
    torch.testing.assert_close(run("agreement_or_calm", growing)[0][-1], expected)
    assert expected.norm() < 0.5 * adam_steps(growing)[-1].norm()  # the next batch never agrees


def test_held_apart_halves_decide_for_each_other():
    equal = noise(60, mean=0.8)
    u, _ = run("held_apart", in_halves(equal, equal))
    expected = soft_steps(equal, alpha=break_even(0.9, 60))[-1]
    torch.testing.assert_close(u[-1, :, :WIDTH], expected)
    a, b = noise(300, seed=3), noise(300, mean=3.0, seed=4)  # A never proves anything: its own gradient enters
    alone = run("held_apart", in_halves(a, b))[0][-1, :, :WIDTH]
    assert alone.abs().mean() < 0.5 * adam_steps((a + b) / 2)[-1].abs().mean()


def test_hysteresis_by_hand():
    gradients = noise(200, members=1, width=20, mean=0.35, seed=5)
    u, _ = run("hysteresis", gradients)
    adam = adam_steps(gradients)
    flips = 0
    for k in range(20):
        m = s = 0.0
        opened = False
        for t in range(1, 201):
            g = gradients[t - 1, 0, k].item()
            s, m = 0.99 * s + 0.01 * (g - m) ** 2, 0.9 * m + 0.1 * g
            ratio = (m / (1 - 0.9**t)) ** 2 / (s / (1 - 0.99**t))
            before = opened
            opened = t > 1 and (ratio > 1 or (opened and ratio >= break_even(0.9, t)))
            flips += opened != before
            assert u[t - 1, 0, k].item() == pytest.approx(adam[t - 1, 0, k].item() if opened else 0.0)
    assert flips > 10


def test_gated_momentum_by_hand():
    gradients = noise(40, members=1, width=6, mean=1.5)
    u, _ = run("gated_momentum", gradients)
    strict, adam = soft_steps(gradients), adam_steps(gradients)
    entered = torch.zeros_like(gradients[0])
    m, v = torch.zeros_like(entered), torch.zeros_like(entered)
    for t, g in enumerate(gradients, 1):
        q = torch.where(adam[t - 1] != 0, strict[t - 1] / adam[t - 1], 0.0)
        entered = 0.9 * entered + 0.1 * q * g
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        expected = entered / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        torch.testing.assert_close(u[t - 1], expected, rtol=1e-6, atol=1e-9)


def test_the_norm_is_adamws_and_the_direction_the_gates():
    gradients = noise(40, mean=1.0)
    u, adam, strict = run("kept_norm", gradients)[0][-1], adam_steps(gradients)[-1], soft_steps(gradients)[-1]
    torch.testing.assert_close(u.norm(dim=-1), adam.norm(dim=-1))
    torch.testing.assert_close(u / u.norm(dim=-1, keepdim=True), strict / strict.norm(dim=-1, keepdim=True))
    assert not run("kept_norm", gradients[:1])[0].any()  # closed everywhere: the weights stay


def test_the_root_keeps_the_order_and_gives_length_back():
    gradients = noise(40, mean=0.5)
    gate = soft_steps(gradients, gate="snr", strength=30.0)[-1] / adam_steps(gradients)[-1]
    q = run("root_gate", gradients)[0][-1] / adam_steps(gradients)[-1]
    torch.testing.assert_close(q, gate**0.25)


def test_a_coordinate_without_gradient_stays():
    gradients = noise(6)
    gradients[..., 3] = 0
    for name in PLAIN:
        u, _ = run(name, gradients, gate_warmup=2.0)
        assert u.isfinite().all(), name
        assert not u[..., 3].any(), name
