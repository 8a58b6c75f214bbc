"""The benchmark of jobs: what it compares, and what the page says of it."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from poprisk_lab.costs.page.jobs import jobs_table

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    pytest.importorskip("zarr")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("scale_jobs")


def test_a_plan_is_resumed_where_one_tile_is_left(benchmark, tmp_path):
    found = {}
    benchmark.ten_thousand(tmp_path, found.update, 40)
    assert found["ten_thousand"]["tiles"] >= 40
    assert found["ten_thousand"]["computed"] == 1
    loop = benchmark.plain_loop(tmp_path / "many", 5)
    assert len(loop["times"]) == 6
    assert len(set(loop["digests"])) == 5


def test_the_speed_is_that_after_the_first_tiles(benchmark):
    loop = {"times": [10.0, 20.0, 21.0, 22.0, 23.0, 24.0, 25.0]}
    regions = [(slice(0, 4), slice(0, 2))] * 6
    found = benchmark.compared(loop, [0.0, 9.0, 11.0, 13.0, 15.0, 17.0], regions, [4, 2])
    assert found["plain_seconds_per_tile"] == 1
    assert found["jobs_seconds_per_tile"] == 2
    assert found["share_of_plain"] == 0.5
    assert not found["reached_share"]
    assert found["whole_kernel_minutes"] == pytest.approx(2 * 60_000 * 50_000 / 8 / 60)


def test_a_bar_that_is_missed_is_said():
    gpu: dict[str, Any] = {
        "share_of_plain": 0.97,
        "tile": [3840, 1024],
        "rows": 60_000,
        "columns": 50_000,
        "measured_share": 0.07,
    }
    gpu |= {"whole_kernel_minutes": 5.5, "tiles_identical": 54, "tiles_compared": 54}
    cpu: dict[str, Any] = {
        "seconds_per_tile": 1.0,
        "overhead": 0.02,
        "scaling_one_to_two": 1.95,
        "scaling_one_to_four": 3.8,
    }
    cpu["ten_thousand"] = {"tiles": 10_011, "planned_seconds": 1.0, "resumed_seconds": 2.0}
    assert jobs_table({"gpu": gpu, "cpu": cpu}).count("| reached |") == 5
    gpu |= {"share_of_plain": 0.5, "tiles_identical": 53}
    cpu |= {"overhead": 0.2, "scaling_one_to_two": 1.1}
    cpu["ten_thousand"]["resumed_seconds"] = 20.0
    assert jobs_table({"gpu": gpu, "cpu": cpu}).count("**missed**") == 5
    assert len(jobs_table({"gpu": {}, "cpu": {}}).splitlines()) == 2


def test_a_part_that_is_measured_again_keeps_the_other(benchmark):
    """Each part says where it was measured, and one that ended early replaces nothing."""
    stored = {"benchmark": "scale_jobs", "tiny": False, "environment": {"gpu": "H200"}, "note": "ended early"}
    stored |= {"gpu": {"share_of_plain": 0.97, "tiles_identical": 53}, "cpu": {"ten_thousand": {"tiles": 10_153}}}
    cpu = {"environment": {"cpu": "EPYC"}, "cores": 2, "overhead": 0.02}
    found = benchmark.merged(stored, {"cpu": cpu})
    assert found["gpu"] == stored["gpu"] | {"tiny": False, "environment": {"gpu": "H200"}}
    assert found["cpu"] == cpu
    assert found.keys() == {"benchmark", "gpu", "cpu"}
    assert benchmark.merged(found, {"cpu": {"cores": 2}}) == found
    assert benchmark.merged({}, {"gpu": {}, "cpu": cpu}) == {"benchmark": "scale_jobs", "gpu": {}, "cpu": cpu}


def test_the_page_says_where_the_workers_were():
    cpu: dict[str, Any] = {"seconds_per_tile": 1.0, "overhead": 0.02, "scaling_one_to_two": 1.7}
    shown = jobs_table({"cpu": cpu | {"machine_scaling": 1.75, "cores": 2, "environment": {"cpu": "EPYC"}}})
    assert "one worker on 2 cores of EPYC" in shown
    assert "two workers: times faster than one (two plain loops at once are 1.75 times faster than one) | 1.70" in shown
    assert "four workers" not in shown
    assert "four workers" in jobs_table({"cpu": cpu | {"scaling_one_to_four": 3.8}})
