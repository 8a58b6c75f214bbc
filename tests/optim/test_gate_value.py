"""The gate as one value: what it checks, how groups store it, and that the options given one by one still work."""

import copy
import dataclasses
import pickle
import re
import warnings

import pytest
import torch
from optimizer_table import ALGORITHM1, BACKENDS, GATES, INPUTS
from streams import start, stream, train

import poprisk
from poprisk.errors import HyperparameterError
from poprisk.optim import Gate, join_gate, parse_options
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._defaults import DEFAULTS, PAPER
from poprisk.optim._gate import GATE_FIELD

OTHER = {
    "alpha": 0.3,
    "strength": 3.0,
    "rho": 0.9,
    "gate_eps": 1e-3,
    "centering": "corrected",
    "signal": "batch",
    "warmup_steps": 3,
    "normalize_gate": False,
    "gated_decay": True,
    "granularity": "row",
}
FLAT = [row for row in INPUTS if any(name in GATE_FIELD for name in row.options)]


def weight():
    return torch.nn.Parameter(torch.ones(2))


def flat(make, params, **options):
    """Built with the options one by one, as before the gate was one value."""
    with pytest.warns(DeprecationWarning, match="is now a field of the gate"):
        return make(params, **options)


def added(optimizer, group):
    optimizer.add_param_group(group)
    return optimizer


def entries(optimizer):
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def test_it_is_public_and_immutable():
    assert poprisk.Gate is Gate
    with pytest.raises(dataclasses.FrozenInstanceError):
        Gate().strength = 1.0
    assert {Gate("snr"), Gate(), Gate("soft")} == {Gate(), Gate("soft")}
    assert pickle.loads(pickle.dumps(Gate("hard", alpha=0.5))) == copy.deepcopy(Gate("hard", alpha=0.5))


def test_its_defaults_are_the_optimizer_s_and_the_paper_s_stay():
    assert PopRiskAdamW([weight()]).defaults == PopRiskAdamW([weight()], gate=Gate()).defaults == DEFAULTS.as_dict()
    paper = PopRiskAdamW.paper([weight()])
    assert paper.defaults == PopRiskAdamW.paper([weight()], gate=Gate.paper()).defaults
    assert {name: paper.defaults[name] for name in PAPER} == PAPER


def test_every_option_of_the_gate_is_a_field():
    assert set(OTHER) == set(GATE_FIELD)
    assert {GATE_FIELD[name] for name in OTHER} == {f.name for f in dataclasses.fields(Gate)} - {"kind"}
    gate = Gate("soft", **{GATE_FIELD[name]: value for name, value in OTHER.items()})
    assert gate.options() == {"gate": "soft", **OTHER}
    assert eval(repr(gate)) == gate


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "x"}, r"Gate.kind must be one of ('soft', 'hard', 'snr'), got 'x'"),
        ({"kind": None}, "Gate.kind must be 'snr', 'soft' or 'hard', got None: for AdamW, pass gate=None"),
        ({"strength": -1.0}, "Gate.strength must be a finite number ≥ 0, got -1.0"),
        ({"alpha": "auto"}, "Gate.alpha must be a finite number ≥ 0, or 'calibrated', got 'auto'"),
        ({"rho": 1.0}, "Gate.rho must be a number in [0, 1), got 1.0"),
        ({"eps": float("nan")}, "Gate.eps must be a finite number ≥ 0, got nan"),
        ({"centering": "mean"}, "Gate.centering must be one of"),
        ({"signal": "x"}, "Gate.signal must be one of"),
        ({"warmup_steps": 1.5}, "Gate.warmup_steps must be a whole number ≥ 0, got 1.5"),
        ({"normalize": "yes"}, "Gate.normalize must be one of"),
        ({"gated_decay": 2}, "Gate.gated_decay must be one of"),
        ({"granularity": "head"}, "Gate.granularity must be one of"),
    ],
    ids=str,
)
def test_a_field_out_of_range_is_refused(fields, words):
    with pytest.raises(HyperparameterError, match=re.escape(words)):
        Gate(**fields)


@pytest.mark.parametrize("row", FLAT, ids=lambda row: row.name)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_spellings_take_the_same_steps_bit_for_bit(backend, gate, row):
    options = {"gate": gate, **row.options, **BACKENDS[backend]}
    params, others = (start(dtype=torch.float32) for _ in range(2))
    one, two = PopRiskAdamW(params, **join_gate(options)), flat(PopRiskAdamW, others, **options)
    assert entries(one) == entries(two)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pooled gates leave the fused kernel
        train(one, params, stream(6, dtype=torch.float32))
        train(two, others, stream(6, dtype=torch.float32))
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    states = zip(one.state_dict()["state"].values(), two.state_dict()["state"].values(), strict=True)
    assert all(torch.equal(a[name], b[name]) for a, b in states for name in a)


@pytest.mark.parametrize(("name", "value"), OTHER.items())
def test_an_option_of_the_gate_given_alone_warns_with_its_field(name, value):
    words = re.escape(f"the option {name} of PopRiskAdamW is now a field of the gate: pass gate=Gate(…, ")
    words += f"{GATE_FIELD[name]}="
    ways = {
        "constructor": lambda: PopRiskAdamW([weight()], **{name: value}),
        "group": lambda: PopRiskAdamW([{"params": [weight()], name: value}]),
        "later": lambda: added(PopRiskAdamW([weight()]), {"params": [weight()], name: value}),
        "paper": lambda: PopRiskAdamW.paper([weight()], **{name: value}),
    }
    made = {}
    for way, make in ways.items():
        with pytest.warns(DeprecationWarning, match=words) as caught:
            made[way] = make()
        assert [w.filename for w in caught] == [__file__]
        assert made[way].param_groups[-1][name] == value
    field = {GATE_FIELD[name]: value}
    assert entries(made["constructor"]) == entries(PopRiskAdamW([weight()], gate=Gate(**field)))
    assert entries(made["paper"]) == entries(PopRiskAdamW.paper([weight()], gate=Gate.paper(**field)))


def test_a_gate_beside_one_of_its_options_is_refused():
    for make in (PopRiskAdamW, PopRiskAdamW.paper):
        with pytest.raises(HyperparameterError, match=r"strength=3.0 was given beside .*write Gate\(…, strength=3.0\)"):
            make([weight()], gate=Gate("soft"), strength=3.0)
    with pytest.raises(HyperparameterError, match=r"eps=0.1 was given beside"):
        PopRiskAdamW([{"params": [weight()], "gate": Gate(), "gate_eps": 0.1}])
    with pytest.raises(TypeError, match="unexpected keyword argument 'strenght'"):
        PopRiskAdamW([weight()], strenght=3.0)


def test_groups_have_gates_of_their_own():
    """A name changes the kind alone, a Gate replaces all of it, None switches it off."""
    gates = [Gate("hard", alpha=0.5), "soft", None]
    groups = [{"params": [weight()]}, *({"params": [weight()], "gate": gate} for gate in gates)]
    made = PopRiskAdamW(groups, gate=Gate("snr", strength=30.0)).param_groups
    assert [g["gate"] for g in made] == ["snr", "hard", "soft", None]
    assert [g["strength"] for g in made] == [30.0, 100.0, 30.0, 30.0]
    assert [g["alpha"] for g in made] == [1.0, 0.5, 1.0, 1.0]


def test_stored_groups_pass_without_a_warning():
    first = PopRiskAdamW([weight()], gate=Gate("soft", alpha=0.3))
    second = PopRiskAdamW(first.param_groups)
    third = PopRiskAdamW([weight()], **{k: v for k, v in first.param_groups[0].items() if k != "params"})
    assert entries(first) == entries(second) == entries(third)


@pytest.mark.parametrize("save_first", [False, True])
def test_a_gate_set_in_the_middle_of_a_run_takes_effect(save_first):
    (changed, other), gradients = (start(dtype=torch.float32) for _ in range(2)), stream(6, dtype=torch.float32)
    one, two = PopRiskAdamW(changed, gate="snr"), PopRiskAdamW(other, gate="snr")
    train(one, changed, gradients[:3])
    train(two, other, gradients[:3])
    one.param_groups[0]["gate"] = Gate("soft", strength=2.0, alpha=0.1)
    two.param_groups[0].update(gate="soft", strength=2.0, alpha=0.1)
    if save_first:
        assert one.state_dict()["param_groups"] == two.state_dict()["param_groups"]
    train(one, changed, gradients[3:])
    train(two, other, gradients[3:])
    assert all(torch.equal(p, q) for p, q in zip(changed, other, strict=True))
    one.param_groups[0]["gate"] = Gate("soft")
    object.__setattr__(one.param_groups[0]["gate"], "rho", 2.0)  # past the constructor's check
    with pytest.raises(HyperparameterError, match="rho must be"):
        one.step()


def test_checkpoints_are_plain_data_and_the_same_in_both_spellings(tmp_path):
    params, others = (start(dtype=torch.float32) for _ in range(2))
    options = {"gate": "soft", **ALGORITHM1}
    one, two = PopRiskAdamW(params, **join_gate(options)), flat(PopRiskAdamW, others, **options)
    train(one, params, stream(3, dtype=torch.float32))
    train(two, others, stream(3, dtype=torch.float32))
    torch.save(one.state_dict(), tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert saved["param_groups"] == two.state_dict()["param_groups"]
    fresh = PopRiskAdamW(others, gate=Gate(normalize=False))
    fresh.load_state_dict(saved)
    assert entries(fresh) == entries(one)
    assert entries(copy.deepcopy(one)) == entries(one)


def test_every_flat_option_beside_a_gate_is_refused():
    """As many as a stored group has, too."""
    flat = {"alpha": 0.5, "strength": 3.0, "rho": 0.9, "gate_eps": 1e-3, "centering": "corrected"}
    weight = torch.zeros(1, requires_grad=True)
    with pytest.raises(HyperparameterError, match=r"alpha=0.5 was given beside .*write Gate\(…, alpha=0.5\)"):
        PopRiskAdamW([weight], gate=Gate("soft"), **flat)
    with pytest.raises(HyperparameterError, match="was given beside"):
        PopRiskAdamW([{"params": [weight], "gate": Gate("soft"), **flat}])
    with pytest.raises(HyperparameterError, match=r"gate_eps=0.5 was given beside .*write Gate\(…, eps=0.5\)"):
        PopRiskAdamW([weight], gate=Gate("soft"), gate_eps=0.5)
    with pytest.raises(HyperparameterError, match=r"alpha=0\.5 was given beside"):
        parse_options({"gate": Gate("hard"), "alpha": 0.5})


@pytest.mark.parametrize("fused", [True, None])
def test_narrow_states_of_complex_parameters_are_refused(fused):
    """Their parts are two numbers each, for which a real state has no room."""
    weight = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(HyperparameterError, match="complex parameters"):
        PopRiskAdamW([weight], state_dtype=torch.bfloat16, fused=fused)
