"""Kernels from tiles that were jobs: the same bits whoever made them, the direct computation to rounding."""

from functools import partial

import job_problems
import pytest
import torch

from poprisk._core.store import load_all
from poprisk.errors import DataError, HyperparameterError, JobError, RunError
from poprisk.jobs import JobPlan, job_status, open_matrix, run_jobs
from poprisk.operators._kernels.tangent import cross_kernel, train_kernel
from poprisk.runs._digest import code_digest
from poprisk.runs._problem import Problem
from poprisk.runs._run import Run
from poprisk.runs._training import train

STEP = 3
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
    run_jobs(tmp_path, client="in-process")
    for name, expected in zip(names, direct(run), strict=True):
        close(open_matrix(tmp_path, name).to_dense(), expected)


@pytest.mark.parametrize("vector", [False, True])
def test_a_preconditioner_is_part_of_the_jobs(tmp_path, run, vector):
    M = torch.linspace(0.1, 2.0, run.num_weights, dtype=torch.float64) if vector else 0.5
    names = planned(tmp_path, run, preconditioner=M)
    run_jobs(tmp_path, client="in-process")
    for name, expected in zip(names, direct(run, preconditioner=M), strict=True):
        close(open_matrix(tmp_path, name).to_dense(), expected)
    with pytest.raises(DataError, match=r"planned in .* with other settings"):
        planned(tmp_path, run)


def test_a_train_kernel_is_symmetric_to_the_last_bit(tmp_path, run):
    (name, _) = planned(tmp_path, run)
    run_jobs(tmp_path, client="in-process")
    K = open_matrix(tmp_path, name)
    dense = K.to_dense()
    assert K.symmetric
    assert torch.equal(dense, dense.T)
    assert torch.linalg.eigvalsh(dense).min() > -1e-12


def test_several_steps_are_several_kernels(tmp_path, run):
    names = JobPlan(tmp_path).train_kernel(run, [0, STEP], side=10)
    run_jobs(tmp_path, client="in-process")
    first, last = (open_matrix(tmp_path, name).to_dense() for name in names)
    assert not torch.equal(first, last)
    close(last, direct(run)[0])


def digests(folder, **options):
    return [group.digest(**options) for group in load_all(JobPlan(folder).store)]


def test_planning_again_changes_nothing_and_a_wider_plan_keeps_what_is_done(tmp_path, run):
    planned(tmp_path, run)
    run_jobs(tmp_path, client="in-process")
    before = {path: path.read_bytes() for path in tmp_path.rglob("zarr.json")}
    planned(tmp_path, run)
    assert {path: path.read_bytes() for path in tmp_path.rglob("zarr.json")} == before
    JobPlan(tmp_path).train_kernel(run, 0, side=6)
    status = job_status(tmp_path)
    assert status.pop("train kernel at step 0") == (0, 10)
    assert all(done == total for done, total in status.values())


@pytest.mark.parametrize(
    "change", [{"method": "jacobian contraction"}, {"dtype": torch.float32}, {"preconditioner": 2.0}]
)
def test_whatever_changes_the_numbers_is_another_plan(tmp_path, run, change):
    JobPlan(tmp_path).train_kernel(run, STEP, side=6)
    with pytest.raises(DataError, match=r"already planned in .* with other settings"):
        JobPlan(tmp_path).train_kernel(run, STEP, **{"side": 6, **change})


def test_threads_and_steps_are_other_plans_too_and_tiles_if_they_are_asked_for(tmp_path, run):
    JobPlan(tmp_path / "one").train_kernel(run, [0, 1, 2])
    JobPlan(tmp_path / "two", threads=2).train_kernel(run, [0, 1, 2])
    both = digests(tmp_path / "one") + digests(tmp_path / "two")
    assert len(set(both)) == len(both) == 6
    JobPlan(tmp_path / "one", memory_limit=2**20).train_kernel(run, 0)  # smaller tiles, if there were none
    with pytest.raises(DataError, match=r"already planned in .* with other settings"):
        JobPlan(tmp_path / "one").train_kernel(run, 0, side=3)


def test_other_code_and_another_run_are_refused(tmp_path, run, monkeypatch):
    from poprisk.jobs import _kinds

    planned(tmp_path, run)
    with monkeypatch.context() as patch:
        patch.setattr(_kinds, "code_digest", lambda *packages: "f" * 64)
        with pytest.raises(JobError, match="planned by another version of the code"):
            run_jobs(tmp_path, client="in-process")
    with monkeypatch.context() as patch:
        patch.setattr(_kinds, "problem_digest", lambda run: "other")
        with pytest.raises(JobError, match=r"is not the run that '(train|cross) kernel at step 3' was"):
            run_jobs(tmp_path, client="in-process")


def test_a_digest_of_code_depends_on_every_source(tmp_path, monkeypatch):
    package = tmp_path / "some_method"
    package.mkdir()
    for name in ("__init__.py", "formula.py"):
        (package / name).write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    digest = code_digest.__wrapped__
    before = digest("some_method")
    assert digest("some_method") == before
    (package / "formula.py").write_text("x = 2\n")
    assert digest("some_method") != before
    assert digest("poprisk.operators._kernels") != digest("poprisk.operators._kernels", "poprisk._core.autodiff")


def test_runs_in_memory_and_problems_of_ones_own(tmp_path, run):
    memory = train(Problem.build(job_problems.blobs), torch.optim.SGD, 1, progress=False)
    plan = JobPlan(tmp_path / "memory")
    plan.train_kernel(memory, 0)
    with pytest.raises(JobError, match=r"the run of 'train kernel at step 0' was only in memory: plan with it again"):
        run_jobs(tmp_path / "memory", client="in-process")
    assert plan.run(client="in-process").computed == 1
    local = job_problems.blobs()
    train(local, torch.optim.SGD, 1, path=tmp_path / "local", progress=False)
    with pytest.raises(RunError, match=r"problem"):
        JobPlan(tmp_path / "jobs").train_kernel(tmp_path / "local", 0)
    JobPlan(tmp_path / "jobs").train_kernel(Run.load(tmp_path / "local", problem=local), 0)
    assert run_jobs(tmp_path / "jobs", client="in-process", problem=local).computed == 1
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
    with pytest.raises(HyperparameterError, match="side must be a whole number of at least 1"):
        plan.train_kernel(run, 0, side=0)
    with pytest.raises(DataError, match="k must lie in 0"):
        JobPlan(tmp_path).train_kernel(run, 99)


def test_a_run_and_its_jobs_can_be_moved_together(tmp_path, run):
    there = tmp_path / "there"
    Run.load(run.path).save(there / "run")
    (name,) = JobPlan(there / "jobs").train_kernel(there / "run", STEP, side=10)
    there.rename(tmp_path / "here")
    run_jobs(tmp_path / "here" / "jobs", client="in-process")
    close(open_matrix(tmp_path / "here" / "jobs", name).to_dense(), direct(run)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["layer factors", "jacobian contraction", "vector products"])
def test_kernels_on_a_gpu(tmp_path, run, method):
    """The CPU's numbers to rounding, and its own to the bit."""
    for folder in ("one", "two"):
        plan, options = JobPlan(tmp_path / folder, device="cuda"), {"side": 6, "method": method}
        names = plan.train_kernel(run, STEP, **options) + plan.cross_kernel(run, STEP, **options)
        run_jobs(tmp_path / folder, client="in-process")
    for name, expected in zip(names, direct(run), strict=True):
        one, two = (open_matrix(tmp_path / folder, name) for folder in ("one", "two"))
        assert torch.equal(one.to_dense(), two.to_dense())
        close(one.to_dense(), expected)
        on_gpu = open_matrix(tmp_path / "one", name, device="cuda")
        v = torch.ones(on_gpu.shape[1], dtype=torch.float64, device="cuda")
        close((on_gpu @ v).cpu(), expected.sum(1))
