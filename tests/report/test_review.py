"""Review of labels by keys in a real browser, decisions read back, and a page that is legible wherever it is read."""

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from report_problems import HOSTILE, curve, pictures

from poprisk import cli
from poprisk.errors import DataError
from poprisk.report import Analysis, write_report
from poprisk.report._analysis.curves import LossCurves
from poprisk.risk import AuditTable, Decisions, Estimate, audit, run_id
from poprisk.runs import Problem, train

REVIEWED = 50


def analyzed(run):
    """An analysis of the examples and nothing else."""
    table = audit(run, tier="any", progress=False)
    curves = LossCurves([0, *table.moments], [1.0, *table.losses.mean(1).tolist()], None, None, None)
    return Analysis(run, 1.0, table=table, curves=curves, left_out={"risk": "not asked for"})


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    problem = Problem.build(pictures, n=120)
    path = tmp_path_factory.mktemp("review") / "run"
    return analyzed(train(problem, partial(torch.optim.SGD, lr=0.1), 20, batch_size=20, path=path, progress=False))


@pytest.fixture(scope="module")
def page(found, tmp_path_factory):
    return write_report(found, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def exported(chromium, found, page):
    """Fifty labels reviewed by keys: the page afterwards, and the two files."""
    shown = chromium.open(page)
    for k in range(REVIEWED):
        shown.press("r" if k % 5 == 0 else "a")
    return shown, shown.download("export-json"), shown.download("export-csv")


def corrected(table):
    order, targets = table.order()[:REVIEWED], table.targets.clone()
    accepted = order[torch.arange(REVIEWED) % 5 != 0]
    targets[accepted] = table["suggested_label"][accepted]
    return targets


def test_fifty_labels_by_keys_come_back_as_corrected_targets(exported, found, capsys, tmp_path):
    shown, file, table_file = exported
    wanted = corrected(found.table)
    assert (wanted != found.table.targets).sum() == 40
    assert torch.equal(found.table.cleaned_targets(file), wanted)
    assert torch.equal(found.table.cleaned_targets(str(table_file)), wanted)
    assert Decisions.load(file) == Decisions.load(table_file)
    assert shown.run("get('progress').textContent").startswith("50 decided: 40 changed, 10 kept.")
    output = tmp_path / "new" / "corrected.npy"
    with pytest.raises(SystemExit) as caught:
        cli.main(["audit", str(found.run.path), "--apply", str(file), "--output", str(output)])
    assert caught.value.code == 0
    assert "Changed 40 of 120 labels, kept 10" in capsys.readouterr().out.replace("\n", " ")
    np.testing.assert_array_equal(np.load(output), wanted.numpy())


def test_no_request_leaves_the_page_and_nothing_can_be_sent(exported, chromium, page):
    shown, *_ = exported
    assert [url for url in shown.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert shown.problems == []
    other = chromium.open(page)
    assert other.run("fetch('https://example.org/').then(() => 'sent', () => 'refused')") == "refused"
    added = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)"
    assert other.run(f"(() => {{ {added}; return window.ran || 0 }})()") == 0


def test_decisions_stay_and_can_be_undone(exported, chromium, found, page):
    again = chromium.open(page)  # in another tab of the same browser
    assert again.run("get('progress').textContent").startswith("50 decided")
    first = int(found.table.order()[0])
    assert f"Example {first}, 1 of 120" in again.run("get('which').textContent")
    assert "kept as" in again.run("get('which').textContent")
    again.press("u", "ArrowRight", "j", "k", "z")
    assert again.run("get('progress').textContent").startswith("49 decided: 40 changed, 9 kept.")
    second = int(found.table.order()[1])
    assert f"Example {second}, 2 of 120" in again.run("get('which').textContent")
    assert again.run("get('zoom').getAttribute('aria-pressed')") == "true"
    again.run("show(listed[100])")
    again.press("a", "u")  # the next example is shown by now: the latest decision is undone
    assert again.run("get('progress').textContent").startswith("49 decided")
    assert "101 of 120" in again.run("get('which').textContent")
    again.run("get('find').focus()")
    again.press("r")  # in the search field, a letter is a letter
    assert again.run("get('progress').textContent").startswith("49 decided")
    assert again.run("get('find').value") == "r"
    again.run("localStorage.clear()")


def test_another_label_a_search_and_the_confusion_of_labels(chromium, found, page):
    shown = chromium.open(page)
    shown.run("localStorage.clear()")
    shown.go(page)
    suspects = found.table.is_suspect
    cells = shown.run("Array.from(document.querySelectorAll('#matrix button'), b => [b.title, Number(b.textContent)])")
    assert sum(count for _, count in cells) == int(suspects.sum())
    shown.run("document.querySelector('#matrix button').click()")
    given, suggested = map(int, re.search(r"given (\d), suggested (\d)", cells[0][0]).groups())
    rows = suspects & (found.table["given_label"] == given) & (found.table["suggested_label"] == suggested)
    assert shown.run("listed.length") == int(rows.sum()) == cells[0][1]
    shown.run("for (const id of ['given', 'suggested']) get(id).value = ''; get('suspects').checked = false; choose()")
    shown.run("get('other').value = '1'; get('other').dispatchEvent(new Event('change'))")
    example = int(found.table.order()[0])
    assert shown.run(f"decisions.get({example})") == 1
    shown.run("get('state').value = 'open'; get('state').dispatchEvent(new Event('input'))")
    assert shown.run("listed.length") == 119
    assert shown.run(
        "document.querySelectorAll('#head th[title]').length == document.querySelectorAll('#head th').length"
    )
    shown.run("localStorage.clear()")


@pytest.fixture(scope="module")
def scattered(found, tmp_path_factory):
    """A page with suspects that are not the most suspicious, and their number is not known."""
    table, columns = found.table, dict(found.table.columns)
    columns["is_suspect"] = torch.zeros(120, dtype=torch.bool)
    columns["is_suspect"][table.order("suspicion")[[0, 3, 40, 90]]] = True
    unsure = replace(table, columns=columns, wrong_labels=replace(table.wrong_labels, valid=False, reason="why"))
    path = write_report(replace(found, table=unsure), tmp_path_factory.mktemp("scattered") / "report.html")
    return path, table.order("suspicion")[[0, 3, 40, 90]].tolist()


def test_suspects_are_reviewed_first_and_counted_until_none_is_left(chromium, scattered):
    page, suspects = scattered
    shown = chromium.open(page)
    shown.run("localStorage.clear()")
    shown.go(page)
    words = "get('progress').textContent"
    assert shown.run("listed.slice(0, 4).map(row => row[AT.example])") == suspects
    assert shown.run("document.querySelectorAll('#head [aria-sort=descending]').length") == 0
    shown.press("a", "a", "r")
    assert shown.run(words) == "3 decided: 2 changed, 1 kept. 1 of 4 suspects left to decide."
    other = chromium.open(page)  # another tab of the same page goes on, and the first one sees it
    other.run("show(listed[3])")
    other.press("a")
    assert other.run(words) == "4 decided: 3 changed, 1 kept. All 4 suspects are decided."
    assert " · not a suspect" in other.run("get('which').textContent")
    shown.run(
        "new Promise(done => decisions.size === 4 ? done() : addEventListener('storage', () => setTimeout(done)))"
    )
    assert shown.run(words) == other.run(words)
    shown.run("localStorage.clear()")


def test_decided_examples_leave_a_list_of_open_ones(chromium, scattered):
    page, suspects = scattered
    shown = chromium.open(page)
    shown.run("localStorage.clear()")
    shown.go(page)
    shown.run("get('suspects').checked = true; get('state').value = 'open'; choose()")
    for left in (3, 2, 1):
        shown.press("a")
        assert shown.run("get('count').textContent").startswith(f"{left} of 120 examples")
        assert f", 1 of {left}" in shown.run("get('which').textContent")
        assert f" {left} of 4 suspects left" in shown.run("get('progress').textContent")
    shown.press("r")
    assert shown.run("[listed.length, decisions.size, get('review').hidden]") == [0, 4, True]
    shown.press("u")
    assert shown.run("listed.map(row => row[AT.example])") == [suspects[-1]]
    shown.run("localStorage.clear()")


def test_values_and_long_texts_are_reviewed_whole(chromium, tmp_path):
    long = " ".join(f"word{j}" for j in range(2000))
    run = train(curve(more=long), partial(torch.optim.SGD, lr=0.01), 8, progress=False)
    found = analyzed(run)
    shown = chromium.open(write_report(found, tmp_path / "page.html"))
    first = int(found.table.order()[0])
    assert shown.run("get('words').textContent") == f"secret point {first} {HOSTILE}{long}"
    shown.press("a")
    wanted = found.table.targets.clone()
    wanted[first] = found.table.suggested_targets[first]
    assert torch.equal(found.table.cleaned_targets(shown.download("export-json")), wanted)


# The contrast of each text with what is painted behind it, as a browser mixes colours.
CONTRAST = """(() => {
  const canvas = document.createElement("canvas"); canvas.width = canvas.height = 1;
  const paint = canvas.getContext("2d", {willReadFrequently: true}), seen = new Map(), low = [];
  const fill = colours => {
    const key = colours.join("|");
    if (!seen.has(key)) {
      for (const c of ["#fff", ...colours]) { paint.fillStyle = c; paint.fillRect(0, 0, 1, 1); }
      const [r, g, b] = paint.getImageData(0, 0, 1, 1).data;
      const part = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      seen.set(key, 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b));
    }
    return seen.get(key);
  };
  for (const d of document.querySelectorAll("details")) d.open = true;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const own = node.parentElement, box = own.getBoundingClientRect(), style = getComputedStyle(own);
    if (!node.textContent.trim() || !box.width || style.visibility !== "visible") continue;
    if (own.closest("script, title")) continue;
    const behind = [];
    for (let e = own; e; e = e.parentElement) behind.unshift(getComputedStyle(e).backgroundColor);
    const ink = own instanceof SVGElement ? style.fill : style.color;
    const a = fill(behind), b = fill([...behind, ink]), ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) low.push([node.textContent.trim().slice(0, 40), ink, ratio.toFixed(2)]);
  }
  return {low, colours: seen.size};
})()"""
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize("look", [{}, {"dark": True}, {"media": "print"}], ids=["light", "dark", "print"])
def test_texts_have_the_contrast_of_aa(chromium, page, look):
    shown = chromium.open(page, **look)
    found = shown.run(CONTRAST)
    assert found["low"] == []
    assert found["colours"] > 5  # it looked
    assert shown.run("getComputedStyle(get('review')).display == 'none'") == (look.get("media") == "print")


@pytest.mark.parametrize("width", [390, 900, 1600])
def test_the_page_fits_its_window(chromium, page, width):
    shown = chromium.open(page, width=width)
    shown.run("for (const d of document.querySelectorAll('details')) d.open = true")
    assert shown.run(WIDE) <= 0
    # The judgement, and what to do next, are on the first screen of a desk.
    assert width < 900 or shown.run("document.querySelector('.actions').getBoundingClientRect().top") < 700


def test_each_command_begins_at_the_left_where_lines_are_broken(chromium, page, tmp_path):
    commands = [
        "poprisk train task.py:make_task --labels decisions.json --output second",
        "poprisk compare first second",
    ]
    text = re.sub(r"(Then: <code class=.command.>)[^<]*", r"\1" + "\n".join(commands), page.read_text(encoding="utf-8"))
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    shown = chromium.open(tmp_path / "page.html", width=390)
    assert shown.run("document.querySelector('#then .command').innerText").split("\n") == commands
    rows = shown.run(
        "Array.from(document.querySelectorAll('#then .line'), e => Array.from(e.children, w => w.offsetLeft))"
    )
    assert len(rows) == 2
    assert all(left < min(rest) for left, *rest in rows)  # also than the first words of the lines that follow


def good():
    row = {"example": 3, "given": 0, "suggested": 1, "decided": 1}
    about = {
        "kind": "poprisk label decisions",
        "version": 1,
        "run": "a",
        "data": "",
        "examples": 5,
        "targets": "classes",
    }
    return {**about, "decisions": [row]}


def test_decisions_are_applied_to_labels_one_hot_rows_and_values():
    made = Decisions.from_value(good())
    assert made.apply(torch.tensor([0, 1, 1, 0, 1])).tolist() == [0, 1, 1, 1, 1]
    rows = torch.eye(2)[[0, 1, 1, 0, 1]]
    assert made.apply(rows).argmax(1).tolist() == [0, 1, 1, 1, 1]
    assert made.apply(torch.tensor([[0.0], [1.0], [1.0], [0.0], [1.0]])).flatten().tolist() == [0, 1, 1, 1, 1]
    value = good() | {"targets": "regression"}
    value["decisions"] = [{"example": 3, "given": 0.1, "suggested": 0.7, "decided": 0.7}]
    floats = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0], dtype=torch.float64)
    assert Decisions.from_value(value).apply(floats)[3] == 0.7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "pickle"}, "expected kind"),
        ({"version": 2}, "expected version 1, got 2"),
        ({"examples": "5"}, "examples must be a positive whole number"),
        ({"targets": "words"}, "targets must be classes or regression"),
        ({"run": 7}, "run and data must be texts"),
        ({"more": 1}, "the file must have kind, version"),
        ({"decisions": {}}, "decisions must be a list"),
        ({"decisions": [{"example": 3}]}, "a decision must have example, given"),
        ({"decisions": [3]}, "a decision must be an object"),
        ({"decisions": 2 * good()["decisions"]}, "an example is listed twice"),
        ({"decisions": [{**good()["decisions"][0], "example": 5}]}, "example must lie in 0 … 4, got 5"),
        ({"decisions": [{**good()["decisions"][0], "example": True}]}, "example must lie in 0 … 4, got True"),
        ({"decisions": [{**good()["decisions"][0], "decided": 1.5}]}, "decided must be a class, got 1.5"),
        ({"decisions": [{**good()["decisions"][0], "decided": "__import__('os')"}]}, "decided must be a class"),
        ({"decisions": [{**good()["decisions"][0], "given": -1}]}, "given must be a class, got -1"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_refused(change, message, tmp_path):
    (tmp_path / "decisions.json").write_text(json.dumps(good() | change))
    with pytest.raises(DataError, match=re.escape(message)):
        Decisions.load(tmp_path / "decisions.json")


def test_decisions_about_other_labels_are_refused(found, tmp_path):
    made = Decisions.from_value(good())
    with pytest.raises(DataError, match="for 5 examples, got 4 targets"):
        made.apply(torch.zeros(4))
    with pytest.raises(DataError, match="example 3 has label 1, but the decision is about 0"):
        made.apply(torch.ones(5))
    beyond = good()
    beyond["decisions"][0] |= {"decided": 7}
    with pytest.raises(DataError, match="7 is not a class, the last one is 1"):
        Decisions.from_value(beyond).apply(torch.tensor([0, 1, 1, 0, 1]))
    with pytest.raises(DataError, match="trained on other data"):
        made.check_is_of(found.run)
    for name, text in (("a.json", "{"), ("b.csv", "x,y\n1,2\n"), ("c.csv", ""), ("d.json", "NaN")):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match="is not a file of decisions"):
            Decisions.load(tmp_path / name)


def test_another_run_on_the_same_data_may_use_the_decisions(found, exported):
    _, file, _ = exported
    other = train(Problem.build(pictures, n=120), torch.optim.AdamW, 2, seed=3, progress=False)
    Decisions.load(file).check_is_of(other)
    assert Decisions.load(file).run == run_id(found.run) != run_id(other)


def linear(inputs):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(inputs, 10))


@pytest.mark.slow
def test_ten_thousand_examples_within_25_mb(chromium, tmp_path):
    n, generator = 10_000, torch.Generator().manual_seed(0)
    noise = torch.rand(n, 3, 32, 32, generator=generator)  # no picture takes more bytes
    labels = torch.randint(10, (n,), generator=generator)
    problem = Problem(linear, "cross_entropy", noise, labels, arguments={"inputs": 3 * 32 * 32})
    run = train(problem, torch.optim.SGD, 1, batch_size=10, progress=False)
    value = lambda: torch.rand(n, generator=generator)  # noqa: E731
    columns = {"example": torch.arange(n), "suspicion": value(), "is_suspect": labels == 0, "given_label": labels}
    columns |= {"suggested_label": (labels + 1) % 10, "loss": value(), "mean_loss": value(), "confidence": value()}
    table = AuditTable(columns, "classes", Estimate(n / 10, 3.0), (1,), value()[None], labels, (labels + 1) % 10)
    path = write_report(Analysis(run, 1.0, table=table), tmp_path / "page.html")
    assert path.stat().st_size < 25_000_000
    shown = chromium.open(path)
    assert shown.run("data.rows.length") == shown.run("Object.keys(data.pictures).length") == n
    shown.press("a", "r")
    assert shown.run("decisions.size") == 2
