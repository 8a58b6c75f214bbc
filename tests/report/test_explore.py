# type: ignore  # the project checks the types of src and lab/src
"""The page to play with: whole in one file, refused input, and in a real browser the library's numbers."""

import html
import json
import math
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from poprisk import cli
from poprisk.errors import DataError
from poprisk.report._explorable import builtin_kernel, kernel_from_file
from poprisk.report._explore import explore_page, page_data
from poprisk.theory.bias_variance import risk
from poprisk.theory.filters import decayed_flow_filter, interpolation_filter

POSITIONS = [  # of the sliders, as a reader could leave them
    {"noise": 25, "rank": 40, "ridge": 0, "time": 100},
    {"noise": 0, "rank": 40, "ridge": 0, "time": 37},
    {"noise": 60, "rank": 11, "ridge": 45, "time": 100},
    {"noise": 100, "rank": 0, "ridge": 100, "time": 0},
    {"noise": 33, "rank": 29, "ridge": 1, "time": 99},
]


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def own_kernel(path, **changes):
    generator = np.random.default_rng(3)
    J, J_Q = generator.normal(size=(6, 9)), generator.normal(size=(4, 9))
    arrays = {"K_SS": J @ J.T, "K_QS": J_Q @ J.T, "signal": generator.normal(size=6)} | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def values_at(data, positions):
    """What the positions of the sliders stand for, written from the page's description."""
    (e0, e1), (t0, t1) = data["ridgeDecades"], data["timeDecades"]
    p = positions
    return (
        data["largestNoise"] * p["noise"] / 100,
        0.0 if p["ridge"] == 0 else 10 ** (e0 + (e1 - e0) * (p["ridge"] - 1) / 99),
        math.inf if p["time"] == 100 else 10 ** (t0 + (t1 - t0) * p["time"] / 99),
    )


def explored_filter(problem, rank, eta, t):
    """The filter that the page explores, by the library."""
    return decayed_flow_filter(problem, eta, t) * (torch.arange(problem.rank) < rank)


def by_the_library(kernel, positions):
    sigma, eta, t = values_at(page_data(kernel), positions)
    M = explored_filter(kernel.problem, positions["rank"], eta, t)
    found = risk(kernel.problem, M, kernel.signal, sigma**2, kernel.truth)
    tests = len(kernel.problem.start_test)
    parts = {
        "bias": found.bias,
        "variance": found.variance,
        "misfit": found.misfit + found.cross,
        "risk": found.total,
    }
    return {name: value / tests for name, value in parts.items()}, M.tolist()


def test_corners_of_the_filter():
    problem = builtin_kernel().problem
    torch.testing.assert_close(explored_filter(problem, problem.rank, 0.0, math.inf), interpolation_filter(problem))
    assert explored_filter(problem, 0, 0.0, math.inf).abs().max() == 0
    assert (explored_filter(problem, 5, 0.1, 3.0) > 0).sum() == 5


def test_command_writes_one_file_that_needs_nothing_else(capsys, tmp_path):
    target = tmp_path / "new" / "page.html"
    code, out, err = call(capsys, "explore", "--output", str(target))
    assert (code, err) == (0, "")
    assert out == f"Wrote {target}: open it in a browser\n"
    page = target.read_text(encoding="utf-8")
    assert page == explore_page(builtin_kernel())
    assert [p.name for p in target.parent.iterdir()] == ["page.html"]
    for outside in ("http:", "https:", "//cdn", "src=", "@import", "fetch(", "XMLHttpRequest", "url("):
        assert outside not in page
    assert re.findall(r'href="([^"]*)"', page) == ["data:,"]
    assert "__" not in page.replace("__proto__", "")
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page).group(1)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert 'style="' not in page  # the policy would ignore it


def test_a_file_name_cannot_leave_its_place_in_the_page(tmp_path):
    page = explore_page(kernel_from_file(own_kernel(tmp_path / "a<b>&.npz")))
    assert "<title>poprisk explore: a&lt;b&gt;&amp;.npz</title>" in page
    block = re.search(r'id="data">(.*?)</script>', page, re.S).group(1)
    assert "<" not in block
    assert json.loads(block)["name"] == "a<b>&.npz"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"signal": None}, "must contain K_SS, K_QS, signal; missing: signal"),
        ({"signal": np.ones(5)}, "signal must be a vector of 6 numbers, got shape [5]"),
        ({"truth": np.ones(6)}, "truth must be a vector of 4 numbers, got shape [6]"),
        ({"K_QS": np.full((4, 6), np.nan)}, "K_QS in .* must contain finite real numbers"),
        ({"signal": np.array(list("abcdef"))}, "signal in .* must contain finite real numbers"),
        ({"K_SS": -np.eye(6)}, "positive semidefinite"),
    ],
)
def test_wrong_kernels_are_one_line_and_nothing_is_written(changes, message, capsys, tmp_path):
    path, target = own_kernel(tmp_path / "own.npz", **changes), tmp_path / "page.html"
    code, out, err = call(capsys, "explore", "--kernel", str(path), "--output", str(target))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message.replace("[", r"\[").replace("]", r"\]"), err)
    assert not target.exists()


def test_files_that_are_no_archive_are_refused(capsys, tmp_path):
    (tmp_path / "words.npz").write_text("not an archive")
    np.save(tmp_path / "one.npy", np.eye(2))
    for name, message in (
        ("words.npz", "not a NumPy archive"),
        ("one.npy", "holds a single array"),
        ("none.npz", "none.npz"),
    ):
        code, _, err = call(capsys, "explore", "--kernel", str(tmp_path / name), "--output", str(tmp_path / "x.html"))
        assert code == 2
        assert message in err
    np.savez(tmp_path / "large.npz", K_SS=np.eye(513), K_QS=np.ones((1, 513)), signal=np.ones(513))
    with pytest.raises(DataError, match="at most 512 directions, got a kernel of rank 513"):
        kernel_from_file(tmp_path / "large.npz")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Opens a page in headless Chromium and gives the document as it stands after its scripts ran."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((path for name in names if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("needs Chromium on the PATH")
    home = tmp_path_factory.mktemp("browser")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=5000"]

    def opened(path, fragment=""):
        # Without a network of its own to reach: every host is mapped to nothing.
        command = [program, *quiet, "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={home}", "--dump-dom"]
        done = subprocess.run(
            [*command, f"{path.as_uri()}{fragment}"],
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
            env={**os.environ, "HOME": str(home)},
        )
        return done.stdout

    return opened


# Moves the sliders as a hand would, by events, and notes what the page shows afterwards.
PLAY = """<script>
const notes = [];
window.onerror = message => notes.push({error: message});
const pause = () => new Promise(done => setTimeout(done, 20));
async function play(positions) {
  for (const name in positions) {
    const slider = document.getElementById(name);
    slider.value = positions[name];
    slider.dispatchEvent(new Event("input"));
  }
  await pause();
  const note = {};
  for (const id of ["bias", "variance", "misfit", "risk"]) note[id] = document.getElementById(id).dataset.value;
  note.words = document.getElementById("risk").textContent;
  note.filter = JSON.parse(document.getElementById("filter-chart").dataset.value);
  note.circle = Number(document.querySelector("#risk-chart circle")?.getAttribute("cy"));
  notes.push(note);
}
(async () => {
  for (const positions of POSITIONS) await play(positions);
  const axis = document.getElementById("axis");
  axis.value = "rank"; axis.dispatchEvent(new Event("change")); await pause();
  document.getElementById("best").click(); await pause();
  const shown = id => document.getElementById(id);
  notes.push({best: shown("risk").dataset.value, lowest: shown("lowest").dataset.value,
              title: shown("risk-title").textContent});
  const out = document.createElement("pre");
  out.id = "notes"; out.textContent = JSON.stringify(notes);
  document.body.append(out);
})();
</script></body>"""


def played(browser, kernel, path, positions):
    page = explore_page(kernel).replace("</body>", PLAY.replace("POSITIONS", json.dumps(positions)))
    page = page.replace(
        "; script-src 'sha256-", "; script-src 'unsafe-inline' 'not-a-hash-"
    )  # for the script added here
    path.write_text(page, encoding="utf-8")
    found = re.search(r'<pre id="notes">(.*?)</pre>', browser(path), re.S)
    assert found, "the page's scripts did not finish"
    return json.loads(html.unescape(found.group(1)))


def test_the_page_shows_the_library_s_numbers(browser, tmp_path):
    kernel = builtin_kernel()
    *notes, best = played(browser, kernel, tmp_path / "page.html", POSITIONS)
    for positions, note in zip(POSITIONS, notes, strict=True):
        parts, M = by_the_library(kernel, positions)
        for name, value in parts.items():
            assert float(note[name]) == pytest.approx(value, rel=1e-9, abs=1e-9 * parts["risk"])
        np.testing.assert_allclose(note["filter"], M, rtol=1e-12, atol=1e-15)
        assert float(note["words"].replace(" · 10^", "e")) == pytest.approx(parts["risk"], rel=1e-3)
    assert len({note["circle"] for note in notes}) == len(notes)  # the marked point moves
    ranks = range(kernel.problem.rank + 1)
    lowest = min(by_the_library(kernel, POSITIONS[-1] | {"rank": r})[0]["risk"] for r in ranks)
    assert float(best["best"]) == float(best["lowest"]) == pytest.approx(lowest, rel=1e-9)
    assert best["title"] == "Risk as a function of capacity"


def test_one_s_own_kernel_and_a_remembered_view(browser, tmp_path):
    kernel = kernel_from_file(own_kernel(tmp_path / "own.npz"))
    path = tmp_path / "own.html"
    path.write_text(explore_page(kernel), encoding="utf-8")
    positions = {"noise": 50, "rank": 4, "ridge": 30, "time": 70}
    words = "&".join(f"{name}={value}" for name, value in positions.items())
    document = browser(path, f"#{words}&axis=noise")
    parts, _ = by_the_library(kernel, positions)
    for name in ("bias", "variance", "risk"):
        shown = re.search(rf'id="{name}" data-value="([^"]*)"', document).group(1)
        assert float(shown) == pytest.approx(parts[name], rel=1e-9)
    assert re.search(r'id="misfit-row" hidden', document)
    assert "own.npz: 6 training examples, 4 test outputs, 6 directions." in document
    assert "Risk as a function of noise" in document
