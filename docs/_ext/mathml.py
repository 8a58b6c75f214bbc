"""Formulas as MathML, made at build time: no script, no fonts and no network are needed to read them."""

import re
import unicodedata
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
_UNKNOWN = re.compile(r"<m[a-z]+>(\\[A-Za-z]+|&)</m[a-z]+>")
_STYLES = {"script": "SCRIPT", "double-struck": "DOUBLE-STRUCK", "sans-serif": "SANS-SERIF", "fraktur": "FRAKTUR"}
_LETTER = re.compile(rf'<mi mathvariant="({"|".join(_STYLES)})">(.)</mi>')
_SEVERAL_LINES = re.compile(r"\\\\|(?<!\\)&")


def mathml(latex: str, display: bool) -> str:
    r"""MathML of a formula; lines outside of an environment are aligned at their first ``&``, as Sphinx does.

    Raises:
        ValueError: the formula uses something that is not known; it would be shown as text.

    >>> mathml("x", display=False)
    '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"><mrow><mi>x</mi></mrow></math>'
    >>> mathml(r"a &= b \\ &= c", display=True).count("<mtr>")
    2
    >>> mathml(r"\nothing", display=False)
    Traceback (most recent call last):
    ValueError: no MathML for \nothing in '\\nothing'
    """
    if display and _SEVERAL_LINES.search(latex) and "\\begin" not in latex:
        latex = rf"\begin{{split}} {latex} \end{{split}}"
    found = convert(latex, display="block" if display else "inline")
    if unknown := _UNKNOWN.findall(found):
        raise ValueError(f"no MathML for {', '.join(sorted(set(unknown)))} in {latex!r}")
    return _LETTER.sub(lambda match: f"<mi>{_letter(match[2], _STYLES[match[1]])}</mi>", found)


def _letter(plain: str, style: str) -> str:
    """The letter of a style as a character of its own: browsers do not draw ``mathvariant`` any more.

    >>> _letter("E", "DOUBLE-STRUCK"), _letter("R", "SCRIPT"), _letter("1", "SCRIPT")
    ('𝔼', 'ℛ', '1')
    """
    case = "CAPITAL" if plain.isupper() else "SMALL"
    for prefix in (f"MATHEMATICAL {style}", style, "BLACK-LETTER"):  # some letters were there before the others
        try:
            return unicodedata.lookup(f"{prefix} {case} {plain.upper()}")
        except KeyError:
            continue
    return plain


def visit_math(self: Any, node: nodes.math) -> None:
    self.body.append(_rendered(node, display=False))
    raise nodes.SkipNode


def visit_math_block(self: Any, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math-block"))
    # Paragraphs of one directive are formulas of their own.
    parts = [part for part in node.astext().split("\n\n") if part.strip()]
    self.body.extend(_rendered(node, display=True, latex=part) for part in parts)
    self.body.append("</div>")
    raise nodes.SkipNode


def _rendered(node: nodes.Element, display: bool, latex: str | None = None) -> str:
    text = node.astext() if latex is None else latex
    try:
        return mathml(text, display)
    except Exception as error:  # whatever the converter raises, the page shows the source and the build says why
        logger.warning("a formula cannot be shown: %s", error, location=node)
        return f"<code>{nodes.fully_normalize_name(text)}</code>"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
