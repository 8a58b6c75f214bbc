"""Knowing at scale: its files are read as they were written, its studies run, and its scores are what they say."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from poprisk.errors import DataError
from poprisk_lab.at_scale import cifar, lora, numbers, ranking
from poprisk_lab.at_scale.blocks import dequantized
from poprisk_lab.at_scale.packed_images import pack_images, unpack_images


def test_packed_images_are_the_same_bytes():
    draw = np.random.default_rng(0)
    rough = draw.integers(0, 256, (7, 8, 8, 3), dtype=np.uint8)
    smooth = np.full((2, 8, 8, 3), 250, np.uint8)
    smooth[1, 3:] = 1
    for images in (rough, smooth):
        assert np.array_equal(unpack_images(pack_images(images), 8), images)
    assert len(pack_images(smooth)) < 0.5 * smooth.nbytes + 100


@pytest.mark.parametrize(("kind", "levels"), [("Q8_0", 254), ("Q4_1", 15)])
def test_blocks_stand_for_numbers_within_half_a_level(kind, levels):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).reshape(-1, 32)
    if kind == "Q8_0":
        factor = (x.abs().amax(1) / 127).half()
        body = (x / factor[:, None].float()).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
        parts = [factor[:, None].view(torch.uint8), body]
    else:
        least = x.amin(1).half()
        factor = ((x.amax(1) - least.float()) / 15).half()
        level = ((x - least[:, None].float()) / factor[:, None].float()).round().clamp(0, 15).to(torch.uint8)
        body = level[:, :16] | (level[:, 16:] << 4)
        parts = [factor[:, None].view(torch.uint8), least[:, None].view(torch.uint8), body]
    found = dequantized(torch.cat(parts, 1).reshape(3, -1), kind, 64).reshape(-1, 32)
    width = (x.amax(1) - x.amin(1)) if kind == "Q4_1" else 2 * x.abs().amax(1)
    assert bool(((found - x).abs() <= 0.51 * width[:, None] / levels + 2e-3).all())
    with pytest.raises(DataError, match="do not hold"):
        dequantized(torch.zeros(1, 5, dtype=torch.uint8), kind, 32)


def test_the_area_is_that_of_scikit_learn():
    draw = torch.Generator().manual_seed(0)
    wrong = torch.rand(200, generator=draw) < 0.3
    score = torch.randn(200, generator=draw).round(decimals=1) - wrong.float()
    assert cifar.auc(score, wrong) == pytest.approx(roc_auc_score(wrong, -score), abs=1e-9)


def test_a_tiny_run_is_judged_and_its_folds_are_scored_on_the_same_images():
    arrays = cifar.load(None)
    device, config = torch.device("cpu"), replace(cifar.TINY, epochs=2)
    result = cifar.judged_run(arrays, config, device)
    assert all(row["valid"] and 0 <= row["test_accuracy"] <= 1 for row in result["curve"])
    assert {"bare", "training", "risk", "truth", "finish", "probabilities"} <= set(result["seconds"])
    assert numbers.moment_gap(result) >= 0
    folds = []
    for fold in range(cifar.FOLDS):  # what folds that know the clean labels would say
        out = np.arange(fold, 600, cifar.FOLDS)
        known = 9 * np.eye(10)[arrays["clean"][out]][None].repeat(2, 0)
        folds.append({"out": out, "steps": np.array(30), "raw": known, "mean": known})
    judged = cifar.confident_learning(result, folds, arrays, np.arange(0, 600, 2))
    assert judged["steps"] == 150
    assert judged["seconds"] == pytest.approx(150 * result["bare_step"])
    assert all(area == 1.0 for areas in judged["auc"].values() for area in areas.values())


@pytest.mark.slow
def test_a_tiny_language_model_is_studied(tmp_path):
    pytest.importorskip("peft")
    saved = []
    result = lora.study(None, lora.TINY, saved.append)
    assert saved[-1] is result
    influence = torch.tensor(result["influence"])
    assert influence.shape == (lora.TINY.queries, 48)
    assert result["replayed_difference"] < 1e-5
    chosen = {row["group"]: row for row in result["removals"]}
    predicted = [sum(chosen[name]["predicted"]) for name in ("most helpful", "most harmful")]
    measured = [sum(chosen[name]["measured"]) for name in ("most helpful", "most harmful")]
    assert predicted[0] > 0 > predicted[1]
    assert measured[0] > 0 > measured[1]


def test_restrictions_are_ranked_by_real_removals():
    config = replace(ranking.SMOKE, shares=(0.05,))
    rows = ranking.study(config)["rows"]
    for row in rows:
        found = row["shares"]["0.05"]
        assert {"all parameters", "last layer", "gradient products"} < set(found)
        assert found["all parameters"]["correlation"] > 0.85
        assert 0.5 < found["all parameters"]["slope"] < 2
