"""Runs side by side: the rules of the verdict, disputed labels, the page in a real browser, and the list of runs."""

import html
import json
import math
import re
import shutil
from functools import partial

import pytest
import torch
from report_problems import call, curve, pictures
from test_review import CONTRAST, WIDE, analyzed

from poprisk import PopRiskAdamW
from poprisk._core.store import json_digest
from poprisk.errors import DataError, HyperparameterError
from poprisk.report import compare_runs, write_comparison
from poprisk.report._analysis.compare import run_names
from poprisk.report._drawing.comparison_rules import Entry, verdict
from poprisk.risk import Estimate
from poprisk.runs import Problem, Run, list_runs, train

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three runs on the same pictures: two optimizers, and examples held back."""
    folder = tmp_path_factory.mktemp("compare") / "runs"
    problem = Problem.build(pictures, n=60)
    train(problem, partial(torch.optim.SGD, lr=0.01), STEPS, batch_size=20, path=folder / "slow", progress=False)
    train(problem, partial(PopRiskAdamW, lr=0.05), STEPS, batch_size=20, path=folder / "fast", progress=False)
    held = {"batch_size": 20, "hold_back": 0.25, "progress": False}
    train(problem, partial(torch.optim.AdamW, lr=0.02), STEPS, path=folder / "held", **held)
    return folder


@pytest.fixture(scope="module")
def comparison(folder):
    return compare_runs([folder / name for name in ("slow", "fast", "held")], budget=0.1)


def test_disputed_labels_are_those_that_the_audits_treat_differently(comparison):
    assert comparison.names == ["slow", "fast", "held"]
    assert comparison.same_data
    tables = [found.table for found in comparison.analyses]
    split = comparison.disagreement
    for name, rows in (
        ("predicted_label", split.predicted),
        ("is_suspect", split.suspect),
        ("given_label", split.given),
    ):
        assert torch.equal(rows, torch.stack([table[name][split.examples] for table in tables]))
    alike = lambda name: (torch.stack([t[name] for t in tables]) == tables[0][name]).all(0)  # noqa: E731
    disputed = ~(alike("predicted_label") & alike("is_suspect"))
    assert 0 < len(split.examples) < 60
    assert sorted(split.examples.tolist()) == disputed.nonzero().squeeze(1).tolist()


def test_the_page_in_a_browser(comparison, chromium, tmp_path):
    path = write_comparison(comparison, tmp_path / "compare.html")
    text = html.unescape(path.read_text(encoding="utf-8"))
    for outside in ("http:", "https:", "<script", "@import", "url("):
        assert outside not in text
    for width, dark in ((390, False), (900, True), (1600, False)):
        shown = chromium.open(path, width=width, dark=dark)
        assert shown.run(CONTRAST)["low"] == []
        assert shown.run(WIDE) <= 0
        assert shown.problems == []
        assert all(url.startswith(("file:", "data:")) for url in shown.requests)
    assert shown.run("Array.from(document.querySelectorAll('thead th'), th => th.title).includes('')") is False
    points = shown.run("Array.from(document.querySelectorAll('.chart'), c => Number(c.dataset.points))")
    assert len(points) >= 4
    assert all(points)
    drawn = shown.run("document.querySelectorAll('#examples tbody tr').length")
    assert drawn == min(100, len(comparison.disagreement.examples))
    assert shown.run("document.querySelectorAll('#verdict tbody tr').length") == 3
    assert "Not on this page: Signal channel and reservoir (slow, fast, held)" in text
    without = write_comparison(comparison, tmp_path / "plain.html", examples=False).read_text(encoding="utf-8")
    assert "base64" in text
    assert "base64" not in without


def test_kept_parts_are_shown_and_never_replaced(folder, comparison, capsys, tmp_path):
    code, _, err = call(capsys, "analyze", folder / "fast", "--budget", 0.2)
    assert code == 0, err
    before = {p.name: p.read_bytes() for p in (folder / "fast" / "analysis").iterdir()}
    found = compare_runs([comparison.analyses[2], folder / "fast"], budget=0.1)
    assert found.analyses[1].gates is None  # kept for another budget
    found = compare_runs([comparison.analyses[2], folder / "fast"])
    assert found.analyses[1].gates is not None
    assert {p.name: p.read_bytes() for p in (folder / "fast" / "analysis").iterdir()} == before
    page = write_comparison(found, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h2>Gate and signal-to-noise</h2>" in page
    assert "poprisk analyze RUN computes and keeps it" in page  # the operators of the other


def test_command_compares_and_writes_one_page(folder, capsys, tmp_path):
    target = tmp_path / "new" / "page.html"
    words = ["compare", folder / "slow", folder / "fast", "-o", target, "--budget", 0.1]
    code, out, err = call(capsys, *words, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [run["name"] for run in found["runs"]] == ["slow", "fast"]
    assert found["page"] == target.as_posix()
    assert [p.name for p in target.parent.iterdir()] == ["page.html"]
    code, out, _ = call(capsys, "compare", folder / "slow", "-o", target)
    assert code == 2


@pytest.mark.parametrize("count", [1, 6])
def test_a_comparison_takes_two_to_five_runs(folder, count):
    with pytest.raises(HyperparameterError, match=f"2 to 5 runs, got {count}"):
        compare_runs(count * [folder / "slow"])
    with pytest.raises(HyperparameterError, match="a name for each of the 2 runs, got 1"):
        compare_runs(2 * [folder / "slow"], names=["a"])


def test_runs_of_other_data_are_not_ranked_by_their_risk(comparison):
    other = analyzed(train(pictures(n=40), torch.optim.AdamW, 3, progress=False))
    mixed = compare_runs([comparison.analyses[0], other])
    assert not mixed.same_data
    assert mixed.disagreement is None
    assert mixed.why_no_disagreement == "the runs have different numbers of examples: 60, 40"
    values = analyzed(train(curve(), torch.optim.AdamW, 3, progress=False))
    assert "targets that are classes" in compare_runs([other, values]).why_no_disagreement
    assert run_names([found.run for found in (comparison.analyses[0], other)]) == ["slow", "run 2"]


A, B, C = Estimate(1.0, 0.1), Estimate(1.5, 0.1), Estimate(1.1, 0.1)
UNKNOWN = Estimate(1.0, 0.1, False, "too few")


@pytest.mark.parametrize(
    ("runs", "options", "words"),
    [
        ([Entry("a", A), Entry("b", B)], {}, "a is best on new data: its expected loss is 1.00 ± 0.10, that of b 1.50"),
        ([Entry("b", B), Entry("a", A)], {}, "a is best on new data"),
        (
            [Entry("a", A), Entry("c", C)],
            {},
            "No run is clearly best on new data: a has the lowest",
        ),
        ([Entry("a", A), Entry("u", UNKNOWN)], {}, "not known for u."),
        ([Entry("a", A), Entry("b")], {}, "not known for b."),
        ([Entry("a", A), Entry("b", B)], {"same_data": False}, "do not rank them"),
        ([Entry("a", A, B, 0.7), Entry("b", B, A, 0.9)], {}, "b is best on the test set: its test loss is 1.00 ± 0.10"),
        ([Entry("a", A, B, 0.7), Entry("b", B, A, 0.9)], {}, "Test accuracy: b 90.0%, a 70.0%."),
        ([Entry("a", A, A), Entry("b", B, B)], {"same_test": False}, "different test sets"),
    ],
)
def test_verdict(runs, options, words):
    lines = verdict(runs, **({"same_data": True, "same_test": True} | options))
    assert any(words in line for line in lines)


def test_a_lead_within_two_standard_errors_is_no_victory():
    assert not any(
        "is best" in line for line in verdict([Entry("a", A), Entry("c", C)], same_data=True, same_test=False)
    )


def test_runs_are_listed_without_executing_anything(folder, tmp_path, capsys):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "manifest.json").write_text("{")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "manifest.json").write_text('{"kind": "jobs"}')
    good, bad = list_runs(folder), list_runs(tmp_path)
    assert good == sorted(good, key=lambda run: (run.created, run.path))
    slow, fast, held = (next(run for run in good if run.path.name == name) for name in ("slow", "fast", "held"))
    assert (slow.optimizer, slow.lr, slow.steps, slow.examples, slow.finished) == ("SGD", 0.01, STEPS, 60, True)
    assert (fast.optimizer, fast.problem, fast.risk, fast.error) == ("PopRiskAdamW", "halves", None, "")
    assert held.risk.step <= STEPS
    assert math.isfinite(slow.loss)
    assert [run.path.name for run in bad] == ["more"]
    assert bad[0].error
    with pytest.raises(DataError, match="is not a folder"):
        list_runs(tmp_path / "nowhere")
    code, out, _ = call(capsys, "runs", folder, "--json")
    assert code == 0
    assert [run["problem"] for run in json.loads(out)["runs"]] == ["halves"] * 3
    code, out, _ = call(capsys, "runs", tmp_path)
    assert code == 0
    assert re.search(r"more cannot be opened: .*", out)
    assert "No recorded runs" in out


def test_losses_of_large_runs_are_listed_and_checked(folder, monkeypatch):
    usual = list_runs(folder)
    monkeypatch.setattr("poprisk.runs._run._QUICK", 10)
    assert [run.loss for run in list_runs(folder)] == [run.loss for run in usual]
    run = Run.load(folder / "slow")
    assert torch.equal(run.last_losses(5), Run.load(folder / "slow").losses[-5:])
    file = next((folder / "slow").glob("segment-*"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        (broken,) = list_runs(folder / "slow")
    finally:
        file.write_bytes(content)
    assert "is damaged" in broken.error


def test_listing_does_not_import_the_problem(folder, tmp_path):
    copy = tmp_path / "foreign"
    shutil.copytree(folder / "slow", copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest.pop("sha256")
    manifest["problem"]["source"]["path"] = "no_such_module_anywhere:make"
    (copy / "manifest.json").write_text(json.dumps({**manifest, "sha256": json_digest(manifest)}))
    (found,) = list_runs(copy)
    assert found.error == ""
    assert found.steps == STEPS
