# type: ignore
"""The quickstart's walk with a model that is not in it: train, report, review, and train again on corrected labels."""

import html
import json
import re
import shlex

import numpy as np
import pytest
from cli_calls import call

from poprisk import Run
from poprisk._core.store import resolve

TASK = '''
import torch
from torch import nn

from poprisk import Problem

EXAMPLES, TEST = 240, 120


def make_network():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(96, 3),
    )


def bars(count, seed):
    """Pictures of a bar: flat, upright, or a square, anywhere in the picture."""
    random = torch.Generator().manual_seed(seed)
    kind = torch.randint(3, (count,), generator=random)
    x = 0.2 * torch.rand(count, 1, 8, 8, generator=random)
    for i, k in enumerate(kind.tolist()):
        height, width = [(2, 6), (6, 2), (4, 4)][k]
        a, b = (int(torch.randint(9 - size, (1,), generator=random)) for size in (height, width))
        x[i, 0, a : a + height, b : b + width] += 0.8
    return x.clamp(0, 1), kind


def shifted(images, generator):
    by = torch.randint(-1, 2, (2,), generator=generator).tolist()
    return torch.roll(images, by, dims=(-2, -1))


def truth():
    return bars(EXAMPLES, 0)[1]


def make_task():
    images, kind = bars(EXAMPLES, 0)
    random = torch.Generator().manual_seed(7)
    wrong = torch.rand(EXAMPLES, generator=random) < 0.2
    given = torch.where(wrong, (kind + torch.randint(1, 3, (EXAMPLES,), generator=random)) % 3, kind)
    return Problem(make_network, "cross_entropy", images, given, augment=shifted, test=bars(TEST, 1))
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def page_data(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S).group(1))


def reviewed(data, truth):
    """The file that the page exports, of a person who sees what is in the pictures of the suspects."""
    at = {column["name"]: j for j, column in enumerate(data["columns"])}
    decisions = []
    for row in data["rows"]:
        i, given, suggested = (row[at[name]] for name in ("example", "given_label", "suggested_label"))
        if row[at["is_suspect"]]:
            decisions.append({"example": i, "given": given, "suggested": suggested, "decided": int(truth[i])})
    about = {"run": data["run"], "data": data["fingerprint"], "examples": data["examples"], "targets": data["kind"]}
    return {"kind": "poprisk label decisions", "version": 1, **about, "decisions": decisions}


def trained(capsys, *options):
    """What the command says of a training."""
    length = ("--epochs", 24, "--lr", 0.01, "--batch-size", 24, "--hold-back", 0)
    code, out, err = call(capsys, "train", "task.py:make_task", *length, *options, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_convolutional_network_with_batch_norm_and_augmentation(folder, capsys):
    first = [trained(capsys, "--output", f"runs/{seed}", "--seed", seed) for seed in (0, 1)]
    code, _, err = call(capsys, "report", "runs/0", "--budget", 0.1, "--output", "report.html")
    assert code == 0, err
    page = html.unescape((folder / "report.html").read_text())
    assert "<h1>runs/0</h1>" in page
    given = Run.load("runs/0").problem.targets
    truth = resolve("task.py:truth")()
    (folder / "decisions.json").write_text(json.dumps(reviewed(page_data(folder / "report.html"), truth)))
    command = shlex.split(re.search(r"poprisk (train .*--labels decisions.json .*)", page).group(1))
    assert command[-2:] == ["--output", "runs/0-corrected"]

    code, out, err = call(capsys, *command)  # as the page has it
    assert code == 0, err
    assert re.search(r"Labels: \d+ of 240 corrected.\n", out)
    again = Run.load("runs/0-corrected").problem
    assert (given != truth).sum() > 30
    assert (again.targets != truth).sum() < 10
    assert (Run.load("runs/0").problem.targets == given).all()  # the first run opens as before
    second = [trained(capsys, "--labels", "decisions.json", "--output", f"again/{s}", "--seed", s) for s in (0, 1)]
    for before, after in zip(first, second, strict=True):
        assert after["test"]["loss"] < 0.6 * before["test"]["loss"]
    code, out, err = call(capsys, "compare", "runs/0", "runs/0-corrected", "--budget", 0.1, "--output", "compare.html")
    assert code == 0, err
    assert re.sub(r"\s+", " ", out).count("0-corrected is best on the test set") == 1


def test_corrected_labels_that_do_not_fit_are_refused_in_a_line(folder, capsys):
    np.save("short.npy", np.zeros(3, dtype=int))
    np.save("real.npy", np.zeros(240))
    (folder / "other.json").write_text("{}")
    for file, words in {
        "short.npy": r"the targets must be as in the problem, torch.int64 \[240\], got torch.int64 \[3\]",
        "real.npy": "got torch.float64",
        "other.json": "not a file of decisions",
        "labels.txt": "read from a .json, .npy or .csv file, got 'labels.txt'",
        "none.npy": "none.npy",
    }.items():
        code, _, err = call(capsys, "train", "task.py:make_task", "--steps", 2, "--labels", file)
        assert code == 2
        assert err.count("\n") == 1
        assert re.search(words, err), err


def test_a_task_that_was_edited_after_its_run_is_told_what_to_do_instead(folder, capsys):
    code, _, err = call(capsys, "train", "task.py:make_task", "--steps", 2, "--output", "run")
    assert code == 0, err
    (folder / "task.py").write_text(TASK.replace("given = torch.where(wrong", "given = torch.where(wrong & False"))
    code, _, err = call(capsys, "audit", "run")
    assert code == 2
    assert (
        "if the task was edited since then, undo that: corrected labels are passed with poprisk train --labels" in err
    )
