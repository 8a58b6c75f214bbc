"""Trainings that are killed, ended, interrupted or started twice at random moments, then continued to their end.

A server imports once and forks a process for each training. That process kills itself, or sends itself a signal, at a
random call of a function in any of its threads: in a step, a measurement, a write. Its clock is made: every step takes
a second, in which what was handed to the disk is written. ``python killed_trainings.py --trials 200`` prints the
outcome.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass
from functools import cache, partial
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from sent_runs import problem
from torch import nn

from poprisk import Problem, Run, train
from poprisk._core.store import pack
from poprisk.cli import main
from poprisk.runs import _writer as writer
from poprisk.runs._storage import all_records

STEPS, SECONDS, SEGMENT = 70, 1.0, 100
SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
ENDS = {"kill": -signal.SIGKILL, "terminate": 130, "interrupt": 130}
KINDS = {
    "plain": {},
    "segments": {"segment_steps": 7},
    "checkpoints": {"every": 9},
    "held back": {"hold_back": 0.2, "segment_steps": 11},
    "command": None,
}


def normalized():
    """With running statistics, which are part of a checkpoint."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def task():
    made = problem()
    return Problem(normalized, "cross_entropy", made.inputs, made.targets, name="killed")


def training(kind, folder):
    """The training of a trial; the same call starts and continues it."""
    if kind == "command":
        words = ("train", "killed_trainings:task", "--steps", str(STEPS), "--batch-size", "4", "--hold-back", "0.1")
        main([*words, "-o", str(folder)])
    options = {"segment_steps": SEGMENT, **KINDS[kind]}
    options |= {"segment_steps": None} if "every" in options else {}
    adam = partial(torch.optim.Adam, lr=0.05)
    train(Problem.build(task), adam, STEPS, batch_size=4, path=folder, resume=True, progress=False, **options)


def fork(kind, folder, counter, at=0, sent=signal.SIGKILL, ready=None):
    """A training in a process of its own, which gets a signal at one of its calls; 0 only counts them."""
    if child := os.fork():
        return child
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    calls, clock, add = [0], [0.0], writer.RunWriter.add

    def stepped(self, record):
        clock[0] += SECONDS
        counter[:8] = (self.num_steps + 1).to_bytes(8, "little")
        add(self, record)
        self.wait()

    def called(*_):
        calls[0] += 1
        if calls[0] == at:
            os.kill(os.getpid(), sent)

    code = 0
    try:
        writer.now, writer.RunWriter.add = (lambda: clock[0]), stepped
        if ready is not None:
            os.read(ready, 1)
        threading.setprofile(called)
        sys.setprofile(called)
        training(kind, folder)
    except SystemExit as error:
        code = int(error.code or 0)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.setprofile(None)
        Path(f"{folder}.error").write_text(traceback.format_exc())
        code = 1
    sys.setprofile(None)
    counter[8:16] = calls[0].to_bytes(8, "little")
    os._exit(code)


def waited(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def content(folder):
    """The bytes of all that is recorded, as hashes: every step, the optimizer's last state, the kept weights.

    How the steps are divided into files may differ: a signal closes one. No other file may be left.
    """
    run = Run.load(folder)
    run.verify()
    steps, last = range(run.num_steps), run.checkpoint(run.num_steps)
    parts: dict[str, Any] = {
        "weights": [run.weights(k) for k in range(run.num_steps + 1) if run.is_dense or k in (0, run.num_steps)],
        "steps": [vars(run.step(k)) for k in steps] if run.is_dense else [],
        "batches": [run.batch(k) for k in steps],
        "options": [run.options(k) for k in steps],
        "losses": run.losses,
        "state": {name: last[name] for name in sorted(last) if name.startswith("checkpoint.")},
        "kept": None if run.kept is None else run.kept.content(),
    }
    manifest = run.manifest
    listed = {file["name"] for file in all_records(manifest)} | {"manifest.json"}
    found: dict[str, Any] = {"strange files": sorted({file.name for file in folder.iterdir()} - listed)}
    for name in ("created", "segments", "held_back", "kept"):
        manifest.pop(name, None)
    manifest["problem"].pop("source")
    for name, part in (*parts.items(), ("manifest", manifest)):
        form, tensors = pack(part)
        digest = hashlib.sha256(json.dumps(form, sort_keys=True).encode())
        for tensor in tensors.values():
            digest.update(tensor.contiguous().numpy().tobytes())
        found[name] = digest.hexdigest()
    return found


@dataclass
class Found:
    """What the trials found so far."""

    trials: int = 0
    hits: int = 0
    """Signals that met their training."""
    lost: int = 0
    most: float = 0.0
    """Most work lost by a kill, in seconds of the made clock."""
    unequal: int = 0
    refused: int = 0
    """Second starts that were told who writes."""
    failures: tuple[str, ...] = ()

    def fail(self, text):
        self.failures += (text,)


class Trials:
    def __init__(self, root, seed):
        self.root, self.draw, self.counter = Path(root), random.Random(seed), mmap(-1, 16)
        self.found = Found()

    @cache  # noqa: B019  # one object for a process
    def whole(self, kind):
        """The files of a training that nobody disturbed, and the number of its calls."""
        folder = self.root / f"whole {kind}"
        code = waited(fork(kind, folder, self.counter))
        assert code == 0, (kind, code)
        return content(folder), int.from_bytes(self.counter[8:], "little")

    def one(self, number):
        """A trial: one or two disturbances, the end of the training, its files."""
        kind, what = self.draw.choice(list(KINDS)), self.draw.choice([*SIGNALS, "twice"])
        folder, (truth, calls) = self.root / f"trial {number}", self.whole(kind)
        self.found.trials += 1
        label = f"trial {number} ({kind}, {what})"
        for _ in range(self.draw.choice([1, 1, 2])):
            if what == "twice":
                self._twice(kind, folder, calls, label)
            else:
                self._disturb(kind, folder, calls, what, label)
        for _ in range(2):  # what is finished stays as it is
            code = waited(fork(kind, folder, self.counter))
            if code != 0:
                self.found.lost += 1
                return self.found.fail(f"{label}: not continued ({code}) {self._error(folder)}")
        here = content(folder)
        if here != truth:
            self.found.unequal += 1
            other = [name for name in truth if here[name] != truth[name]]
            self.found.fail(f"{label}: other bytes of {', '.join(other)} than without the disturbance")
        return None

    def _disturb(self, kind, folder, calls, what, label):
        self.counter[:8] = b"\0" * 8
        code = waited(fork(kind, folder, self.counter, self.draw.randrange(1, calls), SIGNALS[what]))
        if code not in (0, ENDS[what], -SIGNALS[what]):  # before there is anything to save, a signal ends it at once
            self.found.fail(f"{label}: ended with {code} {self._error(folder)}")
        self.found.hits += code != 0
        self._check(folder, what, label)

    def _twice(self, kind, folder, calls, label):
        """The same training started twice at once; the later one is interrupted, too, or the earlier one killed."""
        go, start = os.pipe()
        at, sent = self.draw.randrange(1, calls), self.draw.choice(list(SIGNALS.values()))
        first = fork(kind, folder, self.counter, 0, ready=go)
        second = fork(kind, folder, mmap(-1, 16), at, sent, ready=go)
        os.write(start, b"go")
        codes = waited(first), waited(second)
        os.close(go)
        os.close(start)
        told = self._error(folder)
        refusals = sum(code in (1, 2) for code in codes)
        self.found.refused += refusals
        if refusals > 1 or (told and "is being written by" not in told):
            self.found.fail(f"{label}: ended with {codes} {told}")
        self.counter[:8] = b"\0" * 8
        self._check(folder, "twice", label)

    def _check(self, folder, what, label):
        """The run on disk is whole, and lacks at most what the clock allows."""
        taken, kept = int.from_bytes(self.counter[:8], "little"), 0
        if (folder / "manifest.json").exists():
            try:
                run = Run.load(folder)
                run.verify()
                kept = run.num_steps
            except Exception as error:
                self.found.lost += 1
                return self.found.fail(f"{label}: cannot be opened: {error!r}")
        lost = max(0, taken - kept) * SECONDS
        self.found.most = max(self.found.most, lost)
        if lost > (30 if what == "kill" else 1):
            self.found.fail(f"{label}: {lost} s of work lost")
        return None

    def _error(self, folder):
        file = Path(f"{folder}.error")
        text = file.read_text().strip().splitlines()[-1] if file.exists() else ""
        file.unlink(missing_ok=True)
        return text


def run_trials(trials, seed=0):
    """What a number of trials finds, printed as one JSON object."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        os.environ["POPRISK_STATE_DIR"] = root
        quiet = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet):
            training("command", Path(root) / "first")  # imports what children would import again and again
        tests = Trials(root, seed)
        for number in range(trials):
            tests.one(number)
        print(json.dumps(vars(tests.found)))


if __name__ == "__main__":
    sys.modules["killed_trainings"] = sys.modules["__main__"]
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--trials", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    run_trials(given.trials, given.seed)
