"""Kernels from tiles that were jobs: the same bits whoever made them, the direct computation to rounding."""

import multiprocessing
from functools import partial

import job_problems
import numpy as np
import pytest
import torch

from poprisk.errors import DataError, HyperparameterError, JobError, MixedNumericsWarning
from poprisk.jobs._assemble import assemble_matrix
from poprisk.jobs._manifest import Manifest
from poprisk.jobs._plan import JobPlan
from poprisk.jobs._results import read_logs, read_result, write_result
from poprisk.jobs._status import job_status
from poprisk.jobs._worker import run_jobs, work
from poprisk.operators._kernels.tangent import cross_kernel, train_kernel
from poprisk.runs._problem import Problem
from poprisk.runs._run import Run
from poprisk.runs._training import train

STEP = 3
# Python 3.12 warns of any fork beside threads; these forks only compute, and end.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "recorded"
    problem = Problem.build(job_problems.blobs)
    return train(problem, torch.optim.Adam, 4, batch_size=5, dtype=torch.float64, path=path, progress=False)


def direct(run, **options):
    model, w, x = run.model(), run.weights(STEP), run.problem.batch(dtype=torch.float64)[0]
    q = run.problem.test[0].double()
    return train_kernel(model, w, x, **options), cross_kernel(model, w, q, x, **options)


def planned(folder, run, side=7, **options):
    plan = JobPlan(folder)
    return plan.train_kernel(run, STEP, side=side, **options) + plan.cross_kernel(run, STEP, side=side, **options)


@pytest.mark.parametrize("method", ["auto", "jacobian contraction", "layer factors", "vector products"])
def test_kernels_equal_those_of_the_direct_computation(tmp_path, run, method):
    names = planned(tmp_path, run, method=method)
    assert names == [f"train kernel at step {STEP}", f"cross kernel at step {STEP}"]
    run_jobs(tmp_path)
    for name, expected in zip(names, direct(run), strict=True):
        close(assemble_matrix(tmp_path, name).to_dense(), expected)


@pytest.mark.parametrize("vector", [False, True])
def test_a_preconditioner_is_part_of_the_jobs(tmp_path, run, vector):
    M = torch.linspace(0.1, 2.0, run.num_weights, dtype=torch.float64) if vector else 0.5
    names = planned(tmp_path, run, preconditioner=M)
    run_jobs(tmp_path)
    for name, expected in zip(names, direct(run, preconditioner=M), strict=True):
        close(assemble_matrix(tmp_path, name).to_dense(), expected)
    with pytest.raises(DataError, match="planned in this directory with other settings"):
        planned(tmp_path, run)


def test_a_train_kernel_is_symmetric_to_the_last_bit(tmp_path, run):
    (name, _) = planned(tmp_path, run)
    run_jobs(tmp_path)
    K = assemble_matrix(tmp_path, name)
    dense = K.to_dense()
    assert K.symmetric
    assert torch.equal(dense, dense.T)
    assert torch.linalg.eigvalsh(dense).min() > -1e-12


def test_several_steps_are_several_kernels(tmp_path, run):
    names = JobPlan(tmp_path).train_kernel(run, [0, STEP], side=10)
    run_jobs(tmp_path)
    first, last = (assemble_matrix(tmp_path, name).to_dense() for name in names)
    assert not torch.equal(first, last)
    close(last, direct(run)[0])


def test_workers_in_other_processes_give_the_same_bits(tmp_path, run):
    """One process that does all, against three that share: every number of both kernels is the same."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder in (alone, shared):
        names = planned(folder, run, side=5)
    run_jobs(alone)
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=work, args=(shared,), kwargs={"lease": 60.0}) for _ in range(3)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    for name in names:
        one, two = (assemble_matrix(folder, name).path.read_bytes() for folder in (alone, shared))
        assert one == two
    total = job_status(shared).total
    assert sum(line["event"] == "start" for line in read_logs(shared)) == total


def test_planning_again_changes_nothing_and_a_wider_plan_keeps_what_is_done(tmp_path, run):
    planned(tmp_path, run)
    run_jobs(tmp_path)
    before = (tmp_path / "manifest.json").read_bytes()
    planned(tmp_path, run)
    assert (tmp_path / "manifest.json").read_bytes() == before
    JobPlan(tmp_path).train_kernel(run, 0, side=6)
    status = job_status(tmp_path)
    assert status.total - status.done == len(Manifest.load(tmp_path).groups[-1].jobs)


@pytest.mark.parametrize(
    "change", [{"side": 5}, {"method": "jacobian contraction"}, {"dtype": torch.float32}, {"preconditioner": 2.0}]
)
def test_whatever_changes_the_numbers_changes_the_keys(tmp_path, run, change):
    one, two = (JobPlan(tmp_path / name) for name in ("one", "two"))
    one.train_kernel(run, STEP, side=6)
    two.train_kernel(run, STEP, **{"side": 6, **change})
    keys = [set(Manifest.load(tmp_path / name).groups[0].keys) for name in ("one", "two")]
    assert not keys[0] & keys[1]


def test_threads_and_steps_change_the_keys_too(tmp_path, run):
    JobPlan(tmp_path / "one").train_kernel(run, [0, 1, 2])
    JobPlan(tmp_path / "two", threads=2).train_kernel(run, [0, 1, 2])
    groups = [group for name in ("one", "two") for group in Manifest.load(tmp_path / name).groups]
    keys = [key for group in groups for key in group.keys]
    assert len(set(keys)) == len(keys)


def test_results_on_other_code_or_another_run_are_refused(tmp_path, run, monkeypatch):
    planned(tmp_path, run)
    from poprisk.jobs import _sources as sources

    with monkeypatch.context() as patch:
        patch.setattr(sources, "code_digest", lambda *packages: "f" * 64)
        with pytest.raises(JobError, match="planned by another version of the code"):
            run_jobs(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "problem_digest", lambda run: "other")
        with pytest.raises(JobError, match=r"is not the run that '(train|cross) kernel at step 3' was"):
            run_jobs(tmp_path)


def test_an_unfinished_or_damaged_kernel_is_not_assembled(tmp_path, run):
    (name, _) = planned(tmp_path, run)
    with pytest.raises(JobError, match=r"6 of 6 jobs of 'train kernel at step 3' are not done: run_jobs"):
        assemble_matrix(tmp_path, name)
    run_jobs(tmp_path)
    group = Manifest.load(tmp_path).group(name)
    from poprisk.jobs._results import result_path

    path = result_path(tmp_path, group.keys[4])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(JobError, match=r"a result of 'train kernel at step 3' cannot be used, .*--verify"):
        assemble_matrix(tmp_path, name)
    assert not list((tmp_path / "assembled").glob("*"))
    run_jobs(tmp_path, verify=True)
    close(assemble_matrix(tmp_path, name).to_dense(), direct(run)[0])


def test_tiles_of_different_machines_are_told(tmp_path, run):
    (name, _) = planned(tmp_path, run)
    run_jobs(tmp_path)
    key = Manifest.load(tmp_path).group(name).keys[0]
    write_result(tmp_path, key, read_result(tmp_path, key), {"numerics": {"torch": "1.0", "cpu": "abacus"}})
    with pytest.warns(MixedNumericsWarning, match="2 kinds of machine .*abacus"):
        assemble_matrix(tmp_path, name)


def test_the_file_is_one_that_numpy_maps(tmp_path, run):
    (name, other) = planned(tmp_path, run)
    run_jobs(tmp_path)
    for each in (name, other):
        K = assemble_matrix(tmp_path, each)
        assert np.array_equal(np.load(K.path, mmap_mode="r"), K.to_dense().numpy())
        assert torch.equal(K.mapped(), K.to_dense())


def test_what_other_processes_could_not_find_is_refused(tmp_path, run):
    memory = train(Problem.build(job_problems.blobs), torch.optim.SGD, 1, progress=False)
    with pytest.raises(JobError, match=r"only in memory: call run\.save"):
        JobPlan(tmp_path).train_kernel(memory, 0)
    local = job_problems.blobs()
    train(local, torch.optim.SGD, 1, path=tmp_path / "local", progress=False)
    with pytest.raises(JobError, match=r"cannot rebuild the problem .* Problem\.build"):
        JobPlan(tmp_path / "jobs").train_kernel(tmp_path / "local", 0)
    untested = Problem.build(job_problems.blobs, test=0)
    train(untested, torch.optim.SGD, 1, path=tmp_path / "untested", progress=False)
    with pytest.raises(DataError, match="has no test set"):
        JobPlan(tmp_path / "jobs").cross_kernel(tmp_path / "untested", 0)


def test_wrong_options_are_refused(tmp_path, run):
    with pytest.raises(HyperparameterError, match="threads must be a whole number of at least 1, got 0"):
        JobPlan(tmp_path, threads=0)
    with pytest.raises(HyperparameterError, match="device must be 'cpu' or 'cuda'"):
        JobPlan(tmp_path, device="cuda:1")
    plan = JobPlan(tmp_path, memory_limit=100)
    with pytest.raises(HyperparameterError, match="memory=100 bytes is too little"):
        plan.train_kernel(run, 0)
    with pytest.raises(HyperparameterError, match="method must be a Method"):
        plan.train_kernel(run, 0, method="magic")
    with pytest.raises(HyperparameterError, match="side must be at least 1"):
        plan.train_kernel(run, 0, side=0)
    with pytest.raises(DataError, match="k must lie in 0"):
        JobPlan(tmp_path).train_kernel(run, 99)


def test_a_run_and_its_jobs_can_be_moved_together(tmp_path, run):
    there = tmp_path / "there"
    Run.load(run.path).save(there / "run")
    (name,) = JobPlan(there / "jobs").train_kernel(there / "run", STEP, side=10)
    there.rename(tmp_path / "here")
    run_jobs(tmp_path / "here" / "jobs")
    close(assemble_matrix(tmp_path / "here" / "jobs", name).to_dense(), direct(run)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["layer factors", "jacobian contraction", "vector products"])
def test_kernels_on_a_gpu(tmp_path, run, method):
    """The CPU's numbers to rounding, and its own to the bit."""
    for folder in ("one", "two"):
        plan, options = JobPlan(tmp_path / folder, device="cuda"), {"side": 6, "method": method}
        names = plan.train_kernel(run, STEP, **options) + plan.cross_kernel(run, STEP, **options)
        run_jobs(tmp_path / folder)
    for name, expected in zip(names, direct(run), strict=True):
        one, two = (assemble_matrix(tmp_path / folder, name) for folder in ("one", "two"))
        assert one.path.read_bytes() == two.path.read_bytes()
        close(one.to_dense(), expected)
        on_gpu = assemble_matrix(tmp_path / "one", name, device="cuda")
        v = torch.ones(on_gpu.shape[1], dtype=torch.float64, device="cuda")
        close((on_gpu @ v).cpu(), expected.sum(1))
