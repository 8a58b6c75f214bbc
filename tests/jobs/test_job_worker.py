"""A worker does what nobody has, once; failures, damage and losses end in whole results or in one clear error."""

import multiprocessing
import os
import signal
import threading

import pytest
import torch

from poprisk.errors import HyperparameterError, JobError
from poprisk.jobs._claims import try_claim
from poprisk.jobs._manifest import JobGroup, Manifest
from poprisk.jobs._results import read_logs, read_result, result_path
from poprisk.jobs._status import job_status
from poprisk.jobs._worker import run_jobs, work

COUNT = 6
# Python 3.12 warns of any fork beside threads; these forks only compute, and end.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def squares(tmp_path):
    def plan(**content):
        group = JobGroup("squares", "job_problems:Squares", content, [[i] for i in range(COUNT)])
        Manifest((group,)).save(tmp_path)
        return group

    return plan


def events(folder, *names):
    return [line for line in read_logs(folder) if line["event"] in names]


def test_one_worker_does_every_job_once_and_the_next_none(tmp_path, squares):
    group = squares()
    assert run_jobs(tmp_path).computed == COUNT
    assert [read_result(tmp_path, key)["block"][0, 0].item() for key in group.keys] == [i * i for i in range(COUNT)]
    assert run_jobs(tmp_path, verify=True).computed == 0
    assert len(events(tmp_path, "start")) == COUNT
    status = job_status(tmp_path)
    assert (status.done, status.total, status.claimed, status.seconds_left) == (COUNT, COUNT, 0, None)


def test_several_workers_share_the_jobs(tmp_path, squares):
    squares(seconds=0.05)
    found = []
    threads = [threading.Thread(target=lambda: found.append(work(tmp_path))) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sum(done.computed for done in found) == COUNT
    assert len(events(tmp_path, "start")) == len(events(tmp_path, "done")) == COUNT


def test_a_damaged_result_is_done_again(tmp_path, squares):
    group = squares()
    run_jobs(tmp_path)
    torn, changed = (result_path(tmp_path, key) for key in group.keys[:2])
    torn.write_bytes(torn.read_bytes()[:-5])
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    again = run_jobs(tmp_path)  # sees the missing bytes
    assert (again.computed, again.taken_over) == (1, 1)
    assert run_jobs(tmp_path, verify=True).computed == 1  # and the wrong ones
    for i, key in enumerate(group.keys):
        assert torch.equal(read_result(tmp_path, key)["block"], torch.full((4, 4), float(i * i)))


def test_the_job_of_a_dead_worker_is_taken_over_after_a_lease(tmp_path, squares):
    group = squares()
    try_claim(tmp_path, group.keys[3], 0, "dead")
    done = work(tmp_path, lease=0.3)
    assert (done.computed, done.taken_over) == (COUNT, 1)
    assert done.seconds >= 0.3


def test_the_job_of_a_living_worker_is_waited_for(tmp_path, squares):
    """It beats for much longer than a lease, then gives the job back."""
    group = squares()
    claim = try_claim(tmp_path, group.keys[3], 0, "slow")
    from poprisk.jobs._claims import beating

    release = threading.Event()

    def live():
        with beating(claim, 0.5):
            release.wait(1.2)
        claim.mark("released")

    thread = threading.Thread(target=live)
    thread.start()
    done = work(tmp_path, lease=0.5)
    thread.join()
    assert done.seconds >= 1.1
    assert (done.computed, done.taken_over) == (COUNT, 1)


def test_a_failing_job_is_tried_once_by_each_worker_and_the_others_are_done(tmp_path, squares):
    squares(failing=[2, 4])
    for _ in range(2):
        with pytest.raises(
            JobError, match=r"2 of 6 jobs failed, the first in 'squares' \[.\] with DataError: no square"
        ):
            work(tmp_path, lease=0.2)
    assert len(events(tmp_path, "failed")) == 4
    assert len(events(tmp_path, "done")) == COUNT - 2
    assert "DataError: no square of" in job_status(tmp_path).lines()[-1]
    (tmp_path / "mended").touch()
    assert work(tmp_path, lease=0.2).computed == 2


@pytest.mark.parametrize("state", ["working", "released"])
def test_a_job_that_kills_its_workers_is_left_alone_at_last(tmp_path, squares, state):
    group = squares()
    for generation in range(21):
        claim = try_claim(tmp_path, group.keys[1], generation, f"dead{generation}")
    claim.mark(state)
    with pytest.raises(JobError, match="its workers failed or died 21 times"):
        work(tmp_path, lease=0.2)
    assert job_status(tmp_path).done == COUNT - 1


def test_an_interrupted_worker_gives_its_job_back(tmp_path, squares, monkeypatch):
    squares()
    import job_problems

    def interrupted(self, indices):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job_problems.Squares, "compute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            work(tmp_path)
    done = work(tmp_path, lease=60.0)  # no lease is waited for
    assert (done.computed, done.taken_over) == (COUNT, 1)
    assert done.seconds < 30


def dying_work(folder, fraction):
    """A worker that is killed when so much of its first result has reached the disk."""
    from poprisk._core.store import files

    def killed(path, content):
        with files.atomic_file(path) as file:
            file.write(content[: int(fraction * len(content))])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    from poprisk._core.store import tensors

    tensors.write_bytes = killed
    work(folder, lease=0.3)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_worker_killed_while_it_writes_leaves_nothing_that_is_read(tmp_path, squares, fraction):
    group = squares()
    process = multiprocessing.get_context("fork").Process(target=dying_work, args=(tmp_path, fraction))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.rglob("results/*/.*.tmp"))) == 1
    assert not list(tmp_path.rglob("*.safetensors"))
    done = work(tmp_path, lease=0.3)
    assert (done.computed, done.taken_over) == (COUNT, 1)
    assert all(read_result(tmp_path, key) for key in group.keys)


def test_a_machine_that_rounds_differently_is_refused_unless_tolerated(tmp_path, squares, monkeypatch):
    squares()
    work(tmp_path)
    (tmp_path / "numerics.json").write_text('{"torch": "1.0", "cpu": "abacus", "gpu": null}')
    with pytest.raises(JobError, match=r"the first worker had torch 1.0 on abacus, this machine has torch .*tolerate"):
        work(tmp_path)
    assert work(tmp_path, tolerate=True).computed == 0


def test_assembly_leaves_alone_what_others_are_writing(tmp_path):
    from poprisk.jobs._assemble import assemble_matrix

    where = {"layout": "columns", "shape": [4, 8], "symmetric": False, "dtype": "float32"}
    done = JobGroup("done", "job_problems:Squares", {}, [[0], [4]], where)
    Manifest((done, JobGroup("going on", "job_problems:Squares", {"other": 1}, [[7]]))).save(tmp_path)
    from poprisk.jobs._results import write_result

    for key in done.keys:
        write_result(tmp_path, key, {"block": torch.ones(4, 4)}, {})
    left, live = (
        result_path(tmp_path, key).parent / f".{key}.safetensors.0123456789ab.tmp"
        for key in (done.keys[0], Manifest.load(tmp_path).groups[1].keys[0])
    )
    for path in (left, live):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    assert torch.equal(assemble_matrix(tmp_path, "done").to_dense(), torch.ones(4, 8))
    assert not left.exists()
    assert live.exists()


def test_a_lease_must_be_positive_and_a_name_a_name(tmp_path, squares):
    squares()
    with pytest.raises(HyperparameterError, match=r"name must be up to 100 letters, .* got '\.\./elsewhere'"):
        work(tmp_path, name="../elsewhere")
    with pytest.raises(HyperparameterError, match="lease must be a positive number of seconds, got 0"):
        work(tmp_path, lease=0)
