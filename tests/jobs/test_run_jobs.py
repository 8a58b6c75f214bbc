"""Every job is done once, whatever dies; failures end in one clear error, and two clients do not work at once."""

import contextlib
import multiprocessing
import pickle
import threading
from pathlib import Path
from typing import Any

import job_problems
import pytest
import torch
from zarr.storage import MemoryStore

from distributed import Client, LocalCluster
from poprisk import Problem, cluster, train
from poprisk._core.cluster import is_remote, run_tasks, worker_memory
from poprisk._core.store import locked, trust
from poprisk.errors import DataError, HyperparameterError, JobError, MixedNumericsWarning, UntrustedError
from poprisk.jobs import JobPlan, _engine, _kinds, job_status, open_matrix, run_jobs
from poprisk.runs import Run
from poprisk.runs._shipped import ShippedRun, _recipe

COUNT = 6
SQUARES = torch.tensor([float(i * i) for i in range(COUNT)])


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    monkeypatch.setitem(_kinds.KINDS, "squares", job_problems.Squares)


def values(folder):
    return open_matrix(folder / "store", "squares").to_dense()[0, ::4]


def test_every_job_is_done_once(tmp_path):
    _, options = job_problems.plan_squares(tmp_path)
    done = run_jobs(tmp_path / "store", **options)
    assert (done.computed, done.total) == (COUNT, COUNT)
    assert torch.equal(values(tmp_path), SQUARES)
    assert run_jobs(tmp_path / "store", **options, verify=True).computed == 0
    assert sorted(job_problems.begun(tmp_path / "log")) == [(0, i) for i in range(COUNT)]
    assert job_status(tmp_path / "store") == {"squares": (COUNT, COUNT)}


def test_only_what_is_missing_or_damaged_is_computed_again(tmp_path):
    _, options = job_problems.plan_squares(tmp_path)
    run_jobs(tmp_path / "store", **options)
    (tmp_path / "log").unlink()
    tiles = [tmp_path / "store" / "squares" / "values" / "c" / "0" / str(i) for i in range(COUNT)]
    tiles[1].unlink()
    tiles[3].write_bytes(tiles[3].read_bytes()[:-5])
    tiles[4].with_name(f"4.{'0' * 32}.partial").write_bytes(b"half of a tile whose worker was killed")
    assert run_jobs(tmp_path / "store", **options).computed == 1
    with pytest.raises(DataError, match=r"'squares' in .* is damaged .*: run the jobs again with verify"):
        values(tmp_path)
    assert run_jobs(tmp_path / "store", **options, verify=True).computed == 1
    assert job_problems.begun(tmp_path / "log") == [(0, 1), (0, 3)]
    assert torch.equal(values(tmp_path), SQUARES)
    assert not list(tmp_path.rglob("*.partial"))


def test_failed_jobs_are_named_and_the_others_are_stored(tmp_path):
    _, options = job_problems.plan_squares(tmp_path, failing=[2, 4])
    said = r"2 of 6 jobs failed, the first, \[0, 2\] of 'squares', with DataError: no square of 2 today; the others are"
    for left in (COUNT, 2):
        with pytest.raises(JobError, match=said):
            run_jobs(tmp_path / "store", **options)
        assert job_status(tmp_path / "store") == {"squares": (COUNT - 2, COUNT)}
        assert len(job_problems.begun(tmp_path / "log")) == COUNT if left == COUNT else COUNT + 2
    (tmp_path / "mended").touch()
    assert run_jobs(tmp_path / "store", **options).computed == 2


def test_an_interrupted_call_keeps_what_is_done(tmp_path, monkeypatch):
    _, options = job_problems.plan_squares(tmp_path)

    def interrupted(self, cell, real=job_problems.Squares.compute):
        if cell[1] == 3:
            raise KeyboardInterrupt
        return real(self, cell)

    with monkeypatch.context() as patch:
        patch.setattr(job_problems.Squares, "compute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_jobs(tmp_path / "store", **options)
    assert run_jobs(tmp_path / "store", **options).computed == COUNT - 3


def hold(path, held, release):
    with locked(path):
        held.set()
        release.wait()


def test_a_second_client_refuses_or_waits_and_a_dead_one_holds_nothing(tmp_path):
    _, options = job_problems.plan_squares(tmp_path)
    fork = multiprocessing.get_context("spawn")
    held, release = fork.Event(), fork.Event()
    other = fork.Process(target=hold, args=(tmp_path / "store.lock", held, release))
    other.start()
    assert held.wait(60)
    with pytest.raises(JobError, match=rf"process {other.pid} on \S+ has .*store\.lock: wait until it ends, or pass"):
        run_jobs(tmp_path / "store", **options)
    found = []
    waiting = threading.Thread(target=lambda: found.append(run_jobs(tmp_path / "store", **options, wait=True)))
    waiting.start()
    assert not found
    other.kill()  # SIGKILL: nothing is left to clean up
    waiting.join()
    other.join()
    assert found[0].computed == COUNT


def test_a_machine_that_rounds_differently_is_refused_unless_tolerated(tmp_path, monkeypatch):
    _, options = job_problems.plan_squares(tmp_path, failing=[2])
    with contextlib.suppress(JobError):
        run_jobs(tmp_path / "store", **options)
    (tmp_path / "mended").touch()
    monkeypatch.setattr(_engine, "numerics_here", lambda device: {"torch": "1.0", "cpu": "abacus", "gpu": None})
    with pytest.raises(JobError, match=r"was begun with .*'torch': '2.*, a machine has .*abacus.* tolerate"):
        run_jobs(tmp_path / "store", **options)
    assert run_jobs(tmp_path / "store", **options, tolerate=True).computed == 1
    with pytest.warns(MixedNumericsWarning, match="2 kinds of machine .*abacus"):
        assert torch.equal(values(tmp_path), SQUARES)


def test_a_machine_that_joins_later_is_refused_too(tmp_path):
    group, _ = job_problems.plan_squares(tmp_path)
    no_run: Any = None
    work = _engine.Work(group, no_run, job_problems.Squares, [{"torch": "1.0", "cpu": "abacus", "gpu": None}])
    with pytest.raises(JobError, match=r"this worker has .*, the others .*abacus.*: repeat the call with tolerate"):
        work.do((0, 0))


def test_threads_give_the_bits_of_one(tmp_path):
    run = train(Problem.build(job_problems.blobs, n=23), torch.optim.Adam, 2, batch_size=5, progress=False)
    for place in ("in-process", "threads"):
        plan = JobPlan(tmp_path / place)
        names = plan.train_kernel(run, [0, 2], side=4, dtype=torch.float64) + plan.cross_kernel(run, 2, side=4)
        with cluster(place, workers=3):
            plan.run()
    before = torch.get_num_threads()
    for name in names:
        one, three = (open_matrix(tmp_path / place, name).to_dense() for place in ("in-process", "threads"))
        assert torch.equal(one, three)
    assert torch.get_num_threads() == before


def test_a_cluster_of_processes_gives_the_bits_of_one(tmp_path):
    """Started and closed by itself; a run in memory cannot be sent, one in a directory can."""
    problem = Problem.build(job_problems.blobs, n=23)
    run = train(problem, torch.optim.Adam, 2, batch_size=5, path=tmp_path / "run", progress=False)
    alone, shared = JobPlan(tmp_path / "alone"), JobPlan(tmp_path / "shared")
    for plan in (alone, shared):
        names = [*plan.train_kernel(run, [0, 2], side=4), plan.k_fold(run, 3)]
    alone.run(client="in-process")
    with cluster("processes", workers=2) as client:
        assert is_remote(client)
        assert (worker_memory(client) or 0) > 2**28
        assert sorted(run_tasks(pow, [(2, i) for i in range(4)])) == [(0, 1), (1, 2), (2, 4), (3, 8)]
        memory = JobPlan(tmp_path / "memory")
        memory.train_kernel(train(problem, torch.optim.SGD, 1, progress=False), 0)
        with pytest.raises(JobError, match=r"only in memory: call run\.save"):
            memory.run()
        assert run_jobs(tmp_path / "shared").computed == 2 * 21 + 3
    for name in names:
        path = Path(name.replace(" ", "-").replace(",", "-").replace("--", "-")) / "values"
        files = [sorted(p for p in (tmp_path / each / path).rglob("*") if p.is_file()) for each in ("alone", "shared")]
        assert len(files[0]) == len(files[1]) > 3
        assert [p.read_bytes() for p in files[0]] == [p.read_bytes() for p in files[1]]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to tell the memory")
def test_a_worker_whose_memory_is_nearly_full_goes_on():
    """Dask would pause it, for ever, since what fills it are not results."""
    with cluster("processes", workers=1, memory_limit=2**30):
        found = run_tasks(job_problems.fill, [(2**30, i) for i in range(6)])
        assert sorted(found) == [(i, i) for i in range(6)]


def test_what_is_planned_fits_into_the_workers(tmp_path, monkeypatch):
    run = train(job_problems.blobs(n=60), torch.optim.SGD, 1, progress=False)
    monkeypatch.setattr("poprisk.jobs._plan.worker_memory", lambda pool: 400_000)
    small = JobPlan(tmp_path / "small")
    small.train_kernel(run, 0)
    (group,) = _engine.load_all(small.store)
    assert group.where["memory_limit"] == 200_000
    assert group.where["tile_bytes"] <= 200_000
    monkeypatch.setattr(_engine, "worker_memory", lambda pool: 1000)
    with pytest.raises(JobError, match=r"a tile of 'train kernel at step 0' takes \d+ bytes, and a worker has 1000"):
        small.run(client="in-process")
    monkeypatch.setattr("poprisk.jobs._plan.worker_memory", lambda pool: 100_000)
    with pytest.raises(JobError, match="over the memory limit of 50000 now"):
        JobPlan(tmp_path / "small").train_kernel(run, 0)


def test_ten_thousand_tiles_are_planned_and_found_from_one_listing(tmp_path):
    _, options = job_problems.plan_squares(tmp_path, count=10_000)
    folder = tmp_path / "store" / "squares" / "values" / "c" / "0"
    folder.mkdir(parents=True)
    for i in range(9_999):
        (folder / str(i)).touch()
    assert job_status(tmp_path / "store") == {"squares": (9_999, 10_000)}
    assert run_jobs(tmp_path / "store", **options).computed == 1
    assert job_problems.begun(tmp_path / "log") == [(0, 9_999)]


def test_a_store_in_memory_is_refused_for_other_processes(tmp_path):
    """They would fill copies of their own, and the call would say that all jobs are done."""
    run = train(Problem.build(job_problems.blobs), torch.optim.SGD, 1, path=tmp_path / "run", progress=False)
    stores = [MemoryStore(), f"memory://{tmp_path.name}"]
    for store in stores:
        JobPlan(store).train_kernel(run, 0, side=10)
    with cluster("processes", workers=1) as client:
        for store in stores:
            with pytest.raises(HyperparameterError, match="other processes do not see a store in memory: use"):
                run_jobs(store)
        with pytest.raises(HyperparameterError, match="do not see"), cluster(client, store=stores[1]):
            pass
    with Client(processes=False, n_workers=1, dashboard_address=None) as client:
        assert run_jobs(stores[1], client=client).computed == 3
    assert run_jobs(stores[0], client="threads").computed == 3


def test_jobs_wait_for_the_first_worker(tmp_path):
    """An adaptive cluster, as on Slurm, has none before there is a task, and the first one decides the bits."""
    run = train(Problem.build(job_problems.blobs), torch.optim.SGD, 1, path=tmp_path / "run", progress=False)
    plan = JobPlan(tmp_path / "store")
    plan.train_kernel(run, 0, side=10)
    started: Any = LocalCluster(n_workers=0, processes=False, dashboard_address=":0")
    with started, Client(started) as client:
        started.adapt(minimum=0, maximum=1)
        assert plan.run(client=client).computed == 3


def test_wrong_places_are_refused():
    with (
        pytest.raises(HyperparameterError, match=r"client must be a distributed\.Client, 'processes', 'threads' or"),
        cluster("everywhere"),
    ):
        pass


def test_a_run_is_sent_as_its_directory_and_a_recipe(tmp_path, monkeypatch):
    run = train(Problem.build(job_problems.blobs, n=200), torch.optim.SGD, 1, path=tmp_path / "run", progress=False)
    sent = pickle.dumps(ShippedRun(run))
    assert len(sent) < 4000  # the examples stay here
    monkeypatch.setenv("POPRISK_STATE_DIR", str(tmp_path / "another machine"))  # whose user has not made the call
    monkeypatch.setattr(trust, "_MADE", set())
    with pytest.raises(UntrustedError):
        Run.load(tmp_path / "run").problem
    opened = pickle.loads(sent).open()
    assert isinstance(opened, Run)
    assert not (tmp_path / "another machine").exists()  # it holds for this process, not for later ones
    assert torch.equal(opened.weights(1), run.weights(1))
    small = train(job_problems.blobs(), torch.optim.SGD, 1, path=tmp_path / "small", progress=False)
    assert torch.equal(pickle.loads(pickle.dumps(ShippedRun(small))).open().weights(1), small.weights(1))
    with pytest.raises(JobError, match=r"'blobs' has 71 MiB of examples .* make it with Problem\.build"):
        _recipe(job_problems.blobs(n=300_000, inputs=60))
