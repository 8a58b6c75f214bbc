"""A run recorded on a GPU: the same identities there, and it opens where there is none."""

from functools import partial

import pytest
import torch
from test_run_files import quiet
from test_run_linearize import OPTIMIZERS, assert_every_step_is_rebuilt
from tiny_problems import classification

from poprisk.runs._problem import Problem
from poprisk.runs._replay import replay
from poprisk.runs._run import Run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["sgd nesterov", "adam decay", "adamw fused", "poprisk soft"])
@pytest.mark.parametrize("every", [1, 4])
def test_recorded_on_a_gpu_opened_on_a_laptop(tmp_path, name, every):
    on_gpu = Problem.build(classification).to("cuda")
    run = quiet(on_gpu, OPTIMIZERS[name], 10, path=tmp_path / "run", every=every, dtype=torch.float64, clip_norm=0.5)
    assert replay(run).exact
    laptop = Run.load(tmp_path / "run", tolerate=True)
    assert laptop.weights(10).device.type == "cpu"
    assert laptop.problem.device.type == "cpu"
    found = replay(laptop, tolerate=True)
    assert max(found.deviations.values()) < 1e-10
    if every == 1:
        assert_every_step_is_rebuilt(laptop, laptop.problem)


def test_indices_on_the_device_are_checked_when_written():
    from poprisk.errors import DataError
    from poprisk.runs._recorder import Recorder

    problem = classification().to("cuda")
    model = problem.module(torch.float64)
    optimizer = partial(torch.optim.SGD, lr=0.1)(model.parameters())
    recorder = Recorder(None, model, optimizer, problem=problem, verify_steps=0)
    with recorder.step(torch.tensor([12], device="cuda")):
        torch.nn.functional.cross_entropy(model(problem.inputs[:1]), problem.targets[:1]).backward()
        optimizer.step()
    with pytest.raises(DataError, match="got index 12"):
        recorder.close()
