"""The page on scaling is what the results and the cost models say, and the benchmark behind it runs."""

import json
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch

from poprisk._core.store import write_text
from poprisk.errors import DataError
from poprisk_lab.costs.cost import OperationCost
from poprisk_lab.costs.kernels import lanczos
from poprisk_lab.costs.machine import Fit, Machine, calibrate, checked_operations
from poprisk_lab.costs.operations import OPERATION_MODELS, cost_of
from poprisk_lab.costs.page import numbers
from poprisk_lab.costs.page.methods import choose, first_true, network_of
from poprisk_lab.costs.page.one_gpu import compared, precisions_table, reached_table
from poprisk_lab.costs.page.predictions import (
    LAYOUTS,
    MANY,
    Predictor,
    kernel_products,
    messages,
    optimizer_at_scale,
    whole_kernel,
)
from poprisk_lab.costs.page.tables import Measured, misses
from poprisk_lab.pages.marked_page import fill_marks
from poprisk_lab.pages.registry import chosen_pages

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Machine("toy", 100.0, 400.0, 10.0, memory_bytes=1e9)


def test_the_page_is_what_the_results_say():
    [page] = chosen_pages(["scaling.md"])
    assert not page.is_stale(ROOT / "results")


def test_a_page_with_another_number_is_told(tmp_path):
    [page] = chosen_pages(["scaling.md"])
    text = page.text(ROOT / "results")
    assert "sizes are predicted within" in " ".join(text.split())
    write_text(tmp_path / page.target, text)
    assert not page.is_stale(ROOT / "results", tmp_path)
    write_text(tmp_path / page.target, text.replace("within 1.5×", "within 1.6×"))
    assert page.is_stale(ROOT / "results", tmp_path)


def test_places_and_blocks_must_be_the_same():
    page = "<!-- begin:a -->\nold\n<!-- end:a -->"
    with pytest.raises(DataError, match="differ in b"):
        fill_marks(page, {"a": "new", "b": "more"})
    with pytest.raises(DataError, match="differ in a"):
        fill_marks(page, {})


def test_another_benchmark_is_predicted_with_the_same_fits():
    run = {"queries": 500, "steps": 234, "weights": 109_386, "seconds": 2.0}
    (found,) = compared(predictor(1e11), {"adjoint": {"SGD, ReLU": run}})
    flops = 234 * 64 * (500 * 12 * 109_386)
    assert found.measured == 2.0
    assert 0.5 * flops / 1e13 < found.predicted < 2 * flops / 1e13 + 234 * 31 * 500 * 4 * 109_386 / 1e12


def test_results_are_needed(tmp_path):
    with pytest.raises(DataError, match="run benchmarks"):
        numbers.measurements(tmp_path)


def measured_rows(share, launch, fixed=0.0):
    """As a machine would measure them that is exactly what the model says."""
    base = {"rows": 64, "columns": 8, "inputs": 8, "width": 32, "outputs": 2}
    tiny = {"inputs": 1, "width": 1, "outputs": 1, "rows": 1}
    sizes = [("base", base), ("tiny", base | tiny), ("tiny", base | tiny | {"columns": 2})]
    sizes += [("rows", base | {"rows": rows}) for rows in (16, 256)]
    fit = Fit(share, launch, fixed)
    rows = []
    for series, each in sizes:
        cost = cost_of("product_tile", each)
        seconds = fit.launching(cost) if series == "tiny" else fit.seconds(MACHINE, cost)
        rows.append({"operation": "product_tile", "series": series, "sizes": each, "known": {}, "seconds": seconds})
    return rows


def saved(rows):
    figures = {"float32_flops": 100.0, "half_flops": 400.0, "bytes_per_second": 10.0}
    environment = {"cpu": "toy", "gpu": None, "torch": "2"}
    about = {"benchmark": "cost_models", "device": "cpu", "threads": 1, "machine": figures, "environment": environment}
    return about | {"rows": rows, "storage": [], "missing": []}


def test_a_machine_that_follows_the_model_is_found_again():
    found = checked_operations(saved(measured_rows(0.3, 2.0, 5.0)))["product_tile"]
    assert (found.fit.share, found.fit.launch_seconds) == (pytest.approx(0.3), pytest.approx(2.0))
    assert found.fit.fixed_seconds == pytest.approx(5.0)
    assert [point.ratio for point in found.points] == pytest.approx([1.0, 1.0])
    (exponent,) = found.exponents
    assert exponent.measured == pytest.approx(exponent.model)
    assert exponent.limit == pytest.approx(1.0, abs=0.01)


def test_a_machine_that_does_not_is_told():
    rows = measured_rows(0.3, 2.0)
    rows[-1]["seconds"] *= 3
    found = checked_operations(saved(rows))["product_tile"]
    assert found.worst == pytest.approx(3.0)
    assert found.within(1.5) == 1
    [miss] = misses(Measured("toy", saved(rows)))
    assert "predicted" in miss.sizes


def test_queued_launches_are_hidden_behind_the_work():
    base = (OperationCost(flops=100.0, launches=2), 4.0)
    fit = calibrate(MACHINE, [(OperationCost(launches=1), 0.5)], base, queued=True)
    assert fit.seconds(MACHINE, OperationCost(flops=100.0, launches=2)) == pytest.approx(4.0)
    assert fit.seconds(MACHINE, OperationCost(flops=1.0, launches=2)) == pytest.approx(1.0)


def predictor(memory):
    machine = Machine("toy", 1e13, 1e14, 1e12, memory_bytes=memory)
    names = [*OPERATION_MODELS]
    return Predictor(machine, dict.fromkeys(names, Fit(1.0, 0.0)), dict.fromkeys(names, 1.0))


def test_what_does_not_fit_is_not_predicted():
    large = network_of(1e9, 1)
    assert whole_kernel(predictor(1e9), large, 1000) is None
    assert kernel_products(predictor(1e9), large, 1000) is None
    assert choose(predictor(1e9), large, 1000).method == "subsample"
    small = network_of(1e6, 1)
    assert choose(predictor(1e11), small, 1000).method == "dense"
    whole = whole_kernel(predictor(1e11), small, 10**6)
    assert whole is not None
    assert whole.disk == 4 * 10**12 / 2
    assert choose(predictor(1e11), small, 10**6).method == "disk tiles"


def test_shards_share_states_and_messages_grow_with_ranks():
    states = LAYOUTS["PopRiskAdamW, float32"]
    one, many = (optimizer_at_scale(predictor(1e11), 1e9, states, ranks) for ranks in (1, MANY))
    assert one.held == pytest.approx(MANY * many.held)
    assert one.step == pytest.approx(36e9 / 1e12)
    assert one.least == 1
    sent = [messages(predictor(1e11), 1e9, ranks).extra for ranks in (2, 8, 64)]
    assert sent == sorted(sent)
    assert sent[-1] < 4e9


def test_lanczos_is_its_products_and_a_basis():
    product = OperationCost(flops=10.0, bytes_held=4.0, launches=1)
    assert lanczos(product, 3, 4, block=2).flops == 2 * 10 + 4 * 3 * 4**2


def test_the_first_true_number():
    assert [first_true(lambda n, k=k: n >= k) for k in (1, 2, 3, 1000)] == [1, 2, 3, 1000]


def test_unknown_operations_and_sizes_are_refused():
    with pytest.raises(DataError, match="no cost model"):
        cost_of("nothing", {})
    with pytest.raises(DataError, match="needs the size"):
        cost_of("rounded_product", {"examples": 3})


def test_the_benchmark_runs(tmp_path, monkeypatch):
    """Two operations at sizes of nothing; what was in the file and is not asked for stays."""
    out = tmp_path / "cost_models.json"
    out.write_text(json.dumps({"rows": [{"operation": "adjoint"}], "missing": []}))
    command = ["cost_models.py", "--smoke", "--out", str(out), "--only", "rounded_product", "adamw_step"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        try:
            import_module("cost_models").main()
        finally:
            torch.set_num_threads(threads)
    found = json.loads(out.read_text())
    assert [row["operation"] for row in found["rows"]] == ["adjoint"] + ["rounded_product"] * 2 + ["adamw_step"] * 2
    assert found["missing"] == []
    assert found["finished"]


def test_a_bar_that_is_missed_is_said():
    saved = json.loads((ROOT / "results" / "scale_gpu.json").read_text())
    rows = reached_table(saved).splitlines()[2:]
    assert all(row.endswith("| reached |") for row in rows)
    measured = saved["measurements"]
    measured["resnet_kernel"]["captured"] |= {"extrapolated_minutes": 12.5, "error": 2e-3}
    measured["adjoint"]["SGD, ReLU"]["seconds"] = measured["adjoint_cpu"]["SGD, ReLU"]["seconds"] / 19
    measured["k_fold"]["784-128-64-10, batch 64"]["ratio_to_bare_loop"] = 3.1
    measured["training_step"]["race"]["PopRiskAdamW"]["throughput_ratio"] = 0.98
    missed = [i for i, row in enumerate(reached_table(saved).splitlines()[2:]) if row.endswith("| **missed** |")]
    assert missed == [0, 1, 3, 5, 7]
    assert "| float16 | 561 |" in precisions_table(saved)
