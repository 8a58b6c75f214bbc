"""The measured part of the page on operators, and the benchmark behind it at a tiny size."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from poprisk_lab.pages.operator_sizes import parts
from poprisk_lab.pages.registry import RESULTS

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


def test_sections_are_timed_and_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import operator_sections

    operator_sections.main(["--tiny", "--only", "mnist", "--output", str(tmp_path / "operator_sections_cpu.json")])
    shutil.copy(RESULTS / "operator_readings.json", tmp_path)
    found = json.loads((tmp_path / "operator_sections_cpu.json").read_text())["result"]["tasks"]["mnist"]
    assert found["steps_read"] == found["steps"] == 12
    assert found["displacement_error"] < 1e-4
    assert set(found["terms"]) == {"clean labels", "label noise", "weight decay and momentum"}
    page = parts(tmp_path)["operator_sizes"]
    assert "np = 600" in page
    assert "12 of 12 steps read" in page
    del sys.modules["operator_sections"]


def test_a_task_that_failed_is_no_row(tmp_path):
    shutil.copy(RESULTS / "operator_readings.json", tmp_path)
    saved = {"environment": {"cpu": "x"}, "result": {"threads": 2, "tasks": {"resnet": {"error": "out of memory"}}}}
    (tmp_path / "operator_sections_cuda.json").write_text(json.dumps(saved))
    assert "ResNet" not in parts(tmp_path)["operator_sizes"]


@pytest.mark.parametrize("lacking", [[], ["Drift and diffusion"]])
def test_missing_sections_are_named(tmp_path, lacking):
    shutil.copy(RESULTS / "operator_readings.json", tmp_path)
    run = {"outputs": 6000, "steps_read": 1700, "steps": 1700, "seconds": 80.0, "processor_seconds": 150.0}
    result = {"threads": 2, "readme": {**run, "missing": lacking}}
    (tmp_path / "report_time.json").write_text(json.dumps({"environment": {"cpu": "x"}, "result": result}))
    told = "sections missing: Drift and diffusion" if lacking else "no section is missing"
    assert f"80 s (150 s of processor time); {told}" in parts(tmp_path)["operator_sizes"]
