"""The manners of a torch optimizer: closures, groups, hooks, missing gradients, gradient scaling, copies."""

import copy
import pickle

import pytest
import torch
from optimizer_table import BACKENDS
from streams import relative_error, start, stream, train
from torch import nn
from torch.testing import assert_close

from poprisk.errors import HyperparameterError
from poprisk.optim import Gate, join_gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim.rules._coefficients import Hyper
from poprisk.optim.rules._population import initial_state, population_step
from poprisk.optim.rules._relative import first_scale

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


def by_rule(w, gradients, hyper=None):
    """The pure rule on one tensor, with Algorithm 1's numbers if not told otherwise."""
    hyper = hyper or Hyper()
    w, state = w.detach().clone(), initial_state(w.detach(), hyper)
    for g in gradients:
        w, state = population_step(w, g, state, hyper)
    return w, state


# --- calls


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned():
    p = nn.Parameter(torch.ones(3))
    optimizer = PopRiskAdamW([p], gate="snr")
    modes = []

    def closure():
        modes.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 3.0
    assert modes == [True]
    assert optimizer.step(closure).item() < 3.0
    assert optimizer.step() is None


def test_step_hooks_run_before_and_after():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = PopRiskAdamW([p], gate="snr")
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", p[0].item())))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", p[0].item())))
    optimizer.step()
    assert seen == [("before", 1.0), ("after", p[0].item())]
    assert p[0].item() < 1.0


def test_zero_grad_and_repr():
    p = nn.Parameter(torch.ones(3))
    optimizer = PopRiskAdamW([p])
    p.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(p.grad, torch.zeros(3))
    optimizer.zero_grad()
    assert p.grad is None
    text = repr(optimizer)
    assert text.startswith("PopRiskAdamW (")
    assert "gate: snr" in text
    assert "strength: 100.0" in text


# --- groups


@pytest.mark.parametrize("gives", [iter, list, tuple, lambda x: (p for p in x)], ids=["iter", "list", "tuple", "gen"])
def test_groups_take_their_parameters_from_anything_ordered(gives):
    model, head = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = PopRiskAdamW([{"params": gives(list(model.parameters())), "gate": "hard"}])
    optimizer.add_param_group({"params": gives(list(head.parameters()))})
    assert [[id(p) for p in g["params"]] for g in optimizer.param_groups] == [
        [id(p) for p in m.parameters()] for m in (model, head)
    ]
    assert [g["gate"] for g in optimizer.param_groups] == ["hard", "snr"]


def test_a_set_of_parameters_is_refused_as_in_torch():
    with pytest.raises(TypeError, match="ordered collections"):
        PopRiskAdamW([{"params": set(nn.Linear(3, 2).parameters())}])
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        PopRiskAdamW([1.0], fused=True)


def test_names_of_parameters_are_kept():
    model, head = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = PopRiskAdamW(model.named_parameters())
    optimizer.add_param_group({"params": ((f"head.{n}", p) for n, p in head.named_parameters()), "gate": None})
    assert [g["param_names"] for g in optimizer.param_groups] == [["weight", "bias"], ["head.weight", "head.bias"]]
    assert optimizer.param_groups[1]["params"][0] is head.weight
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_a_group_added_in_the_middle_starts_from_its_first_step():
    params, late = start(), start(seed=5)[0]
    optimizer = PopRiskAdamW.paper(params)
    gradients = stream(12)
    train(optimizer, params, gradients[:5])
    optimizer.add_param_group({"params": late, "lr": 0.1})
    train(optimizer, [*params, late], [[*row, row[0]] for row in gradients[5:]])
    assert_close(late.detach(), by_rule(start(seed=5)[0], [r[0] for r in gradients[5:]], Hyper(lr=0.1))[0])
    assert optimizer.state[late]["step"].item() == 7
    assert optimizer.state[params[0]]["step"].item() == 12


def test_a_group_with_bad_options_is_not_added():
    optimizer = PopRiskAdamW([nn.Parameter(torch.ones(2))])
    with pytest.warns(DeprecationWarning, match="option rho"), pytest.raises(HyperparameterError, match="rho must be"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "rho": 1.0})
    assert len(optimizer.param_groups) == 1


def test_a_group_states_its_dtypes_and_betas_in_one_form():
    group = {"params": [nn.Parameter(torch.ones(2))], "state_dtype": torch.bfloat16, "betas": [0.8, 0.9]}
    (made,) = PopRiskAdamW([group]).param_groups
    assert made["state_dtype"] == {"v": torch.bfloat16, "s": torch.bfloat16}
    assert made["betas"] == (0.8, 0.9)


def test_a_scheduler_must_not_pull_shared_betas_apart():
    """state="shared" holds for ρ = β1 = β2 only, which OneCycleLR's momentum cycling would break in silence."""
    params = start()
    optimizer = PopRiskAdamW(params, state="shared", betas=(0.9, 0.9), gate=Gate(rho=0.9))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    with pytest.raises(HyperparameterError, match="needs rho = betas"):
        train(optimizer, params, stream(1))
    assert all(torch.equal(p, q) for p, q in zip(params, start(), strict=True))


# --- gradients that come and go


@EVERY_BACKEND
def test_each_parameter_counts_its_own_steps(backend):
    """Late, early and patchy gradients: each parameter is the rule on the gradients it had."""
    shapes = ((4, 3),) * 4
    gradients = stream(30, shapes=shapes)
    has = [lambda t: True, lambda t: t >= 11, lambda t: t < 13, lambda t: t % 3 == 0]
    params = start(shapes=shapes)
    optimizer = PopRiskAdamW.paper(params, lr=Hyper().lr, **backend)
    train(
        optimizer,
        params,
        [[g if f(t) else None for g, f in zip(row, has, strict=True)] for t, row in enumerate(gradients)],
    )
    for k, (p, w) in enumerate(zip(params, start(shapes=shapes), strict=True)):
        own = [row[k] for t, row in enumerate(gradients) if has[k](t)]
        expected, state = by_rule(w, own)
        assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)
        assert_close(optimizer.state[p]["exp_var"], state.s, rtol=1e-12, atol=1e-12)
        assert optimizer.state[p]["step"].item() == optimizer.state[p]["var_step"].item() == len(own)


def test_parameters_without_gradients_get_no_state():
    params = start()
    optimizer = PopRiskAdamW(params)
    train(optimizer, params, [[row[0], None, None] for row in stream(3)])
    assert list(optimizer.state) == [params[0]]
    optimizer.diagnostics()
    assert list(optimizer.linearize()) == [params[0]]
    assert list(optimizer.state) == [params[0]]


@EVERY_BACKEND
def test_a_gradient_with_a_lazy_sign_is_read_with_it(backend):
    """torch may keep a minus sign or a conjugation beside the memory of a tensor."""
    lazy, plain = start(), start()
    z, y = (nn.Parameter(torch.ones(4, dtype=torch.complex128)) for _ in range(2))
    one, two = PopRiskAdamW([*lazy, z], gate="snr", **backend), PopRiskAdamW([*plain, y], gate="snr", **backend)
    for row in stream(3):
        c = torch.randn(4, dtype=torch.complex128)
        train(one, [*lazy, z], [[torch._neg_view(g) for g in row] + [c]])
        for p, g in zip(lazy, row, strict=True):
            p.grad = torch._neg_view(g)
        z.grad = c.conj()
        one.step()
        train(two, [*plain, y], [[-g for g in row] + [c], [-g for g in row] + [c.conj().resolve_conj()]])
    for p, q in zip([*lazy, z], [*plain, y], strict=True):
        assert_close(p.detach(), q.detach(), rtol=1e-13, atol=1e-13)


def test_clipping_between_backward_and_step_is_seen():
    params, plain = start(), start()
    optimizer, other = PopRiskAdamW(params), PopRiskAdamW(plain)
    for row in stream(10):
        for p, q, g in zip(params, plain, row, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        total = nn.utils.clip_grad_norm_(params, 1.0)
        for q in plain:
            q.grad = q.grad / total if total > 1 else q.grad
        optimizer.step()
        other.step()
    assert relative_error(params, plain) <= 1e-5  # torch adds 1e-6 to the norm


# --- gradient scaling


def overflow_run(options, scaler, steps=8, bad=3):
    """A scaled run with one overflow and the same run without that step; gives both and the state around it."""
    params, plain = (start(dtype=torch.float32) for _ in range(2))
    optimizer, other = (
        PopRiskAdamW(params, **join_gate(options)),
        PopRiskAdamW(plain, **join_gate({**options, "fused": None})),
    )
    around = []
    for t, row in enumerate(stream(steps, dtype=torch.float32)):
        scaler.scale(torch.zeros(()))
        for p, q, g in zip(params, plain, row, strict=True):
            p.grad, q.grad = g * scaler.get_scale(), g.clone()
        if t == bad:
            params[0].grad[0, 0] = float("inf")
            around.append(copy.deepcopy((params, optimizer.state_dict()["state"])))
        else:
            other.step()
        scaler.step(optimizer)
        scaler.update()
        if t == bad:
            around.append(copy.deepcopy((params, optimizer.state_dict()["state"])))
    return params, plain, optimizer, around


@pytest.mark.parametrize("bad", [0, 3], ids=["first step", "later"])
@pytest.mark.parametrize(
    "options",
    [
        {"foreach": False},
        {"foreach": True},
        {"fused": True},
        {"fused": True, "gate": None},
        {"fused": True, "alpha": "calibrated", "state_dtype": torch.bfloat16},
        pytest.param(
            {"fused": True, "granularity": "row"},
            marks=pytest.mark.filterwarnings("ignore::poprisk.errors.BackendWarning"),
        ),
    ],
    ids=["forloop", "foreach", "fused", "fused, no gate", "fused, low precision", "fused, handed on"],
)
def test_a_gradient_scaler_unscales_and_an_overflow_touches_nothing(options, bad):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    params, plain, optimizer, ((before, old), (after, new)) = overflow_run(options, scaler, bad=bad)
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
    for index, entry in new.items():
        for name, value in entry.items():
            fresh = first_scale(value) if name == "gate_scale" else torch.zeros_like(value)
            expected = old[index][name] if index in old else fresh
            assert torch.equal(value, expected), name
    assert {optimizer.state[p]["step"].item() for p in params} == {7}
    assert relative_error(params, plain) <= (5e-3 if "state_dtype" in options else 2e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_only_an_all_fused_optimizer_takes_over_the_unscaling(fused):
    """A user who looks at .grad after the step finds it as torch's own optimizers leave it."""
    params = start(dtype=torch.float32)
    optimizer = PopRiskAdamW([{"params": params[:1], "fused": True}, {"params": params[1:], "fused": fused}])
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.zeros(()))
    row = stream(1, dtype=torch.float32)[0]
    for p, g in zip(params, row, strict=True):
        p.grad = 64 * g
    scaler.step(optimizer)
    assert torch.equal(params[0].grad, 64 * row[0] if fused else row[0])
    assert_close(optimizer.state[params[0]]["exp_avg"], 0.1 * row[0])


# --- copies


@EVERY_BACKEND
def test_a_deep_copy_goes_on_with_its_own_model(backend):
    model = nn.Linear(4, 3)
    optimizer = PopRiskAdamW(model.parameters(), gate=Gate(alpha="calibrated"), **backend)
    gradients = stream(10, shapes=((3, 4), (3,)), dtype=torch.float32)
    train(optimizer, list(model.parameters()), gradients[:5])
    twin, other = copy.deepcopy((model, optimizer))
    assert other.param_groups[0]["params"][0] is twin.weight
    pickled = pickle.loads(pickle.dumps(optimizer))
    third = pickled.param_groups[0]["params"]
    for o, p in ((optimizer, model.parameters()), (other, twin.parameters()), (pickled, third)):
        train(o, list(p), gradients[5:])
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.weight, third[0])
    assert pickled.state[third[0]]["var_step"].item() == 10
