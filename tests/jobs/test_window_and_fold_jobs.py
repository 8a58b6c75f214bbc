"""Columns of operators and members of a K-fold as jobs: what the direct computations give."""

from functools import partial

import job_problems
import pytest
import torch

from poprisk.errors import DataError, HyperparameterError, JobError
from poprisk.jobs import JobPlan, open_matrix, open_resampled, probe_columns, run_jobs
from poprisk.jobs._plan import OPERATORS
from poprisk.operators._window import Window
from poprisk.risk._k_fold import k_fold
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "recorded"
    problem = Problem.build(job_problems.blobs, n=12, test=4)
    return train(problem, torch.optim.Adam, 4, batch_size=4, dtype=torch.float64, path=path, progress=False)


@pytest.fixture(scope="module")
def window(run):
    return Window.of_run(run, start=2)


def test_columns_of_the_identity_are_the_operators(tmp_path, run, window):
    plan = JobPlan(tmp_path)
    names = {name: plan.operator_columns(run, name, start=2, columns_per_job=13) for name in OPERATORS}
    adjoint = plan.operator_columns(run, "test_transfer", start=2, adjoint=True, columns_per_job=13)
    run_jobs(tmp_path, client="in-process")
    for operator, name in names.items():
        close(open_matrix(tmp_path, name).to_dense(), getattr(window, operator).to_dense())
    close(open_matrix(tmp_path, adjoint).to_dense(), window.test_transfer.T.to_dense())
    W = open_matrix(tmp_path, names["dissipation_gramian"])
    assert W.symmetric


def test_random_probes_can_be_made_again(tmp_path, run, window):
    options = {"columns": "rademacher", "count": 7, "seed": 5}
    name = JobPlan(tmp_path).operator_columns(run, "propagator", start=2, columns_per_job=3, **options)
    run_jobs(tmp_path, client="in-process")
    P = window.propagator
    X = probe_columns(P.shape[1], 0, 7, "rademacher", 5)
    assert set(X.unique().tolist()) == {-1.0, 1.0}
    assert len(X.T.unique(dim=0)) == 7
    Y = open_matrix(tmp_path, name)
    close(Y.to_dense(), P @ X)
    assert not Y.symmetric


def test_wrong_operators_and_columns_are_refused(tmp_path, run):
    plan = JobPlan(tmp_path)
    with pytest.raises(HyperparameterError, match="operator must be one of"):
        plan.operator_columns(run, "hessian")
    with pytest.raises(HyperparameterError, match="columns must be 'identity', 'rademacher'"):
        plan.operator_columns(run, "propagator", columns="ones")
    with pytest.raises(HyperparameterError, match="the operator has 24 columns, got count=25"):
        plan.operator_columns(run, "propagator", count=25)
    with pytest.raises(DataError, match="a window needs 0 ≤ start < stop ≤ 4, the run's steps, got 1 and 9"):
        plan.operator_columns(run, "propagator", start=1, stop=9)
    with pytest.raises(DataError, match="folds must lie between 2 and the 12 examples, got 13"):
        plan.k_fold(run, folds=13)
    with pytest.raises(HyperparameterError, match="members_per_job must be a whole number of at least 1"):
        plan.k_fold(run, folds=3, members_per_job=0)
    with pytest.raises(HyperparameterError, match="columns_per_job must be a whole number of at least 1"):
        plan.operator_columns(run, "propagator", columns_per_job=0)


@pytest.mark.parametrize("members_per_job", [1, 2])
def test_a_k_fold_of_jobs_is_the_k_fold(tmp_path, run, members_per_job):
    name = JobPlan(tmp_path).k_fold(run, folds=4, seed=3, members_per_job=members_per_job)
    run_jobs(tmp_path, client="in-process")
    found, expected = open_resampled(tmp_path, name), k_fold(run, folds=4, seed=3, progress=False)
    close(found.weights, expected.weights)
    close(found.losses, expected.losses)
    close(found.displacement, expected.displacement)
    assert (found.method, found.target, found.trainings) == (expected.method, expected.target, expected.trainings)
    assert found.is_partition
    assert found.risk.valid == expected.risk.valid
    close(found.bias_corrected.value, expected.bias_corrected.value)
    with pytest.raises(JobError, match="is not a matrix: use open_resampled"):
        open_matrix(tmp_path, name)


def test_folds_of_a_network_with_batch_statistics(tmp_path):
    """They cannot be stacked: each job trains by itself, and hands over the running statistics too."""
    run = train(
        Problem.build(job_problems.blobs, n=12, test=4, norm=True),
        *(torch.optim.Adam, 4),
        batch_size=4,
        dtype=torch.float64,
        path=tmp_path / "recorded",
        progress=False,
    )
    name = JobPlan(tmp_path / "jobs").k_fold(run, folds=3, members_per_job=2)
    run_jobs(tmp_path / "jobs", client="in-process")
    found, expected = open_resampled(tmp_path / "jobs", name), k_fold(run, folds=3, progress=False)
    close(found.losses, expected.losses)
    close(found.own_losses, expected.own_losses)
    close(found.bias_corrected.value, expected.bias_corrected.value)


def test_a_kernel_is_no_k_fold(tmp_path, run):
    (name,) = JobPlan(tmp_path).train_kernel(run, 0)
    with pytest.raises(JobError, match="is not a K-fold: use open_matrix"):
        open_resampled(tmp_path, name)
