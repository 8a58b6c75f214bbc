r"""Pages as Markdown templates: the prose is in a ``.jinja`` file beside a study, Python gives it numbers.

A slot that nothing was given for is an error, so that no page is written with a hole in it. Paragraphs and list items
are filled to 120 columns after rendering: a template may break its lines wherever that reads best.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import jinja2

from poprisk_lab.pages.wording import short, spread, table, wrapped

_KEPT = re.compile(r"^(\||#|```|<!--|!\[|\$\$|:::|\s{4,})")
_ITEM = re.compile(r"^(\s*(?:[-*]|\d+\.) )")


def render(package: str, name: str = "page.md.jinja", **slots: Any) -> str:
    """A page from the template of this name in a package, e.g. ``"poprisk_lab.paper.coupling"``.

    Raises:
        jinja2.UndefinedError: the template has a slot that nothing was given for.
    """
    return filled(_templates(package).get_template(name).render(**slots)).strip("\n") + "\n"


def render_blocks(package: str, name: str, slots: Mapping[str, Any]) -> dict[str, str]:
    """Each ``{% block %}`` of a template as one line of text, by its name.

    Raises:
        jinja2.UndefinedError: the template has a slot that nothing was given for.
    """
    template = _templates(package).get_template(name)
    context = template.new_context(dict(slots))
    return {key: " ".join("".join(block(context)).split()) for key, block in template.blocks.items()}


def render_block(package: str, block: str, slots: Mapping[str, Any], name: str = "claim.md.jinja") -> str:
    """One ``{% block %}`` of a template as one line of text.

    Raises:
        KeyError: the template has no such block.
        jinja2.UndefinedError: the block has a slot that nothing was given for.
    """
    template = _templates(package).get_template(name)
    return " ".join("".join(template.blocks[block](template.new_context(dict(slots)))).split())


def render_parts(package: str, name: str, slots: Mapping[str, Any]) -> dict[str, str]:
    """Each ``{% block %}`` of a template as filled Markdown, by its name: the parts of a page between marks.

    Raises:
        jinja2.UndefinedError: the template has a slot that nothing was given for.
    """
    template = _templates(package).get_template(name)
    context = template.new_context(dict(slots))
    return {key: filled("".join(block(context))).strip("\n") for key, block in template.blocks.items()}


def filled(text: str) -> str:
    r"""Paragraphs and list items filled to 120 columns; tables, code, headings and pictures as they are.

    >>> print(filled("one\ntwo\n\n- three\n  four\n\n| a |\n| --- |"))
    one two
    <BLANKLINE>
    - three four
    <BLANKLINE>
    | a |
    | --- |
    """
    kept, gathered, fenced = [], [], False

    def flush() -> None:
        if gathered:
            start = _ITEM.match(gathered[0])
            words = " ".join(line.strip() for line in gathered)
            lead = "" if start is None else start[1][: len(start[1]) - len(start[1].lstrip())]
            kept.append(wrapped(lead + words, indent=" " * len(start[1]) if start else ""))
            gathered.clear()

    for line in text.split("\n"):
        if line.startswith("```"):
            fenced = not fenced
        if fenced or not line.strip() or _KEPT.match(line):
            flush()
            kept.append(line)
            continue
        if _ITEM.match(line):
            flush()
        gathered.append(line)
    flush()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in kept))


@cache
def _templates(package: str) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(package, "."),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Markdown from our own numbers
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"spread": spread, "short": short, "thousands": "{:,.0f}".format}
    environment.globals |= {"table": table}
    return environment
