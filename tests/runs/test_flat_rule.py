"""The optimizer as a pure function of flat vectors takes the steps that the optimizer took."""

from functools import partial

import pytest
import torch
from test_run_linearize import OPTIMIZERS as LINEARIZED
from test_run_linearize import record
from tiny_problems import classification, make_mlp, tied, tiny_data
from torch import nn
from torch.func import jvp, vmap
from torch.optim import SGD, Adam, AdamW

from poprisk.errors import DataError, RunError
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.runs._flat_rule import flat_rule
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._training import train

OPTIMIZERS = {
    **{name: make for name, make in LINEARIZED.items() if "amsgrad" not in name},
    "poprisk tensor": partial(
        PopRiskAdamW,
        gate=Gate("soft", strength=1.0, alpha=0.1, granularity="tensor", normalize=False),
        weight_decay=0.01,
        lr=0.05,
    ),
    "poprisk calibrated paper": partial(
        PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha="calibrated", normalize=False), weight_decay=0.01, lr=0.05
    ),
    "poprisk hard rows calibrated": partial(
        PopRiskAdamW,
        weight_decay=0.01,
        lr=0.05,
        gate=Gate("hard", alpha="calibrated", granularity="row", warmup_steps=2, normalize=False),
    ),
    "poprisk gated decay": partial(
        PopRiskAdamW,
        gate=Gate("soft", strength=1.0, alpha=0.1, gated_decay=True, normalize=False),
        lr=0.05,
        weight_decay=0.3,
    ),
}
POOLED = {
    "poprisk gated decay rows",
    "poprisk relative decay rows",
    "poprisk tensor",
    "poprisk hard rows calibrated",
}
# PyTorch scripts what forward mode needs at its first use, and warns of scripting.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def batch_gradient(problem, run, k, w):
    step = run.step(k)
    inputs, targets = problem.batch(step.batch, dtype=w.dtype)
    return (step.selection.to(w) / len(problem)) @ problem.model(w.dtype).per_example_gradients(w, inputs, targets)


def run_again(problem, run):
    """All weights of the run from its first ones, each step from the gradient at its own weights."""
    rule, w = flat_rule(run), run.weights(0)
    state, weights = rule.initial(w), [w]
    for k in range(run.num_steps):
        w, state = rule.step(k, w, batch_gradient(problem, run, k, w), state)
        weights.append(w)
    return weights, state


def assert_recorded(weights, run):
    for k, w in enumerate(weights):
        assert w.dtype == run.layout.dtype
        assert (w - run.weights(k)).norm() <= TOLERANCE[w.dtype] * run.weights(k).norm()
    assert (weights[-1] - weights[0]).norm() > 1e-3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_recorded_steps_are_taken_again(name):
    problem = classification()
    run, _ = record(problem, OPTIMIZERS[name], steps=9, clip=0.5, parts=2, scale=64.0)
    weights, _ = run_again(problem, run)
    assert_recorded(weights, run)
    assert flat_rule(run).elementwise == (name not in POOLED)


@pytest.mark.parametrize("name", ["sgd nesterov decay foreach", "adam decay", "adamw", "poprisk calibrated"])
def test_single_precision(name):
    inputs, labels = tiny_data(dtype=torch.float32)
    problem = Problem(make_mlp, "cross_entropy", inputs, labels)
    run = train(problem, OPTIMIZERS[name], 12, batch_size=4, clip_norm=0.5, progress=False)
    weights, state = run_again(problem, run)
    assert_recorded(weights, run)
    assert all(x.dtype == torch.float32 for x in state)


@pytest.mark.parametrize(
    "name", ["sgd", "sgd momentum dampening decay", "adam", "adamw", "poprisk gated decay rows", "poprisk calibrated"]
)
def test_groups_and_schedules(name):
    problem = tied()

    def make(parameters):
        first, *rest = parameters
        return OPTIMIZERS[name]([{"params": rest}, {"params": [first], "lr": 0.02, "weight_decay": 0.3}])

    run = train(problem, make, 10, batch_size=5, schedule=lambda k: 1 / (1 + k), clip_norm=1.0, progress=False)
    assert run.options(3)[0]["lr"] != run.options(4)[0]["lr"]
    assert run.options(3)[0]["lr"] != run.options(3)[1]["lr"]
    weights, _ = run_again(problem, run)
    assert_recorded(weights, run)


def test_options_that_begin_late():
    """Momentum, a gate and its calibration that are switched on in the middle begin with a fresh state."""
    problem = classification()
    changes = {
        "sgd": (
            partial(SGD, lr=0.1, dampening=0.5),
            {2: {"momentum": 0.5}, 4: {"momentum": 0.0}, 6: {"momentum": 0.8}},
        ),
        "gate": (
            partial(PopRiskAdamW, gate=None, weight_decay=0.01, lr=0.05),
            {2: {"gate": Gate("soft", strength=1.0, alpha=0.1)}, 5: {"alpha": "calibrated"}, 7: {"gate": "snr"}},
        ),
    }
    for make, when in changes.values():
        model = problem.module(torch.float64)
        optimizer = make(model.parameters())
        recorder = Recorder(None, model, optimizer, problem=problem)
        for k in range(9):
            optimizer.param_groups[0].update(when.get(k, {}))
            batch = (torch.arange(5) + k) % 12
            with recorder.step(batch):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(problem.inputs[batch]), problem.targets[batch]).backward()
                optimizer.step()
        run = recorder.close()
        weights, _ = run_again(problem, run)
        assert_recorded(weights, run)


@pytest.mark.parametrize(
    ("make", "saved"),
    [
        (partial(SGD, lr=0.1, momentum=0.9, dampening=0.5), ["momentum_buffer"]),
        (partial(AdamW, lr=0.05), ["exp_avg", "exp_avg_sq"]),
        (
            partial(PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha="calibrated"), weight_decay=0.01, lr=0.05),
            ["exp_avg", "exp_avg_sq", "exp_var", "q"],
        ),
    ],
)
def test_a_recording_that_starts_in_the_middle(make, saved):
    problem = classification()
    model = problem.module(torch.float64)
    optimizer = make(model.parameters())

    def one_step(batch):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(problem.inputs[batch]), problem.targets[batch]).backward()
        optimizer.step()

    for k in range(3):
        one_step((torch.arange(5) + k) % 12)
    recorder = Recorder(None, model, optimizer, problem=problem)
    for k in range(3, 8):
        batch = (torch.arange(5) + k) % 12
        with recorder.step(batch):
            one_step(batch)
    run = recorder.close()
    rule = flat_rule(run)
    assert all(x.norm() > 0 for x in rule.initial(run.weights(0)))
    weights, state = run_again(problem, run)
    assert_recorded(weights, run)
    for vector, key in zip(state, saved, strict=True):  # the states too, not only what they make of the weights
        states = [optimizer.state[p] for p in model.parameters()]
        if key == "q":
            sizes = [p.numel() for p in model.parameters()]
            expected = torch.cat([s["gate_scale"][0].expand(n) for s, n in zip(states, sizes, strict=True)])
        else:
            expected = torch.cat([s[key].reshape(-1) for s in states])
        torch.testing.assert_close(vector, expected, rtol=1e-11, atol=1e-16)


@pytest.mark.parametrize(
    "name", ["sgd", "sgd nesterov", "adam decay", "poprisk snr", "poprisk default", *sorted(POOLED)]
)
def test_members_in_front_and_vmap(name):
    """A row for each member, with or without vmap, is each member by itself; so are frozen gates."""
    problem = classification()
    run, _ = record(problem, OPTIMIZERS[name], steps=3)
    rule, d = flat_rule(run), run.num_weights
    W, G = torch.randn(2, 3, d, dtype=torch.float64)
    states = tuple(torch.rand(3, d, dtype=torch.float64) for _ in rule.state_names)
    gate = torch.rand(3, d, dtype=torch.float64)
    for q in (None, gate):
        stacked = rule.step(2, W, G, states, gate=q)
        axes = (0, 0, None if q is None else 0, *[0] * len(states))
        mapped = vmap(lambda w, g, q, *s: rule.step(2, w, g, s, gate=q), axes)(W, G, q, *states)
        for i in range(3):
            row = rule.step(2, W[i], G[i], tuple(s[i] for s in states), gate=None if q is None else q[i])
            for found in (stacked, mapped):
                torch.testing.assert_close(found[0][i], row[0], rtol=1e-14, atol=1e-14)
                for a, b in zip(found[1], row[1], strict=True):
                    torch.testing.assert_close(a[i], b, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(rule.gate(2, W, G, states)[1], rule.gate(2, W[1], G[1], tuple(s[1] for s in states)))


@forward_mode
@pytest.mark.parametrize("name", ["sgd momentum", "adam decay", "poprisk soft", "poprisk gated decay", "poprisk snr"])
def test_derivatives_are_those_of_differences(name):
    problem = classification()
    run, _ = record(problem, OPTIMIZERS[name], steps=3)
    rule, d = flat_rule(run), run.num_weights
    w, g, dw, dg = torch.randn(4, d, dtype=torch.float64)
    state = tuple(torch.rand(d, dtype=torch.float64) + 0.5 for _ in rule.state_names)
    moved = tuple(torch.randn(d, dtype=torch.float64) for _ in state)

    def step(w, g, *state):
        new, states = rule.step(2, w, g, state)
        return torch.cat([new, *states])

    _, along = jvp(step, (w, g, *state), (dw, dg, *moved))
    h = 1e-6
    ahead, behind = (
        step(w + e * dw, g + e * dg, *(s + e * t for s, t in zip(state, moved, strict=True))) for e in (h, -h)
    )
    torch.testing.assert_close(along, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-7)


@forward_mode
@pytest.mark.parametrize("name", [
    "poprisk soft", "poprisk gated decay", "poprisk gated decay rows", "poprisk hard", "poprisk default"
])  # fmt: skip
def test_the_gate_of_the_step_gives_the_step(name):
    problem = classification()
    run, _ = record(problem, OPTIMIZERS[name], steps=6)
    rule, w = flat_rule(run), run.weights(0)
    state = rule.initial(w)
    opened = 0.0
    for k in range(6):
        g = batch_gradient(problem, run, k, w)
        q = rule.gate(k, w, g, state)
        assert bool(((q >= (0.5 if name == "poprisk default" else 0)) & (q <= 1)).all())
        opened = max(opened, q.mean().item())
        expected, _ = rule.step(k, w, g, state)
        frozen, _ = rule.step(k, w, g, state, gate=q)
        torch.testing.assert_close(frozen, expected, rtol=1e-13, atol=1e-15)
        held = jvp(lambda w: rule.step(k, w, g, state, gate=0 * q)[0], (w,), (torch.ones_like(w),))  # noqa: B023
        decay = 0.3 if name == "poprisk gated decay" else 0.01
        shrunk = 1.0 if "gated decay" in name else 1 - 0.05 * decay
        torch.testing.assert_close(held[1], torch.full_like(w, shrunk))
        w, state = expected, rule.step(k, w, g, state)[1]
    assert opened > 0.05
    sgd, _ = record(problem, OPTIMIZERS["sgd"], steps=1)
    assert torch.equal(flat_rule(sgd).gate(0, w, g, ()), torch.ones_like(w))


def test_state_names():
    problem = classification()
    expected = {"sgd": (), "sgd momentum": ("momentum",), "adam": ("m", "v"), "poprisk no gate": ("m", "v")}
    expected |= {"poprisk soft": ("m", "v", "s"), "poprisk shared": ("m", "v")}
    expected |= {"poprisk default": ("m", "v", "s", "q"), "poprisk relative shared": ("m", "v", "q")}
    for name, names in expected.items():
        run, _ = record(problem, OPTIMIZERS[name], steps=1)
        assert flat_rule(run).state_names == names


def test_what_has_no_flat_rule_is_refused():
    problem = classification()
    run, _ = record(problem, partial(Adam, amsgrad=True), steps=1)
    with pytest.raises(RunError, match="amsgrad=False"):
        flat_rule(run)
    run, _ = record(
        problem,
        partial(PopRiskAdamW, gate=Gate("soft", strength=1.0), weight_decay=0.01, state_dtype=torch.bfloat16),
        steps=1,
    )
    with pytest.raises(RunError, match="state_dtype=None"):
        flat_rule(run)
    run = train(problem, SGD, 1, dtype=torch.bfloat16, progress=False)
    with pytest.raises(RunError, match=r"float32 or all float64, got torch\.bfloat16"):
        flat_rule(run)
    run, _ = record(problem, OPTIMIZERS["sgd"], steps=2)
    rule, w = flat_rule(run), run.weights(0)
    with pytest.raises(DataError, match=r"k must lie in 0 … 1, got 2"):
        rule.step(2, w, w, ())
    with pytest.raises(DataError, match=r"vectors of 51 entries, got"):
        rule.step(0, w, w[:-1], ())
    with pytest.raises(DataError, match=r"vectors of 51 entries, got"):
        rule.step(0, w, w, (w,))


def test_weights_moved_by_something_else_are_refused():
    problem = classification()
    model = problem.module(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1)
    recorder = Recorder(None, model, optimizer, problem=problem)
    for k in range(2):
        with recorder.step(torch.arange(12)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(problem.inputs), problem.targets).backward()
            optimizer.step()
            if k == 1:
                with torch.no_grad():
                    model[0].weight.clamp_(-0.1, 0.1)
    run = recorder.close()
    rule, w = flat_rule(run), run.weights(0)
    rule.step(0, w, w, ())
    with pytest.raises(RunError, match="weights were changed in step 1"):
        rule.step(1, w, w, ())
