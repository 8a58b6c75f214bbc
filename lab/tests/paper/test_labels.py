"""Wrong labels end to end: the smoke study, its figure, table and verdicts, and what is refused at the door."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from poprisk._core.store.envelope import load_result
from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.engine.arms import ALL_ARMS
from poprisk_lab.paper.labels.numbers import ADAMW_GIVEN, PAPER_RULE, accuracy_table
from poprisk_lab.paper.labels.numbers import claims as claims_labels
from poprisk_lab.paper.labels.numbers import lines as labels_lines
from poprisk_lab.paper.labels.study import KIND, SETTINGS, SMOKE, LabelsConfig, run, studies

DEFAULTS = SETTINGS[0].label


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    told = []
    config = replace(SMOKE, arms=("adamw", "snr", "gate_schedule"))
    result = run(config, lambda *progress: told.append(progress))
    assert told[-1][0] == told[-1][1]
    return load_result(result.save(tmp_path_factory.mktemp("labels") / "labels.json"), KIND)


def stored_study(noise, ends, best, data="digits"):
    """A study as it is stored, with given last accuracies of each row; AdamW's curve passes its best before."""

    def row(label, arm, curves, chosen_for=()):
        made = {"label": label, "arm": arm, "hyper": {"lr": 1e-3}, "chosen_for": list(chosen_for), "failures": 0}
        return made | {"seeds": list(range(len(curves))), "curves": {"test accuracy": curves}, "gate": None}

    rows = [row(label, arm, [[0.1, 0.2, value] for value in ends[label]]) for label, arm in LABELS.items()]
    tuned = [[0.1, top, last] for top, last in zip(best, ends["AdamW"], strict=True)]
    rows.append(row("AdamW", "adamw", tuned, ("last", "best")))
    config = {"task": "LabelTask", "data": data, "noise": noise}
    metric = {"name": "test accuracy", "higher_is_better": True, "target": None, "spec": ".3f"}
    trials = [{"hyper": {}, "curve": tuned}]
    arms = {"adamw": {"label": "AdamW", "search": {}, "trials": trials, "chosen": {"last": 0, "best": 0}}}
    task = {"name": f"{data}-{noise}", "metrics": [metric], "config": config}
    return {"task": task, "evaluation_steps": [1, 2, 3], "arms": arms, "rows": rows}


LABELS = {DEFAULTS: "defaults", ADAMW_GIVEN: "adamw", PAPER_RULE: "soft"}
ENDS = dict.fromkeys((*LABELS, "AdamW"), (0.7, 0.8, 0.75))


def claim_of(defaults, best, noise=0.4, adamw=(0.80, 0.81, 0.82)):
    ends = {DEFAULTS: defaults, ADAMW_GIVEN: (0.6, 0.61, 0.62), PAPER_RULE: (0.5, 0.52, 0.51), "AdamW": adamw}
    return claims_labels({"result": {"studies": {"one": stored_study(noise, ends, best)}}})[0]


def test_the_smoke_study_has_every_row_and_metric(saved):
    assert set(saved["result"]["studies"]) == {"digits-0", "digits-40"}
    for name, study in saved["result"]["studies"].items():
        assert {row["label"] for row in study["rows"]} >= {*LABELS, "AdamW", "SNR gate"}
        metrics = [metric["name"] for metric in study["task"]["metrics"]]
        assert ("memorized" in metrics) == (name == "digits-40")
        for row in study["rows"]:
            assert all(len(curve) == 3 for metric in metrics for curve in row["curves"][metric])


def test_the_figure_shows_each_data_set_twice(saved):
    from poprisk_lab.paper.labels.figure import draw as draw_labels

    figure = draw_labels(saved)
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["Digits: last step", "Digits: learning curves, 40% wrong"]
    last, curves = figure.axes
    assert list(last.get_xticks()) == [0, 40]
    assert len(curves.lines) == 3 * 5  # a mean, its best and its last step for each of five rows
    figure.savefig(io.BytesIO())  # lays it out: a legend or title that does not fit warns


def test_several_data_sets_stand_side_by_side():
    from poprisk_lab.paper.labels.figure import draw as draw_labels

    made = {f"{d}-{n}": stored_study(n, ENDS, (0.9, 0.9, 0.9), d) for d in ("digits", "mnist") for n in (0, 0.2, 0.4)}
    figure = draw_labels({"result": {"studies": made}})
    assert [axes.get_title("left").split(":")[0] for axes in figure.axes] == ["Digits", "MNIST"] * 2
    oracle = figure.axes[0].containers[2].lines[0].get_ydata()
    assert list(oracle) == pytest.approx([90, 90, 90])


def test_a_diverged_member_is_left_out_of_the_figure_and_named_in_the_table():
    from poprisk_lab.paper.labels.figure import draw as draw_labels

    ends = ENDS | {DEFAULTS: (0.7, None, 0.75)}
    result = {"result": {"studies": {"one": stored_study(0.4, ends, (0.9, 0.9, 0.9))}}}
    draw_labels(result)
    assert "diverged (1 of 3)" in accuracy_table(result)[1]
    assert "not held: the defaults diverged in 1 of 3 seeds" in claims_labels(result)[0].verdict
    ends = ENDS | {"AdamW": (None, 0.9, 0.9)}
    result = {"result": {"studies": {"one": stored_study(0.0, ends, (0.9, 0.9, 0.9))}}}
    assert "undecided: AdamW diverged in 1 of 3 seeds" in claims_labels(result)[0].verdict


def test_the_table_and_the_verdicts_are_printed(saved):
    console = Console(file=io.StringIO(), width=200)
    for line in labels_lines(saved):
        console.print(line)
    text = console.file.getvalue()
    assert "digits, clean" in text
    assert "digits, 40% wrong:" in text
    assert len(claims_labels(saved)) == 2


def test_the_table_says_what_the_best_gate_cost_and_has_the_fixed_one_beside_it(saved):
    head, noisy, *_ = accuracy_table(saved)
    cells = dict(zip(head, noisy, strict=True))
    assert cells["best searched gate"].endswith("(SNR gate; the only gate searched)")
    assert cells["gate fixed in advance"] == cells["best searched gate"].split(" (")[0] + " (SNR gate)"
    bare = {"result": {"studies": {"one": stored_study(0.4, ENDS, (0.9, 0.9, 0.9))}}}
    cells = dict(zip(head, accuracy_table(bare)[1], strict=True))
    assert (cells["best searched gate"], cells["gate fixed in advance"]) == ("–", "–")


def test_without_a_searched_adamw_the_given_one_is_compared_with():
    study = stored_study(0.4, ENDS, (0.9, 0.9, 0.9))
    study["arms"], study["rows"] = {}, study["rows"][:-1]
    result = {"result": {"studies": {"one": study}}}
    (claim,) = claims_labels(result)
    assert f"{ADAMW_GIVEN} (best given AdamW, chosen in its favour)" in claim.verdict
    assert any("chosen in its favour" in cell for cell in accuracy_table(result)[1])


def test_a_last_step_beyond_the_best_checkpoint_holds():
    claim = claim_of((0.92, 0.93, 0.925), best=(0.90, 0.91, 0.905))
    assert claim.verdict.startswith("digits, 40% wrong: held: the defaults end +2.0 [+2.0, +2.0] points")
    assert claim.paper == "not in the paper"
    assert "best checkpoint 90.5% ± 0.3%" in claim.equal_tuning
    assert "gain −10.0 [" in claim.paper_conditions


def test_a_last_step_behind_the_best_checkpoint_does_not_hold_though_it_beats_the_last():
    claim = claim_of((0.85, 0.86, 0.87), best=(0.90, 0.91, 0.92))
    assert claim.verdict.startswith("digits, 40% wrong: not held: the defaults end −5.0 [−5.0, −5.0] points")


def test_clean_labels_are_held_against_the_last_step():
    claim = claim_of((0.80, 0.812, 0.82), best=(0.90, 0.91, 0.92), noise=0.0)
    assert claim.verdict.startswith("digits, clean: held")
    assert "within a point" in claim.claim


def test_an_interval_that_holds_the_allowed_loss_decides_nothing():
    assert ": undecided:" in claim_of((0.95, 0.85, 0.90), best=(0.90, 0.91, 0.905)).verdict


def test_the_full_size_is_every_data_set_with_every_share_and_arm():
    config = LabelsConfig()
    task = config.task("mnist", 0.2)
    assert (task.folder, task.train_size, task.steps, task.batch_size) == ("data/mnist", 10_000, 3000, 128)
    assert config.task("digits", 0.0).shape.layers == [(64, 512), (512, 512), (512, 10)]
    assert config.arms == ALL_ARMS
    assert math.isclose(max(config.noises), 0.6)


def test_missing_files_are_refused_before_any_training(tmp_path):
    with pytest.raises(DataError, match=r"mnist has no train-images-idx3-ubyte.*official idx files of MNIST"):
        studies(LabelsConfig(data=("digits", "mnist"), folder=str(tmp_path)))
    with pytest.raises(DataError, match=r"fashion has no .*zalandoresearch/fashion-mnist"):
        studies(LabelsConfig(data=("digits", "fashion"), folder=str(tmp_path)))


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"data": ("cats",)}, DataError, "of digits, mnist, fashion, got 'cats'"),
        ({"noises": ()}, HyperparameterError, "got an empty one"),
        ({"report_seeds": (100,)}, HyperparameterError, "must not meet, got 100"),
    ],
)
def test_a_config_without_sense_is_refused(wrong, error, words):
    with pytest.raises(error, match=words):
        replace(SMOKE, **wrong)
