"""What a release is made of, and that it works where nothing else of this repository is.

The quick tests build with the hatchling of this environment and install the wheel into a new one that borrows the
*dependencies* from here: what they prove is that the wheel is whole (no module, template or C source is missing, the
entry point works, nothing is read from the repository), not that the declared dependencies suffice. The slow test
proves that: a new environment, pip, and only what the wheel's metadata asks for.
"""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import poprisk
from readme_code import blocks

pytestmark = pytest.mark.timeout(300)  # a dozen seconds, most of them other processes' imports of torch
ROOT = Path(__file__).resolve().parent.parent
NAME = f"poprisk-{poprisk.__version__}"
DEMO = ("demo", "--seeds", "1", "--steps", "20", "--size", "100", "--output", "out")


def call(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """What the command printed; paths of this environment do not reach it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "POPRISK"))}
    done = subprocess.run(command, cwd=cwd, env=kept | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source archive, the wheel made of it and of nothing else, and the wheel made of the working tree."""
    both, direct = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("direct")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
    call(*build, both, ROOT)
    call(*build, direct, "--wheel", ROOT)
    wheel = f"{NAME}-py3-none-any.whl"
    return both / f"{NAME}.tar.gz", both / wheel, direct / wheel


@pytest.fixture(scope="module")
def archive(built):
    """Names of the files in the source archive, from its own folder on."""
    with tarfile.open(built[0]) as opened:
        return {name.removeprefix(f"{NAME}/") for name in opened.getnames()}


@pytest.fixture(scope="module")
def metadata(built):
    with zipfile.ZipFile(built[1]) as opened:
        return Parser().parsestr(opened.read(f"{NAME}.dist-info/METADATA").decode())


@pytest.fixture(scope="module")
def borrowed(built, tmp_path_factory):
    """The programs of an environment with the wheel in it and the dependencies of this one behind it.

    A folder named in a .pth file is searched, but the .pth files in it are not read: an editable installation of the
    working tree stays out of sight.
    """
    folder = tmp_path_factory.mktemp("borrowed")
    venv.create(folder, symlinks=True)
    programs = folder / "bin"
    call(sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", "--no-index", built[1])
    site = next(folder.glob("lib/python*/site-packages"))
    here = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (site / "borrowed.pth").write_text("\n".join(here) + "\n")
    return programs


def files_of_the_package() -> set[str]:
    """Paths relative to src/ of all that belongs to the package: what Python and the tests leave there does not."""
    found = (path for path in (ROOT / "src/poprisk").rglob("*") if path.is_file())
    kept = (path for path in found if "__pycache__" not in path.parts and path.suffix != ".so")
    return {path.relative_to(ROOT / "src").as_posix() for path in kept}


def test_the_wheel_is_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as opened:
        names = {name for name in opened.namelist() if not name.startswith(f"{NAME}.dist-info/")}
    assert names == files_of_the_package()
    assert {"poprisk/py.typed", "poprisk/__init__.pyi", "poprisk/report/templates/report.html"} <= names


def test_the_source_archive_builds_the_same_wheel(built):
    assert built[1].read_bytes() == built[2].read_bytes()


def test_the_source_archive_has_what_the_tests_and_the_pages_need(archive):
    assert {f"src/{name}" for name in files_of_the_package()} <= archive
    assert {"Makefile", "constraints.txt", "requirements.lock", "tests/conftest.py", "tools/paper_table.py"} <= archive
    assert {"SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff", ".github/workflows/tests.yml"} <= archive
    page = (ROOT / "README.md").read_text()
    linked = {link.split("#")[0] for link in re.findall(r"]\(([^)\s]+)\)", page) if "://" not in link} - {""}
    assert linked
    assert linked <= archive | {os.path.dirname(name) for name in archive}


def test_the_index_will_take_it(built):
    """Strict: a warning, such as a long description that cannot be shown, is a failure."""
    said = call(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *built[:2])
    assert said.count("PASSED") == 2


def test_an_index_shows_links_that_work(metadata):
    """All of them absolute, those of the repository at the tag of the release."""
    urls = dict(each.split(", ", 1) for each in metadata.get_all("Project-URL"))
    assert {"Source", "Documentation", "Changelog", "Issues"} <= set(urls)
    assert all(url.startswith("https://") for url in urls.values())
    links = re.findall(r"]\(([^)\s]+)\)", metadata.get_payload())
    assert len(links) > 10
    assert all(link.startswith(("https://", "#")) for link in links)
    here = [link for link in links if link.startswith(urls["Source"])]
    for link in here:
        path = link.removeprefix(f"{urls['Source']}/").split(f"v{poprisk.__version__}/", 1)[1].split("#")[0]
        assert (ROOT / path).exists(), link


def test_the_supported_versions_are_those_that_are_tested(metadata):
    """Classifiers, the public host's tests, and the page say the same."""
    classified = {each.rpartition(" ")[2] for each in metadata.get_all("Classifier") if " :: 3.1" in each}
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    tested = workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]
    assert {each["python"] for each in tested} == classified == {"3.11", "3.12", "3.13"}
    assert workflow["jobs"]["wheel"]["strategy"]["matrix"]["python"] == sorted(classified)
    oldest = next(each for each in metadata.get_all("Requires-Dist") if each.startswith("torch>="))
    locked = re.search(r"^torch==(\S+)", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)
    assert locked is not None
    assert {Version(each["torch"]) for each in tested if each["torch"]} == {Version(oldest[7:]), Version(locked[1])}
    assert {each["torch"] for each in tested} >= {""}  # the newest
    assert f"torch from {oldest[7:]} on" in (ROOT / "docs/versions.md").read_text()


def test_every_locked_package_has_a_hash_and_every_dependency_is_locked():
    text = (ROOT / "requirements.lock").read_text()
    entries = [entry for entry in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE) if entry.strip()]
    assert len(entries) > 100
    assert all(re.match(r"[\w.-]+(\[\w,-]+\])?==\S+", entry) and "--hash=sha256:" in entry for entry in entries)
    locked = {re.split(r"[\[=]", entry, maxsplit=1)[0] for entry in entries}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(each for name in ("dev", "docs", "report", "data", "jobs") for each in extras[name]),
    ]
    names = {canonicalize_name(Requirement(each).name) for each in asked} - {"poprisk"}
    assert names <= locked
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or f"\n{line}" in f"\n{text}", line


def test_the_hooks_before_a_commit_are_the_tools_of_lint():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert lint is not None
    assert [re.sub(r"\.venv/bin/| --fix", "", hook["entry"]) for hook in hooks] == [
        re.sub(r".*\$\(BIN\)/| --check| \.$", "", line).replace(" check .", " check").strip()
        for line in lint[1].splitlines()
    ]


def test_the_version_is_written_once(metadata):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert "version" in project["dynamic"]
    assert metadata["Version"] == poprisk.__version__


def test_the_changelog_lists_versions_newest_first():
    """Headings are ``[Unreleased]``, then versions, each with its day and none newer than the package."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    matches = [re.fullmatch(r"\[(\S+)\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:]]
    assert all(matches), headings
    versions = [Version(poprisk.__version__), *(Version(match[1]) for match in matches if match)]
    assert versions == sorted(versions, reverse=True)


def test_the_quick_start_runs_from_the_wheel(borrowed, tmp_path):
    """The blocks of the page in the wheel's metadata; a fallback, for want of the C source say, would warn."""
    script = (borrowed / "python", "-I", "-W", "error", ROOT / "tests/readme_code.py")
    said = call(*script, cwd=tmp_path, POPRISK_CACHE_DIR=str(tmp_path)).splitlines()[-1]
    count, where = said.split(" blocks, ")
    assert int(count) == len(blocks((ROOT / "README.md").read_text())) >= 3
    assert Path(where).is_relative_to(borrowed.parent)


def test_the_command_runs_from_the_wheel(borrowed, tmp_path):
    """The demo without its report, which the slow test writes; a page made of a template instead."""
    program = borrowed / "poprisk"
    assert call(program, "--version", cwd=tmp_path) == f"poprisk {poprisk.__version__}\n"
    call(program, *DEMO, "--no-report", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert {"result.json", "demo.png"} <= {path.name for path in (tmp_path / "out").iterdir()}
    call(program, "explore", "--output", "page.html", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "</html>" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_new_environment_needs_nothing_but_the_wheel(built, tmp_path):
    """Everything by pip: the page's code with the required dependencies alone, the demo with the extras it names."""
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    venv.create(environment, symlinks=True, with_pip=True)
    programs = environment / "bin"
    install = (programs / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    call(*install, built[1])
    script = (programs / "python", "-I", ROOT / "tests/readme_code.py")
    call(*script, "sklearn", cwd=empty, POPRISK_CACHE_DIR=str(tmp_path))
    call(*install, f"{built[1]}[report,data]")
    call(*script, cwd=empty, POPRISK_CACHE_DIR=str(tmp_path))
    call(programs / "poprisk", *DEMO, cwd=empty)
    assert {"demo.png", "report.html"} <= {path.name for path in (empty / "out").iterdir()}
