# type: ignore
"""The report of a run: its numbers against those computed by hand, its page in a real browser, refused input."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalIterable=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

import base64
import html
import io
import json
import re
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from report_problems import HOSTILE, WRONG, call, chance, curve, pictures, truth
from torch.nn import functional as F

from poprisk import PopRiskAdamW
from poprisk._core.autodiff import FlatModel
from poprisk.errors import DataError, HyperparameterError
from poprisk.optim import Gate
from poprisk.report import CleanTargets, analyze, write_report
from poprisk.report._analysis import operators
from poprisk.report._analysis.contents import example_contents, png
from poprisk.report._analysis.curves import memorization
from poprisk.report._analysis.gates import gate_curve
from poprisk.report._drawing.commands import training_call
from poprisk.report._drawing.operator_sections import drift_section
from poprisk.report._drawing.page import report_page
from poprisk.risk._influence.matrix import influence_on
from poprisk.risk._meter import RiskMeter
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._run import Run
from poprisk.runs._training import train

STEPS = 24
GATED = partial(
    PopRiskAdamW, lr=0.1, gate=Gate("soft", strength=1.0), weight_decay=0.01
)  # Algorithm 1: quick enough to err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of pictures on disk, made by the trainer."""
    path = tmp_path_factory.mktemp("report") / "run"
    train(Problem.build(pictures), GATED, STEPS, batch_size=7, path=path, progress=False)
    return path


@pytest.fixture(scope="module")
def found(folder):
    return analyze(Run.load(folder))


@pytest.fixture(scope="module")
def noisy():
    """A regression whose clean targets are known."""
    run = train(
        Problem.build(curve), partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1), STEPS, batch_size=8, progress=False
    )
    return analyze(run, clean=CleanTargets(truth(run.problem.inputs), run.problem.test[1]))


def outputs_at(run, k, inputs):
    module = run.module()
    for p, piece in zip(module.parameters(), run.layout.split(run.weights(k)), strict=True):
        p.data.copy_(piece)
    with torch.no_grad():
        return module(inputs)


def test_losses_are_those_of_the_network(found):
    run, curves = found.run, found.curves
    test_inputs, test_labels = run.problem.test
    assert curves.steps[0] == 0
    assert curves.steps[-1] == STEPS
    for place in (0, 3, -1):
        k = curves.steps[place]
        train_outputs, test_outputs = (outputs_at(run, k, x) for x in (run.problem.inputs, test_inputs))
        assert curves.train[place] == pytest.approx(
            F.cross_entropy(train_outputs, run.problem.targets).item(), rel=1e-5
        )
        assert curves.test[place] == pytest.approx(F.cross_entropy(test_outputs, test_labels).item(), rel=1e-5)
        right = (test_outputs.argmax(1) == test_labels).double().mean().item()
        assert curves.test_accuracy[place] == pytest.approx(right)


def test_memorization_is_the_gap_over_the_drop(noisy):
    run, targets = noisy.run, noisy.run.problem.targets
    risk = RiskMeter("exclusion", examples=run.num_examples).read(run, [STEPS]).readings[0].risk
    assert risk.valid
    first, last = (0.5 * F.mse_loss(outputs_at(run, k, run.problem.inputs), targets).item() for k in (0, STEPS))
    share, error = (float(risk.value) - last) / (first - last), float(risk.standard_error) / (first - last)
    assert noisy.memorization.source == "estimated population risk"
    assert noisy.memorization.share == pytest.approx(share, rel=1e-4)
    assert f"{100 * share:.0f} ± {100 * error:.0f}% of the drop in training loss" in report_page(noisy)


@pytest.fixture(scope="module")
def doubted(found):
    """The same with a risk that is not valid, so that the test set has to do."""
    risk = replace(found.risk, valid=False, reason="deletions differ. Use population_risk(run, retrain_budget=10).")
    with pytest.raises(DataError) as caught:
        memorization(found.curves, risk)
    readings = [*found.readings[:-1], replace(found.readings[-1], risk=risk)]
    left_out = {**found.left_out, "memorization": str(caught.value)}
    return replace(found, risk=risk, readings=readings, memorization=None, left_out=left_out)


def test_a_risk_that_may_not_be_believed_is_said_to_be_and_not_used(doubted):
    page = html.unescape(report_page(doubted))
    reason = doubted.risk.reason.replace("population_risk(run, retrain_budget=10)", "--retrain 10").removesuffix(".")
    assert f"(not valid: {reason})" in page
    assert 'class="dot hollow' in page


def test_trainings_may_be_spent_on_the_risk(folder):
    found = analyze(Run.load(folder), budget=1e-4, retrain=10)  # no time for anything else
    assert {r.risk.method for r in found.readings} == {"k_fold"}
    assert found.risk.valid
    assert found.memorization.share == pytest.approx(found.risk.gap / (found.curves.train[0] - found.curves.train[-1]))
    with pytest.raises(HyperparameterError, match="0, or at least 3 trainings, got 2"):
        analyze(found.run, retrain=2)


def test_a_test_set_that_is_easier_says_nothing_about_memorization(doubted):
    assert doubted.curves.test[-1] < doubted.curves.train[-1]  # its labels are right
    why = doubted.left_out["memorization"]
    assert "not drawn from the same distribution as the training set" in why
    assert f"How much was memorized is not known: {why}" in html.unescape(report_page(doubted))


def test_memorization_falls_back_on_the_test_set():
    run = train(chance(), partial(torch.optim.SGD, lr=0.5), 30, progress=False)
    found = analyze(run, budget=1e-4)
    assert found.readings is None
    assert re.search(
        r"about \d+ s .* budget of 0.0001 s; use budget=\d+, or poprisk report RUN --budget \d+$",
        found.left_out["risk"],
    )
    inputs, labels = run.problem.inputs, run.problem.targets
    first, last = (F.cross_entropy(outputs_at(run, k, inputs), labels).item() for k in (0, 30))
    tested = F.cross_entropy(outputs_at(run, 30, run.problem.test[0]), run.problem.test[1]).item()
    assert found.memorization.source == "test set"
    assert found.memorization.share == pytest.approx((tested - last) / (first - last), rel=1e-5)
    assert found.memorization.share > 2 * found.memorization.standard_error
    page = report_page(found)
    assert "poprisk report RUN --budget" in page
    assert "according to the test set, assuming that it is drawn from the same distribution as the training set" in page


@pytest.mark.parametrize("seconds", [0.0, 50.0])  # that a Jacobian of some examples takes
def test_spectra_are_left_out_where_forming_jacobians_takes_too_long(monkeypatch, found, seconds):
    ticks = count()
    monkeypatch.setattr(operators, "process_time", lambda: seconds * next(ticks))
    window = operators.window_facts(found.run, budget=30.0)
    assert window.readings.steps == found.window.readings.steps
    assert next(ticks) == 2  # one example is enough
    assert (window.dense is None) == (seconds > 30)
    page = html.unescape(report_page(replace(found, window=window)))
    said = re.search(r"the spectra would take about (\d+) s on one CPU core, over the budget of 30 s", page)
    assert (said is None) == (seconds == 0)


def test_a_pilot_takes_more_examples_until_the_estimate_is_known(monkeypatch, found):
    sizes, jacobian = [], FlatModel.output_jacobian
    monkeypatch.setattr(
        FlatModel, "output_jacobian", lambda self, w, x: (sizes.append(len(x)), jacobian(self, w, x))[1]
    )
    monkeypatch.setattr(operators, "process_time", lambda: 0.01 * len(sizes))  # of however many examples
    n = found.run.num_examples
    assert operators._pilot_seconds(found.run, 1e9) > operators._pilot_seconds(found.run, 1e-9)
    assert sizes == [1, *(k for k in (1, 4, 16, 64, 256) if k < n), n]


def test_an_analysis_shows_itself_in_a_few_lines(found):
    shown = repr(found)
    assert shown.splitlines()[0] == f"<Analysis of {found.run!r}>"
    assert "found: curves, readings, risk" in shown
    assert len(shown.splitlines()) == 2 + len(found.left_out)
    left = replace(found, gates=None, left_out={"gates": "the optimizer has no gate"})
    assert repr(left).endswith("\nleft out: gates (the optimizer has no gate)")


@pytest.mark.parametrize("every", [1, 8])
def test_gates_are_those_that_the_training_had(every):
    problem = pictures()
    module = problem.module()
    optimizer = PopRiskAdamW(
        [
            {"params": module[0].parameters()},
            {"params": module[2].parameters(), "lr": 3e-3, "gate": Gate("soft", alpha=0.5)},
        ]
    )
    live = {}
    generator = torch.Generator().manual_seed(5)
    with Recorder(None, module, optimizer, problem=problem, every=every) as recorder:
        for k in range(20):
            batch = torch.randperm(len(problem), generator=generator)[:7]
            with recorder.step(batch):
                optimizer.zero_grad()
                F.cross_entropy(module(problem.inputs[batch]), problem.targets[batch]).backward()
                live[k] = optimizer.overall_diagnostics().to_floats()
                live[k]["last bias"] = optimizer.gates()[module[2].bias].mean().item() if k else 0.0
                optimizer.step()
    curve = gate_curve(recorder.run, moments=5)
    assert len(curve.steps) == 5
    assert curve.steps[-1] == 19
    for place, k in enumerate(curve.steps):
        for name, values in curve.overall.items():
            assert values[place] == pytest.approx(live[k][name], rel=1e-4), name
        assert curve.layers["2.bias"]["mean_gate"][place] == pytest.approx(live[k]["last bias"], rel=1e-4, abs=1e-7)


def test_cells_add_up_to_the_error_of_the_network(noisy):
    run = noisy.run
    inputs, clean = run.problem.test
    error = (outputs_at(run, STEPS, inputs) - clean).square().sum().item() / len(clean)
    assert sum(noisy.window.dense.cells.values()) == pytest.approx(error, rel=1e-4)
    moved = (outputs_at(run, STEPS, inputs) - outputs_at(run, 0, inputs)).flatten().tolist()
    assert noisy.window.displacement == pytest.approx(moved, rel=1e-3, abs=1e-5)
    assert noisy.window.predicted == pytest.approx(moved, rel=1e-3, abs=1e-5)
    page = report_page(noisy)
    assert "label noise in the signal channel" in page
    assert 'id="cells"' in page


def test_neighbours_are_the_most_influential(found):
    example, near = next(iter(found.neighbours.items()))
    problem = found.run.problem
    row = influence_on(found.run, problem.inputs[example : example + 1], problem.targets[example : example + 1])[0]
    others = [(float(v), j) for j, v in enumerate(row) if j != example]
    assert [j for j, _ in near.supports] == [j for _, j in sorted(others, reverse=True)[:3]]
    assert [j for j, _ in near.opposes] == [j for _, j in sorted(others)[:3]]


def test_the_most_suspicious_are_the_wrong_ones(found):
    assert {row["example"] for row in found.table.worst(WRONG)} == set(range(WRONG))


def test_page_needs_nothing_else_and_is_small(found):
    page = report_page(found)
    assert len(page.encode()) < 300_000
    for outside in ("http:", "https:", "//cdn", 'src="', "@import", "fetch(", "XMLHttpRequest", "url("):
        assert outside not in page
    assert all(target.startswith("#") or target == "data:," for target in re.findall(r'href="([^"]*)"', page))
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    targets = set(re.findall(r'href="#([^"]*)"', page))
    assert targets <= set(re.findall(r'id="([^"]*)"', page))


def test_every_section_has_a_chart_or_is_named_at_the_end_with_how_to_get_it(found):
    page = report_page(found)
    keys = ["curves", "gates", "operators", "cells", "drift", "displacement", "kernel"]
    for key in keys:
        body = re.search(rf'<section[^>]* id="{key}">(.*?)</section>', page, re.S).group(1)
        points = [int(n) for n in re.findall(r'data-points="(\d+)"', body)]
        assert points
        assert all(points)
        assert key == "curves" or 'class="meaning"' in body
    order = re.findall(r'<(?:section|details) class="[^"]*" id="([^"]*)"', page)
    assert order == ["verdict", "summary", "examples", "curves", *keys[2:6], "gates", "kernel", "again"]


def test_a_section_without_a_chart_is_named_at_the_end_with_how_to_get_it(found):
    without = replace(found, gates=None, left_out={"gates": "the optimizer has no gate; train with PopRiskAdamW"})
    page = report_page(without)
    missing = re.search(r'id="missing">(.*?)</details>', page, re.S).group(1)
    assert "Not on this page: Gate and signal-to-noise. Why, and how to get them" in missing
    assert "Not available: the optimizer has no gate" in missing
    assert re.findall(r'<(?:section|details) class="[^"]*" id="([^"]*)"', page)[-2:] == ["missing", "again"]


def test_contents_can_be_left_out(noisy, found):
    assert "secret point" in report_page(noisy)
    without = report_page(noisy, examples=False)
    assert "secret point" not in without
    assert "given_target" not in data_of(without)
    assert "the contents of the examples were left out" in without
    pictures_block = json.loads(data_of(report_page(found)))["pictures"]
    assert len(pictures_block) == len(found.run.problem)
    assert json.loads(data_of(report_page(found, examples=False)))["pictures"] == {}


def data_of(page):
    return re.search(r'id="data">(.*?)</script>', page, re.S).group(1)


def test_names_and_texts_cannot_leave_their_place(noisy):
    page = report_page(noisy)
    assert HOSTILE not in page
    assert "<" not in data_of(page)
    assert HOSTILE in json.loads(data_of(page))["texts"]["0"]
    assert f"<h1>{html.escape(f'curve {HOSTILE}')}</h1>" in page


def test_pictures_are_the_inputs():
    image = pytest.importorskip("PIL.Image")
    problem = pictures()
    shown = example_contents(problem, [3])
    pixels = np.asarray(image.open(io.BytesIO(base64.b64decode(shown.pictures[3]))))
    np.testing.assert_array_equal(pixels, (problem.inputs[3].reshape(8, 8) * 255).round().numpy().astype(np.uint8))
    assert "drawn as 8 × 8 pixels" in shown.note
    colours = torch.arange(2 * 3 * 3).reshape(2, 3, 3).to(torch.uint8)
    np.testing.assert_array_equal(np.asarray(image.open(io.BytesIO(png(colours)))), colours.numpy())


def test_large_pictures_are_made_small_and_stop_where_the_page_is_full():
    image = pytest.importorskip("PIL.Image")
    x = torch.randn(6, 3, 100, 60)
    problem = Problem(torch.nn.Flatten, "squared", x, x.flatten(1))
    shown = example_contents(problem, [5, 0, 1], most_bytes=10)
    assert list(shown.pictures) == [5]
    assert image.open(io.BytesIO(base64.b64decode(shown.pictures[5]))).size == (60, 100)
    small = example_contents(problem, [5, 0, 1, 2], most_bytes=70_000)  # half of it is for large ones
    sizes = [image.open(io.BytesIO(base64.b64decode(each))).size for each in small.pictures.values()]
    assert sizes == [(60, 100), (60, 100), (29, 48), (29, 48)]
    assert shown.note == "contents are shown for the first 1 of 3 examples"


def test_the_printed_call_trains_the_same_run(folder, tmp_path, monkeypatch):
    run = Run.load(folder)
    text = training_call(run)
    assert "Problem.build('report_problems:pictures')" in text
    monkeypatch.chdir(tmp_path)
    exec(text, {})
    again = Run.load(tmp_path / "again")
    assert torch.equal(again.weights(STEPS), run.weights(STEPS))


def test_a_run_without_its_problem_still_has_its_losses(tmp_path):
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(6, 2)
    with Recorder(tmp_path / "run", module, optimizer, examples=6, loss="squared") as recorder:
        for _ in range(4):
            with recorder.step(torch.arange(6)) as step:
                optimizer.zero_grad()
                step.loss = module(x).square().mean()
                step.loss.backward()
                optimizer.step()
    found = analyze(Run.load(tmp_path / "run"))
    page = report_page(found)
    assert found.table is None
    assert "loss of each batch" in page
    assert page.count("--problem script.py:function") >= 5
    assert page.count("see below") == 3


def test_a_network_with_batch_statistics_is_analyzed_in_its_evaluation_form():
    x, y = torch.randn(24, 3), torch.arange(24) % 2
    make = lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))  # noqa: E731
    run = train(Problem(make, "cross_entropy", x, y, test=(x, y)), PopRiskAdamW, 6, batch_size=8, progress=False)
    found = analyze(run)
    assert found.table is not None
    assert found.risk.method == "leverage"
    assert set(found.left_out) == {"neighbours"}
    assert "this run cannot be analyzed exactly" in found.left_out["neighbours"]
    said = found.window.form
    assert "batch normalization has the statistics of 24 fixed training examples" in said
    assert found.window.predicted == pytest.approx(found.window.displacement, abs=1e-4)
    assert "batch statistics were recorded at checkpoints only" in found.curves.notes[0]
    assert found.curves.test[-1] == pytest.approx(found.curves.train[-1], rel=1e-6)  # the same examples
    assert not any("has no test set" in why for why in found.left_out.values())
    page = html.unescape(report_page(found))
    assert page.count(said) == 1
    assert page.count("of the network in its evaluation form") == 3
    assert "Not on this page" not in page


def test_command_writes_one_file(folder, capsys, tmp_path):
    target = tmp_path / "new" / "page.html"
    code, out, err = call(capsys, "report", folder, "-o", target, "--budget", 0.2, "--no-examples")
    assert code == 0, err
    assert out == f"Wrote {target}: open it in a browser\n"
    assert [p.name for p in target.parent.iterdir()] == ["page.html"]
    page = html.unescape(target.read_text(encoding="utf-8"))
    assert f"poprisk report {folder} --output {target} --budget 0.2 --no-examples" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["RUN", "--budget", "0"], "expected a number from 0.1"),
        (["RUN", "--budget", "nan"], "expected a number"),
        (["RUN", "--problem", "nonsense"], "import path"),
        (["RUN", "--clean", "words.npz"], "must be a .npz file with the arrays train and test"),
        (["RUN", "--clean", "one.npz"], "must be a .npz file with the arrays train and test"),
        (["RUN", "--clean", "both.npz"], "clean train targets must be of shape [28], got [3]"),
        (["RUN", "-o", "."], "the output must be a file"),
    ],
)
def test_wrong_input_is_one_line_and_nothing_is_written(arguments, message, folder, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.npz").write_text("not an archive")
    np.savez(tmp_path / "one.npz", train=np.ones(3))
    np.savez(tmp_path / "both.npz", train=np.ones(3), test=np.ones(3))
    before = sorted(tmp_path.iterdir())
    arguments = [str(folder) if a == "RUN" else a for a in arguments]
    code, out, err = call(capsys, "report", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err
    assert sorted(tmp_path.iterdir()) == before


def test_wrong_arguments_are_refused(noisy):
    run = noisy.run
    with pytest.raises(HyperparameterError, match="positive number of seconds"):
        analyze(run, budget=-1.0)
    with pytest.raises(DataError, match=r"clean test targets must be of shape \[16, 1\]"):
        analyze(run, clean=CleanTargets(run.problem.targets, torch.ones(3, 1)))


def test_nothing_is_left_behind_if_the_analysis_fails(tmp_path):
    problem = pictures()
    run = train(problem, PopRiskAdamW, 2, progress=False)
    with pytest.raises(HyperparameterError):
        write_report(run, tmp_path / "page.html", budget=0.0)
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_written_from_an_analysis_or_a_run(tmp_path):
    path = tmp_path / "new" / "page.html"
    run = train(chance(), partial(torch.optim.SGD, lr=0.5), 4, progress=False)
    found = analyze(run, budget=30.0, progress=False)  # near a smaller one, times that are measured decide
    assert write_report(found, path, command="c") == path
    assert path.read_text(encoding="utf-8") == report_page(found, command="c")
    again = write_report(run, tmp_path / "again.html", budget=30.0, progress=False, command="c")
    assert again.read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.html", "new"]  # no temporary files
    with pytest.raises(TypeError, match="budget: pass these to analyze"):
        write_report(found, path, budget=3.0)


def test_a_damaged_part_is_one_line_where_it_may_have_been_kept(found, monkeypatch):
    damaged = replace(found, window=replace(found.window, readings=replace(found.window.readings, directions=[1.0])))
    with pytest.raises(DataError, match=r"cannot be drawn \(not enough values.*--again; if that does not help"):
        report_page(damaged)
    monkeypatch.setattr(Run, "path", None)  # in memory nothing is kept: this is our own mistake
    with pytest.raises(ValueError, match="not enough values"):
        report_page(damaged)


def test_drift_and_diffusion_that_nearly_cancel_are_not_read_as_effects(found):
    window = found.window
    moved = float(np.hypot.reduce(window.displacement))
    sums = {name: [size * moved] * len(window.drift.steps) for name, size in (("drift", 9.0), ("diffusion", 8.0))}
    one, two = (replace(window.drift, parts=window.drift.parts | parts) for parts in (sums, {"drift": sums["drift"]}))
    meanings = [drift_section(replace(found, window=replace(window, drift=each))).meaning for each in (one, two)]
    assert meanings[0].startswith("Do not read drift and diffusion separately here")
    assert meanings[1].startswith("Where diffusion grows like drift")


@pytest.mark.parametrize(
    "term",
    [
        "population risk: the expected loss on new data",
        "The gate is a factor",
        "The part that training uses up is the signal channel",
        "the part that it leaves is the reservoir",
    ],
)
def test_the_page_defines_its_terms(found, term):
    assert term in report_page(found)


@pytest.fixture(scope="module")
def kept():
    problem, adamw = Problem.build(pictures, n=60), partial(torch.optim.AdamW, lr=0.01)
    return analyze(train(problem, adamw, 60, batch_size=8, hold_back=0.25, progress=False), budget=1.0, progress=False)


def test_held_back_losses_are_drawn_with_the_kept_moment(kept, tmp_path):
    risk, (line,) = kept.run.kept.risk, kept.held_back.lines
    assert line.losses == pytest.approx([float(each.losses.double().mean()) for each in kept.run.kept.moments])
    assert line.accuracy == pytest.approx([1 - float(each.scores.mean()) for each in kept.run.kept.moments])
    page = write_report(kept, tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count(f"kept: step {risk.step}<") == 2  # in the chart of losses, and in that of accuracies
    assert "held-back loss, mean over the last 20% of the steps" in page
    assert "held-back accuracy, mean over the last 20% of the steps" in page
    assert "15 examples were held back from training. It ended with the weights of step" in page
    assert f"among {risk.measured} measurements" in page
    assert ", hold_back=0.25, tail=0.2)" in training_call(kept.run)


def test_a_page_without_held_back_examples_does_not_speak_of_them(noisy, tmp_path):
    assert noisy.held_back is None
    assert "held back" not in write_report(noisy, tmp_path / "report.html").read_text(encoding="utf-8")


# Sorts, filters and looks, as a hand would, and notes what the page shows afterwards.
PLAY = """(async () => {
document.getElementById("more").click();
const shown = () => Array.from(document.querySelectorAll("#body tr"), row => Number(row.dataset.example));
const buttons = () => Array.from(document.querySelectorAll("#head button"));
const more = () => document.getElementById("more").click();
const pressed = title => { buttons().find(b => b.title === title).click(); more(); };
const changed = (id, value) => {
  const node = document.getElementById(id);
  if (node.type === "checkbox") node.checked = value; else node.value = value;
  node.dispatchEvent(new Event("input"));
  more();
};
const notes = {first: shown()};
pressed("position in the training set"); notes.downwards = shown();
pressed("position in the training set"); notes.upwards = shown();
notes.sorted = document.querySelector("#head [aria-sort=ascending]").textContent;
if (document.getElementById("given")) { changed("given", "1"); notes.given = shown(); changed("given", ""); }
changed("suspects", true); notes.suspects = shown(); changed("suspects", false);
changed("find", "7"); notes.found = shown(); changed("find", "");
notes.all = shown(); notes.count = document.getElementById("count").textContent;
await Promise.all(Array.from(document.querySelectorAll("#body img.thumb"), i => i.decode()));
notes.pictures = Array.from(document.querySelectorAll("#body img.thumb"), i => i.complete && i.naturalWidth);
notes.charts = Array.from(document.querySelectorAll(".chart"), c => {
  const box = c.querySelector("svg").getBoundingClientRect();
  return [Number(c.dataset.points), box.width, box.height];
});
notes.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
return notes;
})()"""


def played(chromium, page, path):
    path.write_text(page, encoding="utf-8")
    shown = chromium.open(path)
    notes = shown.run(PLAY)
    assert shown.problems == []
    return notes


def test_table_sorts_and_filters_in_a_browser(chromium, found, tmp_path):
    notes = played(chromium, report_page(found), tmp_path / "page.html")
    table, n = found.table, len(found.table)
    assert notes["first"] == table.order().tolist()
    assert notes["downwards"] == list(range(n))[::-1]
    assert notes["upwards"] == notes["all"] == list(range(n))
    assert notes["sorted"].startswith("#")
    assert notes["given"] == [i for i, label in enumerate(table["given_label"].tolist()) if label == 1]
    assert notes["suspects"] == table.is_suspect.nonzero().squeeze(1).tolist()
    assert notes["found"] == [7]
    assert notes["count"] == f"{n} of {n} examples, {n} shown."
    assert notes["pictures"] == [8] * n
    assert len(notes["charts"]) >= 9, notes["charts"]
    assert all(points > 0 and width > 200 and height > 50 for points, width, height in notes["charts"])
    assert notes["wide"] <= 0  # the table scrolls by itself, not the page


def test_texts_are_shown_as_texts_in_a_browser(chromium, noisy, tmp_path):
    notes = played(chromium, report_page(noisy), tmp_path / "page.html")
    assert notes["first"] == noisy.table.order().tolist()
    assert notes["found"] == [i for i in range(24) if i == 7 or "7" in str(i)]
    assert "given" not in notes
    assert all(points > 0 for points, _, _ in notes["charts"])


def test_a_curve_without_a_value_at_each_step_is_refused():
    from poprisk.report._drawing.svg_chart import Line

    with pytest.raises(DataError, match="needs one value at each step: compute the analysis again"):
        Line("drift", [0, 1, 2], [0.5, 0.6])
