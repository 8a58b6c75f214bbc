r"""Writes docs/paper_to_code.md, the table from the paper to the code, from docs/paper_to_code.toml.

python tools/paper_table.py                    # rewrite the page
python tools/paper_table.py --check            # exit 1 if page and data differ
python tools/paper_table.py --paper paper.tex  # exit 1 if the data do not list what the paper has

The paper is not in the repository. What it has is frozen in the data file: ``frozen`` lists every environment, every
labelled equation and every row of its table of assumptions; the last command compares that list with a copy of the
paper, and numbers, titles and sections with those of the entries.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poprisk._core.store import write_text

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs/paper_to_code.toml"
PAGE = ROOT / "docs/paper_to_code.md"
SURVEY = ROOT / "lab/results/mutation.json"

WHOLE, PART, STATEMENT = "whole", "part", "statement only"
STATUSES = (WHOLE, PART, STATEMENT)
NUMBERED = ("theorem", "proposition", "corollary", "lemma", "definition", "remark", "algorithm", "figure", "table")
KINDS = (*NUMBERED, "unnumbered", "equation", "assumption", "erratum")

_COUNTED_WITH_THEOREMS = NUMBERED[:6]
_ENVIRONMENTS = (*NUMBERED, "longtable")
_WORD = {"longtable": "table"}


@dataclass(frozen=True)
class Entry:
    """What the paper says in one place, what computes it, and what checks that.

    Attributes:
        kind: One of ``KINDS``.
        label: The paper's own, or made from the title where it has none.
        number: As printed in the paper, "Theorem 4.1"; empty where it has none.
        title: The paper's title, or ours where it has none.
        where: Section of the paper; for errata what they correct.
        status: "whole", "part" or "statement only".
        functions: Dotted names of what computes it.
        tests: Node ids of what checks it, without parameters.
        note: What is left out or differs; the reason of a "statement only".
        inside: Other labels inside, of its equations and of itself by another name.
    """

    kind: str
    label: str
    title: str
    status: str
    number: str = ""
    where: str = ""
    functions: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    note: str = ""
    inside: tuple[str, ...] = ()

    @property
    def faults(self) -> list[str]:
        """What is wrong with it, in words; nothing for a sound entry.

        >>> Entry("theorem", "thm:any", "Any", "statement only").faults
        ['thm:any: a "statement only" needs a reason in its note']
        """
        found = []
        if self.kind not in KINDS:
            found.append(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.status not in STATUSES:
            found.append(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}")
        if self.status == STATEMENT and not self.note:
            found.append('a "statement only" needs a reason in its note')
        if self.status == STATEMENT and (self.functions or self.tests):
            found.append('a "statement only" has no functions and no tests')
        if self.status == PART and not self.note:
            found.append('a "part" needs a note that says which')
        if self.status in (WHOLE, PART) and not (self.functions and self.tests):
            found.append("needs at least one function and one test")
        return [f"{self.label}: {each}" for each in found]


@dataclass(frozen=True)
class Symbol:
    """A symbol of the paper, and what it is called in the code."""

    symbol: str
    meaning: str
    functions: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """The data file."""

    frozen: tuple[str, ...]
    entries: tuple[Entry, ...]
    symbols: tuple[Symbol, ...]


def load(path: Path = DATA) -> Table:
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    return Table(
        tuple(data["frozen"]),
        tuple(Entry(**_with_tuples(each)) for each in data["entry"]),
        tuple(Symbol(**_with_tuples(each)) for each in data["symbol"]),
    )


def _with_tuples(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}


# --- the page


def page(table: Table) -> str:
    of_kind = {kind: [e for e in table.entries if e.kind == kind] for kind in KINDS}
    pictures = [*of_kind["figure"], *of_kind["table"]]
    statements = [e for e in table.entries if e.kind in (*_COUNTED_WITH_THEOREMS, "algorithm", "unnumbered")]
    parts = [
        "# From the paper to the code",
        _introduction(table),
        "## Theorems, definitions, remarks and the algorithm",
        *_by_section(statements),
        "## Figures and tables",
        _rows(pictures),
        "## Assumptions",
        "The rows of the paper's table of assumptions: how a run is checked for each, or why it cannot be.",
        _rows(of_kind["assumption"]),
        "## Equations outside of these",
        "Labelled equations that are in no theorem; those inside one are named in its row.",
        _rows(of_kind["equation"]),
        "## Errata, and where the code differs",
        "What in the paper does not hold as it is written, or holds in continuous time only, and what the code does.",
        _rows(of_kind["erratum"]),
        "## Symbols",
        _symbols(table.symbols),
    ]
    return "\n\n".join(parts) + "\n"


def _introduction(table: Table) -> str:
    inside = [e for e in table.entries if e.kind in NUMBERED]
    counts = {s: sum(e.status == s for e in inside) for s in STATUSES}
    return (
        "Every theorem, proposition, corollary, lemma, definition, remark, algorithm, figure and table of the paper, "
        "with the function that computes it and the test that checks it. Names are inside `poprisk`, or in the lab, "
        "`poprisk_lab`; tests are inside `tests/` or `lab/tests/`. The page is written by `python "
        "tools/paper_table.py` from `docs/paper_to_code.toml`, and a test "
        "holds that all names exist and nothing is missing.\n\n"
        f"Of {len(inside)} such places, {counts[WHOLE]} are computed and checked, {counts[PART]} in part (the note "
        f"says which), and {counts[STATEMENT]} are statements only (the note says why). Checked means: a test would "
        "fail if the statement did. It does not mean proved, and a limit, an expectation or a “for every” is checked "
        "on the cases that the test tries. Operators are those of the steps that a run took; where the paper's "
        "statement is about gradient flow, the flow is checked beside them.\n\n" + _surveyed()
    )


def _surveyed() -> str:
    counts = json.loads(SURVEY.read_text(encoding="utf-8"))["counts"]
    whole, rows = counts["whole"], counts["rows"]
    return (
        "The citations are tested, too: each cited function is broken on purpose (its results are scaled by 1.1, or "
        "negated or set to zero where a factor changes nothing), and a cited test of the same row must fail. This was "
        f"done to the end for {f'{whole} of the' if whole < rows else 'all'} {rows} rows that cite code, with "
        f"{counts['functions']} functions and {counts['tests']} tests: {counts['unnoticed']} functions were noticed by "
        f"no cited test of their row, and {counts['idle_tests']} cited tests noticed nothing "
        "(`python -m poprisk_lab.mutation.survey`)."
    )


def _by_section(entries: list[Entry]) -> Iterator[str]:
    for where in dict.fromkeys(e.where for e in entries):
        yield f"### {where}"
        yield _rows([e for e in entries if e.where == where])


def _rows(entries: list[Entry]) -> str:
    lines = ["| in the paper | computed by | checked by | note |", "|---|---|---|---|"]
    for entry in entries:
        cells = (_heading(entry), _codes(entry.functions, "poprisk."), _codes(entry.tests, "tests/"), _remark(entry))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _heading(entry: Entry) -> str:
    title = _prose(entry.title)
    name = f"**{entry.number}** {title}" if entry.number else f"**{title}**"
    labels = [entry.label, *entry.inside] if _is_the_papers(entry) else entry.inside
    where = f"<br>{entry.where}" if entry.kind in ("figure", "table", "equation", "erratum") and entry.where else ""
    return name + where + "".join(f"<br>`{label}`" for label in labels)


def _is_the_papers(entry: Entry) -> bool:
    """Whether its label is one that the paper gives, and not made of its title."""
    return entry.label.partition(":")[0] in ("thm", "prop", "cor", "lem", "def", "rem", "alg", "fig", "tab", "eq")


def _remark(entry: Entry) -> str:
    said = {WHOLE: "", PART: "*In part.* ", STATEMENT: "*Statement only.* "}[entry.status]
    return (said + _prose(entry.note)).strip()


def _prose(text: str) -> str:
    r"""Text for a page: a star is a star and begins no emphasis.

    >>> _prose("M* is not f*(Q)")
    'M\\* is not f\\*(Q)'
    """
    return text.replace("*", "\\*")


def _codes(names: tuple[str, ...], prefix: str) -> str:
    return "<br>".join(f"`{name.removeprefix(prefix)}`" for name in names) or "–"


def _symbols(symbols: tuple[Symbol, ...]) -> str:
    lines = ["| symbol | meaning | in the code |", "|---|---|---|"]
    lines += [f"| {_prose(s.symbol)} | {s.meaning} | {_codes(s.functions, 'poprisk.')} |" for s in symbols]
    return "\n".join(lines)


# --- what a copy of the paper has


@dataclass
class _Counters:
    """The paper's numbering: theorems by section, everything else through."""

    appendix: bool = False
    depth: list[int] = field(default_factory=lambda: [0, 0, 0])
    title: str = ""
    theorems: int = 0
    others: dict[str, int] = field(default_factory=dict)

    def section(self, level: int, title: str) -> None:
        self.depth[level] += 1
        self.depth[level + 1 :] = [0] * (2 - level)
        self.title = title
        if level == 0:
            self.theorems = 0

    @property
    def first(self) -> str:
        return chr(ord("A") + self.depth[0] - 1) if self.appendix else str(self.depth[0])

    @property
    def where(self) -> str:
        return ".".join([self.first, *(str(n) for n in self.depth[1:] if n)]) + " " + self.title

    def number(self, kind: str) -> str:
        if kind in _COUNTED_WITH_THEOREMS:
            self.theorems += 1
            return f"{kind.capitalize()} {self.first}.{self.theorems}"
        self.others[kind] = self.others.get(kind, 0) + 1
        return f"{kind.capitalize()} {self.others[kind]}"


def statements(tex: str) -> list[Entry]:
    r"""Everything of the paper that needs an entry, in its order, with status "whole" and nothing else filled in.

    >>> found = statements(r"\section{On Sums}\begin{lemma}[Order]\label{lem:a}\begin{align}\label{eq:b}\end{align}"
    ...                    r"\end{lemma}\begin{remark}[No label] x\end{remark}\begin{align}\label{eq:c}\end{align}")
    >>> [(e.number, e.label, e.title, e.inside, e.where) for e in found][0]
    ('Lemma 1.1', 'lem:a', 'Order', ('eq:b',), '1 On Sums')
    >>> [(e.kind, e.number, e.label) for e in found][1:]
    [('remark', 'Remark 1.2', 'remark:no-label'), ('equation', '', 'eq:c')]
    """
    tex = re.sub(r"(?<!\\)%.*", "", tex)
    names = "|".join(_ENVIRONMENTS)
    marks = re.compile(
        rf"\\(?P<level>(?:sub){{0,2}})section\{{|\\(?P<appendix>appendix)\b|\\begin\{{(?P<name>{names})\*?\}}"
        r"|\\label\{(?P<label>(?:thm|def|eq):[^}]*)\}"
    )
    counters, found, end = _Counters(), [], 0
    for mark in marks.finditer(tex):
        if mark.start() < end:
            continue
        if mark["appendix"]:
            counters.appendix, counters.depth = True, [0, 0, 0]
        elif mark["name"]:
            end = tex.index(f"\\end{{{mark['name']}", mark.end())
            found.append(_environment(mark["name"], tex[mark.end() : end], counters))
        elif mark["label"]:
            found.append(_outside(mark["label"], counters))
        else:
            counters.section(len(mark["level"]) // 3, _plain(_braced(tex, mark.end())))
    return found + _assumptions(tex)


def _environment(name: str, body: str, counters: _Counters) -> Entry:
    kind = _WORD.get(name, name)
    labels = re.findall(r"\\label\{([^}]*)\}", body)
    own = [label for label in labels if not label.startswith("eq:")]
    title = _title(kind, body)
    label = own[-1] if own else f"{kind}:{re.sub('[^a-z]+', '-', title.lower()).strip('-')}"
    inside = tuple(each for each in labels if each != label)
    return Entry(kind, label, title, WHOLE, counters.number(kind), counters.where, inside=inside)


def _title(kind: str, body: str) -> str:
    if kind in ("figure", "table", "algorithm"):
        caption = _braced(body, body.index("\\caption{") + len("\\caption{"))
        bold = re.match(r"\\textbf\{", caption)
        return _plain(_braced(caption, bold.end()) if bold else re.split(r"\.\s|, \$", caption)[0]).rstrip(".")
    given = re.match(r"\s*\[", body)
    return _plain(body[given.end() : body.index("]", given.end())]) if given else ""


def _outside(label: str, counters: _Counters) -> Entry:
    """An equation in running text, or a theorem that is a label there and has no number."""
    return Entry("unnumbered" if label.startswith("thm:") else "equation", label, "", WHOLE, "", counters.where)


def _assumptions(tex: str) -> list[Entry]:
    if "\\label{tab:assumptions}" not in tex:
        return []
    body = tex[tex.index("\\label{tab:assumptions}") :]
    rows = body[body.index("\\midrule") + 8 : body.index("\\bottomrule")].split("\\\\\n")
    filled = [row for row in rows if "&" in row]
    return [Entry("assumption", f"assumption-{k}", "", WHOLE) for k in range(1, len(filled) + 1)]


def _braced(text: str, start: int) -> str:
    """What is inside a brace that was opened just before ``start``."""
    depth, at = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return text[start : at - 1]


def _plain(tex: str) -> str:
    r"""A title without its commands: enough for the titles of this paper.

    >>> _plain(r"Content vs.\ channel~split (\autoref{rem:a}), $R$--form")
    'Content vs. channel split, R-form'
    """
    tex = re.sub(r"\s*\(\\autoref\{[^}]*\}\)|\\label\{[^}]*\}", "", tex)
    tex = re.sub(r"Section~\\ref\{[^}]*\}", "the main text", tex)
    tex = tex.replace("\\ ", " ").replace("~", " ").replace("$", "").replace("--", "-")
    return " ".join(tex.split())


def names_of(entries: Iterable[Entry]) -> list[str]:
    """The lines of the frozen list that these make."""
    return [line for e in entries for line in (f"{e.kind} {e.label}", *(f"inside {label}" for label in e.inside))]


def differences(tex: str, table: Table) -> list[str]:
    """Where the data and a copy of the paper disagree, a line each."""
    found, entries = statements(tex), {e.label: e for e in table.entries}
    there, frozen = (
        set(names_of(found)),
        {line for line in table.frozen if not line.startswith("unnumbered unnumbered:")},
    )
    lines = [f"the paper has {line}, the frozen list does not" for line in sorted(there - frozen)]
    lines += [f"the frozen list has {line}, the paper does not" for line in sorted(frozen - there)]
    for each in found:
        for name in ("number", "title", "where", "inside"):
            theirs, ours = getattr(each, name), getattr(entries.get(each.label), name, "nothing")
            if theirs and theirs != ours:
                lines.append(f"{each.label}: {name} is {theirs!r}, the data say {ours!r}")
    return lines


def main() -> None:
    arguments = argparse.ArgumentParser(description="Write the table from the paper to the code.")
    arguments.add_argument("--check", action="store_true", help="change nothing; exit 1 if page and data differ")
    arguments.add_argument("--paper", type=Path, help="compare the data with a copy of the paper instead")
    options = arguments.parse_args()
    table = load()
    problems = [fault for entry in table.entries for fault in entry.faults]
    if options.paper:
        problems += differences(options.paper.read_text(encoding="utf-8"), table)
    elif options.check and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page(table)):
        problems.append(f"{PAGE.relative_to(ROOT)} is not what the data give: run python tools/paper_table.py")
    if problems:
        sys.exit("\n".join(problems))
    if not options.check and not options.paper:
        write_text(PAGE, page(table))
        print(f"Wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
