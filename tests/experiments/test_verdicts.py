"""The page of verdicts, the tables and the figure: on a study small enough to check, and on the stored ones."""

import io
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from poprisk.errors import DataError
from poprisk.experiments.teacher import SETTINGS
from poprisk.report.claims import Claim
from poprisk.report.comparison_page import (
    Gain,
    best_gate,
    compared_rows,
    comparison_lines,
    comparison_table,
    gain,
    gain_words,
    hyper_words,
)
from poprisk.report.teacher import claims_teacher, verdict
from poprisk.report.verdicts import CLAIMS, TITLES, claims_table, is_clean, main, stored_results, verdicts
from poprisk.store import load_result, save_result, write_figure

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
    assert len(missing) == len(CLAIMS) - 1
    assert "`poprisk reproduce dpo --output results`" in page
    # Defaults 0.71 on average; AdamW 0.61 at the last step and 0.66 at its best, all with the same pairing.
    noisy = next(line for line in lines if line.startswith("| teacher_0.4 "))
    assert (
        "| 0.710 ± 0.006 | 0.610 ± 0.006 | +0.100 [+0.100, +0.100] | 0.660 ± 0.006 | +0.050 [+0.050, +0.050] |" in noisy
    )
    assert "Noisy data: better than the tuned AdamW's last step on 1 of 1 tasks, worse on 0, undecided on 0." in lines
    assert "Clean data: better than the tuned AdamW's last step on 0 of 1 tasks, worse on 0, undecided on 1." in lines
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


@pytest.mark.parametrize("kind", CLAIMS)
def test_every_kind_of_result_has_its_claims(kind: str) -> None:
    module, function = CLAIMS[kind].split(":")
    assert callable(getattr(import_module(module), function))
    assert kind in TITLES


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


def test_the_command_writes_the_page(folder: Path, capsys) -> None:
    main([str(folder), "-o", str(folder / "page.md")])
    assert (folder / "page.md").read_text(encoding="utf-8") == verdicts(folder)
    assert "page.md" in capsys.readouterr().out


def test_an_empty_folder_lists_what_to_run_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    page = verdicts(tmp_path)
    assert page.count("poprisk reproduce ") == len(CLAIMS) + 1
    assert "## How it was made" in page
    with pytest.raises(DataError, match="should be a folder with stored results"):
        verdicts(tmp_path / "nowhere")


def test_the_stored_page_is_what_the_stored_results_give() -> None:
    if not stored_results(ROOT / "results"):
        pytest.skip("no result of these kinds is stored yet")
    page = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert page == verdicts(ROOT / "results"), "write it again: python -m poprisk.report.verdicts results"


def test_claims_become_one_line_each_and_bars_are_escaped() -> None:
    table = claims_table([Claim("a | b", "2\n× faster", "1", "0.9", "Not held.")])
    assert table.splitlines()[-1] == "| a \\| b | 2 × faster | 1 | 0.9 | Not held. |"


def test_claims_of_the_teacher(folder: Path) -> None:
    noisy, clean = claims_teacher(load_result(folder / "teacher.json", "teacher"))
    assert noisy.claim.startswith("Teacher labels, 40% wrong")
    assert "held: the defaults end +5.0 [+5.0, +5.0] points" in noisy.sentence
    assert noisy.equal_tuning.startswith(
        "AdamW: last 61.0% ± 0.6%, best 66.0% ± 0.6%; PopRiskAdamW, defaults: last 71.0%"
    )
    assert "undecided: the defaults end −1.0 [−3.5, +1.5] points" in clean.sentence


def test_a_loss_is_held_against_what_is_allowed() -> None:
    assert verdict(Gain(-0.004, (-0.005, -0.003), None), 0.005, "AdamW").startswith("held")
    assert verdict(Gain(-0.004, (-0.006, -0.002), None), 0.005, "AdamW").startswith("undecided")
    assert verdict(Gain(-0.04, (-0.06, -0.006), None), 0.005, "AdamW").startswith("not held")
    assert verdict(Gain(-0.04, None, None), 0.005, "AdamW").endswith("(one seed).")
    assert "diverged" in verdict(None, 0.005, "AdamW")


def test_gains_point_the_same_way_for_both_kinds_of_metric() -> None:
    up, down = gain([2.0, 3.0], [1.0, 1.5], True), gain([1.0, 1.5], [2.0, 3.0], False)
    assert up == down
    assert up is not None
    assert up.value == 1.25
    assert up.bootstrap == (1.0, 1.5)
    assert gain([1.0, math.nan], [1.0, 1.0], True) is None
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


def test_the_figure_and_the_terminal_say_what_diverged(folder: Path, tmp_path: Path) -> None:
    from poprisk.report.comparison import draw_comparison

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
