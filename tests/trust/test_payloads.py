"""Nothing that a run names is imported when it is opened, unless the person said so or has run the same call here."""

import contextlib
import inspect
import json
import shutil
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import sent_runs
import torch
from cli_calls import call
from sent_runs import EVIL, manifest_of, payloads, recorded, sent, sign

import poprisk.risk as risks
from poprisk import Problem, Run, analyze, audit, population_risk, refit, replay, train, write_report
from poprisk.errors import PopRiskError, RunError
from poprisk.jobs import JobPlan, cluster, job_status, open_resampled, run_jobs
from poprisk.operators import Window, evaluation_model
from poprisk.report import Analysis, KeptAnalysis, compare_runs
from poprisk.risk import out_of_sample_probabilities
from poprisk.runs import list_runs

NAMES = list(payloads(Path("/nowhere"), Path("/nowhere/executed"), plant=False))
METHODS: tuple[Any, ...] = ("auto", "held_back", "exclusion", "leverage", "k_fold")
OF_A_RUN = (
    *("cross_validation_risk", "exclusion", "exclusion_risk", "first_order_risk", "generalization_gap", "holdouts"),
    *("influence_matrix", "influence_on", "influence_operator", "k_fold", "leave_one_out", "retrain", "self_influence"),
    *("subsets", "Unrolled"),
)
MORE = {
    "cross_validation_risk": (3,),
    "holdouts": (3, 2),
    "influence_on": (torch.ones(2, 3), torch.zeros(2).long()),
    "retrain": (risks.Members(torch.ones(1, 24)),),
    "subsets": (torch.ones(2, 24, dtype=torch.bool),),
}


def plan(kind, *arguments):
    return lambda p: getattr(JobPlan(p.parent / "new jobs"), kind)(p, *arguments)


def resumed(p):
    """A training of one's own, into the folder that was sent."""
    train(Problem.build(sent_runs.problem), partial(torch.optim.SGD, lr=0.1), 13, path=p, resume=True, progress=False)


PYTHON = {
    **{
        name: lambda p, name=name: getattr(Run.load(p), name)
        for name in ("problem", "losses", "kept", "obstacles", "augmented", "unexplained", "manifest")
    },
    **{
        name: lambda p, name=name: getattr(Run.load(p), name)()
        for name in ("module", "model", "verify", "_repr_html_", "__repr__", "require_exact")
    },
    **{
        name: lambda p, name=name: getattr(Run.load(p), name)(3)
        for name in ("step", "weights", "buffer", "options", "batch", "recorded", "checkpoint")
    },
    **{name: lambda p, name=name: getattr(risks, name)(Run.load(p), *MORE.get(name, ())) for name in OF_A_RUN},
    **{f"population_risk {method}": lambda p, method=method: population_risk(p, method) for method in METHODS},
    "out_of_sample_probabilities": out_of_sample_probabilities,
    "salvage": lambda p: Run.load(p, salvage=True).problem,
    "tolerate": lambda p: Run.load(p, tolerate=True).problem,
    "replay": lambda p: replay(Run.load(p)),
    "save": lambda p: Run.load(p).save(p.parent / "copy").problem,
    "list_runs": lambda p: list_runs(p.parent),
    "audit": lambda p: audit(p, progress=False),
    "analyze": lambda p: analyze(p, progress=False),
    "Analysis": lambda p: Analysis(Run.load(p), 1.0).run.problem,
    "write_report": lambda p: write_report(Run.load(p), p.parent / "page.html", progress=False),
    "compare_runs": lambda p: compare_runs([p, p]),
    "kept": lambda p: KeptAnalysis(Run.load(p)),
    "window": lambda p: Window.of_run(Run.load(p)),
    "evaluation_model": lambda p: evaluation_model(Run.load(p)),
    "refit": lambda p: refit(Run.load(p), partial(torch.optim.SGD, lr=0.1)),
    "resume": resumed,
    "plan train_kernel": plan("train_kernel", 3),
    "plan cross_kernel": plan("cross_kernel", 3),
    "plan operator_columns": plan("operator_columns", "propagator"),
    "plan k_fold": plan("k_fold", 3),
    "job_status": lambda p: job_status(p.parent / "jobs"),
    "jobs in-process": lambda p: run_jobs(p.parent / "jobs", client="in-process", progress=False),
    "jobs in threads": lambda p: run_jobs(p.parent / "jobs", client="threads", progress=False),
    "open_resampled": lambda p: open_resampled(p.parent / "jobs", "3-fold, seed 0"),
}
COMMANDS = {
    "analyze": ("analyze", "{run}", "--json"),
    "report": ("report", "{run}", "-o", "page.html"),
    "report with a budget": ("report", "{run}", "-o", "page.html", "--budget", "1"),
    "audit": ("audit", "{run}"),
    "audit --apply": ("audit", "{run}", "--apply", "{run}/evil.py"),
    "compare": ("compare", "{run}", "{run}", "-o", "page.html"),
    "runs": ("runs", "{run}"),
    "runs repair": ("runs", "repair", "{run}"),
    "jobs status": ("jobs", "status", "{run}/../jobs"),
    "jobs resume": ("jobs", "resume", "{run}/../jobs", "--workers", "1"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run, and beside it a store of jobs that names it."""
    run = recorded(tmp_path_factory.mktemp("recorded") / "run")
    jobs = JobPlan(run.parent / "jobs")
    jobs.train_kernel(run, 3)
    jobs.k_fold(run, 3)
    return run


@pytest.fixture
def attacked(whole, tmp_path, monkeypatch):
    """A folder with everything the payloads need, first in the path and the current one."""
    made = payloads(tmp_path / "sent", tmp_path / "executed")
    monkeypatch.chdir(tmp_path / "sent" / "run")
    for place in ("sent/evil.zip", "sent", "sent/run"):
        monkeypatch.syspath_prepend(str(tmp_path / place))
    for name in ("evil_module", "evil_package", "evil_space", "evil_zipped"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    script = EVIL.format(mark=str(tmp_path / "executed"))

    def send(name):
        shutil.rmtree(tmp_path / "sent" / "run")
        run = sent(whole, tmp_path / "sent", made[name])
        shutil.copytree(whole.parent / "jobs", tmp_path / "sent" / "jobs", dirs_exist_ok=True)
        monkeypatch.chdir(run)
        (run / "evil.py").write_text(script)
        return run

    return send, tmp_path / "executed"


def test_every_public_function_of_a_run_is_attacked():
    """Functions and classes of the facades whose first argument may be a run."""
    found = set()
    for room in ("runs", "risk", "operators", "report", "jobs"):
        facade = import_module(f"poprisk.{room}")
        for name in facade.__all__:
            with contextlib.suppress(TypeError, ValueError):
                first = next(iter(inspect.signature(getattr(facade, name)).parameters), "")
                found |= {name} if first in ("run", "runs") else set()
    tried = {name.split()[0] for name in PYTHON}
    assert found - tried == {"Replay"}  # the result of replay
    assert len(NAMES) >= 40


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
    for entry, words in COMMANDS.items():
        code, _, err = call(capsys, *(word.format(run=run) for word in words))
        assert not mark.exists(), f"{entry} executed the payload"
        assert code in (0, 2), (entry, err)
        assert "Traceback" not in err


@pytest.mark.parametrize("field", ["make_model", "loss", "augment", "batch_loss"])
def test_other_functions_that_a_description_names_are_not_imported(attacked, field):
    send, mark = attacked
    run = send("script in the run")
    manifest = manifest_of(run)
    for path in ("evil_module:make", "evil.py:make", "poprisk.__main__:main"):
        manifest["problem"][field] = {"path": path, "arguments": {}, "reason": None}
        sign(run, manifest)
        for use in PYTHON.values():
            with contextlib.suppress(PopRiskError):
                use(run)
            assert not mark.exists()
        with contextlib.suppress(PopRiskError):
            Run.load(run, problem=sent_runs.problem()).module()
        assert not mark.exists()


def test_workers_in_other_processes_execute_nothing_of_a_sent_store(attacked, monkeypatch):
    """Dask's workers start in the current directory, where a sender may have put modules of well-known names."""
    send, mark = attacked
    run = send("script in the run")
    for name in ("dask", "distributed", "random", "json", "click", "torch", "sitecustomize", "usercustomize"):
        (run / f"{name}.py").write_text(EVIL.format(mark=str(mark)))
    sys.path.remove(str(run))  # a person who puts the folder there has imported it
    sys.path.remove(str(run.parent))
    with cluster("processes", workers=1) as client:
        with pytest.raises(RunError, match=r"evil\.py"):
            run_jobs(run.parent / "jobs", client=client, progress=False)
        assert client.submit(int, 3).result(60) == 3
    assert not mark.exists()


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
    page = (run / "page.html").read_text()
    assert "Loss over the run" in page
    assert "subprocess:Popen" in page
    code, out, _ = call(capsys, "analyze", run, "--json")
    assert code == 0
    assert json.loads(out)["risk"] is not None  # of the kept weights
