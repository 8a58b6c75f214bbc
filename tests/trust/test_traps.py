"""What else a sender can put into a folder, or another user beside it, to have code executed or files overwritten."""

import ast
import contextlib
import hashlib
import html.parser
import importlib.util
import json
import os
import pickle
import py_compile
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sent_runs
import torch
from cli_calls import call
from sent_runs import EVIL, _Touch, manifest_of, recorded, sent, sign

from poprisk import Problem, Run, analyze, train, write_report
from poprisk._core.store import WriterLock, locked, open_store, remember, require_known, trust
from poprisk._core.store.import_paths import Importable, resolve
from poprisk.errors import DataError, PopRiskError, RunError, UntrustedError
from poprisk.jobs import JobPlan, convert_matrix, job_status, open_matrix, run_jobs
from poprisk.optim.backends import _compiler as compiler
from poprisk.report import KeptAnalysis

OTHER = Importable("evil.py:make", {"n": 1}, folder="/somewhere")


@pytest.fixture(autouse=True)
def no_calls(monkeypatch):
    """The calls that other tests of this process have made."""
    monkeypatch.setattr(trust, "_MADE", set())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def run(whole, tmp_path, monkeypatch):
    """A run that was sent, with the current directory in it."""
    monkeypatch.chdir(tmp_path)
    path = sent(whole, tmp_path, {"path": "evil.py:make", "folder": "."})
    (path / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "executed")))
    monkeypatch.chdir(path)
    return path


# Which calls are trusted


@pytest.mark.parametrize(
    ("place", "variables"),
    [
        ("state", {"POPRISK_STATE_DIR": "state"}),
        ("poprisk", {"XDG_STATE_HOME": ".", "POPRISK_STATE_DIR": ""}),
        ("~/.local/state/poprisk", {"HOME": "~", "XDG_STATE_HOME": "", "POPRISK_STATE_DIR": ""}),
    ],
)
def test_a_list_of_trusted_calls_in_the_sent_folder_is_not_read(run, tmp_path, monkeypatch, place, variables):
    call_ = Importable("evil.py:make", {}, folder=str(run))
    (run / place).mkdir(parents=True, mode=0o700)
    (run / place / "trusted-calls").write_text(trust._digest(call_) + "\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UntrustedError, match="not an absolute path"):
        Run.load(run).problem
    assert not (tmp_path / "executed").exists()
    remember(OTHER, lasting=True)
    assert (run / place / "trusted-calls").read_text().count("\n") == 1  # nor written


@pytest.mark.parametrize("trap", ["writable", "link to a file", "pipe", "link in a shared folder"])
def test_a_list_of_trusted_calls_that_others_can_change_is_not_read(tmp_path, monkeypatch, trap):
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (tmp_path / "planted").write_text(trust._digest(OTHER) + "\n")
    monkeypatch.setenv("POPRISK_STATE_DIR", str(state))
    if trap == "writable":
        shutil.copy(tmp_path / "planted", state / "trusted-calls")
        state.chmod(0o777)
    elif trap == "link to a file":
        (state / "trusted-calls").symlink_to(tmp_path / "planted")
    elif trap == "pipe":
        os.mkfifo(state / "trusted-calls")
    else:
        shutil.copy(tmp_path / "planted", state / "trusted-calls")
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        (shared / "state").symlink_to(state)  # by another user, who may point it to any folder of this one
        monkeypatch.setenv("POPRISK_STATE_DIR", str(shared / "state"))
    with pytest.raises(UntrustedError, match=r"not read|cannot be read"):
        require_known(OTHER, "the run")


def test_trust_is_for_one_call(tmp_path, monkeypatch):
    """Neither for other arguments, functions, folders or scripts, nor for another file that an argument names."""
    monkeypatch.setenv("POPRISK_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text("1")
    folder, given = str(tmp_path / "tasks"), {"n": 1, "path": "data.csv"}
    remember(Importable("task.py:make", given, folder=folder), lasting=True)
    require_known(Importable("task.py:make", dict(reversed(given.items())), folder=folder), "the same")
    others = [
        Importable("task.py:make", {**given, "n": 2}, folder=folder),
        Importable("task.py:make", {**given, "n": True}, folder=folder),
        Importable("task.py:make", {**given, "m": 1}, folder=folder),
        Importable("task.py:make", {}, folder=folder),
        Importable("task.py:other", given, folder=folder),
        Importable("task.py:make.other", given, folder=folder),
        Importable("other.py:make", given, folder=folder),
        Importable("task.py:make", given, folder=folder + "2"),
        Importable("task:make", given),
        Importable("tasks.task:make", given),
    ]
    for other in others:
        with pytest.raises(UntrustedError):
            require_known(other, "another")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data.csv").write_text("2")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UntrustedError):
        require_known(Importable("task.py:make", given, folder=folder), "another file")


def test_what_was_only_trusted_is_not_remembered(run, tmp_path, monkeypatch, capsys):
    """Tomorrow another archive may be unpacked at the same place."""
    monkeypatch.setenv("POPRISK_STATE_DIR", str(tmp_path / "state"))
    call(capsys, "analyze", run, "--trust")
    assert (tmp_path / "executed").exists()
    with pytest.raises((PopRiskError, TypeError)):
        Run.load(run, trust=True).problem
    assert not (tmp_path / "state").exists()


def test_trusting_one_run_of_several_says_which(run, tmp_path, capsys):
    """`compare --trust` is about all runs it is given; without it the first foreign one stops the command."""
    code, _, err = call(capsys, "compare", run, run, "-o", "page.html")
    assert code in (0, 2)
    assert str(run) in err
    assert not (tmp_path / "executed").exists()


def test_the_script_that_was_read_is_executed_not_what_was_compiled(tmp_path):
    """A compiled file need not agree with the source beside it; Python believes its header."""
    script, mark = tmp_path / "task.py", tmp_path / "executed"
    script.write_text(EVIL.format(mark=str(mark)))
    compiled = Path(importlib.util.cache_from_source(str(script)))
    py_compile.compile(
        str(script), cfile=str(compiled), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    script.write_text("def make():\n    return 'read'\n")
    assert resolve(f"{script}:make")() == "read"
    assert not mark.exists()


# What is loaded


@pytest.mark.parametrize(
    ("place", "variables"),
    [
        ("cache", {"POPRISK_CACHE_DIR": "cache"}),
        ("poprisk", {"XDG_CACHE_HOME": ".", "POPRISK_CACHE_DIR": ""}),
        ("~/.cache/poprisk", {"HOME": "~", "XDG_CACHE_HOME": "", "POPRISK_CACHE_DIR": ""}),
    ],
)
def test_no_library_is_loaded_from_the_sent_folder(run, tmp_path, monkeypatch, place, variables):
    (run / place).mkdir(parents=True, mode=0o700)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: str(tmp_path))
    assert compiler.cache_directory().is_absolute()
    assert not compiler.cache_directory().is_relative_to(run)


def test_no_library_is_loaded_through_a_link_that_another_user_made(tmp_path, monkeypatch):
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    mine.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o777)
    (shared / f"poprisk-{os.getuid()}").symlink_to(mine)
    for name in ("POPRISK_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/dev/null/none")
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: str(shared))
    with pytest.raises(compiler.BuildError, match="no writable cache folder"):
        compiler.cache_directory()


@pytest.mark.parametrize("name", ["kept", "start", "segment-00000005", "analysis", "held-back-00000012"])
def test_a_pickle_in_the_place_of_tensors_is_not_loaded(run, tmp_path, name, capsys):
    content, manifest = pickle.dumps(_Touch(f"open({str(tmp_path / 'executed')!r}, 'w')")), manifest_of(run)
    about = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    if name == "analysis":
        analyze(run, budget=0.1, kept=KeptAnalysis(Run.load(run), 0.1), progress=False)
        for part in (run / "analysis").glob("*.safetensors"):
            part.write_bytes(content)
    else:
        records = {
            "kept": manifest["kept"],
            "start": manifest["start"],
            "segment-00000005": manifest["segments"][1]["file"],
        }
        record = records.get(name, {"name": f"{name}.safetensors"})
        record |= about
        if name not in records:
            manifest["held_back"] = record
        (run / record["name"]).write_bytes(content)
        sign(run, manifest)
    for words in (("analyze", run), ("report", run, "-o", "x.html"), ("runs", run), ("runs", "repair", run)):
        code, _, err = call(capsys, *words)
        assert code in (0, 2), err
    for salvage in (False, True):
        with contextlib.suppress(DataError):
            Run.load(run, salvage=salvage, problem=sent_runs.problem()).verify()
    assert not (tmp_path / "executed").exists()


def test_arrays_with_pickles_are_not_loaded(tmp_path, capsys):
    array = np.array([_Touch(f"open({str(tmp_path / 'executed')!r}, 'w')")], dtype=object)
    np.savez(tmp_path / "evil.npz", train=array, test=array, curves=array)
    np.save(tmp_path / "evil.npy", array, allow_pickle=True)
    run = recorded(tmp_path / "run")
    for words in (
        ("report", run, "--clean", tmp_path / "evil.npz", "-o", tmp_path / "x.html"),
        ("analyze", run, "--clean", tmp_path / "evil.npz"),
        ("explore", "--kernel", tmp_path / "evil.npz", "-o", tmp_path / "y.html"),
        ("explore", "--kernel", tmp_path / "evil.npy", "-o", tmp_path / "y.html"),
        ("audit", run, "--apply", tmp_path / "evil.npy"),
        ("jobs", "convert", tmp_path / "evil.npy", tmp_path / "jobs", "--name", "K"),
    ):
        code, out, err = call(capsys, *words)
        assert (code, out, err.count("\n")) == (2, "", 1), words
    assert not (tmp_path / "executed").exists()


# Stores of jobs


@pytest.fixture
def jobs(whole, tmp_path):
    """A finished store of a kernel."""
    plan = JobPlan(tmp_path / "jobs")
    plan.train_kernel(Run.load(whole, problem=sent_runs.problem()), 3)
    plan.run(client="in-process", progress=False)
    return tmp_path / "jobs"


def metadata(jobs, *place):
    return next(jobs.glob("/".join(["train*", *place, "zarr.json"])))


def rewrite(file, change):
    """Change metadata, and give them their true hash."""
    from poprisk._core.store.tiled import _sealed

    raw = json.loads(file.read_bytes())
    raw["attributes"]["poprisk"].pop("sha256")
    file.write_bytes(_sealed(change(raw) or raw))


def test_other_codecs_and_formats_are_refused(jobs, tmp_path):
    mark, values = tmp_path / "executed", metadata(jobs, "values")
    before = values.read_bytes()
    for codec in ("numcodecs.pickle", "zstd", "gzip", "vlen-bytes", "evil_module:make"):
        rewrite(
            values, lambda raw, codec=codec: raw["codecs"].append({"name": codec, "configuration": {"id": "pickle"}})
        )
        with pytest.raises(DataError, match="codecs"):
            open_matrix(jobs, "train kernel at step 3").to_dense()
        values.write_bytes(before)
    rewrite(values, lambda raw: raw.update(data_type={"name": "numpy.object", "configuration": {}}))
    with pytest.raises(DataError, match="data_type"):
        open_matrix(jobs, "train kernel at step 3").to_dense()
    values.write_bytes(before)
    # An array of the second format, with objects as pickles, beside the right one: Zarr looks for both.
    old = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "fill_value": None, "order": "C"}
    old |= {"compressor": None, "filters": [{"id": "pickle", "protocol": 5}]}
    (values.parent / ".zarray").write_text(json.dumps(old))
    (values.parent / "0").write_bytes(pickle.dumps(np.array([_Touch(f"open({str(mark)!r}, 'w')")], dtype=object)))
    assert open_matrix(jobs, "train kernel at step 3").shape[0] == 48
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "/dev/zero", "folder"])
def test_a_store_with_links_or_pipes_is_refused(jobs, tmp_path, kind):
    tile = next(path for path in jobs.rglob("*") if path.is_file() and path.parent.name == "0")
    tile.rename(tmp_path / "aside")
    if kind == "pipe":
        os.mkfifo(tile)
    elif kind == "folder":
        shutil.rmtree(tile.parent)
        tile.parent.symlink_to(tmp_path)
    else:
        tile.symlink_to(tmp_path / "aside" if kind == "link" else kind)
    for use in (job_status, open_store, partial(open_matrix, name="train kernel at step 3"), run_jobs):
        with pytest.raises(DataError, match="is a link or no regular file"):
            use(jobs)


@pytest.mark.parametrize(
    "change",
    [{"shape": [2**40, 2**40]}, {"tile": [2**30, 2**30]}, {"shape": [-1, 3]}, {"tile": [0, 1]}, {"dtype": "object"}],
)
def test_sizes_that_lie_are_refused_before_memory_is_used(jobs, change):
    rewrite(metadata(jobs), lambda raw: raw["attributes"]["poprisk"]["where"].update(change))
    with pytest.raises(DataError):
        job_status(jobs)


def test_a_store_names_only_what_can_be_computed(whole, tmp_path):
    plan = JobPlan(tmp_path / "jobs")
    opened = Run.load(whole, problem=sent_runs.problem())
    plan.operator_columns(opened, "propagator")
    file = next((tmp_path / "jobs").glob("*/zarr.json"))
    for change in ({"operator": "__class__"}, {"dtype": "hub"}, {"device": "cuda:os"}, {"stop": None}):
        before = file.read_bytes()
        rewrite(file, lambda raw, change=change: raw["attributes"]["poprisk"]["content"].update(change))
        with pytest.raises(DataError, match="is not valid at"):
            run_jobs(tmp_path / "jobs", client="in-process", problem=sent_runs.problem(), progress=False)
        file.write_bytes(before)


# What is written


@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
def test_locks_do_not_overwrite_other_files(tmp_path, kind):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for place in (tmp_path / "jobs.lock", tmp_path / ".writer.lock"):
        if kind == "link":
            place.symlink_to(precious)
        elif kind == "pipe":
            os.mkfifo(place)
        else:
            os.link(precious, place)
    with pytest.raises(RunError, match="must be a file of its own"), locked(tmp_path / "jobs.lock"):
        pass
    with pytest.raises(RunError, match="must be a file of its own"):
        WriterLock(tmp_path)
    assert precious.read_text() == "precious"


def test_pages_and_tables_replace_links(run, tmp_path, capsys):
    """In the current directory, which may be the sent folder, a link has the usual name of a page."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name in ("poprisk-report.html", "poprisk-compare.html", "audit.csv"):
        (run / name).symlink_to(precious)
    for words in (("report", run), ("compare", run, run), ("audit", run, "--output", "audit.csv")):
        call(capsys, *words, "--problem", "sent_runs:problem")
        assert precious.read_text() == "precious"
    for name in ("poprisk-report.html", "poprisk-compare.html", "audit.csv"):
        assert (run / name).is_file()
        assert not (run / name).is_symlink()


def test_a_training_does_not_continue_into_a_link(tmp_path, monkeypatch):
    recorded(tmp_path / "run")
    (tmp_path / "precious").write_text("precious")
    for name in ("segment-00000010.safetensors", "kept.safetensors", "manifest.json.tmp"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    options = {"batch_size": 4, "segment_steps": 5, "hold_back": 0.1, "progress": False, "resume": True}
    with pytest.raises(PopRiskError):
        train(Problem.build(sent_runs.problem), partial(torch.optim.SGD, lr=0.1), 20, path=tmp_path / "run", **options)
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_matrix_to_convert_must_be_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "link.npy").symlink_to("/dev/zero")
    for name in ("pipe.npy", "link.npy"):
        with pytest.raises(DataError, match=r"regular file|is a link"):
            convert_matrix(tmp_path / name, tmp_path / "jobs", "K")


# What is shown

BREAKOUT = "</script></title></style>--><img src=x onerror=pwned()>'\"><svg onload=pwned()>javascript:pwned()"


class Seen(html.parser.HTMLParser):
    """Tags and attributes that would execute something."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        bad = [(k, v) for k, v in attrs if k.startswith("on") or "pwned" in k or (v or "").startswith("javascript:")]
        self.found += bad + (
            [tag] if tag in ("img", "iframe", "object", "embed", "base", "link") and "pwned" in str(attrs) else []
        )


def hostile(value):
    """A copy of a JSON value in which texts that may be anything break out of whatever they are put into."""
    for entry in ("created", "obstacles"):
        value[entry] = BREAKOUT if entry == "created" else [BREAKOUT]
    value["environment"] |= {"poprisk": BREAKOUT, "torch": BREAKOUT, BREAKOUT: BREAKOUT}
    value["problem"] |= {"name": BREAKOUT, "data": {BREAKOUT: BREAKOUT}}
    value["problem"]["source"] = {
        "path": f"{BREAKOUT}.py:f",
        "arguments": {BREAKOUT: BREAKOUT},
        "reason": BREAKOUT,
        "folder": BREAKOUT,
    }
    value["unexplained"] = {"step": 3, "reason": BREAKOUT}
    value["numerics"]["device"] = BREAKOUT
    value["layout"]["names"] = [f"{BREAKOUT}{i}" for i in range(len(value["layout"]["names"]))]
    return value


def test_names_and_texts_do_not_become_markup(whole, tmp_path, capsys):
    path = sent(whole, tmp_path / "x' onload=pwned() <img src=x onerror=pwned()>")
    manifest = hostile(manifest_of(path))
    sign(path, manifest)
    opened = Run.load(path)
    assert opened.kept is not None
    pages = [opened._repr_html_(), opened.kept.risk._repr_html_()]
    pages.append(write_report(opened, tmp_path / "page.html", progress=False).read_text())
    assert call(capsys, "compare", path, path, "-o", tmp_path / "compare.html")[0] == 0
    pages.append((tmp_path / "compare.html").read_text())
    for page in pages:
        seen = Seen()
        seen.feed(page)
        assert seen.found == []
    assert "pwned" in pages[0]
    assert "pwned" in pages[2]


def test_code_that_a_page_offers_to_copy_is_one_call(whole, tmp_path):
    path = sent(whole, tmp_path, {"path": 'a.py:f"); import os; os.system("x', "arguments": {"n): evil(": 1}})
    page = write_report(Run.load(path), tmp_path / "page.html", progress=False).read_text()
    assert "Problem.build(" not in page
    path = sent(whole, tmp_path / "2", {"path": 'a.py:f"); import os; os.system("x', "arguments": {"n": "'); evil("}})
    from poprisk.report._drawing.page import training_call

    tree = ast.parse(training_call(Run.load(path)))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {each.id for each in calls if isinstance(each, ast.Name)}
    assert called == {"train", "partial"}


def test_a_terminal_obeys_nothing_in_a_run(whole, tmp_path, capsys):
    path = sent(whole, tmp_path)
    manifest = manifest_of(path)
    escape = "[/x]\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe[link=https://x.org]"
    manifest["problem"] |= {"name": escape, "data": {escape: escape}}
    manifest["problem"]["source"] = {"path": f"{escape}:f", "arguments": {escape: escape}, "reason": None}
    manifest["created"] = escape
    manifest["obstacles"] = [escape]
    sign(path, manifest)
    for words in (
        ("analyze", path),
        ("report", path, "-o", tmp_path / "x.html"),
        ("audit", path),
        ("runs", path),
        ("runs", path, "--json"),
        ("compare", path, path, "-o", tmp_path / "y.html"),
    ):
        _, out, err = call(capsys, *words)
        assert all(c.isprintable() or c == "\n" for c in out + err), (words, out + err)


def test_a_sent_folder_as_the_current_directory_executes_nothing(run, tmp_path):
    """The installed command, from within a folder with modules of well-known names; ``python -m`` would import them."""
    for name in (
        "random",
        "json",
        "torch",
        "numpy",
        "typer",
        "rich",
        "matplotlib",
        "poprisk_lab",
        "sitecustomize",
        "readline",
    ):
        (run / f"{name}.py").write_text(EVIL.format(mark=str(tmp_path / "executed")))
    (run / "evil.dist-info").mkdir()
    (run / "evil.dist-info" / "entry_points.txt").write_text("[poprisk_commands]\nevil = random:make\n")
    (run / "matplotlibrc").write_text("backend: module://evil\n")
    (run / "pyproject.toml").write_text("[tool.poprisk]\nplugins = ['evil']\n")
    start = "import sys; sys.path.pop(0); sys.argv = sys.argv[:1] + sys.argv[2:]; from poprisk.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, "-", "report", ".", "-o", "page.html"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "executed").exists()
