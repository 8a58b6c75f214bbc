"""Random edits of every kind of file: refused in one line, or without effect; never a traceback, never another result.

Edits without a new hash are damage, and nothing may change. Edits that are signed again are an attacker's: any result
may change then, but what is opened must hold together or be refused. Seeds are fixed; the slow tests make more than
10,000 edits in all.
"""

import contextlib
import copy
import hashlib
import itertools
import json
import random
import shutil
from functools import partial
from zlib import crc32

import numpy as np
import pytest
import torch
from sent_runs import manifest_of, problem, recorded, sign

from poprisk import Problem, Run, analyze, k_fold, replay, train, write_report
from poprisk._core.store import (
    Importable,
    TensorFile,
    json_digest,
    pack,
    read_tensors,
    remember,
    require_known,
    trust,
    write_tensors,
)
from poprisk._core.store.tiled import _sealed
from poprisk.errors import PopRiskError, RunError, UntrustedError
from poprisk.jobs import JobPlan, convert_matrix, job_status, open_matrix, open_resampled, run_jobs
from poprisk.optim.backends import _compiler as compiler
from poprisk.report import KeptAnalysis
from poprisk.report._analysis.analyze import PARTS
from poprisk.risk import Decisions
from poprisk.risk._audit.decisions import KIND


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = recorded(tmp_path_factory.mktemp("recorded") / "run")
    opened = Run.load(run, problem=problem())
    analyze(opened, budget=0.5, kept=KeptAnalysis(opened, 0.5), progress=False)
    return run


def observed(run):
    opened = Run.load(run, problem=problem())
    opened.verify()
    steps = [opened.step(k) for k in range(opened.num_steps)]
    kept = None if opened.kept is None else opened.kept.content()
    values = [opened.manifest, [vars(step) for step in steps], opened.losses, opened.weights(opened.num_steps)]
    form, tensors = pack([values, kept, [opened.options(k) for k in range(opened.num_steps)]])
    digest = hashlib.sha256(json.dumps(form, sort_keys=True).encode())
    for tensor in tensors.values():
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def analysis_of(run):
    kept = KeptAnalysis(Run.load(run, problem=problem()))
    parts = {name: part for name in PARTS if (part := kept.get(name)) is not None}
    return {name: json.dumps(pack([part.value, part.reason])[0], sort_keys=True) for name, part in parts.items()}


def damaged(content, draw):
    """A bit, a byte, a cut, a hole or a doubled stretch."""
    at, content = draw.randrange(len(content)), bytearray(content)
    kind = draw.choice(["bit", "bit", "byte", "cut", "hole", "doubled", "swapped"])
    if kind == "bit":
        content[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        content[at] = draw.randrange(256)
    elif kind == "cut":
        del content[at:]
    elif kind == "hole":
        del content[at : at + draw.randrange(1, 40)]
    elif kind == "doubled":
        content[at:at] = content[at : at + draw.randrange(1, 40)]
    else:
        content[at], content[-at - 1] = content[-at - 1], content[at]
    return bytes(content)


def damages(folder, files, observe, draw):
    """A trial that damages a file, observes, and puts the file back: whether it was refused, in one line."""
    truth = observe()
    files = sorted(file for file in files if file.is_file())
    assert files, folder

    def trial():
        file = draw.choice(files)
        before, said, found = file.read_bytes(), "", truth
        file.write_bytes(damaged(before, draw))
        try:
            found = observe()
            assert found == truth or (isinstance(truth, dict) and found.items() <= truth.items()), file
        except PopRiskError as error:
            said = str(error)
        finally:
            file.write_bytes(before)
        assert "\n" not in said
        return bool(said) or found != truth

    return trial


def damaged_run(whole, folder, draw):
    shutil.copytree(whole, folder / "run")
    run = folder / "run"
    return damages(run, run.rglob("*"), lambda: {"run": observed(run), **analysis_of(run)}, draw)


def damaged_interrupted_run(whole, folder, draw):
    """With the state of a held-back choice, from which a training goes on."""

    def after(k, loss):
        if k == 7:
            raise KeyboardInterrupt

    run, options = folder / "run", {"batch_size": 4, "segment_steps": 5, "hold_back": 0.1}
    with pytest.raises(KeyboardInterrupt):
        train(problem(), partial(torch.optim.SGD, lr=0.1), 12, path=run, progress=after, **options)
    assert list(run.glob("held-back-*"))
    return damages(run, run.glob("*"), lambda: observed(run), draw)


def job_store(whole, folder):
    opened = Run.load(whole, problem=problem())
    jobs = JobPlan(folder / "jobs")
    names = [*jobs.train_kernel(opened, 3, side=11), jobs.operator_columns(opened, "propagator")]
    folds = jobs.k_fold(opened, 3)
    jobs.run(client="in-process", progress=False)
    np.save(folder / "K.npy", np.arange(30.0).reshape(5, 6))
    convert_matrix(folder / "K.npy", folder / "jobs", "converted", side=4)
    return opened, folder / "jobs", [*names, "converted"], folds


def read_jobs(opened, store, names, folds):
    found = {name: open_matrix(store, name).to_dense().numpy().tobytes() for name in names}
    folded = open_resampled(store, folds, run=opened)
    return {**found, folds: numbers_of(folded), "status": job_status(store)}


def numbers_of(folded):
    return folded.example.tolist(), float(folded.risk.value), float(folded.risk.standard_error)


def damaged_jobs(whole, folder, draw):
    made = job_store(whole, folder)
    return damages(made[1], made[1].rglob("*"), lambda: read_jobs(*made), draw)


def signed_jobs(whole, folder, draw):
    """Metadata with other entries and their true hash."""
    made = job_store(whole, folder)
    files = sorted(made[1].rglob("zarr.json"))

    def trial():
        file = draw.choice(files)
        before = file.read_bytes()
        raw = json.loads(before)
        raw["attributes"]["poprisk"].pop("sha256")
        changed = edited(raw, draw)
        with contextlib.suppress(LookupError, TypeError, AttributeError):
            changed = json.loads(_sealed(changed))
        file.write_text(json.dumps(changed))
        try:
            return refused(lambda: (read_jobs(*made), run_jobs(made[1], client="in-process", problem=problem())), file)
        finally:
            file.write_bytes(before)

    return trial


def damaged_retrained(whole, folder, draw):
    """Trainings without some examples, kept to be used again; what is damaged is trained again."""
    opened = Run.load(whole, problem=problem())
    read = lambda: numbers_of(k_fold(opened, 3, folder=folder / "kept", progress=False))  # noqa: E731
    read()
    return damages(folder, (folder / "kept").glob("*"), read, draw)


def damaged_trust(whole, folder, draw):
    """No edit of the list makes a call trusted that nobody made; at worst the person is asked again."""
    mine, other = Importable("task.py:make", {"n": 1}, folder="/tasks"), Importable("evil.py:make", folder="/tasks")
    (folder / "state").mkdir(mode=0o700)
    file = folder / "state" / "trusted-calls"

    def trusted(call):
        with contextlib.suppress(UntrustedError):
            require_known(call, "the run")
            return {str(call)}
        return set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POPRISK_STATE_DIR", str(folder / "state"))
        remember(mine, lasting=True)

    def trial():
        before = file.read_bytes()
        file.write_bytes(damaged(before, draw))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("POPRISK_STATE_DIR", str(folder / "state"))
            patch.setattr(trust, "_MADE", set())
            assert trusted(other) == set()
            known = trusted(mine)
        file.write_bytes(before)
        return not known

    return trial


def damaged_decisions(whole, folder, draw):
    """As a report exports them; of the table for editing only that it is refused or read."""
    rows = [{"example": i, "given": i % 2, "suggested": 1 - i % 2, "decided": 1} for i in range(5)]
    about = {"version": 1, "run": "ab12", "data": "cd34", "examples": 24, "targets": "classes"}
    text = json.dumps({"kind": KIND, **about, "decisions": rows}, indent=1)[:-2]
    (folder / "decisions.json").write_text(f'{text},\n "crc32": "{crc32(text.encode()):08x}"\n}}\n')
    lines = [",".join(map(str, [*about.values(), *row.values()])) for row in rows]
    (folder / "decisions.csv").write_text("\n".join([",".join([*about, *rows[0]]), *lines]) + "\n")
    of_json = damages(folder, [folder / "decisions.json"], lambda: Decisions.load(folder / "decisions.json"), draw)

    def of_csv():
        with contextlib.suppress(PopRiskError):
            Decisions.load(folder / "decisions.csv")

    table = damages(folder, [folder / "decisions.csv"], of_csv, draw)

    def trial():
        return of_json() if draw.random() < 0.5 else table()

    return trial


def damaged_kernels(whole, folder, draw):
    """Libraries of the fused step: what is damaged is removed, and would be built again."""
    content = draw.randbytes(4000)
    path = folder / f"fused-ab-{hashlib.sha256(content).hexdigest()}.so"
    path.write_bytes(content)
    return damages(
        folder, [path], lambda: {p.name: p.read_bytes() for p in [compiler._stored(folder, "fused-ab")] if p}, draw
    )


def damaged_matrices(whole, folder, draw):
    """A matrix to convert has no checksum; whatever is in the file, there is no traceback."""
    np.save(folder / "K.npy", np.arange(30.0).reshape(5, 6))
    (folder / "K.json").write_text('{"bound": 0.5, "precision": null}')
    count = itertools.count()

    def convert():
        convert_matrix(folder / "K.npy", f"memory://{folder.name}-{next(count)}", "K")

    return damages(folder, [folder / "K.npy", folder / "K.json"], convert, draw)


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2**40,
    2**70,
    1e308,
    "",
    "x",
    "torch.os",
    "\x1b[31m",
    [],
    {},
    [[]],
    [1],
    {"a": 1},
    "../x",
    0.5,
]


def edited(value, draw):
    """A copy of a JSON value with one entry changed, removed, doubled or renamed."""
    value = copy.deepcopy(value)
    places = []

    def walk(node):
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(value)
    node, key = draw.choice(places)
    kind = draw.choice(["value", "value", "value", "gone", "doubled", "renamed", "near"])
    if kind == "value":
        node[key] = draw.choice(VALUES)
    elif kind == "gone":
        del node[key]
    elif kind == "near" and isinstance(node[key], int | float):
        node[key] = node[key] + draw.choice([-1, 1, 0.5, 1000])
    elif isinstance(node, list):
        node.insert(draw.randrange(len(node) + 1), copy.deepcopy(node[key]))
    else:
        node[draw.choice(["x", "name", "lr"])] = node.pop(key)
    return value


def use(run, page):
    """What a person does with a run, with the problem and without; a page only where the problem is not known."""
    opened = Run.load(run, problem=problem())
    opened._repr_html_()
    opened.verify()
    replay(opened, tolerate=True)
    (
        opened.step(1),
        opened.weights(3),
        opened.buffer(2),
        opened.options(2),
        opened.kept,
        opened.num_trained,
        opened.obstacles,
    )
    without = Run.load(run)
    with contextlib.suppress(RunError):
        return without.problem
    return write_report(without, page, progress=False)


def refused(call, edit):
    """Whether a call is refused in one line; a traceback is a failure."""
    said = ""
    try:
        call()
    except PopRiskError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{edit} gave a traceback: {error!r}") from error
    assert "\n" not in said
    return bool(said)


def signed_manifests(whole, folder, draw):
    shutil.copytree(whole, folder / "run", ignore=shutil.ignore_patterns("analysis"))
    run, truth = folder / "run", manifest_of(whole)
    Problem.build(problem)  # with the true source the problem is rebuilt, with another one the page is drawn without

    def trial():
        truth["problem"]["source"]["path"] = draw.choice(["sent_runs:unknown", "sent_runs:problem"])
        manifest = edited(truth, draw)
        sign(run, manifest)
        return refused(lambda: use(run, folder / "page.html"), f"edit {_difference(truth, manifest)}")

    return trial


def signed_analyses(whole, folder, draw):
    """An index or a part with other entries, and their true hashes; the page is drawn from them."""
    shutil.copytree(whole, folder / "run")
    run = folder / "run"
    index = json.loads((run / "analysis/index.json").read_text())
    truth = {name: read_tensors(run / "analysis", TensorFile(**file)) for name, file in index["parts"].items()}

    def draw_page():
        opened = Run.load(run, problem=problem())
        kept = KeptAnalysis(opened, writes=False)
        found = analyze(opened, budget=kept.budget, kept=kept, parts=tuple(kept.finished), progress=False)
        write_report(found, folder / "page.html")

    def trial():
        name, changed = draw.choice([*truth, "index"]), copy.deepcopy(index)
        file = run / "analysis" / f"{name}.safetensors"
        before = file.read_bytes() if name != "index" else b""
        if name == "index":
            changed = edited(changed, draw)
        else:
            tensors, notes = truth[name]
            tensors, which = dict(tensors), draw.choice([*tensors, "#notes"])
            if which == "#notes":
                notes = edited(notes, draw)
            else:
                tensors[which] = changed_tensor(tensors[which], draw)
            changed["parts"][name] = vars(write_tensors(file, tensors, notes))
        changed.pop("sha256", None)
        (run / "analysis/index.json").write_text(json.dumps(changed | {"sha256": json_digest(changed)}))
        try:
            return refused(draw_page, f"{name}: {_difference(index, changed)}")
        finally:
            if before:
                file.write_bytes(before)

    return trial


def _difference(a, b, at=""):
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((d for k in a if (d := _difference(a[k], b[k], f"{at}.{k}")) and k != "sha256"), "")
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next(
            (d for i, (x, y) in enumerate(zip(a, b, strict=True)) if (d := _difference(x, y, f"{at}[{i}]"))), ""
        )
    return "" if a == b and type(a) is type(b) else f"{at}: {str(a)[:80]} -> {str(b)[:80]}"


def changed_tensor(x, draw):
    kind = draw.choice(["dtype", "shape", "longer", "negative", "huge", "nan", "empty"])
    if kind == "dtype":
        return x.to(draw.choice([torch.float16, torch.int32, torch.float64, torch.bool]))
    if kind == "shape":
        return x.reshape(-1, 1)
    if kind == "longer":
        return torch.cat([x.reshape(-1), x.reshape(-1)])
    if kind == "empty":
        return x.reshape(-1)[:0]
    filled = {"negative": -3, "huge": 2**40, "nan": float("nan") if x.is_floating_point() else 2**62}[kind]
    return torch.full_like(x, filled)


def signed_files(whole, folder, draw):
    """Files with other tensors or notes, with their true hashes in a signed manifest."""
    shutil.copytree(whole, folder / "run", ignore=shutil.ignore_patterns("analysis"))
    run, opened = folder / "run", Run.load(whole, problem=problem())
    truth = manifest_of(whole)
    truth["problem"]["source"]["path"] = "sent_runs:unknown"
    records = [("start",), *(("segments", i, "file") for i in range(len(truth["segments"]))), ("kept",)]

    def trial():
        manifest, place = copy.deepcopy(truth), draw.choice(records)
        holder = manifest
        for key in place[:-1]:
            holder = holder[key]
        record = holder[place[-1]]
        tensors, notes = opened._storage.read(record)
        tensors, name = dict(tensors), draw.choice([*tensors, "#notes", "#gone", "#more"])
        if name == "#notes" and isinstance(notes, dict):
            notes = edited(notes, draw)
        elif name == "#gone":
            del tensors[draw.choice(list(tensors))]
        elif name == "#more":
            tensors["more"] = torch.ones(2)
        elif name in tensors:
            tensors[name] = changed_tensor(tensors[name], draw)
        before = (run / record["name"]).read_bytes()
        holder[place[-1]] = vars(write_tensors(run / record["name"], tensors, notes))
        sign(run, manifest)
        try:
            return refused(lambda: use(run, folder / "page.html"), f"{name} of {record['name']}")
        finally:
            (run / record["name"]).write_bytes(before)

    return trial


KINDS = {
    damaged_run: (50, 3000),
    damaged_interrupted_run: (20, 1000),
    damaged_jobs: (30, 2000),
    damaged_retrained: (4, 200),
    damaged_trust: (50, 1000),
    damaged_decisions: (100, 1000),
    damaged_kernels: (50, 500),
    damaged_matrices: (20, 300),
    signed_manifests: (50, 2000),
    signed_files: (50, 2000),
    signed_analyses: (15, 500),
    signed_jobs: (10, 300),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("how", ["some", pytest.param("many", marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_edits_change_no_result_and_give_no_traceback(whole, tmp_path, kind, how):
    few, many = KINDS[kind]
    draw, trials = random.Random(1 if how == "some" else 11), few if how == "some" else many
    trial = kind(whole, tmp_path, draw)
    found = [trial() for _ in range(trials)]
    assert any(found) or kind is damaged_retrained  # the numbers are there again


def test_the_slow_edits_are_more_than_ten_thousand():
    assert sum(many for _, many in KINDS.values()) > 10_000
