"""``poprisk reproduce all --smoke``: every experiment from its run to its figure, by the command itself."""

import io
import time

import pytest

from poprisk import cli
from poprisk.report.reproductions import known, reproduction
from poprisk.store import load_result

pytestmark = pytest.mark.timeout(400)
LONGEST = 300.0


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """The directory, what was said, and how long it took."""
    directory = tmp_path_factory.mktemp("all") / "new"
    began = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:
        out, err = io.StringIO(), io.StringIO()
        patch.setattr("sys.stdout", out)
        patch.setattr("sys.stderr", err)
        with pytest.raises(SystemExit) as caught:
            cli.main(["reproduce", "all", "--smoke", "--output", str(directory)])
    assert caught.value.code == 0, err.getvalue()
    return directory, out.getvalue(), time.perf_counter() - began


def test_every_experiment_wrote_its_result_and_its_figure_in_minutes(everything):
    """One test, so that workers that share the suite do not each run everything."""
    directory, out, seconds = everything
    assert seconds < LONGEST
    assert sorted(path.name for path in directory.iterdir()) == sorted(known())
    for name in known():
        there = sorted(path.name for path in (directory / name).iterdir())
        assert there == [f"{name}.json", f"{name}.pdf", f"{name}.png"]  # and no parts
        assert load_result(directory / name / f"{name}.json", reproduction(name).kind)["result"]
        assert (directory / name / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (directory / name / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert f"Wrote {directory / name}: {name}.json, {name}.png, {name}.pdf" in out
