"""``python -m poprisk.jobs``: one voice with the command line, and scripts that a scheduler takes."""

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import job_problems
import pytest
import torch

from poprisk._core.progress import Progress
from poprisk.cli import main
from poprisk.jobs._assemble import assemble_matrix
from poprisk.jobs._manifest import JobGroup, Manifest
from poprisk.jobs._plan import JobPlan
from poprisk.jobs._slurm import slurm_script
from poprisk.jobs._status import job_status
from poprisk.jobs._worker import run_jobs, worker_name
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

HERE = Path(__file__).parent
# Python 3.12 warns of any fork beside threads; these forks only compute, and end.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def squares(tmp_path):
    group = JobGroup("squares", "job_problems:Squares", {}, [[i] for i in range(20)])
    Manifest((group,)).save(tmp_path)
    return tmp_path


def call(*arguments):
    with pytest.raises(SystemExit) as leaving:
        main(["jobs", *map(str, arguments)])
    return leaving.value.code


def test_work_then_status(squares, capfd, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert call("status", squares) == 0
    assert "squares: 0 of 20 done\nin all: 0 of 20 done, 0 claimed\n" in capfd.readouterr().out
    assert call("work", squares, "--name", "me") == 0
    out, err = capfd.readouterr()
    assert re.search(r"me finished 20 jobs in \d+ s; all jobs are done", out)
    assert "jobs: 20 of 20 done" in err
    assert call("status", squares) == 0
    assert "in all: 20 of 20 done, 0 claimed\nme finished 20\n" in capfd.readouterr().out


def test_errors_are_one_line_with_an_exit_code(tmp_path, capfd):
    for command in ("work", "status", "slurm", "assemble"):
        assert call(command, tmp_path / "nothing") == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("poprisk: error: ")
        assert "holds no jobs" in err
        assert err.count("\n") == 1
    assert call("work") == 2
    assert "Missing argument 'DIR'" in capfd.readouterr().err


def test_assemble_prints_where_the_matrices_are(tmp_path, capfd):
    run = train(Problem.build(job_problems.blobs), torch.optim.SGD, 1, path=tmp_path / "run", progress=False)
    JobPlan(tmp_path / "jobs").train_kernel(run, 0, side=10)
    JobPlan(tmp_path / "jobs").train_kernel(run, 0, side=10, precision="float16", name="rounded")
    run_jobs(tmp_path / "jobs")
    assert call("assemble", tmp_path / "jobs") == 0
    exact, rounded = (assemble_matrix(tmp_path / "jobs", f"{name} at step 0") for name in ("train kernel", "rounded"))
    assert capfd.readouterr().out == (
        f"train kernel at step 0: {exact.path}\n"
        f"rounded at step 0: {rounded.path}, |dK_ij| <= {rounded.bound:.2g} sqrt(K_ii K_jj)\n"
    )


def test_a_worker_that_is_told_to_end_gives_its_job_back(tmp_path, capfd):
    """SIGTERM, as SLURM and torchrun send it: another worker goes on at once, no lease is waited for."""
    Manifest((JobGroup("squares", "job_problems:Squares", {"seconds": 0.7}, [[i] for i in range(4)]),)).save(tmp_path)
    process = multiprocessing.get_context("fork").Process(target=main, args=(["jobs", "work", str(tmp_path)],))
    process.start()
    while not job_status(tmp_path).done:
        time.sleep(0.05)
    while not job_status(tmp_path).claimed:  # the next one
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == 143
    assert "poprisk: interrupted; finished jobs are kept" in capfd.readouterr().err
    left = job_status(tmp_path)
    assert 0 < left.done < 4
    assert left.claimed == 0
    rest = run_jobs(tmp_path, lease=600.0)
    assert (rest.computed, rest.taken_over) == (4 - left.done, 1)


def test_the_slurm_script_is_a_script(squares, tmp_path):
    script = slurm_script(squares, tasks=7, time_limit="00:30:00")
    assert "#SBATCH --array=0-6\n" in script
    assert "#SBATCH --cpus-per-task=1 " in script
    assert "#SBATCH --time=00:30:00\n" in script
    assert "--gpus" not in script
    assert f"exec srun python -m poprisk jobs work {squares} --lease 90\n" in script
    bash = shutil.which("bash")
    if bash is not None:
        file = tmp_path / "script.sh"
        file.write_text(script)
        assert subprocess.run([bash, "-n", str(file)], check=False).returncode == 0


def test_a_plan_for_gpus_asks_for_them(tmp_path):
    content = {"device": "cuda", "threads": 4}
    Manifest((JobGroup("squares", "job_problems:Squares", content, [[0]], {"memory_limit": 2**33}),)).save(tmp_path)
    script = slurm_script(tmp_path, tasks=1)
    assert "#SBATCH --gpus-per-task=1 " in script
    assert "#SBATCH --cpus-per-task=4 " in script
    assert "#SBATCH --mem=12288M\n" in script


@pytest.mark.parametrize(
    ("variable", "start"),
    [("SLURM_ARRAY_TASK_ID", "task3-"), ("RANK", "rank3-"), (None, f"process{os.getpid()}-")],
    ids=("slurm", "torchrun", "alone"),  # a number that each process has for itself is no name for a test
)
def test_names_come_from_the_launcher(monkeypatch, variable, start):
    for each in ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "RANK"):
        monkeypatch.delenv(each, raising=False)
    if variable:
        monkeypatch.setenv(variable, "3")
    assert worker_name().startswith(start)


def test_progress_has_the_time_left(capfd):
    with Progress("jobs", 10, counted="{done} of {total} done") as progress:
        progress.update(4, worked=False)
        progress.update(5)
        progress.update(10)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "jobs: 4 of 10 done"
    assert re.fullmatch(r"jobs: 5 of 10 done, about \d+ s left", lines[1])
    assert lines[2] == "jobs: 10 of 10 done"


@pytest.mark.slow
def test_torchrun_starts_workers(squares):
    """Two ranks, no process group: each is a worker."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "poprisk", "jobs", "work"]
    done = subprocess.run(
        [sys.executable, *command, str(squares)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.stem[:6] for path in squares.glob("log/*")) == ["rank0-", "rank1-"]
    assert job_status(squares).done == 20
