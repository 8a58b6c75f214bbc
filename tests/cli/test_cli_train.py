# type: ignore  # the project checks the types of src and lab/src
"""``poprisk train``: a user's own script recorded with no other code, gone on with, and reopened without a flag."""

import json
import re
import shutil
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from cli_calls import call
from torch.optim import AdamW

from poprisk import PopRiskAdamW, Run
from poprisk.cli._train_plan import read_plan
from poprisk.errors import DataError, HyperparameterError, UntrustedError
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

SCRIPT = """
import torch
from torch.optim import AdamW
from torch import nn
from beside import classes

from poprisk import Problem


def network(width=5):
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def make_task(n=36):
    x, y = classes(n)
    return Problem(network, "cross_entropy", x, y, name="two kinds", arguments={"width": 4}, test=classes(20, 1))


def wrong_shapes():
    x, y = classes(12)
    return Problem(nn.Linear, "cross_entropy", x, y, arguments={"in_features": 7, "out_features": 2})


def no_task():
    return 3


def breaks():
    return {}["nothing"]


if __name__ == "__main__":
    raise SystemExit("run as a script")
"""
BESIDE = """
import torch
from torch.optim import AdamW


def classes(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    return x, (x[:, 0] > 0).long()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, in which the command is typed."""
    (tmp_path / "task.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text(BESIDE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "beside", raising=False)
    return tmp_path


def test_own_script_is_recorded_and_opens_without_a_flag(folder, capsys):
    code, out, err = call(capsys, "train", "task.py:make_task", "--epochs", 3, "--output", "runs/first")
    assert code == 0, err
    assert out.splitlines()[-1] == "Next: poprisk report runs/first"
    assert re.search(r"two kinds: step 9 of 18, loss \S+, about \d+ s left", err)
    run = Run.load("runs/first")
    assert run.kept is not None
    assert len(run.kept.held) == 2  # 5% of 36
    assert run.manifest["problem"]["source"]["folder"] == "../.."
    assert str(folder) not in (folder / "runs/first/manifest.json").read_text()
    by_hand = train(Problem.build("task.py:make_task"), AdamW, 18, batch_size=5, hold_back=0.05, progress=False)
    assert torch.equal(run.weights(18), by_hand.weights(18))
    code, out, err = call(capsys, "audit", "runs/first", "--tier", "any", "--json")
    assert code == 0, err
    assert json.loads(out)["examples"] == 36


def test_a_folder_that_was_moved_with_its_runs_is_asked_about_again(folder, capsys, tmp_path_factory):
    assert call(capsys, "train", "task.py:make_task", "--steps", 2, "--output", "run")[0] == 0
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(folder, elsewhere / "all")
    (elsewhere / "all" / "task.py").write_text(SCRIPT.replace("two kinds", "moved"))
    with pytest.raises(UntrustedError, match=r"task\.py:make_task\(\) in .*all"):
        Run.load(elsewhere / "all" / "run").problem  # another script, for all that is known
    assert Run.load(elsewhere / "all" / "run", trust=True).problem.name == "moved"
    assert Run.load(elsewhere / "all" / "run").problem.name == "moved"  # remembered
    assert Run.load("run").save(elsewhere / "copy").path is not None
    assert Run.load(elsewhere / "copy").problem.name == "two kinds"
    shutil.copytree("run", elsewhere / "alone")
    code, out, err = call(capsys, "audit", elsewhere / "alone", "--tier", "any")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "task.py" in err
    assert "--problem FUNCTION" in err
    code, out, err = call(capsys, "audit", elsewhere / "alone", "--tier", "any", "--problem", "task.py:make_task")
    assert code == 0, err


def test_interrupted_it_goes_on_to_the_same_bits(folder, capsys, monkeypatch):
    command = ["train", "task.py:make_task", "--steps", 20, "--every", 7, "--seed", 3]
    command += ["--optimizer", "poprisk", "--hold-back", "0"]
    from poprisk.runs import add_gradients

    usual, calls = add_gradients, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 11:
            signal.raise_signal(signal.SIGINT)  # in the middle of a step, which is finished first
        return usual(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr("poprisk.runs._training.add_gradients", interrupted)
        code, out, err = call(capsys, *command)
    assert (code, out) == (130, "")
    last = "11 of 20 steps are kept in poprisk-run; the same command continues from there"
    assert err.splitlines()[-1] == f"poprisk: interrupted; {last}"
    assert "stopping after this step" in err
    assert "Traceback" not in err
    assert Run.load("poprisk-run").num_steps == 11
    code, out, err = call(capsys, *command, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["steps_before"], found["steps"], found["every"]) == (11, 20, 7)
    whole = train(Problem.build("task.py:make_task"), PopRiskAdamW, 20, batch_size=6, seed=3, progress=False)
    assert torch.equal(Run.load("poprisk-run").weights(20), whole.weights(20))
    assert found["last_loss"] == pytest.approx(whole.losses[-1].item())
    code, _, err = call(capsys, *command)
    assert code == 0
    assert "poprisk-run already holds 20 steps (3.333 epochs), and this command asks for 20 (3.333 epochs), so " in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_directory_with_more_epochs_says_what_it_holds_and_what_to_do(folder, capsys):
    command = ["train", "task.py:make_task", "--hold-back", 0, "--batch-size", 6, "--epochs"]
    assert call(capsys, *command, 4)[0] == 0
    code, out, err = call(capsys, *command, 3)
    assert code == 0
    assert (
        "poprisk-run already holds 24 steps (4 epochs), and this command asks for 18 (3 epochs), so there is nothing "
        "to do: choose another directory with --output, or more than 4 epochs to continue this run"
    ) in err
    assert ": 24 steps of AdamW" in out
    code, _, err = call(capsys, *command[:-1], "--steps", 3)
    assert ("asks for 3 (0.5 epochs)" in err, "or more than 24 steps to continue" in err) == (True, True)
    code, _, err = call(capsys, *command, 5)
    assert "poprisk-run already holds 24 steps (4 epochs); continuing to 30" in err
    assert Run.load("poprisk-run").num_steps == 30


def test_a_directory_goes_on_only_with_its_own_run(folder, capsys):
    assert call(capsys, "train", "task.py:make_task", "--steps", 2, "--optimizer", "sgd", "--lr", 0.5)[0] == 0
    for changed, message in (
        (["--optimizer", "sgd", "--lr", 0.1], "holds a run with lr=0.5, got lr=0.1"),
        (["--optimizer", "adamw", "--lr", 0.5], "poprisk-run holds a run with"),
        (["--optimizer", "sgd", "--lr", 0.5, "--seed", 9], "another run"),
    ):
        code, out, err = call(capsys, "train", "task.py:make_task", "--steps", 4, *changed)
        assert (code, out) == (2, "")
        assert message in err
    assert Run.load("poprisk-run").num_steps == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py:make_task"], "cannot read the script .*missing.py .*check the path"),
        (["task.py:other"], "task.py has no 'other': it defines network, make_task"),
        (["task.py"], "expected an import path"),
        (["task.py:no_task"], "must return a Problem, got int"),
        (["task.py:breaks"], r"task.py:breaks failed: .*task.py, line \d+: KeyError: 'nothing'"),
        (
            ["task.py:wrong_shapes", "--steps", "2"],
            "the model must take the training inputs .*RuntimeError: mat1 and mat2 shapes",
        ),
        (["broken.py:make_task"], r"broken.py, line 2: SyntaxError"),
        (["exits.py:make_task"], r"exits.py, line 1: SystemExit: 4; put code that exits the process under if __name__"),
        (["nowhere.module:function"], "nowhere.module:function cannot be imported"),
        (["task.py:make_task", "--optimizer", "adam"], "optimizer must be one of poprisk, adamw, sgd, got 'adam'"),
        (["task.py:make_task", "--lr", "fast"], "'--lr': expected a number from"),
        (["task.py:make_task", "--batch-size", "37"], "between 1 and the 34 training examples, got 37"),
        (["task.py:make_task", "--steps", "3", "--epochs", "2"], "give steps or epochs"),
        (["task.py:make_task", "--output", "task.py"], "task.py"),
        (["plan.toml"], "plan.toml cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_2(arguments, message, folder, capsys):
    (folder / "broken.py").write_text("x = 1\ndef make_task(:\n")
    (folder / "exits.py").write_text("raise SystemExit(4)\n")
    before = [p.name for p in folder.iterdir()]
    code, out, err = call(capsys, "train", *arguments)
    assert (code, out) == (2, ""), err
    assert "Traceback" not in err
    assert re.fullmatch(f"poprisk: error: .*{message}.*", err.splitlines()[-1])
    assert {p.name for p in folder.iterdir()} - {"__pycache__", "poprisk-run"} == set(before)


PLAN = """
task = "task.py:make_task"
epochs = 2
batch_size = 9
hold_back = 0
output = "runs/planned"

[arguments]
n = 27

[optimizer]
name = "adamw"
lr = 0.02
betas = [0.8, 0.9]
"""


def test_a_small_file_says_it_all_and_the_command_line_overrides_it(folder, capsys, monkeypatch):
    (folder / "plans").mkdir()
    shutil.copy("task.py", "plans/task.py")
    (folder / "plans" / "first.toml").write_text(PLAN)
    code, out, err = call(capsys, "train", "plans/first.toml", "--seed", 5, "--json")
    assert code == 0, err
    found = json.loads(out)
    wanted = {"examples": 27, "steps": 6, "batch_size": 9, "lr": 0.02, "seed": 5, "run": "runs/planned"}
    assert {key: found[key] for key in wanted} == wanted
    run = Run.load("runs/planned")
    assert run.manifest["problem"]["source"]["folder"] == "../../plans"
    assert tuple(run.options(0)[0]["betas"]) == (0.8, 0.9)
    make = partial(torch.optim.AdamW, lr=0.02, betas=(0.8, 0.9))
    problem = Problem.build("plans/task.py:make_task", n=27)
    assert torch.equal(run.weights(6), train(problem, make, 6, batch_size=9, seed=5, progress=False).weights(6))
    plan = read_plan("plans/first.toml", {"optimizer": "sgd", "steps": 4, "lr": None})
    assert (plan.optimizer, plan.options, plan.steps, plan.epochs) == ("sgd", {}, 4, None)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("epochs = 3", DataError, "needs task ="),
        ('task = "a:b"\nspeed = 3', DataError, "has the unknown key 'speed'; known keys are"),
        ('task = "a:b"\nsteps = 0', HyperparameterError, "steps: expected a whole number from 1"),
        ('task = "a:b"\nsteps = 2.5', HyperparameterError, "steps: expected a whole number"),
        ('task = "a:b"\nsteps = true', HyperparameterError, "steps: expected a whole number"),
        ('task = "a:b"\noutput = 3', HyperparameterError, "output must be the name of a directory in quotes, got 3"),
        ('task = "a:b"\noptimizer = "lion"', HyperparameterError, "optimizer must be one of"),
        ('task = "a:b"\narguments = 3', DataError, r"\[arguments\] must be a table"),
        ("task = a", DataError, "is not valid TOML"),
    ],
)
def test_wrong_files_are_refused(text, kind, message, tmp_path):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(kind, match=message):
        read_plan(str(tmp_path / "plan.toml"), {})
    with pytest.raises(HyperparameterError, match="sgd has no option 'rho'; its options are lr, momentum"):
        read_plan("a:b", {"optimizer": "sgd"}).__class__("a:b", optimizer="sgd", options={"rho": 1}).make_optimizer()


def test_large_runs_are_recorded_sparsely(folder, capsys, monkeypatch):
    monkeypatch.setattr("poprisk.runs._disk_use._DENSE", 5_000)
    code, out, err = call(capsys, "train", "task.py:make_task", "--steps", 40, "--json")
    assert code == 0, err
    every = json.loads(out)["every"]
    assert every > 1
    assert f"recording weights every {every} steps" in err
    run = Run.load("poprisk-run")
    assert run.checkpoints == [0, *range(every, 40, every), 40]
    assert sum(run.weights(k).nbytes for k in run.checkpoints) < 5_000


def test_a_training_that_failed_at_once_is_not_in_the_way(folder, capsys):
    assert call(capsys, "train", "task.py:wrong_shapes", "--steps", 2)[0] == 2
    code, _, err = call(capsys, "train", "task.py:make_task", "--steps", 2)
    assert code == 0, err
    assert Run.load("poprisk-run").problem.name == "two kinds"


def test_examples_held_back_choose_the_weights_that_are_kept(folder, capsys):
    command = ["train", "task.py:make_task", "--optimizer", "adamw", "--steps", 30, "--hold-back", 0.25, "--tail", 0.5]
    code, out, err = call(capsys, *command)
    assert code == 0, err
    run = Run.load("poprisk-run")
    kept = run.kept
    lines = out.splitlines()
    assert "batches of 4 from 27 of 36 examples" in lines[0]
    mean = "averaged over about the last 50% of the steps up to it"
    assert lines[1].startswith(f"Kept the weights of step {kept.risk.step} of 30, {mean}: held-back risk ")
    assert "on 9 examples that no step trained on" in lines[1]
    assert re.fullmatch(r"Test accuracy: \S+% with the kept weights, \S+% with those of the last step\.", lines[2])
    code, out, err = call(capsys, *command, "--json")
    found = json.loads(out)["kept"]
    assert (found["step"], found["tail"], found["examples"]) == (kept.risk.step, 0.5, 9)
    assert found["valid"] is False  # 9 examples are too few for an error
    assert "nothing to do" in err
    module = run.module()
    module.load_state_dict(kept.weights)
    inputs, labels = run.problem.test
    assert found["test"]["kept"]["accuracy"] == pytest.approx(
        float((module(inputs).argmax(1) == labels).float().mean())
    )
    code, _, err = call(capsys, *command[:-4])
    assert code == 2
    assert "another run" in err


def test_hold_back_needs_no_number_and_may_come_from_a_file(folder, capsys):
    code, out, err = call(capsys, "train", "--hold-back", "task.py:make_task", "--steps", 4, "--json")
    assert code == 0, err
    assert json.loads(out)["kept"]["examples"] == 2
    (folder / "own.toml").write_text('task = "task.py:make_task"\nsteps = 4\nhold_back = 0.5\noutput = "other"\n')
    code, out, err = call(capsys, "train", "own.toml", "--json")
    assert code == 0, err
    assert json.loads(out)["kept"]["examples"] == 18
    code, out, _ = call(capsys, "train", "own.toml", "--hold-back", 0, "--output", "none", "--json")
    assert json.loads(out)["kept"] is None
    code, _, err = call(capsys, "train", "own.toml", "--hold-back", 2)
    assert (code, "from 0.0 to 0.9" in err) == (2, True)


def test_killed_while_holding_back_it_goes_on_to_the_same_weights(folder, capsys):
    """By SIGKILL, which nothing can catch, in the middle of a training."""
    command = ["train", "task.py:make_task", "--steps", 40, "--every", 6, "--optimizer", "adamw", "--hold-back", 0.3]
    (folder / "dies.py").write_text(DIES)
    killed = subprocess.run(
        [sys.executable, "dies.py", *map(str, command), "--output", "killed"], capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert 0 < Run.load("killed").num_steps < 40
    assert Run.load("killed").kept is None
    for output in ("killed", "whole"):
        code, _, err = call(capsys, *command, "--output", output)
        assert code == 0, err
    ours, theirs = Run.load("killed").kept, Run.load("whole").kept
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=0)
    assert ours.risk.to_dict() == theirs.risk.to_dict()


DIES = """
import os
import signal
import sys

from poprisk import cli
from poprisk.runs import _training

usual, calls = _training.add_gradients, []


def dying(*args, **options):
    calls.append(1)
    if len(calls) == 23:
        os.kill(os.getpid(), signal.SIGKILL)
    return usual(*args, **options)


_training.add_gradients = dying
cli.main(sys.argv[1:])
"""


def test_refit_trains_again_on_all_examples_and_goes_on_after_a_kill(folder, capsys):
    command = ["train", "task.py:make_task", "--steps", 30, "--every", 2, "--hold-back", 0.3, "--refit"]
    code, out, err = call(capsys, *command, "--output", "whole")
    assert code == 0, err
    first, final = Run.load("whole"), Run.load("whole/refit")
    assert final.num_steps == round(first.kept.risk.step * 36 / 25)
    line = (
        f"Trained again on all 36 examples for {final.num_steps} steps, as many passes: the final weights are kept in "
    )
    assert f"{line}whole/refit. They are not measured; the held-back risk is that of the first training." in out
    code, out, err = call(capsys, *command, "--output", "whole", "--json")
    found = json.loads(out)["refit"]
    assert (found["run"], found["steps"]) == ("whole/refit", final.num_steps)
    module = final.module()
    module.load_state_dict(final.kept.weights)
    inputs, labels = final.problem.test
    assert found["test"]["accuracy"] == pytest.approx(float((module(inputs).argmax(1) == labels).float().mean()))
    (folder / "dies.py").write_text(DIES.replace("23", "38"))  # by SIGKILL, in the second training
    killed = subprocess.run(
        [sys.executable, "dies.py", *map(str, command), "--output", "killed"], capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert 0 < Run.load("killed/refit").num_steps < final.num_steps
    code, _, err = call(capsys, *command, "--output", "killed")
    assert code == 0, err
    torch.testing.assert_close(Run.load("killed/refit").kept.weights, final.kept.weights, rtol=0, atol=0)
    code, _, err = call(capsys, "train", "task.py:make_task", "--hold-back", 0, "--refit", "--output", "none")
    assert (code, "held-back examples chose" in err) == (2, True)
