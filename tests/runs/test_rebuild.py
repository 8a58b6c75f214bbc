"""A run's model built again: modes and frozen numbers as recorded, and a wrong model refused by what the steps say."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from poprisk import PopRiskAdamW
from poprisk.errors import DataError, RunError
from poprisk.optim import Gate
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import retrain
from poprisk.runs._first_steps import check_first_steps
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._replay import replay
from poprisk.runs._run import Run
from poprisk.runs._storage import MemoryStorage
from poprisk.runs._training import train

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = X[:, :1] * X[:, 1:2]
ADAM = partial(torch.optim.Adam, lr=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
GATED = partial(PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha="calibrated"), lr=0.1, weight_decay=0.05)


def network(activation="Tanh"):
    return nn.Sequential(nn.Linear(3, 8), getattr(nn, activation)(), nn.Linear(8, 1))


def with_statistics():
    """Batch normalization whose statistics are not those of a new module, and dropout."""
    module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    module[1].running_mean.copy_(torch.linspace(-1, 1, 8))
    return module


def problem_of(make_model=network, loss="squared", **options):
    return Problem(make_model, loss, X, Y, **options)


def recorded(module, problem, *, every=1, steps=4):
    """A loop of one's own."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    recorder = Recorder(None, module, optimizer, problem=problem, every=every)
    for k in range(steps):
        batch = torch.arange(4) + 4 * (k % 3)
        with recorder.step(batch):
            optimizer.zero_grad()
            problem.batch_loss(module(X[batch]), Y[batch]).backward()
            optimizer.step()
    return recorder.close()


def with_manifest(run, **changed):
    """The same run with another manifest."""
    storage = MemoryStorage()
    storage.__dict__.update(run._storage.__dict__)
    manifest = {**run.manifest, **changed}
    storage.read_manifest = lambda: {key: value for key, value in manifest.items() if value is not ...}
    return Run(storage, problem=run.problem)


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_in_evaluation_mode_is_rebuilt_in_it(every):
    problem = problem_of(with_statistics)
    run = recorded(problem.module().eval(), problem, every=every)
    assert run.manifest["modes"] is False
    assert not run.obstacles
    assert not any(part.training for part in run.module().modules())
    assert replay(run).exact
    assert_close(
        retrain(run, Members(torch.ones(1, 12))).weights[0], run.weights(run.num_steps), rtol=1e-12, atol=1e-12
    )
    assert Unrolled(run).forward(weights=torch.eye(12, dtype=torch.float64)).isfinite().all()
    old = with_manifest(run, modes=...)  # from before modes were recorded: as make_model sets them
    assert all(part.training for part in old.module().modules())


def test_parts_in_different_modes():
    problem = problem_of(with_statistics)
    module = problem.module()
    for part in (module[1], module[3]):
        part.eval()
    run = recorded(module, problem)
    assert run.manifest["modes"] == ["1", "3"]
    assert [part.training for part in run.module()] == [True, False, True, False, True]
    assert replay(run).exact
    with pytest.raises(RunError, match=r"had a submodule '7' in evaluation mode.*pass the problem"):
        with_manifest(run, modes=["7"]).module()


def test_frozen_numbers_are_compared_everywhere():
    problem = problem_of(with_statistics)
    module = problem.module()
    module[1].running_var.mul_(2)
    run = recorded(module.eval(), problem)
    for use in (replay, Unrolled, lambda run: retrain(run, Members(torch.ones(1, 12))), lambda run: run.model()):
        with pytest.raises(RunError, match="frozen parameters or buffers differ from the recorded"):
            use(run)


def test_another_layout_is_named():
    run = train(problem_of(), ADAM, 2, dtype=torch.float64, progress=False)
    wider = Run(run._storage, problem=problem_of(lambda: nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1))))
    with pytest.raises(
        RunError, match=r"in names or shapes: 0\.weight \[8, 3\] was recorded, 0\.weight \[9, 3\] was built"
    ):
        wider.module()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [ADAM, MOMENTUM, GATED], ids=["adam", "momentum", "gated"])
def test_the_first_steps_know_their_model(rule, dtype):
    run = train(problem_of(), rule, 3, batch_size=5, dtype=dtype, clip_norm=0.3, progress=False)
    for precision in (torch.float32, torch.float64):
        check_first_steps(run, run.model(precision))
    others = {
        "activation": problem_of(lambda: network("ReLU")),
        "loss": problem_of(network, lambda u, y: (u - y).abs().sum()),
        "nearly": problem_of(lambda: network("Softsign")),
    }
    for other in others.values():
        wrong = Run(run._storage, problem=_claimed(other))
        with pytest.raises(RunError, match=r"does not have the gradient of step [01] .* relative difference"):
            check_first_steps(wrong, wrong.model())
        with pytest.raises((RunError, DataError)):
            Unrolled(wrong)


def _claimed(problem):
    """A problem that the check by names lets through: the steps alone are to tell."""
    problem.check_is = lambda description: None
    return problem


def test_a_sparse_run_is_checked_by_its_replay():
    run = train(problem_of(), ADAM, 4, every=2, progress=False)
    wrong = Run(run._storage, problem=problem_of(lambda: network("ReLU")))
    check_first_steps(wrong, wrong.model())  # nothing was recorded that it could compare
    with pytest.raises(RunError, match="model or loss may differ from the recorded one"):
        wrong.step(0)


def test_resuming_with_another_model_is_refused(tmp_path):
    train(problem_of(), ADAM, 2, path=tmp_path / "run", progress=False)
    other = problem_of(arguments={"activation": "ReLU"})
    with pytest.raises(
        DataError, match=r"was trained with make_model=.*network\(\), but problem .*activation='ReLU'\)"
    ):
        train(other, ADAM, 4, path=tmp_path / "run", resume=True, progress=False)
