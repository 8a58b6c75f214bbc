"""The page of verdicts, the tables and the figure: on a study small enough to check, and on the stored ones."""

import io
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from poprisk._core.store.envelope import load_result, save_result
from poprisk._core.store.files import write_figure
from poprisk.errors import DataError
from poprisk_lab.pages.claims import VerdictRow
from poprisk_lab.pages.comparison import (
    Diverged,
    Gain,
    adamw_reference,
    adamw_words,
    best_gate,
    compared_rows,
    comparison_lines,
    comparison_table,
    gain,
    gain_over_adamw,
    gain_over_oracle,
    gain_words,
    hyper_words,
    table_note,
)
from poprisk_lab.pages.gate_choice import budget_words, fixed_gate, library_gate, tuned_gates
from poprisk_lab.pages.verdicts import TITLES, claims_table, is_clean, stored_results, verdicts
from poprisk_lab.paper.default_choice.task import default_tasks
from poprisk_lab.paper.teacher.numbers import claims as claims_teacher
from poprisk_lab.paper.teacher.numbers import verdict
from poprisk_lab.paper.teacher.study import SETTINGS

matplotlib = pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
SEARCH = {"lr": [3e-6, 1e-2], "beta2_gap": [1e-3, 5e-2]}
HYPER = {"lr": 3e-4, "weight_decay": 0.01, "beta2": 0.97}


def _row(label: str, arm: str, ends: list[float | None], *, chosen_for: list[str], peak: float = 0.0) -> Any:
    """Two evaluations: the best at the first where a peak is given, the end at the second."""
    curves = [[(end or 0.5) + peak, end] for end in ends]
    return {
        "label": label,
        "arm": arm,
        "hyper": HYPER if arm != "defaults" else {"lr": 0.01, "weight_decay": 0.01},
        "chosen_for": chosen_for,
        "seeds": list(range(len(ends))),
        "curves": {"test accuracy": curves},
        "gate": None,
        "failures": sum(end is None for end in ends),
    }


def _arm(label: str, end: float) -> Any:
    return {
        "label": label,
        "search": SEARCH,
        "trials": [{"hyper": HYPER, "curve": [[0.1, end]]}],
        "chosen": {"last": 0, "best": 0, "target": 0},
    }


def _study(noise: float, defaults: list[float | None]) -> Any:
    metric = {"name": "test accuracy", "higher_is_better": True, "target": 0.6, "spec": ".3f"}
    given = [_row(s.label, s.arm, [0.5, 0.5, 0.52], chosen_for=[]) for s in SETTINGS if s.arm != "defaults"]
    return {
        "task": {
            "name": f"teacher_{noise:g}",
            "description": "a task.",
            "steps": 20,
            "streams": {},
            "metrics": [metric],
            "config": {"noise": noise},
        },
        "evaluation_steps": [10, 20],
        "arms": {"adamw": _arm("AdamW", 0.6), "soft": _arm("soft gate", 0.7), "cubed": _arm("|u|³ Adam", 0.5)},
        "rows": [
            *given,
            _row("PopRiskAdamW, defaults", "defaults", defaults, chosen_for=[]),
            _row("AdamW", "adamw", [0.60, 0.61, 0.62], chosen_for=["last", "best", "target"], peak=0.05),
            _row("soft gate", "soft", [0.70, 0.72, 0.71], chosen_for=["last", "best", "target"]),
            _row("|u|³ Adam", "cubed", [0.55, None, 0.5], chosen_for=["last", "best", "target"]),
        ],
        "portraits": {},
        "seconds": 90.0,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    studies = {"teacher_0.4": _study(0.4, [0.70, 0.71, 0.72]), "teacher_clean": _study(0.0, [0.60, 0.60, 0.60])}
    save_result(tmp_path / "teacher.json", "teacher", {}, {"studies": studies})
    save_result(tmp_path / "coupling.json", "coupling", {}, {"runs": []})
    (tmp_path / "notes.json").write_text("[1, 2")
    return tmp_path


def test_the_page_has_every_experiment_and_computes_its_numbers(folder: Path) -> None:
    page = verdicts(folder)
    lines = page.splitlines()
    assert "## Wrong labels of a teacher network" in lines
    missing = [line for line in lines if line.startswith("- ") and "poprisk reproduce" in line]
    assert len(missing) == len(TITLES) - 1
    assert "`poprisk reproduce dpo --output results`" in page
    # Defaults 0.71 on average; AdamW 0.61 at the last step and 0.66 at its best, all with the same pairing.
    noisy = next(line for line in lines if line.startswith("| teacher_0.4 "))
    assert (
        "| 0.710 ± 0.006 | 0.610 ± 0.006 | +0.100 [+0.100, +0.100] | 0.660 ± 0.006 | +0.050 [+0.050, +0.050] |" in noisy
    )
    tally = "out-of-sample: better than AdamW's last step on"
    assert f"Noisy data, {tally} 1 of 1 tasks, worse on 0, undecided on 0." in lines
    assert f"Clean data, {tally} 0 of 1 tasks, worse on 0, undecided on 1." in lines
    assert "| soft gate | **+0.100** | **+0.100** |" in lines
    assert "| \\|u\\|³ Adam | diverged | diverged |" in lines
    assert "| AdamW | 3e-6 … 0.01 | 0.001 … 0.05 |" in lines
    assert any(line.startswith("| `teacher.json` | 2 | 3 | 1 | 1 | 3 | 3.0 |") for line in lines)


def test_every_row_of_a_table_has_the_columns_of_its_head(folder: Path) -> None:
    width = None
    for line in [*verdicts(folder).splitlines(), ""]:
        cells = line.replace("\\|", "").count("|") if line.startswith("|") else None
        assert width is None or cells in (None, width), line
        width = cells


@pytest.mark.parametrize("kind", TITLES)
def test_every_kind_of_result_has_its_claims(kind: str) -> None:
    assert callable(import_module(f"poprisk_lab.paper.{kind}.numbers").claims)
    assert callable(import_module(f"poprisk_lab.paper.{kind}.figure").draw)


@pytest.mark.parametrize(
    ("config", "clean"),
    [
        ({}, True),
        ({"noise": 0.0}, True),
        ({"noise": 0.2}, False),
        ({"wrong_share": 0.1}, False),
        ({"labels": "clean"}, True),
        ({"labels": "worse"}, False),
    ],
)
def test_noisy_tasks_are_told_by_their_configuration(config: dict[str, Any], clean: bool) -> None:
    assert is_clean({"task": {"config": config}}) == clean


def test_a_figure_is_shown_where_it_is_stored(folder: Path) -> None:
    assert "(teacher.png)" not in verdicts(folder)
    (folder / "teacher.png").write_bytes(b"")
    assert f"![{TITLES['teacher']}](teacher.png)" in verdicts(folder)


def test_an_empty_folder_lists_what_to_run_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    page = verdicts(tmp_path)
    assert page.count("poprisk reproduce ") == len(TITLES)
    assert "## How this page is made" in page
    with pytest.raises(DataError, match="should be a folder with stored results"):
        verdicts(tmp_path / "nowhere")


def test_the_stored_page_is_what_the_stored_results_give() -> None:
    if not stored_results(ROOT / "results"):
        pytest.skip("no result of these kinds is stored yet")
    page = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert page == verdicts(ROOT / "results"), "write it again: make pages"


def test_claims_become_one_line_each_and_bars_are_escaped() -> None:
    table = claims_table([VerdictRow("a | b", "2\n× faster", "1", "0.9", "Not held.")])
    assert table.splitlines()[-1] == "| a \\| b | 2 × faster | 1 | 0.9 | Not held. |"


def test_claims_of_the_teacher(folder: Path) -> None:
    noisy, clean = claims_teacher(load_result(folder / "teacher.json", "teacher"))
    assert noisy.claim.startswith("Teacher labels, 40% wrong")
    assert "held: the defaults end +5.0 [+5.0, +5.0] points" in noisy.verdict
    assert noisy.equal_tuning.startswith(
        "AdamW: last 61.0% ± 0.6%, best 66.0% ± 0.6%; PopRiskAdamW, defaults: last 71.0%"
    )
    assert "undecided: the defaults end −1.0 [−3.5, +1.5] points" in clean.verdict


def test_a_loss_is_held_against_what_is_allowed() -> None:
    assert verdict(Gain(-0.004, (-0.005, -0.003), None), 0.005, "AdamW").startswith("held")
    assert verdict(Gain(-0.004, (-0.006, -0.002), None), 0.005, "AdamW").startswith("undecided")
    assert verdict(Gain(-0.04, (-0.06, -0.006), None), 0.005, "AdamW").startswith("not held")
    assert verdict(Gain(-0.04, None, None), 0.005, "AdamW").endswith("(one seed).")
    assert "no AdamW" in verdict(None, 0.005, "AdamW")


def test_a_verdict_says_who_diverged() -> None:
    """Ours is a loss; AdamW's is none of ours, and a gain only where all its seeds diverged."""

    def said(ours: list[float], theirs: list[float]) -> str:
        return verdict(gain(ours, theirs, True), 0.005, "AdamW's last step")

    fine, once, never = [0.5, 0.6, 0.7], [0.5, math.nan, 0.7], [math.nan] * 3
    assert said(once, fine) == "not held: the defaults diverged in 1 of 3 seeds, against AdamW's last step."
    assert said(fine, once).startswith("undecided: AdamW diverged in 1 of 3 seeds, the defaults in none")
    assert said(fine, never).startswith("held: AdamW diverged in 3 of 3 seeds")
    assert said(once, never).startswith("undecided: the defaults diverged in 1 of 3 seeds and AdamW in 3 of 3")


def test_gains_point_the_same_way_for_both_kinds_of_metric() -> None:
    up, down = gain([2.0, 3.0], [1.0, 1.5], True), gain([1.0, 1.5], [2.0, 3.0], False)
    assert up == down
    assert up.value == 1.25
    assert up.bootstrap == (1.0, 1.5)
    failed = gain([1.0, math.nan], [1.0, 1.0], True)
    assert failed.diverged == Diverged(first=1, second=0, pairs=2)
    assert math.isnan(failed.value)
    assert gain_words(failed, ".2f") == "diverged (1 of 2)"
    assert "the other side" in gain_words(gain([1.0, 1.0], [1.0, math.nan], True), ".2f")
    assert gain([1.0], [0.5], True) == Gain(0.5, None, None)
    assert gain_words(Gain(0.5, None, None), ".2f") == "+0.50"


def test_the_table_is_sorted_with_the_diverged_last(folder: Path) -> None:
    study = load_result(folder / "teacher.json", "teacher")["result"]["studies"]["teacher_0.4"]
    labels = [row["label"] for row in compared_rows(study)]
    assert set(labels[:2]) == {"PopRiskAdamW, defaults", "soft gate"}
    assert (labels[2], labels[-1]) == ("AdamW", "|u|³ Adam")
    head, *rows = comparison_table(study)
    cells = dict(zip(head, rows[-1], strict=True))
    assert (cells["diverged"], cells["last step"], cells["steps to 0.6"]) == (
        "1 of 3",
        "diverged (1 of 3)",
        "– (0 of 3)",
    )
    assert dict(zip(head, rows[2], strict=True))["steps to 0.6"] == "10 (3 of 3)"
    assert hyper_words(study, study["rows"][-2]) == "lr 0.0003, β2 0.97"


def test_the_best_gate_is_chosen_by_tuning_seeds(folder: Path) -> None:
    study = load_result(folder / "teacher.json", "teacher")["result"]["studies"]["teacher_0.4"]
    study["arms"]["snr"] = _arm("SNR gate", 0.8)
    study["rows"].append(_row("SNR gate", "snr", [0.1, 0.1, 0.1], chosen_for=["last"]))
    chosen = best_gate(study)
    assert chosen is not None
    assert chosen["label"] == "SNR gate"


def _given_only(noise: float = 0.0) -> Any:
    """A study in which nothing was searched: two AdamWs and the defaults."""
    study = _study(noise, [0.70, 0.71, 0.72])
    study["arms"] = {}
    study["rows"] = [
        _row("AdamW, slow", "adamw", [0.50, 0.51, 0.52], chosen_for=[], peak=0.3),
        _row("AdamW, quick", "adamw", [0.65, 0.66, 0.67], chosen_for=[], peak=0.01),
        *(row for row in study["rows"] if row["arm"] == "defaults"),
    ]
    return study


def test_without_a_searched_adamw_the_best_given_one_is_compared_with(tmp_path: Path) -> None:
    study = _given_only()
    reference = adamw_reference(study)
    assert reference is not None
    assert reference["label"] == "AdamW, quick"
    assert adamw_words(study) == "AdamW, quick (best given AdamW, chosen in its favour)"
    defaults = study["rows"][-1]
    last, checkpoint = gain_over_adamw(study, defaults), gain_over_oracle(study, defaults)
    assert last is not None
    assert checkpoint is not None
    assert (last.value, checkpoint.value) == (pytest.approx(0.05), pytest.approx(0.04))
    assert "best given AdamW, chosen in its favour" in table_note({"result": {"studies": {"one": study}}})
    save_result(tmp_path / "pinn.json", "pinn", {}, {"studies": {"pinn_clean": study}})
    page = _page_without_claims(tmp_path)
    assert "| pinn_clean | out-of-sample |" in page
    assert "| 0.660 ± 0.006 * | +0.050 [+0.050, +0.050] |" in page
    assert "| AdamW, quick | 0 |" in page
    study["rows"] = study["rows"][-1:]
    assert adamw_reference(study) is None
    assert adamw_words(study) == "no AdamW"


def _page_without_claims(folder: Path) -> str:
    """The page of a made-up result, whose kind asks for rows that it does not have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("poprisk_lab.pages.verdicts._claims_of", lambda _: lambda _: [])
        return verdicts(folder)


def test_tasks_that_chose_the_defaults_are_marked(folder: Path) -> None:
    """From the stored study of candidates, by class, data and whether they are noisy; and the page says so."""
    page = verdicts(folder)
    assert "not tuned to any task" not in page
    words = " ".join(page.split())
    assert "may not be the choice of the study `default_choice`, whose result is not stored here" in words
    assert "compares candidates on teacher_clean, teacher_20" in words
    assert "chosen by experiment" not in words
    studies = {"teacher_0.4": _study(0.4, [0.7, 0.7, 0.7])}
    save_result(folder / "default_choice.json", "default_choice", {}, {"studies": studies})
    page = verdicts(folder)
    words = " ".join(page.split())
    assert "the stored study `default_choice` compared candidates on teacher_0.4, with other seeds (0, 1, 2)" in words
    assert "but the same test metric" in words
    assert "| teacher_0.4 | in-sample |" in page
    assert "| teacher_clean | out-of-sample |" in page
    assert "Noisy data, in-sample: better than AdamW's last step on 1 of 1" in page


def test_the_library_was_chosen_on_some_kinds_of_task_and_not_on_others(tmp_path: Path) -> None:
    chosen_on = default_tasks(tmp_path)

    def inside(task: str, **config: Any) -> bool:
        return chosen_on.includes({"task": {"name": "", "config": {"task": task, **config}}})

    assert inside("TeacherTask", noise=0.6)
    assert inside("LabelTask", data="fashion", noise=0.2)
    assert inside("LorenzTask", noise=0.0)
    assert inside("InrTask", noise=0.1, image="coffee")
    for task in ("CifarTask", "DpoTask", "PinnTask", "GrokkingTask", "CharLanguageTask", "SftTask"):
        assert not inside(task, noise=0.3), task


def test_the_best_of_several_gates_is_said_to_be_that_and_the_fixed_one_stands_beside_it(folder: Path) -> None:
    study = load_result(folder / "teacher.json", "teacher")["result"]["studies"]["teacher_0.4"]
    assert budget_words(study) == "the only gate searched"
    best = "hard" if library_gate() != "hard" else "snr"
    for arm in ("snr", "soft_calibrated", "hard"):
        study["arms"][arm] = _arm(arm, 0.8 if arm == best else 0.3)
        study["rows"].append(_row(f"{arm} gate", arm, [0.1, 0.1, 0.1], chosen_for=["last"]))
    assert budget_words(study) == "best of 4 gates, 4 times the trials"
    fixed = fixed_gate(study, "last")
    assert fixed is not None
    assert fixed["arm"] == (library_gate() if library_gate() in study["arms"] else "soft")
    words = list(tuned_gates(study, "last"))
    assert words == [
        f"{best} gate (best of 4 gates, 4 times the trials)",
        f"{fixed['label']} (the gate fixed in advance)",
    ]
    for arm in {"snr", "soft_calibrated", "hard"} & {library_gate()}:
        del study["arms"][arm]
    plain = fixed_gate(study, "last")
    assert plain is not None
    assert plain["arm"] == "soft", "where the library's own gate was not searched"
    assert "several times AdamW's trials" in table_note({"result": {"studies": {"one": study}}})
    study["arms"] = {"adamw": study["arms"]["adamw"]}
    assert tuned_gates(study, "last") == {}
    assert best_gate(study) is None


def test_the_figure_and_the_terminal_say_what_diverged(folder: Path, tmp_path: Path) -> None:
    from poprisk_lab.engine.figure import draw_comparison

    saved = load_result(folder / "teacher.json", "teacher")
    figure = draw_comparison(saved)
    write_figure(tmp_path / "comparison.png", figure)
    first = figure.axes[0]
    assert first.get_yticklabels()[0].get_text() == "|u|³ Adam"  # at the bottom
    assert any("1 of 3 diverged" in text.get_text() for text in first.texts)
    out = io.StringIO()
    for line in comparison_lines(saved):
        Console(file=out, width=200).print(line)
    assert "diverged (1 of 3)" in out.getvalue()
