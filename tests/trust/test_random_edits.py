"""Random edits of every file of a run: refused in one line, or without effect; never a traceback, never another result.

Edits without a new hash are damage, and nothing may change. Edits that are signed again are an attacker's: any result
may change then, but what is opened must hold together or be refused. Seeds are fixed; the slow tests make more.
"""

import copy
import hashlib
import json
import random
import shutil
from functools import cache

import pytest
import torch
from sent_runs import manifest_of, problem, recorded, sign

from poprisk import Run, analyze, replay, write_report
from poprisk._core.store import pack, write_tensors
from poprisk.errors import DataError, PopRiskError
from poprisk.report import KeptAnalysis
from poprisk.report._analysis.analyze import PARTS

QUICK, MANY = 100, 3000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = recorded(tmp_path_factory.mktemp("recorded") / "run")
    opened = Run.load(run, problem=problem())
    analyze(opened, budget=0.5, kept=KeptAnalysis(opened, 0.5), progress=False)
    return run


@cache
def reading(run):
    """Everything that is read from a run and from its kept analysis, as one hash."""
    return observed(run)


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


def damage_many(whole, folder, trials, seed):
    draw = random.Random(seed)
    shutil.copytree(whole, folder / "run")
    run, truth, parts = folder / "run", reading(whole), analysis_of(whole)
    files = sorted(file for file in run.rglob("*") if file.is_file())
    assert len(files) > 10
    refused, lines = 0, {0}
    for _ in range(trials):
        file = draw.choice(files)
        before = file.read_bytes()
        file.write_bytes(damaged(before, draw))
        try:
            assert observed(run) == truth
            found = analysis_of(run)
            assert all(parts[name] == value for name, value in found.items())
        except DataError as error:
            refused += 1
            lines |= {str(error).count("\n")}
        finally:
            file.write_bytes(before)
    assert lines == {0}
    return refused


VALUES = [None, True, -1, 0, 1, 2**70, 1e308, "", "x", "torch.os", "\x1b[31m", [], {}, [[]], [1], {"a": 1}, "../x", 0.5]


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
    """What a person does with a run, with the problem and without."""
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
    write_report(Run.load(run), page, progress=False)


def is_refused(run, folder, edit):
    """Whether a run is refused in one line; a traceback is a failure."""
    said = ""
    try:
        use(run, folder / "page.html")
    except PopRiskError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{edit} gave a traceback: {error!r}") from error
    assert "\n" not in said
    return bool(said)


def sign_many(whole, folder, trials, seed):
    draw = random.Random(seed)
    shutil.copytree(whole, folder / "run", ignore=shutil.ignore_patterns("analysis"))
    run, truth = folder / "run", manifest_of(whole)
    truth["problem"]["source"]["path"] = "sent_runs:unknown"  # the page is drawn without the problem
    refused = 0
    for _ in range(trials):
        manifest = edited(truth, draw)
        sign(run, manifest)
        refused += is_refused(run, folder, f"edit {_difference(truth, manifest)}")
    return refused


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


def rewrite_many(whole, folder, trials, seed):
    """Files with other tensors or notes, with their true hashes in a signed manifest."""
    draw = random.Random(seed)
    shutil.copytree(whole, folder / "run", ignore=shutil.ignore_patterns("analysis"))
    run, opened = folder / "run", Run.load(whole, problem=problem())
    truth = manifest_of(whole)
    truth["problem"]["source"]["path"] = "sent_runs:unknown"
    records = [("start",), *(("segments", i, "file") for i in range(len(truth["segments"]))), ("kept",)]
    refused = 0
    for _ in range(trials):
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
            refused += is_refused(run, folder, f"{name} of {record['name']}")
        finally:
            (run / record["name"]).write_bytes(before)
    return refused


def test_damage_changes_no_result(whole, tmp_path):
    assert damage_many(whole, tmp_path, QUICK, seed=1) > QUICK / 3


def test_signed_edits_of_a_manifest_give_no_traceback(whole, tmp_path):
    assert sign_many(whole, tmp_path, QUICK, seed=2) > QUICK / 3


def test_signed_edits_of_the_files_give_no_traceback(whole, tmp_path):
    assert rewrite_many(whole, tmp_path, QUICK, seed=3) > QUICK / 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("attack", [damage_many, sign_many, rewrite_many])
def test_many_edits(whole, tmp_path, attack):
    assert attack(whole, tmp_path, MANY, seed=11) > MANY / 3
