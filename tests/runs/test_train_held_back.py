"""``train(…, hold_back=…)``: no step sees the held-back examples, the best weights are kept beside an honest record."""

import shutil
from functools import partial

import pytest
import torch
from tiny_problems import classification, make_mlp, regression, tiny_data
from torch import nn
from torch.testing import assert_close

from poprisk import Run
from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.runs._problem import Problem
from poprisk.runs._replay import replay
from poprisk.runs._storage import DirectoryStorage
from poprisk.runs._training import train

ADAM = partial(torch.optim.AdamW, lr=1e-2)


def normed():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))


def noisy(make_model=make_mlp, n=60):
    inputs, labels = tiny_data(n, dtype=torch.float32)
    labels = torch.where(torch.arange(n) % 5 == 0, labels, inputs[:, :3].argmax(1))
    return Problem(make_model, "cross_entropy", inputs, labels, test=(inputs[:20], labels[:20]), name="noisy")


def held(problem, steps=60, **options):
    return train(problem, ADAM, steps, **({"batch_size": 8, "hold_back": 0.25, "progress": False} | options))


def measured(run, weights):
    """Errors and losses of the held-back examples under a module's state."""
    module = run.problem.module()
    module.load_state_dict(weights)
    inputs, targets = run.problem.batch(run.kept.held)
    with torch.no_grad():
        outputs = module.eval()(inputs)
    return float((outputs.argmax(1) != targets).float().mean()), float(nn.functional.cross_entropy(outputs, targets))


@pytest.mark.parametrize("make_model", [make_mlp, normed])
def test_the_kept_weights_are_the_best_measured_and_no_step_saw_the_held_examples(make_model):
    run = held(noisy(make_model), tail=(0.2, 0.5))
    kept = run.kept
    assert kept.risk.valid
    assert len(kept.held) == 15
    drawn = torch.cat([run.batch(k) for k in range(run.num_steps)]).unique()
    assert len(drawn) == 45
    assert not torch.isin(drawn, kept.held).any()
    (best,) = [m for m in kept.moments if (m.step, m.tail) == (kept.risk.step, kept.risk.tail)]
    expected = float(best.scores.mean()), float(best.losses.mean())
    assert_close(measured(run, kept.weights), expected, rtol=1e-5, atol=1e-6)
    assert {each.tail for each in kept.moments} == {0.2, 0.5}
    assert kept.risk.accuracy == pytest.approx(1 - float(best.scores.mean()))


def test_the_record_is_that_of_the_training_alone():
    """The same steps as without measurements, on the same examples; it can be replayed."""
    problem = noisy()
    run = held(problem, steps=20)
    rest = torch.ones(len(problem), dtype=torch.bool)
    rest[run.kept.held] = False
    alone = Problem(make_mlp, "cross_entropy", problem.inputs[rest], problem.targets[rest])
    plain = train(alone, ADAM, 20, batch_size=8, progress=False)
    assert torch.equal(run.weights(20), plain.weights(20))
    assert replay(run).exact
    assert plain.kept is None


@pytest.mark.parametrize(("every", "make_model"), [(1, make_mlp), (7, normed)])
def test_killed_after_any_file_it_ends_with_the_same_weights(tmp_path, monkeypatch, every, make_model):
    """Whatever was written last, the directory as it is then goes on to the same end."""
    problem, copies = noisy(make_model), []
    options = {"every": every, "segment_steps": 6 if every == 1 else None, "steps": 20}

    def copying(name):
        usual = getattr(DirectoryStorage, name)

        def changed(self, *args):
            found = usual(self, *args)
            copies.append(tmp_path / f"killed-{len(copies)}")
            shutil.copytree(tmp_path / "whole", copies[-1])
            return found

        return changed

    with monkeypatch.context() as patch:
        for name in ("write", "write_manifest", "discard"):
            patch.setattr(DirectoryStorage, name, copying(name))
        whole = held(problem, path=tmp_path / "whole", **options)
    assert sorted(f.name for f in (tmp_path / "whole").iterdir() if "segment" not in f.name) == [
        "held-back-00000020.safetensors",
        "kept.safetensors",
        "manifest.json",
        "start.safetensors",
    ]
    assert len(copies) > 12
    for copy in copies:
        again = held(problem, path=copy, resume=True, **options)
        assert_close(again.kept.weights, whole.kept.weights, rtol=0, atol=0)
        assert again.kept.risk.to_dict() == whole.kept.risk.to_dict()
        assert [m.step for m in again.kept.moments] == [m.step for m in whole.kept.moments]
        assert torch.equal(again.weights(20), whole.weights(20))


def test_a_finished_run_is_opened_and_a_longer_one_goes_on(tmp_path):
    problem = noisy()
    first = held(problem, steps=20, path=tmp_path / "run")
    stamp = (tmp_path / "run" / "kept.safetensors").stat().st_mtime_ns
    again = held(problem, steps=20, path=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "kept.safetensors").stat().st_mtime_ns == stamp
    assert again.kept.risk.to_dict() == first.kept.risk.to_dict()
    longer = held(problem, steps=50, path=tmp_path / "run", resume=True)
    whole = held(problem, steps=50)
    assert_close(longer.kept.weights, whole.kept.weights, rtol=0, atol=0)
    copied = longer.save(tmp_path / "copy")
    copied.verify()
    assert_close(Run.load(tmp_path / "copy", problem=problem).kept.weights, whole.kept.weights, rtol=0, atol=0)
    (tmp_path / "copy" / "kept.safetensors").write_bytes(b"x")
    with pytest.raises(DataError, match=r"kept\.safetensors is damaged"):
        Run.load(tmp_path / "copy", problem=problem)
    with pytest.raises(RunError, match="another run"):
        held(problem, steps=60, path=tmp_path / "run", resume=True, hold_back=None)


def test_numbers_are_chosen_by_their_loss():
    run = held(regression(60), hold_back=0.2)
    least = min(run.kept.moments, key=lambda moment: float(moment.losses.mean()))
    assert run.kept.risk.step == least.step
    assert run.kept.risk.accuracy != run.kept.risk.accuracy  # NaN: there are no classes
    assert run.kept.risk.value > 0


def test_shares_out_of_range_are_refused():
    for share in (0, 1.0, True, "x"):
        with pytest.raises(HyperparameterError, match=r"use 0\.05"):
            held(classification(), hold_back=share)
    with pytest.raises(HyperparameterError, match="9 training examples"):
        held(classification(), hold_back=0.25, batch_size=12)
