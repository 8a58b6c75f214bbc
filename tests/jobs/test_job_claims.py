"""Exactly one worker gets a claim, and the dead are told from the slow by the watcher's own clock."""

import os
import threading

import pytest

from poprisk._core.store.exclusive import create_exclusively
from poprisk.jobs._claims import Watch, beating, claim_path, last_generation, read_mark, try_claim


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_of_many_that_try_at_once_one_gets_the_claim(tmp_path):
    barrier, won = threading.Barrier(16), []

    def attempt(name):
        barrier.wait()
        if try_claim(tmp_path, "ab", 0, name):
            won.append(name)

    threads = [threading.Thread(target=attempt, args=(f"w{i}",)) for i in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(won) == 1
    assert read_mark(tmp_path, "ab", 0).worker == won[0]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_link_that_succeeded_counts_though_its_answer_was_lost(tmp_path, monkeypatch):
    real = os.link

    def lossy(source, target):
        real(source, target)
        raise FileExistsError(target)  # as a repeated request over a network is answered

    monkeypatch.setattr(os, "link", lossy)
    assert create_exclusively(tmp_path / "x", b"mine")


def test_without_links_the_file_is_opened_exclusively(tmp_path, monkeypatch):
    def refused(source, target):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refused)
    assert create_exclusively(tmp_path / "x", b"mine")
    assert not create_exclusively(tmp_path / "x", b"yours")
    assert (tmp_path / "x").read_bytes() == b"mine"


def test_a_silent_worker_is_dead_after_a_lease_of_the_watchers_clock(tmp_path):
    claim, clock = try_claim(tmp_path, "ab", 0, "one"), Clock()
    watch = Watch(tmp_path, "ab", lease=10.0, clock=clock)
    assert watch.look()[1] is False
    clock.now = 9.9
    assert watch.look()[1] is False
    claim.mark("working", 1)  # a beat, just in time
    assert watch.look()[1] is False
    clock.now = 19.8
    assert watch.look()[1] is False
    clock.now = 20.0
    assert watch.look()[1] is True


def test_the_times_of_files_do_not_matter(tmp_path):
    """A claim dated into the future or the past by another machine's clock is watched like any other."""
    try_claim(tmp_path, "ab", 0, "one")
    for date in (0, 2**33):
        os.utime(claim_path(tmp_path, "ab", 0), (date, date))
        clock = Clock()
        watch = Watch(tmp_path, "ab", lease=10.0, clock=clock)
        assert watch.look()[1] is False
        clock.now = 10.0
        assert watch.look()[1] is True


def test_a_takeover_starts_the_lease_anew(tmp_path):
    try_claim(tmp_path, "ab", 0, "one")
    clock = Clock()
    watch = Watch(tmp_path, "ab", lease=10.0, clock=clock)
    watch.look()
    clock.now = 11.0
    assert watch.look()[1] is True
    assert try_claim(tmp_path, "ab", 1, "two") is not None
    assert try_claim(tmp_path, "ab", 1, "three") is None
    mark, silent = watch.look()
    assert (mark.worker, silent, watch.generation) == ("two", False, 1)
    assert last_generation(tmp_path, "ab") == 1
    assert last_generation(tmp_path, "cd") == -1


def test_a_worker_beats_while_it_works_and_not_after(tmp_path):
    claim = try_claim(tmp_path, "ab", 0, "one")
    with beating(claim, lease=0.2):
        for _ in range(500):
            if read_mark(tmp_path, "ab", 0).counter >= 3:
                break
            threading.Event().wait(0.01)
    assert read_mark(tmp_path, "ab", 0).counter >= 3
    claim.mark("done")
    threading.Event().wait(0.1)
    assert read_mark(tmp_path, "ab", 0).state == "done"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"worker": "x"}'])
def test_a_claim_that_cannot_be_read_is_taken_for_work(tmp_path, content):
    try_claim(tmp_path, "ab", 0, "one")
    claim_path(tmp_path, "ab", 0).write_bytes(content)
    assert read_mark(tmp_path, "ab", 0).state == "unreadable"


def test_a_long_reason_is_cut(tmp_path):
    claim = try_claim(tmp_path, "ab", 0, "one")
    claim.mark("failed", reason="x" * 5000)
    assert read_mark(tmp_path, "ab", 0).state == "failed"
