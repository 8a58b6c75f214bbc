"""Nothing that a run names is imported when it is opened, unless the person said so or has run the same call here."""

import contextlib
import json
import sys

import pytest
import sent_runs
from cli_calls import call
from sent_runs import manifest_of, payloads, recorded, sent, sign

from poprisk import Run, analyze, audit, population_risk, refit, replay, write_report
from poprisk.errors import PopRiskError, RunError
from poprisk.jobs import JobPlan
from poprisk.operators import Window
from poprisk.report import KeptAnalysis

NAMES = [
    "system",
    "mkdir",
    "popen",
    "check call",
    "run path",
    "run module",
    "import module",
    "script in the run",
    "script beside",
    "absolute folder",
    "absolute script",
    "script through ..",
    "module in the path",
    "package in the path",
    "hub",
    "our own builder",
    "our own resolver",
    "open a file",
    "copy",
    "save",
]


def opened(path):
    return Run.load(path)


def jobs_open(path):
    JobPlan(path.parent / "jobs").train_kernel(path, 3)


PYTHON = {
    "problem": lambda p: opened(p).problem,
    "module": lambda p: opened(p).module(),
    "model": lambda p: opened(p).model(),
    "replay": lambda p: replay(opened(p)),
    "step": lambda p: opened(p).step(3),
    "weights": lambda p: opened(p).weights(3),
    "verify": lambda p: opened(p).verify(),
    "page": lambda p: opened(p)._repr_html_(),
    "save": lambda p: opened(p).save(p.parent / "copy").problem,
    "risk": lambda p: population_risk(opened(p)),
    "exclusion": lambda p: population_risk(opened(p), "exclusion"),
    "audit": lambda p: audit(opened(p), progress=False),
    "analyze": lambda p: analyze(opened(p), progress=False),
    "report": lambda p: write_report(opened(p), p.parent / "page.html", progress=False),
    "kept": lambda p: KeptAnalysis(opened(p)),
    "window": lambda p: Window.of_run(opened(p)),
    "refit": lambda p: refit(opened(p), lambda w: None),
    "jobs": jobs_open,
}
COMMANDS = {
    "analyze": ("analyze", "{run}", "--json"),
    "report": ("report", "{run}", "-o", "page.html"),
    "audit": ("audit", "{run}"),
    "jobs plan": ("jobs", "plan", "kernel", "jobs", "{run}"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def attacked(whole, tmp_path, monkeypatch):
    """A folder with everything the payloads need, first in the path and the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("evil_module", "evil_package"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    mark = tmp_path / "executed"
    made = payloads(tmp_path / "sent", mark)
    assert list(made) == NAMES
    script = (tmp_path / "sent/run/evil.py").read_text()
    monkeypatch.syspath_prepend(str(tmp_path / "sent"))

    def send(name):
        for file in (tmp_path / "sent/run").iterdir():
            file.unlink()
        (tmp_path / "sent/run").rmdir()
        run = sent(whole, tmp_path / "sent", made[name])
        (run / "evil.py").write_text(script)
        return run

    return send, mark


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_never_executes_in_python(attacked, name):
    send, mark = attacked
    run = send(name)
    for entry, use in PYTHON.items():
        with contextlib.suppress(PopRiskError):
            use(run)
        assert not mark.exists(), f"{entry} executed the payload"


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_never_executes_from_the_command_line(attacked, name, capsys):
    send, mark = attacked
    run = send(name)
    for words in COMMANDS.values():
        code, _, err = call(capsys, *(word.format(run=run) for word in words))
        assert not mark.exists(), f"{words[0]} executed the payload"
        assert code in (0, 2)
        assert "Traceback" not in err


def test_a_refusal_names_the_call_and_the_three_ways_out(attacked, capsys):
    send, mark = attacked
    run = send("system")
    with pytest.raises(RunError) as caught:
        Run.load(run).problem
    text = str(caught.value)
    assert f"os:system(command='touch {mark}')" in text
    for way in ("problem=", "trust=True", "--problem", "--trust"):
        assert way in text
    code, out, err = call(capsys, "audit", run)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "os:system" in err


def test_a_given_problem_opens_a_sent_run(attacked, whole):
    send, mark = attacked
    run = Run.load(send("system"), problem=sent_runs.problem())
    assert replay(run).exact
    assert not mark.exists()


def test_trusting_executes_and_says_so(attacked):
    send, mark = attacked
    with pytest.raises((PopRiskError, TypeError)):
        Run.load(send("system"), trust=True).problem  # no problem comes of it
    assert mark.exists()


def test_an_edited_argument_is_another_call(whole, tmp_path):
    run = sent(whole, tmp_path, {"path": "sent_runs:problem"})
    assert Run.load(run).problem.name == "sent"  # this process has built it
    manifest = manifest_of(run)
    manifest["problem"]["source"]["arguments"] = {"n": 3}
    sign(run, manifest)
    with pytest.raises(RunError, match="trust=True"):
        Run.load(run).problem


def test_what_needs_no_task_is_shown_without_it(attacked, capsys):
    send, _ = attacked
    run = send("popen")
    found = Run.load(run)
    assert found.num_steps == 12
    assert found.weights(7).shape == (26,)
    assert found.kept is not None
    assert len(found.losses) == 12
    code, out, err = call(capsys, "report", run, "-o", "page.html")
    assert code == 0, err
    page = (run.parent.parent / "page.html").read_text()
    assert "Loss over the run" in page
    assert "subprocess:Popen" in page
    code, out, _ = call(capsys, "analyze", run, "--json")
    assert code == 0
    assert json.loads(out)["risk"] is not None  # of the kept weights
