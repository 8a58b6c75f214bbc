"""State dicts: a run that is saved and resumed goes on bit for bit; AdamW's are taken in; others are refused."""

import copy
import io

import pytest
import torch
from optimizer_table import BACKENDS
from streams import SHAPES, relative_error, start, stream, train
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.testing import assert_close

from poprisk.errors import HyperparameterError, StateDictError
from poprisk.optim import Gate, join_gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._defaults import PAPER
from poprisk.optim.rules._coefficients import Hyper
from poprisk.optim.rules._population import PopulationState, population_step

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
RUNS = {
    "defaults": {},
    "low precision": {"state_dtype": torch.bfloat16},
    "low precision s": {"state_dtype": {"s": torch.bfloat16}},
    "calibrated": {"alpha": "calibrated", "centering": "corrected"},
    "shared": {"state": "shared", "betas": (0.9, 0.9), "rho": 0.9, "alpha": "calibrated"},
    "no gate": {"gate": None},
}


def through_file(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


WAYS = {"in memory": lambda d: d, "file": through_file}


def half_way(dtype, options):
    params = start(dtype=dtype)
    optimizer = PopRiskAdamW(params, **join_gate(options))
    train(optimizer, params, stream(10, dtype=dtype))
    return params, optimizer


def twins(params):
    return [nn.Parameter(p.detach().clone()) for p in params]


def snapshot(optimizer):
    """Everything a refused state dict must leave alone."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    params = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    return copy.deepcopy((groups, params, optimizer.state_dict()["state"]))


def assert_equal_snapshots(before, after):
    assert before[0] == after[0]
    assert all(torch.equal(p, q) for p, q in zip(before[1], after[1], strict=True))
    assert before[2].keys() == after[2].keys()
    for index, entry in before[2].items():
        assert {k: (v.dtype, v.tolist()) for k, v in entry.items()} == {
            k: (v.dtype, v.tolist()) for k, v in after[2][index].items()
        }


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@EVERY_BACKEND
def test_a_resumed_run_goes_on_bit_for_bit(backend, options, dtype, way):
    """State dtypes included: float32 moments of bfloat16 weights, and bfloat16 moments of float32 weights."""
    params, optimizer = half_way(dtype, {**options, **backend})
    others = twins(params)
    resumed = PopRiskAdamW(others, lr=7.0, gate=Gate("hard", alpha=0.5))  # the file decides
    resumed.load_state_dict(way(optimizer.state_dict()))
    for p, q in zip(params, others, strict=True):
        for name, value in optimizer.state[p].items():
            assert resumed.state[q][name].dtype == value.dtype, name
            assert resumed.state[q][name].data_ptr() != value.data_ptr()
    more = stream(15, dtype=dtype, seed=9)
    train(optimizer, params, more)
    train(resumed, others, more)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert_equal_snapshots(snapshot(optimizer), snapshot(resumed))


def test_stochastic_rounding_repeats_after_a_resume():
    """Not the same bits at another step or another place: the random numbers do come from the counters."""
    params, optimizer = half_way(torch.float32, {"state_dtype": torch.bfloat16})
    saved, states = optimizer.state_dict(), []
    row = stream(1, dtype=torch.float32, seed=9)
    for shift in (0, 0, 1):
        others = twins(params)
        resumed = PopRiskAdamW(others)
        resumed.load_state_dict(saved)
        for q in others:
            resumed.state[q]["step"] += shift
        train(resumed, others, row)
        states.append(resumed.state[others[2]]["exp_var"].clone())
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@EVERY_BACKEND
def test_loading_in_the_middle_of_a_run_rewinds_it(backend):
    params, optimizer = half_way(torch.float32, backend)
    saved, weights = copy.deepcopy(optimizer.state_dict()), twins(params)
    more = stream(12, dtype=torch.float32, seed=9)
    train(optimizer, params, more)
    first = twins(params)
    with torch.no_grad():
        for p, w in zip(params, weights, strict=True):
            p.copy_(w)
    optimizer.load_state_dict(saved)
    train(optimizer, params, more)
    assert all(torch.equal(p, q) for p, q in zip(params, first, strict=True))


def test_hooks_of_the_user_run_around_the_library_s_own():
    params, optimizer = half_way(torch.bfloat16, {})
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "note": "mine"})
    seen = []
    saved = optimizer.state_dict()
    assert saved["note"] == "mine"
    resumed = PopRiskAdamW(twins(params))

    def unwrap(o, d):
        seen.append("before loading")
        return d["wrapped"]

    def change(o):
        state = next(iter(o.state.values()))
        seen.append(state["exp_var"].dtype)
        state["step"].fill_(99.0)

    resumed.register_load_state_dict_pre_hook(unwrap)
    resumed.register_load_state_dict_post_hook(change)
    resumed.load_state_dict({"wrapped": saved, "state": {}, "param_groups": []})
    assert seen == ["before saving", "before loading", torch.float32]  # not cast to the weights' bfloat16
    state = next(iter(resumed.state.values()))
    assert state["step"].item() == 99.0
    assert torch.equal(state["exp_var"], optimizer.state[params[0]]["exp_var"])


# --- from AdamW and back


ADAMW = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def adamw_half_way(options, named=False):
    params = start(dtype=torch.float32)
    names = [(f"p{k}", p) for k, p in enumerate(params)] if named else params
    adamw = AdamW(names, lr=1e-3, betas=(0.8, 0.9), weight_decay=0.5, **options)
    train(adamw, params, stream(10, dtype=torch.float32))
    return params, adamw


@pytest.mark.parametrize("named", [False, True], ids=["", "named"])
@pytest.mark.parametrize("kind", ADAMW.values(), ids=ADAMW)
@EVERY_BACKEND
def test_training_goes_on_from_adamw(backend, kind, named):
    """m, v and t come from AdamW; s begins with its own count, as in the rule started from those moments."""
    params, adamw = adamw_half_way(kind, named)
    others = twins(params)
    names = [(f"p{k}", p) for k, p in enumerate(others)] if named else others
    ours = PopRiskAdamW.paper(names, lr=0.02, betas=(0.8, 0.9), **backend)
    options = {k: v for k, v in ours.param_groups[0].items() if k != "params"}
    ours.load_state_dict(through_file(adamw.state_dict()))
    assert {k: v for k, v in ours.param_groups[0].items() if k != "params"} == options
    hyper, more = Hyper(lr=0.02, betas=(0.8, 0.9)), stream(20, dtype=torch.float32, seed=9)
    expected = []
    for k, p in enumerate(params):
        m, v = adamw.state[p]["exp_avg"].double(), adamw.state[p]["exp_avg_sq"].double()
        assert torch.equal(ours.state[others[k]]["exp_avg"], adamw.state[p]["exp_avg"])
        w, state = p.detach().double(), PopulationState(m, v, torch.zeros_like(m), step=10.0, var_step=0.0)
        for row in more:
            w, state = population_step(w, row[k].double(), state, hyper)
        expected.append(w)
    train(ours, others, more)
    assert relative_error(others, expected) <= 2e-6
    assert {ours.state[p]["step"].item() for p in others} == {30}
    assert {ours.state[p]["var_step"].item() for p in others} == {20}


@pytest.mark.parametrize("options", [{"lr": 1e-2}, {**PAPER, "lr": 1e-2}], ids=["defaults", "Algorithm 1"])
def test_the_loss_goes_on_falling_after_a_change_from_adamw(options):
    model, x = nn.Linear(5, 1), torch.randn(64, 5)
    y = x.sum(dim=1, keepdim=True)
    adamw = AdamW(model.parameters(), lr=1e-3)
    losses = []

    def closure():
        model.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(10):
        adamw.step(closure)
    ours = PopRiskAdamW(model.parameters(), **join_gate(options))
    ours.load_state_dict(adamw.state_dict())
    for _ in range(20):
        ours.step(closure)
    assert losses[-1] < 0.8 * losses[10] < losses[0]


def test_bfloat16_weights_get_float32_moments_from_adamw():
    params = start(dtype=torch.bfloat16)
    adamw = AdamW(params)
    train(adamw, params, stream(3, dtype=torch.bfloat16))
    ours = PopRiskAdamW(params, state_dtype={"s": torch.bfloat16})
    ours.load_state_dict(adamw.state_dict())
    train(ours, params, stream(1, dtype=torch.bfloat16))
    dtypes = [ours.state[params[0]][name].dtype for name in ("exp_avg", "exp_avg_sq", "exp_var")]
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("target", ADAMW.values(), ids=ADAMW)
@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@EVERY_BACKEND
def test_adamw_takes_what_we_export(backend, options, target):
    params, ours = half_way(torch.float32, {**options, **backend, "lr": 0.02})
    others = twins(params)
    adamw = AdamW(others, **target)
    adamw.load_state_dict(through_file(ours.to_adamw_state_dict()))
    for p, q in zip(params, others, strict=True):
        assert set(adamw.state[q]) == {"step", "exp_avg", "exp_avg_sq"}
        assert_close(adamw.state[q]["exp_avg_sq"], ours.state[p]["exp_avg_sq"].float(), rtol=0, atol=0)
        assert adamw.state[q]["step"].item() == 10
    assert adamw.param_groups[0]["lr"] == 0.02
    before = twins(others)
    train(adamw, others, stream(2, dtype=torch.float32))
    assert not torch.equal(before[0], others[0])


# --- refused


def state_of(optimizer_class, shapes=SHAPES, **options):
    params = start(shapes=shapes, dtype=torch.float32)
    optimizer = optimizer_class(params, lr=1e-3, **options)
    train(optimizer, params, stream(2, shapes=shapes, dtype=torch.float32))
    return optimizer.state_dict()


def spoiled(change):
    saved = copy.deepcopy(state_of(AdamW))
    change(saved)
    return saved


REFUSED = {
    "SGD with momentum": (lambda: state_of(SGD, momentum=0.9), "options .*momentum.* another optimizer"),
    "SGD without state": (lambda: state_of(SGD), "another optimizer"),
    "RMSprop": (lambda: state_of(RMSprop), "another optimizer"),
    "NAdam": (lambda: state_of(torch.optim.NAdam), "mu_product.* another optimizer"),
    "Adamax": (lambda: state_of(torch.optim.Adamax), "exp_inf.* another optimizer"),
    "amsgrad": (lambda: state_of(Adam, amsgrad=True), "amsgrad=True"),
    "shapes": (lambda: state_of(AdamW, shapes=((7, 6), (), (130,))), r"exp_avg of parameter 0 has shape \(7, 6\)"),
    "fewer parameters": (lambda: state_of(AdamW, shapes=SHAPES[:2]), r"sizes \[2\], this optimizer of sizes \[3\]"),
    "groups": (lambda: spoiled(lambda d: d["param_groups"].append(d["param_groups"][0])), r"sizes \[3, 3\]"),
    "empty": (dict, r"got the keys \[\]"),
    "other keys": (lambda: {"model": 1, 2: 3}, r"got the keys \['2', 'model'\]"),
    "wrong kinds": (lambda: {"state": 1, "param_groups": 2}, "'state' and 'param_groups'"),
    "groups of numbers": (lambda: {"state": {}, "param_groups": [1]}, "'state' and 'param_groups'"),
    "a list": (list, "got list"),
    "nothing": (lambda: None, "got NoneType"),
    "no tensors": (lambda: spoiled(lambda d: d["state"][1].update(exp_avg=3.0)), "exp_avg of .* has type float"),
    "state of numbers": (lambda: spoiled(lambda d: d["state"].update({1: 5})), "parameter 1 must be a dict"),
    "s without count": (lambda: spoiled(lambda d: d["state"][1].update(exp_var=torch.ones(()))), "var_step"),
}  # fmt: skip


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_touched(case, fused):
    make, words = case
    params, optimizer = half_way(torch.float32, {"fused": fused})
    given, before = make(), snapshot(optimizer)
    with pytest.raises(StateDictError, match=words):
        optimizer.load_state_dict(given)
    assert_equal_snapshots(before, snapshot(optimizer))
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
    train(optimizer, params, stream(1, dtype=torch.float32))


def test_moments_made_with_other_betas_or_another_sign_are_refused():
    """Their bias corrections, or their sign, would be wrong from the first step on."""
    params, adamw = adamw_half_way({}, False)
    for options in ({}, {"betas": (0.8, 0.9), "maximize": True}, {"betas": (0.9, 0.9), "rho": 0.9, "state": "shared"}):
        ours = PopRiskAdamW(twins(params), **join_gate(options))
        with pytest.raises(StateDictError, match="the moments were made with"):
            ours.load_state_dict(adamw.state_dict())
        assert not ours.state


@pytest.mark.parametrize("other", [torch.optim.RAdam, torch.optim.NAdam, torch.optim.Adagrad])
def test_optimizers_with_similar_entries_are_told_apart(other):
    params = start()
    strange = other(params)
    train(strange, params, stream(2))
    with pytest.raises(StateDictError, match="another optimizer"):
        PopRiskAdamW(params).load_state_dict(strange.state_dict())


@pytest.mark.parametrize(("name", "value"), [("gate", "foo"), ("alpha", -1.0), ("betas", (0.9, 2.0))])
def test_options_of_a_state_dict_are_checked(name, value):
    optimizer = PopRiskAdamW(start())
    saved = optimizer.state_dict()
    saved["param_groups"][0][name] = value
    with pytest.raises(HyperparameterError, match=name):
        optimizer.load_state_dict(saved)
