"""The documentation's generated pages: every public name is there, links hold, commands are listed as they are.

The build itself (``make docs``) is a test too: a warning, or a public name without an entry, fails it.
"""

import doctest
import importlib
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest
import typer

import command_page
import offline
import outside_pages
import poprisk
import public_names
import reference_pages
from poprisk import cli
from public_names import aliases, documented_at, exists, missing, public_targets, rooms, words_of_constant
from reference_pages import page_name, room_page

ROOT = Path(__file__).resolve().parents[2]
ROOMS = rooms()
KNOWN = public_targets(ROOMS) | set(aliases(ROOMS))
NEEDS_EXTRAS = "poprisk.integrations"


@pytest.fixture(scope="module")
def pages():
    """The reference as it is written, but for the page whose modules need every trainer."""
    return {page_name(room): room_page(room) for room in ROOMS if room.name != NEEDS_EXTRAS}


def test_every_name_in_the_namespace_of_a_room_is_known():
    """Counted another way than by the reference: by what a room lists once it is imported."""
    packages = [
        m.name for m in pkgutil.iter_modules(poprisk.__path__, "poprisk.") if m.ispkg and m.name != "poprisk.cli"
    ]
    names = {
        f"{package}.{name}" for package in packages for name in getattr(importlib.import_module(package), "__all__", ())
    }
    assert len(names) > 90
    assert sorted(names - KNOWN) == []


def test_every_name_of_the_package_is_known():
    assert missing([f"poprisk.{name}" for name in poprisk.__all__], KNOWN) == []
    assert missing(["poprisk.nobody", "poprisk.train"], KNOWN) == ["poprisk.nobody"]


def test_every_target_is_explained_on_exactly_one_page(pages):
    explained = [t for text in pages.values() for t in re.findall(r"^\.\. auto(?:class|function):: (\S+)", text, re.M)]
    for text in pages.values():
        explained += [".".join(found) for found in re.findall(r"currentmodule:: (\S+)\n\n\.\. py:data:: (\S+)", text)]
    wanted = {target for target in public_targets(ROOMS) if not target.startswith(NEEDS_EXTRAS)}
    assert sorted(explained) == sorted(wanted)


def test_a_definition_leads_to_where_it_is_explained():
    assert documented_at(ROOMS)["poprisk.runs._training.train"] == "poprisk.runs.train"
    assert aliases(ROOMS)["poprisk.train"] == "poprisk.runs.train"
    assert all(exists(target) for target in public_targets(ROOMS) if not target.startswith(NEEDS_EXTRAS))


def imported(text):
    """Dotted names that a text imports from this package, not from the lab."""
    for module, names in re.findall(r"^\s*from (poprisk(?:\.\w+)*) import \(?([\w, \n]+?)\)?$", text, re.M):
        for name in re.split(r"[,\s]+", names.strip(" ,\n")):
            yield f"{module}.{name.split(' as ')[0]}"


def test_what_pages_and_examples_import_is_public():
    """A page may show a module as a whole, or a constant of an open one; whatever else it imports must be explained."""
    places = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/gallery/*.py"), *ROOT.glob("examples/*/*")]
    texts = {path: path.read_text(encoding="utf-8") for path in places if path.suffix in {".md", ".py"}}
    found = {name: path.name for path, text in texts.items() for name in imported(text)}
    assert len(found) > 40
    modules = {m.name for room in ROOMS for m in room.modules}
    constants = {name for name in found if name.rpartition(".")[2].isupper() and name.rpartition(".")[0] in modules}
    lab = {name for name in found if name.startswith("poprisk_lab.")}  # a project of its own
    places = {name: name.rpartition(".") for name in lab}
    assert all("._" not in name and hasattr(import_module(m), n) for name, (m, _, n) in places.items())
    unknown = {name: path for name, path in found.items() if name not in KNOWN | modules | constants | lab}
    assert unknown == {}


def test_a_constant_has_words_or_is_refused():
    assert words_of_constant("poprisk.optim._defaults", "DEFAULTS").startswith("What ``PopRiskAdamW(params)`` uses.")
    assert words_of_constant("poprisk._core.autodiff.losses", "ExampleLoss").startswith(
        "The outputs and the target of ONE"
    )
    with pytest.raises(LookupError, match="has no words"):
        words_of_constant("poprisk.runs._digits", "TRAIN_SIZES")


def test_the_command_page_has_every_command(tmp_path):
    path = tmp_path / "command_line.md"
    command_page.write_command_page(path)
    text = path.read_text(encoding="utf-8")
    commands = typer.main.get_command(cli.app).commands
    assert {"demo", "report"} <= set(commands)
    for name, command in commands.items():
        assert f"## poprisk {name}\n" in text
        for option in command.params:
            assert {*option.opts, option.name.upper()} & set(re.findall(r"[\w-]+", text))


def test_a_command_is_shown_as_it_says_itself():
    app = typer.Typer()

    @app.command()
    def first(path: str, loud: bool = typer.Option(False, help="Say *all*.")) -> None:
        """Do it.

        \b
        $ tool first HERE
        """

    @app.command(hidden=True)
    def second() -> None:
        """Nobody's business."""

    @app.command()
    def third() -> None:
        """Do another thing, with <angles>."""

    text = command_page.command_page(typer.main.get_command(app), "tool")
    assert "| [`tool first`](#tool-first) | Do it. |" in text
    assert "```console\n$ tool first HERE\n```" in text
    assert r"Say \*all\*." in text
    assert r"with \<angles\>" in text
    assert "Nobody" not in text


def test_links_of_pages_from_elsewhere_hold(tmp_path):
    source = tmp_path / "docs"
    (tmp_path / "examples/a").mkdir(parents=True)
    source.mkdir()
    for name in ("README.md", "docs/guide.md", "examples/a/README.md", "code.py", "picture.png"):
        (tmp_path / name).write_text("text", encoding="utf-8")
    (tmp_path / "README.md").write_text(
        "[g](docs/guide.md#part) [a](examples/a/README.md) [`c`](code.py) ![p](picture.png) [w](https://w.org) "
        "[gone](gone.md)\n```\n[g](docs/guide.md)\n```\n",
        encoding="utf-8",
    )
    outside_pages.write_outside_pages(source / "pages", source, tmp_path)
    text = (source / "pages/readme.md").read_text(encoding="utf-8")
    assert text == (
        "[g](/guide.md#part) [a](/pages/examples-a.md) `c` ![p](/pages/pictures/picture.png) [w](https://w.org) "
        "[gone](gone.md)\n```\n[g](docs/guide.md)\n```\n"
    )
    assert (source / "pages/pictures/picture.png").read_text(encoding="utf-8") == "text"


def test_a_page_that_went_away_is_left_out(tmp_path):
    source = tmp_path / "docs"
    (tmp_path / "lab/results").mkdir(parents=True)
    results = tmp_path / "lab/results/README.md"
    results.write_text("# Verdicts\n", encoding="utf-8")
    outside_pages.write_outside_pages(source / "pages", source, tmp_path)
    assert [path.name for path in (source / "pages").iterdir()] == ["lab-results.md"]
    results.unlink()
    outside_pages.write_outside_pages(source / "pages", source, tmp_path)
    assert list((source / "pages").iterdir()) == []


def test_an_unchanged_page_is_not_written_again(tmp_path):
    path = tmp_path / "page.md"
    reference_pages.write_if_changed(path, "a")
    before = path.stat().st_mtime_ns
    reference_pages.write_if_changed(path, "a")
    assert path.stat().st_mtime_ns == before
    reference_pages.write_if_changed(path, "b")
    assert path.read_text(encoding="utf-8") == "b"


@pytest.mark.parametrize("module", [public_names, reference_pages, command_page, outside_pages, offline])
def test_examples_of_the_generators(module):
    assert doctest.testmod(module).failed == 0


def test_pages_that_no_list_names_are_listed(tmp_path):
    for name in ("index", "named", "forgotten"):
        (tmp_path / f"{name}.md").write_text("text\n", encoding="utf-8")
    (tmp_path / "guide.md").write_text("```{toctree}\nnamed\nguide\n```\n", encoding="utf-8")
    found = outside_pages.with_other_pages("before\n<!-- other pages -->\n", tmp_path)
    assert found == "before\n```{toctree}\n:caption: More\n:maxdepth: 1\n\nforgotten\n```\n"
    (tmp_path / "forgotten.md").unlink()
    assert outside_pages.with_other_pages("<!-- other pages -->", tmp_path) == ""


def test_an_optional_page_is_listed_where_it_is(tmp_path):
    text = "```{toctree}\n? pages/results*\ntime\n```\n"
    assert outside_pages.with_optional_pages(text, tmp_path) == "```{toctree}\ntime\n```\n"
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/results.md").write_text("text", encoding="utf-8")
    assert outside_pages.with_optional_pages(text, tmp_path) == "```{toctree}\npages/results\ntime\n```\n"


def test_pages_that_need_a_network_are_named(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "own.html").write_text('<img src="a.png"><a href="https://a.org">a</a>', encoding="utf-8")
    (tmp_path / "below/far.html").write_text('<img alt="a" src="https://a.org/a.png">', encoding="utf-8")
    assert offline.pages_that_fetch(tmp_path) == ["below/far.html"]
