"""The influence benchmark at its smoke sizes: what is measured, that it goes on where it was, and what it refuses."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from poprisk._core.store.envelope import load_result
from poprisk.errors import DataError
from poprisk_lab.data.idx import ImageSplit
from poprisk_lab.paper.mnist_influence import mislabels as mnist_mislabels
from poprisk_lab.paper.mnist_influence import study as experiment
from poprisk_lab.paper.mnist_influence import task as mnist_task
from poprisk_lab.paper.mnist_influence.metrics import share_found
from poprisk_lab.paper.mnist_influence.study import SMOKE, MnistConfig, Setting

ROOT = Path(__file__).parents[2]


def silent(_):
    pass


@pytest.fixture(scope="module")
def driver():
    spec = importlib.util.spec_from_file_location("influence_benchmark", ROOT / "benchmarks/influence.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(driver, capsys, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["influence.py", *map(str, arguments)])
    driver.main()
    return capsys.readouterr().out.splitlines()


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mnist")
    lines = []
    return folder, experiment.run(SMOKE, None, folder, progress=lines.append), lines


def test_every_setting_has_its_stages_and_says_so(smoke):
    folder, found, lines = smoke
    assert [each["setting"]["name"] for each in found["settings"]] == ["SGD, ReLU", "Adam, tanh"]
    assert [line.split(": {")[0] for line in lines[2:6]] == [
        f"SGD, ReLU: {stage}" for stage in ("influence", "removals", "subsets", "derivative")
    ]
    assert [each["influence"]["kinks"] for each in found["settings"]] == [["ReLU"], []]
    for each in found["settings"]:
        assert each["influence"]["cpu_seconds"] >= 0
        assert each["removals"]["pairs"] == each["setting"]["queries"] * SMOKE.removals
        assert 0 < each["subsets"]["standard_error"] < 1
    assert len(list(folder.glob("*.safetensors"))) == 2


def test_ten_steps_are_predicted_and_are_not_chaotic(smoke):
    """So short a run of so small a network crosses few kinks: what holds on long ones is not for a smoke test."""
    for each in smoke[1]["settings"]:
        for column in ("first_order", "linearized"):
            assert each["removals"][column]["pearson"] > 0.95
            assert 0.8 < each["removals"][column]["slope_actual_on_predicted"] < 1.2
        assert each["removals"]["same_removals_again"]["pearson"] > 0.9999
        assert each["removals"]["rounding_rms"] < 1e-4 * each["removals"]["actual_rms"] + 1e-6
        assert each["derivative"]["relative_error"]["1e-06"] < 1e-5


def test_labels_have_every_column(smoke):
    labels = smoke[1]["mislabels"]
    assert {"suspicion (audit)", "last loss", "AUM", "self-confidence, 5 folds"} <= set(labels["columns"])
    assert {"self-influence", "linearized leave-one-out loss", "AUM"} <= set(labels["sampled"]["columns"])
    assert (labels["sampled"]["wrong"], labels["sampled"]["right"]) == (SMOKE.exact_wrong, SMOKE.exact_right)
    best = labels["columns"][labels["best"]]["auc"]
    assert all(column["auc"] <= best for column in labels["columns"].values())
    assert "folds" not in labels["best of the run alone"]
    by_seed = [seed["columns"]["AUM"]["auc"] for seed in labels["by_seed"]]
    assert math.isclose(labels["columns"]["AUM"]["auc"], sum(by_seed) / 2)


def test_what_was_stored_is_read_and_only_the_missing_is_made(smoke, monkeypatch):
    folder, found, _ = smoke
    (folder / "SGD--ReLU--subsets.json").unlink()
    made = []
    real = experiment.retrain
    monkeypatch.setattr(experiment, "retrain", lambda *a, **k: made.append(a[1].count) or real(*a, **k))
    again = experiment.run(SMOKE, None, folder, progress=silent)
    assert made == [SMOKE.subsets, SMOKE.subsets]
    assert again == found


def test_a_setting_more_or_less_leaves_the_others_as_they_are(smoke, monkeypatch):
    folder, found, _ = smoke

    def never(*_, **__):
        raise AssertionError("it was made already")

    monkeypatch.setattr(experiment, "train_images", never)
    fewer = replace(SMOKE, settings=SMOKE.settings[1:])
    assert experiment.run(fewer, None, folder, progress=silent)["settings"] == found["settings"][1:]
    other = replace(SMOKE, settings=(replace(SMOKE.settings[0], queries=11),))
    with pytest.raises(DataError, match=r"SGD--ReLU--influence\.json was made with another configuration"):
        experiment.run(other, None, folder, progress=silent)


def test_a_folder_of_another_configuration_is_refused(smoke, monkeypatch):
    folder = smoke[0]
    with pytest.raises(DataError, match=r"labels--seed-0\.json was made with another configuration"):
        experiment.run(replace(SMOKE, removals=7), None, folder, progress=silent)
    made = experiment.images(SMOKE, None)
    other = ImageSplit(made.train_inputs.flip(0), made.train_labels, made.test_inputs, made.test_labels)
    monkeypatch.setattr(experiment, "images", lambda *_: other)
    with pytest.raises(DataError, match="was made with another configuration"):
        experiment.run(SMOKE, None, folder, progress=silent)


def test_images_are_asked_for_and_counted(tmp_path):
    with pytest.raises(DataError, match="give the folder"):
        experiment.images(MnistConfig(), None)
    with pytest.raises(DataError, match="has no file train-images-idx3-ubyte"):
        experiment.images(MnistConfig(), tmp_path)
    few = ImageSplit(torch.zeros(3, 4), torch.zeros(3).long(), torch.zeros(2, 4), torch.zeros(2).long())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mnist_task, "idx_split", lambda _: few)
        with pytest.raises(DataError, match="at least 5000 training images, got 3"):
            experiment.images(MnistConfig(), tmp_path)


def test_the_setting_is_the_one_that_is_asked_for():
    config = MnistConfig()
    split = ImageSplit(torch.rand(128, 784), torch.arange(128) % 10, torch.rand(2, 784), torch.zeros(2).long())
    run = experiment.train_images(replace(config, n=128, epochs=1), Setting("x", "sgd"), split)
    assert run.layout.shapes[::2] == ((128, 784), (64, 128), (10, 64))
    assert run.num_steps == 2
    assert len(run.batch(0)) == 64
    assert (config.n, config.epochs, config.removals, config.subset_size) == (5000, 3, 100, 50)


def test_agreement_regresses_the_actual_on_the_predicted():
    predicted = torch.linspace(-1, 1, 12).reshape(3, 4)
    found = experiment._agreement(predicted, 2 * predicted)
    assert math.isclose(found["slope_actual_on_predicted"], 2, rel_tol=1e-6)
    assert math.isclose(found["median_pearson_by_query"], 1, rel_tol=1e-6)


def test_mean_spearman_is_scipys():
    generator = torch.Generator().manual_seed(0)
    one, other = torch.rand(9, 3, generator=generator), torch.rand(9, 3, generator=generator)
    expected = sum(spearmanr(one[:, j], other[:, j]).statistic for j in range(3)) / 3
    assert math.isclose(experiment._mean_spearman(one, other), expected, rel_tol=1e-9)


def test_a_sample_that_is_everything_has_the_share_of_everything():
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(200, generator=generator) < 0.2
    scores = torch.rand(200, generator=generator).double() + wrong
    whole = mnist_mislabels._stratified(scores, wrong, torch.ones(200))
    assert math.isclose(whole["found_in_first_15%"], float(share_found(scores, wrong, 0.15).value), rel_tol=1e-5)
    # Each right label counted twice is the same as a table with every right label twice.
    twice = torch.cat([torch.arange(200), (~wrong).nonzero().squeeze(1)])
    expected = share_found(scores[twice], wrong[twice], 0.15).value
    found = mnist_mislabels._stratified(scores, wrong, torch.where(wrong, 1.0, 2.0))["found_in_first_15%"]
    assert abs(found - float(expected)) < 1.5 / int(wrong.sum())


def test_the_driver_prints_one_json_line_for_mnist(smoke, driver, capsys, monkeypatch, tmp_path):
    output = tmp_path / "mnist.json"
    lines = call(driver, capsys, monkeypatch, "--smoke", "--folder", smoke[0], "--output", output)
    assert lines[0].startswith("labels, seed 0: ")
    printed = json.loads(lines[-1])
    assert (printed["part"], printed["smoke"]) == ("mnist", True)
    saved = load_result(output, "influence benchmark: mnist")
    assert saved["result"]["settings"] == printed["settings"] == smoke[1]["settings"]
    assert saved["config"]["n"] == SMOKE.n


def test_the_driver_needs_the_data(driver, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        call(driver, capsys, monkeypatch)
    assert "needs --data DIR" in capsys.readouterr().err
