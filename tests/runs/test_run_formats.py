"""Runs of older versions: stored ones open, replay and are audited for ever after; others are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from stored_run import BATCH, EVERY, STEPS
from torch.testing import assert_close

from poprisk import PopRiskAdamW
from poprisk._core.store import json_digest
from poprisk.errors import DataError, RunError
from poprisk.operators._window import Window
from poprisk.risk._audit.run_audit import audit
from poprisk.runs import _manifest as formats
from poprisk.runs import _storage as storage
from poprisk.runs._recorder import Recorder
from poprisk.runs._replay import replay
from poprisk.runs._run import Run

DATA = Path(__file__).parent / "data"
STORED = sorted(path.parent for path in DATA.glob("format_*/*/manifest.json"))
SAME_STEPS = {"rtol": 1e-9, "atol": 1e-12}  # float64; other processors and versions of torch may round otherwise


def test_every_format_is_stored_dense_and_sparse():
    assert {f"format_{version}" for version in range(1, formats.FORMAT_VERSION + 1)} == {p.parent.name for p in STORED}
    assert len(STORED) == 2 * formats.FORMAT_VERSION
    assert sum(file.stat().st_size for file in DATA.rglob("*") if file.is_file()) < 100_000


def test_there_is_a_migration_from_every_older_format():
    assert sorted(formats.MIGRATIONS) == list(range(1, formats.FORMAT_VERSION))


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_stored_run_opens_replays_and_is_audited(path):
    run = Run.load(path, trust=True)
    run.verify()
    assert (run.num_steps, run.num_examples, run.num_weights) == (STEPS, 24, 31)
    assert run.is_dense == (path.name == "dense")
    assert run.checkpoints == ([0, STEPS] if run.is_dense else [0, EVERY, 2 * EVERY, STEPS])
    assert len(run.batch(3)) == BATCH
    assert len(run.recorded(3).parts(3)) == 2
    assert run.options(0)[0]["lr"] == 0.3
    assert bool(run.losses.isfinite().all())
    again = replay(run, tolerate=True)
    assert max(again.deviations.values()) < 1e-9
    assert_close(again.run.losses, run.losses, **SAME_STEPS)
    assert {4, 9} == {row["example"] for row in audit(run, tier="any", progress=False).worst(2)}
    if run.is_dense:
        ops = Window.of_run(run, stop=6).dense_operators()
        assert_close(ops.predicted_test, ops.test_displacement, rtol=1e-9, atol=1e-10)


def copied(path, **changes):
    """A stored run with other entries in its manifest, signed."""
    shutil.copytree(STORED[0], path)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    manifest |= changes
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": json_digest(manifest)}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"format_version": 99},
            r"99, but poprisk \S+ reads .*1: read it with poprisk \d\S+, which wrote it, or a later version",
        ),
        ({"format_version": 99, "environment": {}}, "read it with the poprisk that wrote it, or a later version"),
        ({"format_version": 99, "environment": {"poprisk": "7.0"}}, "read it with poprisk 7.0, which wrote it"),
        ({"format_version": 0}, r"format_version 0, .*: read it with poprisk \S+, which wrote it"),
        ({"format_version": True}, "format_version True"),
        ({"format_version": "1"}, "format_version '1'"),
        ({"format_version": None}, "format_version None"),
    ],
)
def test_other_formats_are_refused_with_what_reads_them(tmp_path, changes, message):
    path = copied(tmp_path / "run", **changes)
    with pytest.raises(DataError, match=message):
        Run.load(path)


@pytest.fixture
def an_older_format(tmp_path, monkeypatch):
    """As if there had been a version 0, which called examples and losses otherwise, and had no modes."""

    def manifest(old):
        examples = old.pop("number_of_examples")
        return {**old, "examples": examples, "modes": True}

    def content(old):
        tensors, notes = old
        return {name.replace("verluste", "loss"): tensor for name, tensor in tensors.items()}, notes

    names = {"manifest": manifest, "content": content}
    monkeypatch.setattr(formats, "MIGRATIONS", {0: formats.Migration("examples and losses have other names", **names)})
    there = Run.load(STORED[0])
    path = tmp_path / "old"
    shutil.copytree(STORED[0], path)
    old = json.loads((path / "manifest.json").read_text())
    del old["sha256"], old["modes"]
    old["format_version"], old["number_of_examples"] = 0, old.pop("examples")
    for record in [old["start"], *(segment["file"] for segment in old["segments"])]:
        tensors, notes = storage.read_tensors(path, storage.TensorFile(**record))
        renamed = {name.replace("loss", "verluste"): tensor for name, tensor in tensors.items()}
        record |= vars(storage.write_tensors(path / record["name"], renamed, notes))
    (path / "manifest.json").write_text(json.dumps({**old, "sha256": json_digest(old)}))
    return path, there


def test_an_older_format_goes_through_its_migration(an_older_format, tmp_path, monkeypatch):
    path, there = an_older_format
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    run = Run.load(path)
    assert run.manifest["format_version"] == formats.FORMAT_VERSION
    assert run.num_examples == 24
    assert torch.equal(run.losses, there.losses)
    assert max(replay(run, tolerate=True).deviations.values()) < 1e-9
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before  # opening writes nothing
    new = run.save(tmp_path / "new")
    monkeypatch.setattr(formats, "MIGRATIONS", {})
    assert torch.equal(Run.load(new.path).losses, there.losses)
    with pytest.raises(DataError, match="format_version 0"):
        Run.load(path)


def test_an_older_run_is_not_gone_on_with(an_older_format):
    path, there = an_older_format
    module, manifest = there.module(), there.manifest
    optimizer = PopRiskAdamW(module.parameters(), lr=0.3)
    first = [p.clone() for p in module.parameters()]
    options = {"problem": there.problem, "training": manifest["training"], "seed": manifest["seed"], "resume": True}
    with pytest.raises(RunError, match=r"format_version 0, .*other names.*Run.load\(path\).save\(new_path\)"):
        Recorder(path, module, optimizer, **options)
    assert_close([p.clone() for p in module.parameters()], first, rtol=0, atol=0)


def test_a_migrated_run_is_still_checked_for_damage(an_older_format):
    path, _ = an_older_format
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"num_steps": 40', '"num_steps": 41'))
    with pytest.raises(DataError, match="damaged"):
        Run.load(path)
