"""From the paper to the code: all names exist, nothing of the paper is missing, the page is what the data give."""

import ast
import importlib
import importlib.util
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from poprisk.errors import MissingExtraError

ROOT = Path(__file__).resolve().parent.parent


def load_tool():
    spec = importlib.util.spec_from_file_location("paper_table", ROOT / "tools/paper_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()
TABLE = tool.load()
FUNCTIONS = sorted({name for each in (*TABLE.entries, *TABLE.symbols) for name in each.functions})
NODES = sorted({node for entry in TABLE.entries for node in entry.tests})
OF_OTHER_PAPERS = {"poprisk.risk._error.nested_error", "poprisk._core.linalg.trace.xtrace"}


def resolve(name):
    """The object of a dotted name: modules as far as there are files, attributes from there on."""
    parts = name.split(".")
    depth, top = len(parts), ROOT / ("lab/src" if parts[0] == "poprisk_lab" else "src")
    while not (base := top.joinpath(*parts[:depth])).with_suffix(".py").is_file() and not base.is_dir():
        depth -= 1
    found = importlib.import_module(".".join(parts[:depth]))
    for attribute in parts[depth:]:
        found = getattr(found, attribute)
    return found


def unresolved(names):
    """Those that cannot be imported, with the reason; where an optional package is missing nothing can be said."""
    found = {}
    for name in names:
        try:
            resolve(name)
        except MissingExtraError:
            continue
        except (ImportError, AttributeError) as error:
            found[name] = str(error)
    return found


@cache
def names_in(path):
    if not (ROOT / path).is_file():
        return frozenset()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def nowhere(nodes):
    """Node ids whose file has no such test."""
    split = [(node, *node.split("::")) for node in nodes]
    return [node for node, path, name in split if not name.startswith("test_") or name not in names_in(path)]


def test_every_function_can_be_imported():
    assert unresolved(FUNCTIONS) == {}
    assert set(unresolved(["poprisk.operators._coupling.Coupled", "poprisk.nowhere.at_all"])) == {
        "poprisk.operators._coupling.Coupled",
        "poprisk.nowhere.at_all",
    }


def test_an_extra_that_is_not_installed_is_no_fault(monkeypatch):
    for name in ("optax", "poprisk.integrations.optax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "optax", None)
    assert unresolved(["poprisk.integrations.optax.population_risk_gate"]) == {}
    with pytest.raises(MissingExtraError):
        resolve("poprisk.integrations.optax.population_risk_gate")


def test_every_test_exists():
    assert nowhere(NODES) == []
    bad = ["tests/test_paper_table.py::load_tool", "tests/test_paper_table.py::test_none", "tests/none.py::test_a"]
    assert nowhere([*bad, "tests/test_paper_table.py::test_every_test_exists"]) == bad


def test_the_page_is_what_the_data_give():
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(TABLE)


def test_nothing_of_the_paper_is_missing():
    """Counted once by hand in the paper's source: \\begin{…} of each kind, and the rows of its table of assumptions."""
    assert Counter(tool.names_of(e for e in TABLE.entries if e.kind != "erratum")) == Counter(TABLE.frozen)
    kinds = Counter(line.split()[0] for line in TABLE.frozen)
    by_hand = {"theorem": 22, "proposition": 6, "corollary": 17, "lemma": 3, "definition": 4, "remark": 9}
    by_hand |= {"algorithm": 1, "figure": 11, "table": 4, "assumption": 9, "equation": 36}
    assert {kind: kinds[kind] for kind in by_hand} == by_hand
    assert sum("eq:" in line for line in TABLE.frozen) == 91


def test_every_entry_is_sound():
    assert [fault for entry in TABLE.entries for fault in entry.faults] == []
    labels = Counter(entry.label for entry in TABLE.entries)
    assert max(labels.values()) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"status": "statement only"}, "needs a reason"),
        ({"status": "statement only", "note": "why", "functions": ("poprisk.a",)}, "no functions"),
        ({"status": "part", "functions": ("poprisk.a",), "tests": ("tests/a.py::test_b",)}, "says which"),
        ({"status": "whole", "functions": ("poprisk.a",)}, "one function and one test"),
        ({"status": "perhaps"}, "status must be"),
        ({"kind": "conjecture", "status": "statement only", "note": "why"}, "kind must be"),
    ],
)
def test_unsound_entries_are_named(change, says):
    (fault,) = tool.Entry(**{"kind": "theorem", "label": "thm:a", "title": "A", **change}).faults
    assert fault.startswith("thm:a: ")
    assert says in fault


def sources():
    """Every module of the library and of the lab, with the folder that its dotted name begins in."""
    for top in (ROOT / "src", ROOT / "lab/src"):
        for path in sorted(top.rglob("*.py")):
            yield path, top


def cited_labels():
    """Labels of the paper that docstrings cite, with the file; sections are not in the table."""
    prefixed = r"\b((?:thm|prop|cor|lem|def|rem|alg|fig|tab|eq):\w+)"
    plain = r"\b(?:Eqs?|Thm|Cor|Prop|Lemma|Theorem|Corollary|Remark)\.? ``(\w+)``"
    for path, _ in sources():
        for match in re.finditer(f"{prefixed}|{plain}", path.read_text(encoding="utf-8")):
            yield match[1] or match[2], path.name


def test_labels_in_docstrings_are_in_the_table():
    frozen = {line.split()[1] for line in TABLE.frozen}
    known = frozen | {label.partition(":")[2] for label in frozen}
    cited = dict(cited_labels())
    assert len(cited) > 50
    assert {label: file for label, file in cited.items() if label not in known} == {}


def differing():
    """Dotted names of what says in its docstring that it differs from the paper."""
    for path, top in sources():
        module = ".".join(path.relative_to(top).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for outer in tree.body:
            inner = outer.body if isinstance(outer, ast.ClassDef) else []
            for node, name in [(outer, ""), *((each, f"{getattr(outer, 'name', '')}.") for each in inner)]:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    said = " ".join((ast.get_docstring(node) or "").split())
                    if "Differs from the paper" in said:
                        yield f"{module}.{name}{node.name}"


def test_whatever_differs_from_the_paper_is_among_the_errata():
    listed = {name for entry in TABLE.entries if entry.kind == "erratum" for name in entry.functions}
    found = set(differing())
    assert len(found) > 15
    assert found >= OF_OTHER_PAPERS
    assert found - listed - OF_OTHER_PAPERS == set()


TEX = r"""
\section{On Sums}\label{sec:sums} % \begin{theorem}[A comment]
\begin{align}\label{eq:sum}\end{align}
\begin{theorem}[Order--free]\label{thm:order}\begin{align}\label{eq:order}\end{align}\end{theorem}
\begin{remark}[Without a label] x \end{remark}
\begin{figure}\caption{\textbf{Sums (\autoref{thm:order}).} More.}\label{fig:sums}\end{figure}
\appendix
\section{Proofs}\subsection{Of Sums}
\begin{lemma}[Zero]\label{lem:zero}\end{lemma}
\begin{table}\caption{What is assumed. All of it.}\label{tab:assumptions}\midrule
a & b \\
\addlinespace c & d \\
\bottomrule\end{table}
"""


def test_a_paper_is_read():
    found = {entry.label: entry for entry in tool.statements(TEX)}
    assert list(found) == [
        *("eq:sum", "thm:order", "remark:without-a-label", "fig:sums", "lem:zero", "tab:assumptions"),
        *("assumption-1", "assumption-2"),
    ]
    numbers = [entry.number for entry in found.values()]
    assert numbers == ["", "Theorem 1.1", "Remark 1.2", "Figure 1", "Lemma A.1", "Table 1", "", ""]
    assert found["thm:order"].inside == ("eq:order",)
    assert (found["thm:order"].title, found["fig:sums"].title) == ("Order-free", "Sums")
    assert (found["lem:zero"].where, found["eq:sum"].where) == ("A.1 Of Sums", "1 On Sums")


def test_differences_from_a_paper_are_told():
    entries = tuple(tool.statements(TEX))
    agreed = tool.Table(tuple(tool.names_of(entries)), entries, ())
    assert tool.differences(TEX, agreed) == []
    renamed = TEX.replace("Zero", "Nought").replace("{eq:sum}", "{eq:total}")
    assert tool.differences(renamed, agreed) == [
        "the paper has equation eq:total, the frozen list does not",
        "the frozen list has equation eq:sum, the paper does not",
        "eq:total: where is '1 On Sums', the data say 'nothing'",
        "lem:zero: title is 'Nought', the data say 'Zero'",
    ]
