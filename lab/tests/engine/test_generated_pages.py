"""Every generated page is what the stored results give; every claim of the paper is a folder of the same shape."""

import json
import re
from importlib import import_module
from pathlib import Path

import jinja2
import pytest

import poprisk_lab
from poprisk_lab import results
from poprisk_lab.pages import __main__ as command
from poprisk_lab.pages.registry import PAGES, ROOT, Page, chosen_pages, function
from poprisk_lab.pages.template import filled, render_block, render_parts
from poprisk_lab.reproductions import known

PAPER = Path(poprisk_lab.__file__).parent / "paper"
FOLDERS = sorted(path.name for path in PAPER.iterdir() if (path / "__init__.py").exists())
SHAPE = ("task.py", "study.py", "figure.py", "numbers.py")
TEMPLATE_OF = {"cifar": "labels"}
"""CIFAR-10N makes the claims of the other studies of wrong labels, in the same words."""


NO_FIGURE = {"clipping": {"figure.py"}}
"""Its result is that clipping changes nothing: a table says it, and lines would coincide."""
NO_PAGE = {"mnist_influence", "sobolev_slope"}
"""No page makes a claim from them: the one is a benchmark whose stored result the tests read, the other stores none."""


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_claim_is_a_folder_of_the_same_shape(folder):
    there = {path.name for path in (PAPER / folder).iterdir()}
    wanted = {"task.py", "study.py"} if folder in NO_PAGE else set(SHAPE) - NO_FIGURE.get(folder, set())
    assert wanted <= there
    templates = {path.name for path in (PAPER / TEMPLATE_OF.get(folder, folder)).glob("*.jinja")}
    assert bool(templates & {"page.md.jinja", "claim.md.jinja"}) == (folder not in NO_PAGE)
    assert not {"page.py", "report.py"} & there, "prose belongs in a template"


def test_every_page_is_up_to_date(capsys):
    assert command.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.target)
def test_what_a_page_names_is_there(page):
    assert (ROOT / page.target).exists()
    glued = re.findall(r"[.;:)]-(?= [A-Z])", (ROOT / page.target).read_text(encoding="utf-8"))
    assert not glued, "a list item must begin a line: a block tag of the template took the line break before it"
    assert callable(function(page.numbers))
    for drawing in page.drawings:
        assert callable(function(drawing.draw))
        assert (ROOT / drawing.target).exists()
    if page.template is not None:
        package, name = page.template.split("/")
        assert (Path(import_module(package).__file__ or "").parent / name).exists()


def test_no_page_has_two_writers():
    targets = [target for page in PAGES for target in (page.target, *(drawing.target for drawing in page.drawings))]
    assert len(set(targets)) == len(targets)


def test_a_stale_page_is_named(monkeypatch, tmp_path, capsys):
    page = Page("page.md", "poprisk_lab.pages.readme:slots", "poprisk_lab.paper.default_choice/claim.md.jinja")
    (tmp_path / "page.md").write_text("something else\n")
    monkeypatch.setattr(Page, "text", lambda self, *_: "as it should be\n")
    assert page.is_stale(tmp_path, tmp_path)
    page.write(tmp_path, tmp_path)
    assert not page.is_stale(tmp_path, tmp_path)
    assert command.main(["--check", "README.md"]) == 1
    assert "Out of date, run `make pages`: README.md" in capsys.readouterr().err


def test_pages_are_chosen_by_part_of_their_path(capsys):
    assert [page.target for page in chosen_pages(["lab/docs/coupling"])] == ["lab/docs/coupling.md"]
    assert chosen_pages([]) == list(PAGES)
    with pytest.raises(SystemExit):
        command.main(["nowhere"])
    assert "no page has 'nowhere' in its path" in capsys.readouterr().err
    assert command.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == [page.target for page in PAGES]


def test_a_slot_without_a_number_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="usual_rate"):
        render_block("poprisk_lab.paper.default_choice", "note", {})
    with pytest.raises(jinja2.UndefinedError):
        render_parts("poprisk_lab.pages", "readme.md.jinja", {})
    with pytest.raises(KeyError, match="nothing"):
        render_block("poprisk_lab.paper.default_choice", "nothing", {})


def test_paragraphs_are_filled_and_tables_are_kept():
    words = "word " * 40
    text = filled(f"{words}\n\n| {words} |\n\n```\n{words}\n```")
    assert max(map(len, text.split("\n\n")[0].splitlines())) <= 120
    assert f"| {words} |" in text
    assert f"```\n{words.rstrip()}\n```" in text


def test_every_result_is_listed_with_what_it_needs(capsys):
    assert results.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert set(known()) < set(results.names())
    for name in results.names():
        assert f"\n{name}: " in f"\n{listed}"
    stored = {path.stem for path in results.RESULTS.glob("*.json")} | {"demo"}
    assert stored == set(results.names()), "a result that nothing makes, or a name without a result"


def test_unknown_results_and_a_smoke_run_over_the_stored_ones_are_refused(capsys):
    for arguments, message in (
        (["nothing"], "no result is called nothing"),
        ([], "name the results to make again"),
        (["pinn", "--smoke"], "name another folder with --output"),
    ):
        with pytest.raises(SystemExit):
            results.main(arguments)
        assert message in capsys.readouterr().err


def test_a_result_is_made_again(tmp_path, capsys, monkeypatch):
    """One study that ``poprisk reproduce`` knows, one script, and one whose data are missing."""
    assert results.main(["teacher", "--smoke", "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "teacher.json").read_text())["kind"] == "teacher"
    script = results.Script("", ("-c", "open(r'{output}', 'w').write('[]')"), smoke="")
    monkeypatch.setitem(results.SCRIPTS, "kernel_cpu", script)
    assert results.main(["kernel_cpu", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "kernel_cpu.json").read_text() == "[]"
    assert results.main(["cifar", "--output", str(tmp_path), "--data", str(tmp_path)]) == 1
    assert "cifar: " in capsys.readouterr().err
