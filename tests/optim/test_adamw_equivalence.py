"""``gate=None`` is torch's AdamW: bit for bit where the operations are the same, weights and state.

At the same options: lr and weight decay have other defaults than AdamW's, so they are given here.
"""

import pytest
import torch
from streams import SHAPES, relative_error, start, stream, train
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from poprisk.optim._adamw import PopRiskAdamW

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 100
DECAY = AdamW([torch.zeros(1, requires_grad=True)]).defaults["weight_decay"]
PATHS = {"forloop": {"foreach": False}, "foreach": {"foreach": True}, "default": {}}
OPTIONS = {
    "defaults": {},
    "decay": {"weight_decay": 0.3},
    "no decay": {"weight_decay": 0.0, "eps": 1e-6, "betas": (0.8, 0.95)},
    "maximize": {"maximize": True, "weight_decay": 0.1},
}
SCHEDULERS = {
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.03, total_steps=STEPS + 1, cycle_momentum=True),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=STEPS),
    "lambda": lambda o: LambdaLR(o, lambda t: 1 / (1 + t)),
}


def pair(ours, torchs, dtype, **options):
    mine, theirs = start(dtype=dtype), start(dtype=dtype)
    options = {"weight_decay": DECAY, **options}
    return (mine, PopRiskAdamW(mine, gate=None, **options, **ours)), (theirs, AdamW(theirs, **options, **torchs))


def assert_same_bits(mine, ours, theirs, adamw):
    for p, q in zip(mine, theirs, strict=True):
        assert torch.equal(p, q)
        assert set(ours.state[p]) == set(adamw.state[q]) == {"step", "exp_avg", "exp_avg_sq"}
        for name, value in adamw.state[q].items():
            assert torch.equal(ours.state[p][name], value), name
            assert ours.state[p][name].dtype == value.dtype


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_without_a_gate_it_is_adamw_bit_for_bit(path, dtype, options):
    (mine, ours), (theirs, adamw) = pair(path, path, dtype, lr=1e-2, **options)
    gradients = stream(STEPS, dtype=dtype)
    train(ours, mine, gradients)
    train(adamw, theirs, gradients)
    assert not torch.equal(mine[0], start(dtype=dtype)[0])
    assert_same_bits(mine, ours, theirs, adamw)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_a_gate_fused_is_adamw_to_rounding(dtype, options):
    (mine, ours), (theirs, adamw) = pair({"fused": True}, {"foreach": False}, dtype, lr=1e-2, **options)
    gradients = stream(STEPS, dtype=dtype)
    train(ours, mine, gradients)
    train(adamw, theirs, gradients)
    assert relative_error(mine, theirs) <= 1e-6
    assert {ours.state[p]["step"].item() for p in mine} == {STEPS}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_schedulers_steer_it_as_they_steer_adamw(path, scheduler):
    (mine, ours), (theirs, adamw) = pair(path, path, torch.float32, lr=1e-2)
    schedules = scheduler(ours), scheduler(adamw)
    seen = set()
    for row in stream(STEPS, dtype=torch.float32):
        train(ours, mine, [row])
        train(adamw, theirs, [row])
        for schedule in schedules:
            schedule.step()
        assert ours.param_groups[0]["betas"] == tuple(adamw.param_groups[0]["betas"])
        seen.add((ours.param_groups[0]["lr"], ours.param_groups[0]["betas"]))
    assert len(seen) > STEPS / 3
    assert_same_bits(mine, ours, theirs, adamw)


@pytest.mark.parametrize("path", [{"foreach": False}, {"fused": True}], ids=["forloop", "fused"])
def test_the_learning_rate_may_be_a_tensor(path):
    lr = torch.tensor(1e-2)
    (mine, ours), (theirs, adamw) = pair(path, path, torch.float32, lr=lr)
    gradients = stream(STEPS, dtype=torch.float32)
    for k, row in enumerate(gradients):
        lr.fill_(1e-2 / (1 + k))
        train(ours, mine, [row])
        train(adamw, theirs, [row])
    assert_same_bits(mine, ours, theirs, adamw)


def test_one_cycle_steers_the_gated_step_too():
    """Changed lr and betas reach the rule: the run equals one whose options are set by hand."""
    scheduled, by_hand = start(), start()
    ours, other = PopRiskAdamW(scheduled, foreach=False), PopRiskAdamW(by_hand, fused=True)
    schedule = SCHEDULERS["one cycle"](ours)
    for row in stream(STEPS):
        for name in ("lr", "betas"):
            other.param_groups[0][name] = ours.param_groups[0][name]
        train(ours, scheduled, [row])
        train(other, by_hand, [row])
        schedule.step()
    assert ours.param_groups[0]["betas"][0] != 0.9
    assert relative_error(scheduled, by_hand) <= 1e-12


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_each_group_follows_its_own_gate(path):
    """A group with a gate and one without it are exactly the two optimizers side by side."""
    mine, theirs, alone = (start(dtype=torch.float32) for _ in range(3))
    ours = PopRiskAdamW(
        [{"params": mine[:1], "gate": None, "lr": 1e-3, "weight_decay": DECAY}, {"params": mine[1:], "gate": "soft"}],
        lr=1e-2,
        **path,
    )
    adamw = AdamW(theirs[:1], lr=1e-3, **path)
    gated = PopRiskAdamW(alone[1:], lr=1e-2, gate="soft", **path)
    gradients = stream(STEPS, dtype=torch.float32)
    train(ours, mine, gradients)
    train(adamw, theirs[:1], [row[:1] for row in gradients])
    train(gated, alone[1:], [row[1:] for row in gradients])
    assert_same_bits(mine[:1], ours, theirs[:1], adamw)
    for p, q in zip(mine[1:], alone[1:], strict=True):
        assert torch.equal(p, q)
        assert torch.equal(ours.state[p]["exp_var"], gated.state[q]["exp_var"])


def test_the_gated_run_is_another_one():
    """Against tests that compare AdamW with itself: the gate matters on this stream."""
    gated, plain = start(shapes=SHAPES), start(shapes=SHAPES)
    train(PopRiskAdamW(gated, lr=1e-2), gated, stream(40))
    train(PopRiskAdamW(plain, lr=1e-2, gate=None), plain, stream(40))
    assert relative_error(gated, plain) > 0.01
