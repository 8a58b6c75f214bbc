"""Steps replayed on still copies, as CUDA graphs do it: the same derivatives, whatever changes from step to step."""

from functools import partial

import pytest
import torch
from recorded import Case
from torch import nn
from torch.testing import assert_close

from poprisk.risk._influence.replayed_steps import ReplayedSteps, form_of
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

CLOSE = {"rtol": 1e-11, "atol": 1e-13}
CASES = {
    "momentum, clipped": {"optimizer": "momentum", "clip_norm": 0.3},
    "adam, short last batches": {"optimizer": "adam", "n": 7},
    "scheduled, gated": {"optimizer": "soft", "schedule": lambda k: 1 / (1 + k)},
    "relative gate": {"optimizer": "default"},
    "pooled gate": {"optimizer": "row"},  # cannot be captured: taken as it is
}


@pytest.mark.parametrize("name", CASES)
def test_solves_on_still_copies_are_those_on_the_steps_themselves(name):
    run = Case(steps=9, **CASES[name]).run
    d, n = run.num_weights, run.num_examples
    generator = torch.Generator().manual_seed(1)
    covectors = torch.randn(d, 4, generator=generator, dtype=torch.float64)
    plain, replayed = Unrolled(run, graphs=False), Unrolled(run, graphs=True)
    seen: dict[bool, list] = {True: [], False: []}
    for unrolled in (plain, replayed):
        unrolled.adjoint(covectors, on_step=lambda step, by: seen[bool(unrolled.graphs)].append((step.number, by)))  # noqa: B023
    for (k, one), (j, other) in zip(seen[False], seen[True], strict=True):
        assert k == j
        assert_close(other, one, **CLOSE)
    wrt = ("weights", "labels", "initial")
    one, other = plain.adjoint(covectors, wrt=wrt), replayed.adjoint(covectors, wrt=wrt)
    for kind in wrt:
        assert_close(getattr(other, kind), getattr(one, kind), **CLOSE)
    changes = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    assert_close(replayed.forward(weights=changes), plain.forward(weights=changes), **CLOSE)


def test_steps_of_one_form_share_a_still_copy_and_others_do_not():
    unrolled = Unrolled(Case(steps=9, optimizer="adam", n=7, batch_size=3).run)
    steps = list(unrolled.steps())
    forms = {form_of(step) for step in steps}
    assert len({len(step.examples) for step in steps}) <= len(forms) <= 4
    replayed = ReplayedSteps(lambda step: step.batch.push(torch.ones_like(step.batch.w)[None])[0], capture=False)
    for step in steps:
        expected = step.batch.push(torch.ones_like(step.batch.w)[None])[0]
        assert_close(replayed.take(step), expected, **CLOSE)
    repeated = [form for form in forms if sum(form_of(step) == form for step in steps) > 1]
    assert replayed.forms == len(repeated) > 0


def stack():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adam, lr=0.02)]
)
def test_captured_solves_on_a_gpu_are_those_of_the_cpu(optimizer):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(23, 5, generator=generator).double(), torch.randint(3, (23,), generator=generator)
    covectors, found = None, {}
    for device in ("cpu", "cuda"):
        problem = Problem(stack, "cross_entropy", x, y).to(device)
        run = train(problem, optimizer, 20, batch_size=5, dtype=torch.float64, progress=False)
        if covectors is None:
            covectors = torch.randn(run.num_weights, 6, generator=generator, dtype=torch.float64)
        unrolled = Unrolled(run)
        found[device] = (
            unrolled.adjoint(covectors, wrt=("weights",)).weights,
            unrolled.forward(weights=torch.eye(23, dtype=torch.float64)),
        )
    for one, other in zip(found["cpu"], found["cuda"], strict=True):
        assert_close(other.cpu(), one, rtol=1e-6, atol=1e-9)
