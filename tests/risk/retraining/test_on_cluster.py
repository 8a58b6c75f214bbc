"""Folds and real deletions as tasks: the bits of any number of workers, kept in a store, continued after an end."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from poprisk import Problem, cluster, population_risk, train
from poprisk.errors import JobError
from poprisk.jobs import job_status
from poprisk.risk import Members, k_fold, retrain
from poprisk.risk._retraining import on_cluster

needs_dask = pytest.mark.skipif(find_spec("distributed") is None, reason="needs Dask")
needs_zarr = pytest.mark.skipif(find_spec("zarr") is None, reason="needs zarr")


def network(norm=False):
    between = [nn.BatchNorm1d(5)] if norm else []
    return nn.Sequential(nn.Linear(3, 5), *between, nn.Tanh(), nn.Linear(5, 2))


def blobs(n=24, norm=False):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    return Problem(network, "cross_entropy", x, (x[:, 0] > 0).long(), arguments={"norm": norm})


def recorded(path, **options):
    return train(Problem.build(blobs, **options), torch.optim.Adam, 4, batch_size=8, path=path, progress=False)


@pytest.fixture
def few(monkeypatch):
    """Two stacked members in a task, as for a larger network."""
    monkeypatch.setattr(on_cluster, "_TASK_WORK", {"cpu": 2 * 6.0 * 32 * 8})


def same(one, other):
    found = [(each.weights, *each.kept.values(), *each.state) for each in (one, other)]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert (one.step, one.trainings) == (other.step, pytest.approx(other.trainings))
    assert list(one.kept) == list(other.kept)
    for k, found in one.buffers.items():
        for mine, theirs in zip(found, other.buffers[k], strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert len(one.members) == len(other.members)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("place", ["in-process", "threads"])
def test_tasks_give_what_one_call_gives(tmp_path, few, norm, place):
    """Members that are stacked, and members that are trained one after another; resumed half way."""
    run = recorded(tmp_path / "run", norm=norm)
    members = Members(1.0 - torch.eye(24)[:5])
    plain = [retrain(run, members, keep=[1, 2], stop=2, progress=False)]
    plain.append(retrain(run, members, keep=[4], resume=plain[0], progress=False))
    with cluster(place, workers=2):
        tasks = [retrain(run, members, keep=[1, 2], stop=2, progress=False)]
        tasks.append(retrain(run, members, keep=[4], resume=tasks[0], progress=False))
    for one, other in zip(plain, tasks, strict=True):
        for x, y in zip((one.weights, *one.kept.values()), (other.weights, *other.kept.values()), strict=True):
            torch.testing.assert_close(x, y)
        assert one.notes == other.notes
        assert one.step == other.step
        assert one.trainings == pytest.approx(other.trainings)


@needs_zarr
@pytest.mark.parametrize("norm", [False, True])
def test_finished_trainings_are_kept_and_found(tmp_path, few, norm, monkeypatch):
    run, members = recorded(tmp_path / "run", norm=norm), Members(1.0 - torch.eye(24)[:5])
    with cluster("in-process"):
        expected = retrain(run, members, keep=[2], progress=False)
    trained, real = [], on_cluster.Trainings.do

    def counted(shared, item):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(item[0])
        return real(shared, item)

    monkeypatch.setattr(on_cluster.Trainings, "do", counted)
    with cluster("in-process", store=tmp_path / "store"):
        with pytest.raises(KeyboardInterrupt):
            retrain(run, members, keep=[2], progress=False)
        assert set(job_status(tmp_path / "store").values()) == {(1, 1)}
        assert len(job_status(tmp_path / "store")) == 2
        monkeypatch.setattr(on_cluster.Trainings, "do", real)
        same(retrain(run, members, keep=[2], progress=False), expected)
        monkeypatch.setattr(on_cluster.Trainings, "do", counted)  # which would end: nothing is left to do
        same(retrain(run, members, keep=[2], progress=False), expected)
        other = Members(1.0 - torch.eye(24)[1:6])
        with pytest.raises(KeyboardInterrupt):
            retrain(run, other, keep=[2], progress=False)
        monkeypatch.setattr(on_cluster.Trainings, "do", real)
        for path in sorted(tmp_path.glob("store/*/*/c/**/*"))[::3]:
            if path.is_file():
                whole = bytearray(path.read_bytes())
                whole[len(whole) // 2] ^= 4
                path.write_bytes(whole)
        same(retrain(run, members, keep=[2], progress=False), expected)  # what is damaged is trained again


@needs_dask
@pytest.mark.timeout(300)
def test_any_number_of_processes_gives_the_bits_of_one(tmp_path, few):
    """K-fold, stacked and one by one, and population risk with its real deletions and its folds."""
    stacked, alone = recorded(tmp_path / "stacked"), recorded(tmp_path / "alone", norm=True)

    def everything():
        risks = [
            population_risk(stacked, method, weights="last", retrain_budget=5) for method in ("k_fold", "exclusion")
        ]
        folds = [k_fold(run, 5, progress=False) for run in (stacked, alone)]
        return [
            *((each.value, each.standard_error) for each in risks),
            *((each.weights, each.losses) for each in folds),
        ]

    with cluster("in-process"):
        expected = everything()
    with cluster("processes", workers=2, store=tmp_path / "store"):
        found = everything()
        memory = train(Problem.build(blobs), torch.optim.SGD, 2, batch_size=8, progress=False)
        assert any("trained in this process" in note for note in retrain(memory, Members(torch.ones(1, 24))).notes)
    assert found[:2] == expected[:2]
    for one, other in zip(found[2:], expected[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert len(job_status(tmp_path / "store")) > 8


def test_a_scheduler_that_dies_is_an_error_and_not_another_estimate(tmp_path, monkeypatch):
    """Of "auto" as well, which takes another method where the model does not allow one."""
    problem = Problem.build(blobs, norm=True)
    run = train(problem, partial(torch.optim.Adam, lr=0.05), 60, batch_size=8, path=tmp_path / "run", progress=False)

    def lost(*_, **__):
        raise JobError("the connection to Dask's scheduler was lost")

    with cluster("in-process"):
        monkeypatch.setattr(on_cluster, "run_tasks", lost)
        for method in ("k_fold", "auto"):
            with pytest.raises(JobError, match="was lost"):
                population_risk(run, method, retrain_budget=10)


@needs_zarr
def test_workers_of_another_version_or_another_store_are_refused(tmp_path, few, monkeypatch):
    run, members = recorded(tmp_path / "run"), Members(torch.ones(1, 24))
    with cluster("in-process", store=tmp_path / "store"):
        monkeypatch.setattr(on_cluster, "_keep", lambda *_: None)  # as into a directory of another machine
        with pytest.raises(JobError, match=r"does not have 'trainings 0 to 1 of .* all must see one"):
            retrain(run, members, progress=False)
        codes = iter(["ours", "ours", "theirs"])
        monkeypatch.setattr(on_cluster, "code_digest", lambda *_: next(codes))
        with pytest.raises(JobError, match="a worker has another version of poprisk than this process"):
            retrain(run, members, progress=False)


@needs_zarr
def test_what_cannot_be_stored_is_refused(tmp_path, few):
    run = recorded(tmp_path / "run")
    with (
        cluster("in-process", store=tmp_path / "store"),
        pytest.raises(ValueError, match="float32 or float64, got dtype"),
    ):
        retrain(run, Members(torch.ones(1, 24)), dtype=torch.bfloat16, progress=False)
