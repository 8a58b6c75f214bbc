"""Rules that read more than one gradient, in stacks: each is what a plain loop over one network gives."""

import pytest
import torch
from test_comparison_engine import CPU, Regression, member
from torch.testing import assert_close

from poprisk._core.seeds import stream
from poprisk.cli._demonstration.training import epoch_batches
from poprisk_lab.engine.stack import Stack

STEPS = 12


class Alone:
    """One network of the regression task, its batches, and the gradient of any part of a batch at any weights."""

    def __init__(self, seed, task):
        self.weights = {name: value.clone() for name, value in task.initial(seed).items()}
        self.x, _, self.y = task.data(seed)
        self.batches = epoch_batches(task.examples, task.batch_size, [stream(seed, "batches:train")], CPU)

    def gradient(self, index, weights):
        w = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
        hidden = torch.tanh(self.x[index] @ w["hidden.weight"].T + w["hidden.bias"])
        loss = ((hidden @ w["out.weight"].T).squeeze(-1) - self.y[index]).square().mean()
        return dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))


def in_a_stack(arm, seed=1, steps=STEPS, **hyper):
    stack = Stack(
        Regression(steps=steps), [member("adamw", seed), member(arm, 0, **hyper), member(arm, seed, **hyper)], CPU
    )
    for _ in range(steps):
        stack._advance()
    with torch.no_grad():
        return stack, stack.layout.member(stack.evaluated()[2])


def adam(lr, decay, gradients_of, seed=1, steps=STEPS):
    """AdamW of torch with the gradients that a function gives for a batch."""
    alone = Alone(seed, Regression(steps=steps))
    parameters = {name: torch.nn.Parameter(value) for name, value in alone.weights.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr, weight_decay=decay)
    for _ in range(steps):
        index = next(alone.batches)[0]
        for name, gradient in gradients_of(alone, index, parameters).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: value.detach() for name, value in parameters.items()}


def test_rm3_takes_the_median_of_three():
    def median(alone, index, weights):
        parts = [alone.gradient(part, weights) for part in index.chunk(3)]
        return {name: torch.stack([part[name] for part in parts]).median(0).values for name in weights}

    _, found = in_a_stack("rm3", lr=0.01)
    assert_close(found, adam(0.01, 0.01, median), rtol=1e-5, atol=1e-6)


def test_sam_takes_the_gradient_nearby():
    def nearby(alone, index, weights):
        first = alone.gradient(index, weights)
        norm = torch.cat([g.flatten() for g in first.values()]).norm()
        return alone.gradient(index, {name: w.detach() + 0.05 * first[name] / norm for name, w in weights.items()})

    _, found = in_a_stack("sam", lr=0.01)
    assert_close(found, adam(0.01, 0.01, nearby), rtol=1e-5, atol=1e-6)


def test_plain_members_are_not_changed_by_their_neighbours():
    stack, _ = in_a_stack("sam")
    assert_close(
        stack.layout.member(stack.weights[0].detach()),
        adam(1e-3, 0.01, lambda a, i, w: a.gradient(i, w)),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("warmup", [0, 5])
def test_schedule_free_is_measured_at_its_average(warmup):
    """The three sequences of the paper, written out."""
    lr, decay, beta1, beta2, steps = 0.02, 0.1, 0.9, 0.999, STEPS
    alone = Alone(1, Regression(steps=steps))
    z = {name: value.clone() for name, value in alone.weights.items()}
    x, v, total = dict(z), {name: torch.zeros_like(value) for name, value in z.items()}, 0.0
    for t in range(1, steps + 1):
        y = {name: (1 - beta1) * z[name] + beta1 * x[name] for name in z}
        gradient = alone.gradient(next(alone.batches)[0], y)
        rate = lr * min(t / max(warmup, 1), 1)
        total += rate**2
        for name, g in gradient.items():
            v[name] = beta2 * v[name] + (1 - beta2) * g**2
            z[name] = z[name] - rate * g / ((v[name] / (1 - beta2**t)).sqrt() + 1e-8) - rate * decay * y[name]
            x[name] = x[name] + rate**2 / total * (z[name] - x[name])
    stack, found = in_a_stack("schedule_free", lr=lr, weight_decay=decay, lr_warmup=float(warmup))
    assert_close(found, x, rtol=1e-5, atol=1e-6)
    trained = stack.layout.member(stack.weights[2].detach())
    assert_close(trained, {name: (1 - beta1) * z[name] + beta1 * x[name] for name in z}, rtol=1e-5, atol=1e-6)


def test_curves_show_the_average_of_schedule_free():
    task = Regression(steps=STEPS, evaluations=1)
    stack = Stack(task, [member("schedule_free", 1, lr=0.02)], CPU)
    curves = stack.train()
    with torch.no_grad():
        expected = stack.cohort.measure(stack.layout.views(stack.evaluated()))["clean error"]
        other = stack.cohort.measure(stack.layout.views(stack.weights))["clean error"]
    assert_close(curves.metrics["clean error"][:, 0].float(), expected)
    assert not torch.equal(expected, other)


def test_magma_rests_whole_tensors_and_scales_the_others():
    stack = Stack(Regression(), [member("magma", 0, lr=0.01, weight_decay=0.0)], CPU)
    alone = Alone(0, Regression())
    m = {name: torch.zeros_like(value) for name, value in alone.weights.items()}
    v, score = dict(m), dict.fromkeys(m, 0.0)
    rested = []
    for t in range(1, 21):
        before = stack.layout.member(stack.weights[0].detach().clone())
        gradient = alone.gradient(next(alone.batches)[0], before)
        stack._advance()
        after = stack.layout.member(stack.weights[0].detach())
        for name, g in gradient.items():
            m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.999 * v[name] + 0.001 * g**2
            cosine = (m[name] * g).sum() / (m[name].norm() * g.norm())
            score[name] = 0.9 * score[name] + 0.1 * torch.sigmoid(cosine / 2)
            direction = m[name] / (1 - 0.9**t) / ((v[name] / (1 - 0.999**t)).sqrt() + 1e-8)
            moved = before[name] - after[name]
            rested.append(bool((moved == 0).all()))
            if not rested[-1]:
                assert_close(moved, 0.01 * score[name] * direction, rtol=1e-3, atol=2e-7)
    assert 15 < sum(rested) < 45  # of 60, half on average


def test_casmo_has_a_trust_for_each_tensor():
    lr, steps = 0.01, 5
    _, found = in_a_stack("casmo", lr=lr, steps=steps)
    alone = Alone(1, Regression(steps=steps))
    w = alone.weights
    m = {name: torch.zeros_like(value) for name, value in w.items()}
    s = dict(m)
    for t in range(1, steps + 1):
        for name, g in alone.gradient(next(alone.batches)[0], w).items():
            s[name] = 0.999 * s[name] + 0.001 * (g - m[name]) ** 2
            m[name] = 0.9 * m[name] + 0.1 * g
            mean, noise = m[name] / (1 - 0.9**t), s[name] / (1 - 0.999**t)
            share = mean**2 / (mean**2 + noise)
            trust, focus = (0.1 + 0.9 * share.mean()) ** 0.5, (share / (share.mean() + 1e-8)).clamp(0.1, 1)
            w[name] = w[name] * (1 - lr * 0.01) - lr * trust * focus * mean / ((mean**2 + noise).sqrt() + 1e-8)
    assert_close(found, w, rtol=1e-4, atol=1e-5)


def test_a_shuffled_gate_has_the_same_openings_elsewhere():
    lr = member("defaults").hyper["lr"]
    rows = [member("defaults", seed) for seed in (0, 1)]
    stack = Stack(Regression(), [*rows, member("shuffled_gate", 1, lr=lr, weight_decay=0.0)], CPU)
    for _ in range(STEPS):
        before = stack.weights.detach().clone()
        stack._advance()
    state, gate = stack._blocks[1][1].state, stack._blocks[0][1].gate[1]
    direction = state["m"][0] / (1 - 0.9**STEPS) / ((state["v"][0] / (1 - 0.999**STEPS)).sqrt() + 1e-8)
    openings = (before - stack.weights.detach())[2] / (lr * direction)
    assert_close(openings.sort().values, gate.sort().values, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(openings, gate, atol=1e-2)
