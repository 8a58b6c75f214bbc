"""The rule for all tasks on made-up results whose answer is known, and the page made from them."""

import gzip
import json

import pytest

from poprisk_lab.recipes.condense import main as condense
from poprisk_lab.recipes.figure import draw
from poprisk_lab.recipes.judging import Recipe, controls, gain_over, judge, judge_all, swap_test
from poprisk_lab.recipes.numbers import page_slots
from poprisk_lab.recipes.stored_tasks import ANY, StoredTask, stored_tasks

SEEDS = [0, 1, 2]
AVERAGES = ["weights", "tail 0.2"]


def row(arm, test, held=None, lr=1e-3, share=0.05, metric="test accuracy", averages=AVERAGES):
    """A row whose seeds differ by 0.001; test and held are [average][evaluation]."""
    lists = {"curves": {metric: seeded(test)}}
    if held is not None:
        lists |= {name: seeded(held, 0) for name in ("held_error", "half_held_error", "held_loss", "half_held_loss")}
    return {"arm": arm, "hyper": {"lr": lr}, "share": share, "seeds": SEEDS, "averages": averages, **lists}


def seeded(values, step=0.001):
    return [[[None if v is None else v + step * seed for v in curve] for curve in values] for seed in SEEDS]


def task(rows, clean=False, metric="test accuracy", higher=True):
    return {"metric": metric, "higher_is_better": higher, "clean": clean, "evaluation_steps": [1, 2, 3], "rows": rows}


NOISY = [
    row("adamw", [[0.5, 0.7, 0.6], [0.5, 0.8, 0.7]], [[0.5, 0.3, 0.4], [0.5, 0.2, 0.3]]),
    row("adamw", [[0.5, 0.72, 0.6], [0.5, 0.79, 0.71]], share=0),
    row("adamw", [[0.5, 0.6, 0.65], [0.5, 0.6, 0.6]], lr=3e-3, share=0),
    row("adamw_cosine", [[0.5, 0.6, 0.68], [0.5, 0.6, 0.6]], share=0),
    row("literal", [[0.5, 0.6, 0.66], [0.5, 0.6, 0.6]], [[0.5, 0.4, 0.3]] * 2),
    row("gate_schedule", [[0.5, 0.6, 0.65]], averages=["weights"]),
    row("shuffled_gate", [[0.5, 0.6, 0.66]], averages=["weights"]),
    row("relative", [[0.5, 0.6, 0.54], [0.5, 0.6, 0.6]], [[0.5, 0.4, 0.3]] * 2),
]
CLEAN = [
    row("adamw", [[0.5, 0.8, 0.9], [0.5, 0.85, 0.91]], [[0.5, 0.2, 0.1], [0.5, 0.1, 0.09]]),
    row("adamw", [[0.5, 0.8, 0.905], [0.5, 0.85, 0.915]], share=0),
    row("adamw_cosine", [[0.5, 0.8, 0.91], [0.5, 0.8, 0.9]], share=0),
    row("literal", [[0.5, 0.8, 0.85], [0.5, 0.8, 0.9]], [[0.5, 0.2, 0.1]] * 2),
]


@pytest.fixture
def results(tmp_path):
    stored = {"tails": [0.2], "tasks": {"digits-40": task(NOISY), "digits-0": task(CLEAN, clean=True)}}
    (tmp_path / "recipes.json").write_text(json.dumps(stored))
    return tmp_path


def test_a_recipe_reads_the_training_it_needs(results):
    _, noisy = stored_tasks(results)
    assert Recipe("adamw").values(noisy) == pytest.approx({0: 0.6, 1: 0.601, 2: 0.602})  # of all examples
    assert Recipe("adamw", "tail 0.2").values(noisy)[0] == pytest.approx(0.71)
    assert Recipe("adamw", "tail 0.2", "error").values(noisy)[0] == pytest.approx(0.8)  # held back, second moment
    assert Recipe("adamw", ANY, "half loss").values(noisy)[0] == pytest.approx(0.8)
    assert Recipe("adamw", ANY).values(noisy) is None
    assert Recipe("adamw_cosine", "tail 0.2", "loss").values(noisy) is None  # it has no block
    assert Recipe("sam").values(noisy) is None
    assert Recipe("shuffled_gate", "tail 0.2").values(noisy) is None


def test_without_a_search_the_oracle_is_the_best_rate_and_schedule(results):
    clean, noisy = stored_tasks(results)
    assert not noisy.searched
    assert noisy.tuned_best[0] == pytest.approx(0.72)
    assert noisy.tuned_last[0] == pytest.approx(0.68)
    assert clean.tuned_last[0] == pytest.approx(0.91)


def test_the_stored_search_is_the_oracle(results):
    def searched(last, best, reasons):
        return {"arm": "adamw", "chosen_for": reasons, "seeds": SEEDS, "curves": {"test accuracy": [[best, last]] * 3}}

    rows = [searched(0.74, 0.75, ["last"]), searched(0.3, 0.77, ["best"])]
    study = {"task": {"config": {"noise": 0.4, "evaluations": 30}}, "rows": rows}
    (results / "labels.json").write_text(json.dumps({"result": {"studies": {"digits-40": study}}}))
    clean, noisy = stored_tasks(results)
    assert (noisy.searched, clean.searched) == (True, False)
    assert noisy.tuned_last == dict.fromkeys(SEEDS, 0.74)
    assert noisy.tuned_best == dict.fromkeys(SEEDS, 0.77)
    stored = json.loads((results / "recipes.json").read_text())
    stored["tasks"]["digits-40"]["task"] = {"config": {"noise": 0.6, "evaluations": 40}}
    (results / "recipes.json").write_text(json.dumps(stored))
    assert not stored_tasks(results)[1].searched  # of another task


def test_the_winner_has_the_least_regret_among_those_that_lose_nothing(results):
    ranked, others = judge_all(stored_tasks(results))
    winner = ranked[0]
    assert winner.recipe == Recipe("adamw", "tail 0.2", "error")
    assert winner.regret == pytest.approx(-8)  # 0.80 against 0.72
    gain = winner.gains["digits-40"]
    assert gain.at_oracle
    assert gain.last.value == pytest.approx(12)
    assert winner.gains["digits-0"].usual.value == pytest.approx(0)  # 0.91 against cosine's 0.91
    literal = judge(Recipe("literal"), stored_tasks(results))
    assert literal.clean_losses == 1  # 0.85
    losses = [each.clean_losses for each in ranked]
    assert losses == sorted(losses)  # whatever their regret
    assert {each.recipe.arm for each in others} >= {"gate_schedule", "relative"}


def test_a_tie_goes_to_the_simpler_recipe(results):
    stored = json.loads((results / "recipes.json").read_text())
    stored["tasks"]["digits-40"]["rows"][1] = row("adamw", [[0.5, 0.72, 0.6], [0.5, 0.8, 0.7995]], share=0)
    (results / "recipes.json").write_text(json.dumps(stored))
    assert judge_all(stored_tasks(results))[0][0].recipe == Recipe("adamw", "tail 0.2")  # 0.05 points behind


def test_gains_by_unit_and_divergence():
    def made(metric, higher):
        return StoredTask("t", metric, higher, False, (), {}, {})

    accuracy = made("test accuracy", True)
    gain = gain_over(accuracy, {0: 0.8, 1: 0.9}, {0: 0.7, 1: 0.7})
    assert (gain.value, gain.count) == (pytest.approx(15), 2)
    assert gain.low == pytest.approx(15 - 12.7062 * 5, rel=1e-4)  # Student's t with one degree of freedom
    assert gain_over(accuracy, {5: 0.8}, {0: 0.7, 1: 0.6}).value == pytest.approx(15)  # the mean of the others
    assert gain_over(made("held-out MSE", False), {0: 0.3}, {0: 0.2}).value == pytest.approx(-50)
    assert gain_over(made("clean PSNR", True), {0: 20.0}, {0: 23.0}).value == pytest.approx(-99.526, rel=1e-4)
    assert gain_over(accuracy, {0: float("nan")}, {0: 0.7}).value == -100
    assert (accuracy.limit, made("loss", False).limit) == (0.5, 1.0)


def test_controls_and_swaps(results):
    tasks = stored_tasks(results)
    ((found, gains),) = controls(tasks)
    assert found.name == "digits-40"
    assert gains["mean opening"].value == pytest.approx(1)
    assert gains["mean opening"].verdict == "above"
    assert gains["shuffled"].value == pytest.approx(0)
    assert "random mask" not in gains
    ((_, lr, gain),) = swap_test(tasks)
    assert (lr, gain.value) == (1e-3, pytest.approx(-6))


def test_the_page_has_every_verdict(results, tmp_path):
    slots = page_slots(results)
    assert slots["winner"] == "AdamW, mean of the last 20%, least error on the block"
    assert slots["qualified"]
    assert "met: at or above tuned AdamW's best checkpoint on 1 of 1 noisy tasks" in slots["bars"]
    assert slots["swap_words"].startswith("1 of 1 pairs of a task and a learning rate are more than 5 points")
    assert "**no**" in slots["swap"]
    assert slots["control_counts"] == {"tasks": 1, "above": 0, "below": 0}
    assert slots["waves"] == {}
    text = (results / "recipes.json").read_bytes()
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/recipes.json.gz").write_bytes(gzip.compress(text))
    assert page_slots(tmp_path / "packed") == slots
    curves = {"changed": [[0, 5, 2, 4]] * 3, "test accuracy": [[0.1, 0.2, 0.7, 0.3]] * 3}
    wave = {"window": 1, "tasks": {"digits-40": {"seeds": SEEDS, **curves}}}
    (results / "label_wave.json").write_text(json.dumps(wave))
    waves = page_slots(results)["waves"]
    assert waves["regret"] == "+2.10"  # 0.70 against 0.72, 0.721 and 0.722
    assert waves["own"] == "−8.00"
    draw(results)


def test_a_training_that_diverged_is_shown(results):
    stored = json.loads((results / "recipes.json").read_text())
    broken = row("sam", [[0.5, None, None], [0.5, None, None]], [[0.5, None, None]] * 2)
    stored["tasks"]["digits-40"]["rows"].append(broken)
    (results / "recipes.json").write_text(json.dumps(stored))
    tasks = stored_tasks(results)
    assert judge(Recipe("sam"), tasks).regret == 100
    assert Recipe("sam", "weights", "loss").values(tasks[1])[0] == 0.5  # the moments before
    page_slots(results)


def test_a_condensed_study_gives_the_same_page(results, tmp_path):
    before = page_slots(results)
    output = tmp_path / "small" / "recipes.json"
    output.parent.mkdir()
    condense([str(results / "recipes.json"), "--output", str(output)])
    assert page_slots(output.parent) == before
    stored = json.loads(output.read_text())
    assert stored["tails"] == [0.2]
    assert "curves" not in stored["tasks"]["digits-40"]["rows"][0]


def test_the_loss_decides_between_errors_that_are_about_equal(tmp_path):
    errors, losses = [[0.5, 0.2, 0.2, 0.21]], [[1.0, 0.9, 0.7, 0.5]]
    one = row("adamw", [[0.1, 0.2, 0.3, 0.4]], errors, averages=["weights"])
    one["held_loss"] = seeded(losses, 0)
    stored = {"tails": [], "tasks": {"digits-40": task([one]) | {"task": {"config": {"train_size": 2000}}}}}
    (tmp_path / "recipes.json").write_text(json.dumps(stored))
    (found,) = stored_tasks(tmp_path)
    assert Recipe("adamw", moment="error").values(found)[0] == pytest.approx(0.3)  # a tie of errors
    assert Recipe("adamw", moment="kept").values(found)[0] == pytest.approx(0.4)  # 0.21 is within half of 0.04
    stored["tasks"]["digits-40"]["task"]["config"]["train_size"] = 200_000
    (tmp_path / "recipes.json").write_text(json.dumps(stored))
    assert Recipe("adamw", moment="kept").values(stored_tasks(tmp_path)[0])[0] == pytest.approx(0.3)
    assert Recipe("adamw", ANY, "kept").values(found)[0] == pytest.approx(0.4)
