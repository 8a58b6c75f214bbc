"""At home in a notebook: what an object shows there, and a bar that is replaced instead of a flood of lines."""

import html
import os
import re
import shutil
import subprocess
import sys
import types
from functools import partial
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from poprisk import Estimate, Problem, Window, train
from poprisk._core.html import bar, card, sparkline, table
from poprisk._core.linalg.matrices import diagonal, from_dense
from poprisk._core.notebook import in_notebook
from poprisk._core.progress_faces import PERIOD, Notebook, Row
from poprisk.operators._kernels.products import kernel_operator
from poprisk.risk._audit.run_audit import audit
from poprisk.risk._verdict import RiskEstimate
from poprisk.runs import _run as run_module
from poprisk.runs._run import Run

HOSTILE = '<script>alert("x")</script> & \'"'
VOID = {"path", "polyline", "br"}


class Balanced(HTMLParser):
    """Tags close in the order in which they opened; notes tags, attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not {name for name, _ in attrs} & {"href", "src", "onclick", "onload"}
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(text):
    reader = Balanced()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert reader.tags <= {
        "div",
        "strong",
        "table",
        "thead",
        "tbody",
        "tr",
        "td",
        "th",
        "svg",
        "title",
        "polyline",
        "span",
    }
    for outside in ("http", "url(", "@import", "<script", "<style", "background:#", "color:#"):
        assert outside not in text
    return " ".join(reader.text)


@pytest.fixture(scope="module")
def run():
    inputs = torch.eye(4, dtype=torch.float64).repeat(4, 1)
    labels = torch.arange(4).repeat(4)
    labels[7] = 0
    size = {"in_features": 4, "out_features": 4}
    problem = Problem(
        nn.Linear,
        "cross_entropy",
        inputs,
        labels,
        arguments=size,
        name=f"four {HOSTILE}",
        test=(inputs[:4], labels[:4]),
    )
    return train(problem, partial(torch.optim.SGD, lr=1.0), 6, dtype=torch.float64, progress=False)


@pytest.fixture(scope="module")
def shown(run):
    """Everything a person holds, by name."""
    window = Window.of_run(run)
    A = from_dense(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    return {
        "run": run,
        "estimate": Estimate(0.41234, 0.0312, cost=30),
        "doubtful": Estimate(3.0, float("nan"), valid=False, reason=f"a single probe {HOSTILE}"),
        "tensor": Estimate(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.3])),
        "risk": RiskEstimate(0.5, 0.1, target="this model", method="exclusion", training_loss=0.25),
        "operator": 2 * A @ A.T - diagonal(torch.tensor([10.0, 2.0])),
        "kernel": kernel_operator(run.model(), run.weights(0), run.problem.inputs),
        "window": window,
        "operators": window.dense_operators(),
        "audit": audit(run, tier="any", progress=False),
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("run", ["Run: four <script>", "6", "16", "SGD, initial lr 1", "every step", "in memory", "possible", "→"]),
        ("estimate", ["Estimate", "0.412 ± 0.031", "valid", "30"]),
        ("doubtful", ["not valid: a single probe <script>", "± nan"]),
        ("tensor", ["tensor of shape [2] with mean 1.5"]),
        ("risk", ["RiskEstimate", "this model", "exclusion", "training loss", "0.25"]),
        ("operator", ["Sum", "2 × 2", "float32 on cpu", "symmetric", "<Chain 2x2 float32 on cpu> + <Scaled"]),
        ("kernel", ["64 × 64", "float64", "yes"]),
        ("window", ["Window", "0 … 6", "16, 64 outputs in all", "16 × 64"]),
        ("operators", ["Operators", "64 × 64", "16 × 64", "first-order dissipation", "displacement missed by"]),
        ("audit", ["Audit of training labels", "wrong labels", "suspicion", "given_label", "10 most suspicious of 16"]),
    ],
)
def test_what_is_shown(shown, name, words):
    text = shown[name]._repr_html_()
    assert len(text) < 20_000
    said = parsed(text)
    for word in words:
        assert word in said, said
    assert HOSTILE not in text


def test_the_audit_shows_the_worst_first(shown):
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", shown["audit"]._repr_html_().split("<thead>")[1], re.S)[1:]
    first = [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", rows[0], re.S)]
    assert first[0] == str(shown["audit"].worst(1)[0]["example"]) == "7"
    assert len(rows) == 10


def test_plain_text_stays_short(shown):
    for thing in shown.values():
        assert len(repr(thing)) < 500


def test_a_run_whose_files_are_damaged_or_large_is_still_shown(run, tmp_path, monkeypatch):
    saved = run.save(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_QUICK", 10)
        assert "run.losses reads them" in parsed(Run.load(saved.path)._repr_html_())
    file = next((tmp_path / "run").glob("segment-*"))
    file.write_bytes(file.read_bytes()[:-3] + b"xyz")
    assert "the losses cannot be read" in parsed(Run.load(saved.path)._repr_html_())


def test_pieces():
    assert parsed(card("a", {"b": None, "c": ""})) == "a"
    assert sparkline([1.0, float("nan")], "x") == ""
    assert parsed(sparkline([2.0, 2.0, 2.0], HOSTILE)) == HOSTILE
    assert sparkline(list(range(10_000)), "x").count(",") <= 200
    assert "width:100.0%" in bar(7.0, "over")
    assert parsed(table({HOSTILE: HOSTILE}, [[HOSTILE]])).count(HOSTILE) == 2


def test_no_notebook_here():
    assert not in_notebook()


class Handle:
    def __init__(self, log, content):
        self.log = log
        log.append(("display", content.data))

    def update(self, content):
        self.log.append(("update", content.data))


@pytest.fixture
def kernel(monkeypatch):
    """IPython's two names as a kernel has them, with a log of what was displayed."""
    log = []
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    shell = types.SimpleNamespace(kernel=object())
    ipython.get_ipython = lambda: shell
    display.HTML = lambda data: types.SimpleNamespace(data=data)
    display.display = lambda content, *, display_id: Handle(log, content)
    ipython.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return types.SimpleNamespace(log=log, shell=shell)


def test_training_in_a_notebook_is_one_display_and_no_lines(kernel, run, capsys):
    assert in_notebook()
    train(run.problem, partial(torch.optim.SGD, lr=1.0), 200)
    kinds = [kind for kind, _ in kernel.log]
    assert kinds.count("display") == 1
    assert 1 <= kinds.count("update") <= 40  # four a second at most, and not one for each of the steps
    last = parsed(kernel.log[-1][1])
    assert "200 of 200, loss " in last
    assert "left" not in last
    assert "&lt;script&gt;" in kernel.log[-1][1]
    assert capsys.readouterr() == ("", "")


def test_the_audit_shows_its_bars_there_too(kernel, run, capsys):
    audit(run, tier="any")
    assert kernel.log[0][0] == "display"
    assert "audit: " in parsed(kernel.log[-1][1])
    assert capsys.readouterr() == ("", "")


def test_a_bar_that_breaks_off_says_so(kernel, run):
    def bad(k):
        if k == 5:
            raise KeyError("enough")
        return 1.0

    with pytest.raises(KeyError):
        train(run.problem, partial(torch.optim.SGD, lr=1.0), 200, schedule=bad)
    assert "stopped" in parsed(kernel.log[-1][1])


def test_time_left_and_throttle(kernel):
    now = [0.0]
    face, row = Notebook(lambda: now[0]), Row("work", 100, 0, 0, 0.0)
    face.add(row, "")
    now[0], row.done = PERIOD / 2, 10
    assert not face.is_due(row)
    row.done = 100
    assert face.is_due(row)
    now[0], row.done, row.words = 5.0, 10, "loss 1"
    assert face.is_due(row)
    face.show(row)
    assert "work: 10 of 100, loss 1, about 45 s left" in parsed(kernel.log[-1][1])
    face.remove(row, finished=True, nested=False)
    assert "100 of 100" in parsed(kernel.log[-1][1])


def test_ipython_in_a_terminal_is_no_notebook(kernel):
    del kernel.shell.kernel
    assert not in_notebook()


def test_a_browser_shows_it_in_light_and_dark(shown, tmp_path):
    """Nothing is wider than the page, nothing has a background, and text has the page's colour."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((path for name in names if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("needs Chromium on the PATH")
    body = "".join(f"<p>{thing._repr_html_()}</p>" for thing in shown.values()) + bar(
        0.4, "training: 40 of 100, loss 0.3"
    )
    look = """<script>
    const found = {count: document.querySelectorAll(".poprisk").length, odd: [], rows: 0};
    for (const node of document.querySelectorAll(".poprisk, .poprisk *")) {
      const style = getComputedStyle(node);
      const painted = node.tagName == "SPAN" && style.opacity == "0.55";  // the bar's own filling
      if (style.color != "rgb(1, 2, 3)") found.odd.push("colour " + node.tagName);
      if (!painted && style.backgroundColor != "rgba(0, 0, 0, 0)") found.odd.push("background " + node.tagName);
    }
    found.rows = document.querySelectorAll(".poprisk tr").length;
    found.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    const out = document.createElement("pre"); out.id = "found"; out.textContent = JSON.stringify(found);
    document.body.append(out);
    </script>"""
    zebra = (
        "<style>tr:nth-child(even) {background: #eee} table {color: #999; background: #fff}</style>"  # as Jupyter has
    )
    page = tmp_path / "page.html"
    page.write_text(
        f'<!doctype html><meta charset="utf-8">{zebra}<body style="color:rgb(1, 2, 3)">{body}{look}', encoding="utf-8"
    )
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=2000"]
    command = [program, *quiet, f"--user-data-dir={tmp_path / 'home'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=True, env={**os.environ, "HOME": str(tmp_path)}
    )
    found = html.unescape(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S).group(1))
    assert '"odd":[]' in found, found
    assert f'"count":{len(shown) + 1}' in found
    assert re.search(r'"wide":(0|-\d+)', found), found
