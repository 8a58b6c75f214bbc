"""The swap test: its optimizers see the same run, and its file says what was measured."""

import json
from dataclasses import replace
from statistics import mean

import pytest
from torch.optim import SGD, AdamW

from poprisk import PopRiskAdamW
from poprisk_lab.recipes.swap import GATES, SMOKE, accuracy, main, run


def test_the_stored_file_has_every_cell_and_its_difference_from_adamw(tmp_path):
    main(["--smoke", "--output", str(tmp_path / "swap.json")])
    saved = json.loads((tmp_path / "swap.json").read_text(encoding="utf-8"))
    rows = {row["optimizer"]: row for row in saved["result"]["rows"]}
    assert set(rows) == {"adamw", *GATES}
    assert {"commit", "torch", "poprisk"} <= set(saved["environment"])
    for row in rows.values():
        assert len(row["accuracies"]) == SMOKE.seeds
        assert row["points_over_adamw"] == pytest.approx(100 * (mean(row["accuracies"]) - rows["adamw"]["mean"]))
    assert saved["result"]["lowest_points_over_adamw"] == min(row["points_over_adamw"] for row in rows.values())


def test_only_the_optimizer_differs():
    """Without a gate, PopRiskAdamW is AdamW on the same run; another seed or share of wrong labels is another run."""
    config = replace(SMOKE, steps=60)
    theirs = [accuracy(config, 0.4, s, lambda p: AdamW(p, lr=1e-2)) for s in (0, 0, 1)]
    ours = accuracy(config, 0.4, 0, lambda p: PopRiskAdamW(p, lr=1e-2, gate=None))
    assert theirs[0] == theirs[1] == ours != theirs[2]
    assert accuracy(config, 0.0, 0, lambda p: AdamW(p, lr=1e-2)) > theirs[0]
    assert accuracy(config, 0.0, 0, lambda p: SGD(p, lr=0.0)) < 0.3


def test_a_clean_run_learns():
    rows = run(replace(SMOKE, shares=(0.0,), seeds=1, train_size=600, steps=100))["rows"]
    assert min(row["mean"] for row in rows) > 0.7
