"""Influence through some of the parameters: equal to a run that froze the others, and to a run that follows them."""

from functools import partial

import pytest
import torch
from recorded import OPTIMIZERS
from torch import nn
from torch.testing import assert_close

from poprisk import population_risk
from poprisk.errors import HyperparameterError, RunError
from poprisk.risk import Unrolled, exclusion, influence_matrix, influence_on, influence_operator, self_influence
from poprisk.runs import Problem, train

LAST = ("4.weight", "4.bias")


def network(frozen: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    for p in model[:4].parameters():
        p.requires_grad_(not frozen)
    return model


def recorded(make, rule="adamw", steps=8, **options):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 3, dtype=torch.float64, generator=generator)
    problem = Problem(make, "cross_entropy", x, torch.randint(3, (12,), generator=generator))
    options = {"batch_size": 4, "dtype": torch.float64, "progress": False} | options
    return train(problem, OPTIMIZERS[rule], steps, **options)


@pytest.mark.parametrize("rule", ["nesterov", "adamw", "default", "row"])
def test_a_run_that_froze_the_rest_has_the_full_influence(rule):
    run = recorded(partial(network, frozen=True), rule)
    full = influence_matrix(run)
    assert float(full.abs().max()) > 1e-4
    assert_close(influence_matrix(run, parameters="last_layer"), full)
    assert_close(influence_matrix(recorded(network, rule), parameters="*"), influence_matrix(recorded(network, rule)))


def followed(run, alpha, chosen):
    """The last weights of a training whose other weights are those recorded at every step."""
    names, w = run.layout.names, run.weights(0).clone()
    module, mine = run.module(torch.float64), run.layout.indices(chosen)
    parameters = dict(module.named_parameters())
    optimizer = OPTIMIZERS["adamw"]([parameters[name] for name in names])
    for k in range(run.num_steps):
        others = run.weights(k).clone()
        others[mine] = w[mine]
        with torch.no_grad():
            for name, piece in zip(names, run.layout.split(others), strict=True):
                parameters[name].copy_(piece)
        rows = run.batch(k)
        x, y = run.problem.batch(rows)
        losses = nn.functional.cross_entropy(module(x), y, reduction="none")
        optimizer.zero_grad()
        (losses * alpha[rows]).mean().backward()
        for p in module.parameters():
            p.grad *= run.recorded(k).factor(k)[0]
        optimizer.step()
        w = torch.cat([parameters[name].detach().reshape(-1) for name in names])
    last = run.weights(run.num_steps).clone()
    last[mine] = w[mine]
    return last


@pytest.mark.parametrize(("chosen", "clip_norm"), [(LAST, None), (("0.bias", "2.weight"), None), (LAST, 0.3)])
def test_other_weights_and_the_factors_of_clipping_follow_the_record(chosen, clip_norm):
    run = recorded(network, clip_norm=clip_norm)
    found = Unrolled(run, parameters=chosen).forward(weights=torch.eye(12, dtype=torch.float64))
    mine, eye, step = run.layout.indices(chosen), torch.eye(12, dtype=torch.float64), 1e-5
    for j in (0, 7):
        ends = [followed(run, 1 + s * step * eye[j], chosen)[mine] for s in (1, -1)]
        assert_close(found[:, j], (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-8)


def test_the_adjoint_the_operator_and_the_queries_agree():
    run = recorded(network, clip_norm=0.3)
    unrolled = Unrolled(run, parameters=("4", "0.*"))
    assert unrolled.parameters == ("0.weight", "0.bias", *LAST)
    J = influence_matrix(unrolled)
    assert_close(influence_operator(unrolled).to_dense(), J)
    assert_close(self_influence(run, parameters=("4", "0.*")).value, J.diagonal())
    x, y = run.problem.inputs[:5], run.problem.targets[:5]
    assert_close(influence_on(run, x, y, parameters=("4", "0.*")), J[:5])
    assert "parameters are held" in unrolled.note
    whole = influence_matrix(run)
    assert float((whole - J).norm()) > 0.05 * float(whole.norm())


def test_lora_is_found_by_its_names():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(3, 3)
            self.lora_A, self.lora_B = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)

        def forward(self, x):
            return self.base(x) + self.lora_B(self.lora_A(x))

    run = recorded(Adapted)
    assert Unrolled(run, parameters="lora").parameters == ("lora_A.weight", "lora_B.weight")
    both = influence_matrix(run, parameters=("lora", "base"))
    assert_close(both, influence_matrix(run))


@pytest.mark.parametrize("parameters", ["5", "*.gamma", "lora", (), (3,)])
def test_what_fits_nothing_is_refused(parameters):
    with pytest.raises(HyperparameterError, match="parameters"):
        influence_matrix(recorded(network, steps=2), parameters=parameters)


def test_risks_need_the_whole_run():
    unrolled = Unrolled(recorded(network), parameters="last_layer")
    with pytest.raises(RunError, match="whole run"):
        population_risk(unrolled, "exclusion")
    with pytest.raises(HyperparameterError, match="Unrolled"):
        influence_matrix(unrolled, parameters="lora")
    assert exclusion(unrolled, torch.arange(3), controls=0).predictions.method == "exclusion"
