"""A run executed again has the same bits, or says how far it is from them."""

from functools import partial

import pytest
import torch
from test_run_files import ADAM, SGD, files, quiet
from test_run_linearize import OPTIMIZERS, assert_every_step_is_rebuilt, record
from tiny_problems import classification, make_mlp, regression, tied, tiny_data, with_dropout
from torch import nn
from torch.nn import functional as F

from poprisk.errors import DataError, RunError
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._replay import replay
from poprisk.runs._run import Run


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_runs_give_the_steps_of_dense_ones(name):
    problem = classification()  # its loss is computed as torch.nn.CrossEntropyLoss does
    dense, _ = record(problem, OPTIMIZERS[name], steps=7, clip=0.5)
    sparse, _ = record(problem, OPTIMIZERS[name], steps=7, clip=0.5, every=3)
    assert sparse.checkpoints == [0, 3, 6, 7]
    for k in range(8):
        assert torch.equal(dense.weights(k), sparse.weights(k))
        assert torch.equal(dense.buffer(k), sparse.buffer(k))
    for k in (1, 3, 5):
        a, b = dense.step(k), sparse.step(k)
        assert torch.equal(a.preconditioner, b.preconditioner)
        assert torch.equal(a.selection, b.selection)
    assert replay(sparse).exact
    assert replay(dense, start=0).exact


@pytest.mark.parametrize("problem", [tied(), classification(augmented=True), with_dropout()])
def test_replay_of_shared_weights_augmentation_and_dropout(problem):
    run = quiet(problem, ADAM, 9, every=4, accumulate=2, clip_norm=0.3, seed=5)
    found = replay(run)
    assert found.deviations == {4: 0.0, 8: 0.0, 9: 0.0}
    assert torch.equal(found.run.weights(9), run.weights(9))


def test_loss_scale_and_weights_are_replayed():
    problem = regression()
    run, _ = record(problem, OPTIMIZERS["sgd momentum"], steps=4, scale=64.0, parts=2, every=2)
    assert_every_step_is_rebuilt(replay(run, tolerate=True).run, problem)
    model = problem.module(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(None, model, optimizer, problem=problem, every=2)
    omega = torch.tensor([0.5, 0.1, 0.2], dtype=torch.float64)
    for _ in range(4):
        with recorder.step([3, 1, 2], weights=omega):
            optimizer.zero_grad()
            losses = 0.5 * (model(problem.inputs[[3, 1, 2]]) - problem.targets[[3, 1, 2]]).square().sum(1)
            (omega * losses).sum().backward()
            optimizer.step()
    assert max(replay(recorder.close(), tolerate=True).deviations.values()) < 1e-14


def test_a_loss_written_otherwise_deviates_unless_the_problem_says_how():
    problem = regression()
    run, _ = record(problem, OPTIMIZERS["adam"], steps=20, batch=5, every=10, criterion=written_otherwise)
    with pytest.raises(RunError, match=r"deviate from the recorded ones at step 10 by .*batch_loss"):
        replay(run)
    with pytest.raises(RunError, match="deviate"):
        run.step(3)
    found = replay(run, tolerate=True)
    assert not found.exact
    assert 0 < found.deviations[20] < 1e-12
    tolerant = Run(run._storage, problem=problem, tolerate=True)
    assert (tolerant.weights(3) - found.run.weights(3)).norm() == 0
    inputs, _ = tiny_data()
    exact = Problem(make_mlp, "squared", inputs, problem.targets, batch_loss=written_otherwise)
    assert replay(Run(run._storage, problem=exact)).exact


def test_a_run_of_popriskadamw_is_replayed_by_whichever_kernel_there_is(monkeypatch):
    """Earlier recordings, which had no C kernel by default, are exact; another kernel deviates by rounding only."""
    problem = classification()
    sparse = partial(quiet, problem, steps=12, every=4, batch_size=5)
    run = sparse(partial(PopRiskAdamW, lr=1e-2))
    assert replay(run).exact
    slow = sparse(partial(PopRiskAdamW, lr=1e-2, fused=False))
    for k in range(13):
        for group in slow.options(k):
            assert group["fused"] is False
    options = type(run).options
    monkeypatch.setattr(Run, "options", lambda self, k: [{**group, "fused": None} for group in options(self, k)])
    found = replay(slow)  # by the C kernel
    assert not found.exact
    assert max(found.deviations.values()) < 1e-6
    del slow._manifest["numerics"]["fused_by_default"]  # as an earlier version recorded it
    assert replay(slow).exact
    run._storage.read(run.manifest["segments"][1]["file"])[0]["checkpoint.weights"][0] += 1e-3
    with pytest.raises(RunError, match="deviate"):
        replay(run)


def by_threads(outputs, target):
    """A loss that depends on the number of threads as clearly as sums do by rounding."""
    return torch.get_num_threads() * (outputs - target).square().sum()


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_is_replayed_with_the_number_of_threads_that_it_was_recorded_with(every, tmp_path):
    inputs, _ = tiny_data()
    problem, before = Problem(make_mlp, by_threads, inputs, torch.zeros(len(inputs), 3)), torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        run = quiet(problem, SGD, 6, path=tmp_path / "run", every=every)
    finally:
        torch.set_num_threads(before)
    assert replay(run).exact
    assert torch.equal(Run.load(run.path, problem=problem).weights(2), replay(run).run.weights(2))
    assert torch.get_num_threads() == before
    run._manifest["numerics"]["threads"] = before
    with pytest.raises(RunError, match="deviate"):
        replay(run)
    for unknown in (None, "all", 10**9):  # from other hands
        run._manifest["numerics"]["threads"] = unknown
        with pytest.raises(RunError, match=f"threads was {unknown}, is {before}"):
            replay(run)
    assert torch.get_num_threads() == before


def written_otherwise(outputs, targets):
    """Half the squared distances, in an order of operations that rounds differently."""
    return (1.5 * ((outputs - targets) ** 2 / 3).sum(1)).mean()


def test_other_weights_are_noticed():
    problem = classification()
    run, _ = record(problem, OPTIMIZERS["adamw"], steps=6, every=3)
    tensors, _ = run._storage.read(run.manifest["segments"][0]["file"])
    tensors["checkpoint.weights"][0] += 1e-9
    with pytest.raises(RunError, match="at step 3"):
        run.weights(1)
    found = replay(Run(run._storage, problem=problem), tolerate=True)
    assert found.deviations[3] == pytest.approx(1e-9 / run.weights(3).norm().item(), rel=1e-3)


def test_what_cannot_be_replayed():
    problem = with_dropout()
    model = problem.module(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(None, model, optimizer, problem=problem, every=2)
    for _ in range(2):
        with recorder.step(range(12)):
            optimizer.zero_grad()
            F.cross_entropy(model(problem.inputs), problem.targets).backward()
            optimizer.step()
    run = recorder.close()
    with pytest.raises(RunError, match=r"cannot be executed again: .*draws at random"):
        replay(run)
    run = quiet(classification(), SGD, 6, every=3)
    for start, stop in ((1, 3), (3, 3), (0, 7)):
        with pytest.raises(RunError, match=r"one of run.checkpoints \(\[0, 3, 6\]\)"):
            replay(run, start=start, stop=stop)
    assert replay(run, start=3).deviations == {6: 0.0}


def test_a_factory_that_makes_something_else_is_refused():
    inputs, labels = tiny_data()
    run = quiet(Problem(make_mlp, "cross_entropy", inputs, labels), SGD, 4, every=2)
    wider = Problem(make_mlp, "cross_entropy", inputs, labels, arguments={"width": 7})
    with pytest.raises(DataError, match=r"make_model=.*make_mlp\(\), .*make_mlp\(width=7\)"):
        Run(run._storage, problem=wider)
    wider = Problem(lambda: make_mlp(width=7), "cross_entropy", inputs, labels)
    with pytest.raises(RunError, match="builds a model that differs"):
        replay(Run(run._storage, problem=wider))
    run = quiet(tied(), SGD, 4, every=2)

    def shifted():
        model = tied().make_model()
        model.shift += 1
        return model

    other = Problem(shifted, "cross_entropy", inputs, labels)
    with pytest.raises(RunError, match="frozen parameters or buffers"):
        replay(Run(run._storage, problem=other))
    run = quiet(classification(augmented=True), SGD, 4, every=2)
    with pytest.raises(RunError, match="has no augment"):
        replay(Run(run._storage, problem=classification()))


def test_buffers_that_change_are_part_of_checkpoints(tmp_path):
    inputs, labels = tiny_data()
    problem = Problem(make_normalized, "cross_entropy", inputs, labels)
    for steps in (4, 8):
        run = quiet(problem, SGD, steps, path=tmp_path / "parts", every=2, resume=True)
    whole = quiet(problem, SGD, 8, path=tmp_path / "whole", every=2)
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    assert (run.checkpoint(8)["checkpoint.module.1.running_mean"] != 0).all()
    assert whole.obstacles
    assert replay(whole).exact


def make_normalized():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def test_low_precision_runs_are_replayed():
    inputs, labels = tiny_data(dtype=torch.bfloat16)
    problem = Problem(make_mlp, "cross_entropy", inputs, labels)
    make = partial(
        PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha=0.1), weight_decay=0.01, lr=0.05, state_dtype=torch.bfloat16
    )
    run = quiet(problem, make, 6, every=3, dtype=torch.bfloat16)
    assert replay(run).exact
    with pytest.raises(RunError, match="bfloat16"):
        run.require_exact()
