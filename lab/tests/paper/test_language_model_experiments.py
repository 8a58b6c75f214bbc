"""The clean language model and the clipping experiment at their smoke size, and that they resume."""

from dataclasses import replace

import pytest
import torch

from poprisk._core.store.envelope import load_result
from poprisk.cli._demonstration.study import DemoConfig
from poprisk.errors import DataError
from poprisk_lab.data.char_lm import help_topics
from poprisk_lab.engine.run_ledger import Ledger
from poprisk_lab.paper.clean_lm import study as clean_lm
from poprisk_lab.paper.clipping import study as clipping

SMALL = replace(clean_lm.SMOKE, seeds=1)


def test_clean_lm_smoke(tmp_path, capsys):
    path = tmp_path / "lm.json"
    clean_lm.main(["--smoke", "--output", str(path)])
    saved = load_result(path, clean_lm.KIND)["result"]
    assert saved["complete"]
    assert len(saved["runs"]) == 2 * len(saved["summary"]) == 8
    for row in saved["summary"]:
        assert 3.0 < row["loss"]["value"] < 5.0
        assert (row["mean_gate"] is None) == (row["optimizer"] == "AdamW")
    assert str(path) in capsys.readouterr().out


def test_clean_lm_goes_on_where_it_was(tmp_path, monkeypatch):
    path = tmp_path / "lm.json"
    real, calls = clean_lm.train, []

    def counted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(clean_lm, "train", counted)
    with pytest.raises(KeyboardInterrupt):
        clean_lm.run(SMALL, path)
    assert not load_result(path, clean_lm.KIND)["result"]["complete"]
    clean_lm.run(SMALL, path)
    assert len(calls) == 3 + 2  # two done before, one interrupted, two of four left
    assert load_result(path, clean_lm.KIND)["result"]["complete"]


def test_another_configuration_is_not_mixed_in(tmp_path):
    path = tmp_path / "x.json"
    Ledger(path, "trial", {"a": (1,)}).measure({"seed": 0}, lambda: {"loss": 1.0})
    assert Ledger(path, "trial", {"a": [1]}).select(seed=0)[0]["loss"] == 1.0
    with pytest.raises(DataError, match="another configuration"):
        Ledger(path, "trial", {"a": [2]})


def test_same_seed_same_run_and_global_generator_untouched():
    text = help_topics()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second = (clean_lm.train(SMALL.model, text, "soft", 1e-2, 0) for _ in range(2))
    assert first == second
    torch.testing.assert_close(torch.random.get_rng_state(), before)


def test_clipping_smoke(tmp_path):
    path = tmp_path / "clipping.json"
    clipping.main(["--smoke", "--output", str(path)])
    rows = load_result(path, clipping.KIND)["result"]["summary"]
    assert {row["task"] for row in rows} == {"noisy digits", "clean LM"}
    for row in rows:
        assert (row["clipped_share"] is None) == (row["max_norm"] is None)
        assert (row["mean_gate"] is None) == (row["optimizer"] == "AdamW")


def test_clipping_that_never_acts_changes_nothing():
    config = DemoConfig(seeds=1, train_size=100, steps=10, width=8)
    plain, loose = (clipping.train_digits(config, "soft", 1e-2, 0, max_norm=norm) for norm in (None, 1e6))
    assert loose.pop("clipped_share") == 0
    plain.pop("clipped_share")
    assert plain == loose
