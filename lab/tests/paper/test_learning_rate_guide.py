"""The learning-rate guide at its smoke size by the real Trainer: paired, resumable, and drawn."""

import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from poprisk._core.store.envelope import load_result
from poprisk.errors import MissingExtraError
from poprisk_lab.data.char_lm import help_topics
from poprisk_lab.paper.learning_rate import study as guide
from poprisk_lab.paper.learning_rate.factors import cells_of, reference_lr, tasks_of

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

NOISY, TEXT = (sweep.task for sweep in guide.SMOKE.sweeps)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    path = tmp_path_factory.mktemp("guide") / "guide.json"
    guide.main(["--smoke", "--output", str(path)])
    return path


def test_smoke_measures_every_cell(smoke):
    saved = load_result(smoke, guide.KIND)["result"]
    assert saved["complete"]
    assert [(r["task"], r["optimizer"], r["lr"]) for r in saved["summary"]] == guide.SMOKE.cells()
    assert len(saved["runs"]) == len(saved["summary"]) == 6
    for row in saved["summary"]:
        assert (row["mean_gate"] is None) == (row["optimizer"] == "AdamW")
        assert (row["memorized"] is None) == (row["task"] == TEXT)
        low, high = (0.0, 0.5) if row["metric"] == "accuracy" else (4.0, 5.0)
        assert low < row["last"]["value"] < high
        assert 2 < row["train_loss"]["value"] < 5
    by_lr = {(r["task"], r["optimizer"], r["lr"]): r["train_loss"]["value"] for r in saved["summary"]}
    assert by_lr[TEXT, "AdamW", 1e-3] != by_lr[TEXT, "soft", 1e-3] != by_lr[TEXT, "soft", 1e-2]


def test_goes_on_where_it_was_and_grows(smoke, tmp_path, monkeypatch):
    path = tmp_path / "guide.json"
    real, calls = guide.train, []

    def counted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(guide, "train", counted)
    config = replace(guide.SMOKE, sweeps=guide.SMOKE.sweeps[1:])
    with pytest.raises(KeyboardInterrupt):
        guide.run(config, path)
    assert not load_result(path, guide.KIND)["result"]["complete"]
    summary = guide.run(config, path)["summary"]
    assert len(calls) == 2 + 2  # one done, one interrupted, two of three left
    finished = load_result(smoke, guide.KIND)["result"]["summary"]
    assert summary == [row for row in finished if row["task"] == TEXT]  # as if never interrupted
    longer = replace(config.sweeps[0], adamw_lrs=(1e-3, 3e-3))
    assert len(guide.run(replace(config, sweeps=(longer,)), path)["summary"]) == 4
    assert len(calls) == 4 + 1


@pytest.mark.parametrize("name", [NOISY, TEXT])
def test_every_optimizer_sees_the_same_weights_and_batches_and_no_generator_moves(name):
    text, seen, take = help_topics(), {}, guide._Rows.__getitems__
    torch.manual_seed(5)
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    for optimizer in ("AdamW", "soft"):
        task = guide.make_task(guide.SMOKE, text, name, seed=1)
        first, make = [], task.model

        def model(make=make, first=first):
            network = make()
            first.append(torch.cat([p.detach().flatten().clone() for p in network.parameters()]))
            return network

        def batch(rows, indices, first=first):
            first.append(tuple(indices))
            return take(rows, indices)

        with patch.object(guide._Rows, "__getitems__", batch):
            guide.train(replace(task, model=model), guide.SMOKE.trainer, optimizer, 1e-3, 1)
        seen[optimizer] = first
    (weights, *batches), (other_weights, *other_batches) = seen["AdamW"], seen["soft"]
    assert torch.equal(weights, other_weights)
    assert batches == other_batches
    assert len(batches) >= task.steps
    after = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_learning_rate_reaches_the_optimizer_through_the_schedule():
    """Warm-up ends at the peak; the Trainer's two groups get the gate's options and its own weight decay."""
    task = guide.make_task(guide.SMOKE, help_topics(), TEXT, seed=0)
    seen = []
    step = guide.PopRiskAdamW.step

    def spy(self, closure=None):
        groups = self.param_groups
        seen.append(([g["lr"] for g in groups], [g["weight_decay"] for g in groups], {g["alpha"] for g in groups}))
        return step(self, closure)

    with patch.object(guide.PopRiskAdamW, "step", spy):
        guide.train(task, replace(guide.SMOKE.trainer, warmup_share=0.25), "calibrated", 1e-2, 0)
    rates = [lrs[0] for lrs, _, _ in seen]
    assert rates == pytest.approx([0.0, 1e-2, 1e-2 * 2 / 3, 1e-2 / 3])
    assert all(decays == [0.01, 0.0] and alphas == {"calibrated"} for _, decays, alphas in seen)


def test_the_default_is_trained_as_it_comes_and_the_others_are_spelt_out():
    task = guide.make_task(guide.SMOKE, help_topics(), TEXT, seed=0)
    made, step = {}, guide.PopRiskAdamW.step

    def spy(self, closure=None):
        made[name] = self.param_groups[0]
        return step(self, closure)

    with patch.object(guide.PopRiskAdamW, "step", spy):
        for name in guide.SETTINGS:
            guide.train(task, guide.SMOKE.trainer, name, 1e-2, 0)
    chosen = {name: (g["gate"], g["strength"], g["alpha"], g["weight_decay"]) for name, g in made.items()}
    assert not any(g["normalize_gate"] for g in made.values())
    assert chosen == {
        "soft": ("soft", 1.0, 1.0, 0.01),
        "calibrated": ("soft", 1.0, "calibrated", 0.01),
        "snr": ("snr", 1.0, 1.0, 0.01),
        "default": ("snr", 100.0, 1.0, 5e-3),
    }


def test_says_what_is_missing(tmp_path):
    with patch.dict("sys.modules", {"transformers": None}), pytest.raises(MissingExtraError, match=r"poprisk\[hf\]"):
        guide.run(guide.SMOKE, tmp_path / "x.json")


def test_figure_shows_the_stored_numbers(smoke, tmp_path):
    pytest.importorskip("matplotlib")
    from poprisk._core.store import write_figure
    from poprisk_lab.paper.learning_rate.figure import draw

    saved = load_result(smoke, guide.KIND)
    rows = saved["result"]["summary"]
    figure = draw(saved)
    panels = figure.axes
    assert [panel.get_title(loc="left").lower() for panel in panels] == [task.lower() for task in tasks_of(rows)]
    for panel, task in zip(panels, tasks_of(rows), strict=True):
        drawn = {c.get_label(): c.lines[0].get_xydata().tolist() for c in panel.containers}
        assert len(drawn) == 2
        for optimizer, label in (("AdamW", "AdamW"), ("soft", "Algorithm 1 (soft, α = 1)")):
            cells = cells_of(rows, task, optimizer)
            expected = [[lr / reference_lr(rows, task), row["last"]["value"]] for lr, row in cells.items()]
            np.testing.assert_allclose(drawn[label], expected)
    write_figure(tmp_path / "figure.png", figure)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_stored_result_is_of_the_configuration_the_command_runs():
    stored = load_result(Path(__file__).parents[2] / "results/learning_rate_guide.json", guide.KIND)
    config = guide.GuideConfig()
    assert [(r["task"], r["optimizer"], r["lr"]) for r in stored["result"]["summary"]] == config.cells()
    assert all(r["last"]["count"] == config.seeds_of(r["optimizer"]) for r in stored["result"]["summary"])
    assert config.seeds_of("AdamW") == config.seeds == 3
    assert stored["config"] | guide.sizes(config) == stored["config"]
