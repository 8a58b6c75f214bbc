"""``poprisk reproduce all --smoke``: every experiment from its run to its figure, by the command itself."""

import pytest

from poprisk._core.store.envelope import load_result
from poprisk_lab.reproductions import known, reproduction

pytestmark = pytest.mark.timeout(900)  # five times what it takes alone: only a test that hangs reaches it
LONGEST = 300.0
"""Limit in seconds of processor time, which does not depend on how busy the machine is."""


def test_every_experiment_wrote_its_result_and_its_figure_in_minutes(everything):
    """One test; the tests of the single experiments read what it wrote (``smoke_of``)."""
    made = everything()
    directory = made.directory
    assert made.seconds < LONGEST
    assert sorted(path.name for path in directory.iterdir()) == sorted(known())
    for name in known():
        there = sorted(path.name for path in (directory / name).iterdir())
        assert there == [f"{name}.json", f"{name}.pdf", f"{name}.png"]  # and no parts
        assert load_result(directory / name / f"{name}.json", reproduction(name).kind)["result"]
        assert (directory / name / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (directory / name / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert f"Wrote {directory / name}: {name}.json, {name}.png, {name}.pdf" in made.out
