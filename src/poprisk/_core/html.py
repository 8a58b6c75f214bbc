"""Small pieces of HTML for notebooks: escaped text, colours inherited from the page, nothing fetched from anywhere.

A notebook shows what ``_repr_html_`` returns. Light or dark is the notebook's choice: nothing here has a colour or a
background of its own, lines and shading are the text's colour made faint.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

_FAINT = "color-mix(in srgb, currentColor 22%, transparent)"
_BLOCK = "display:inline-block;max-width:100%;overflow-x:auto;font-size:0.92em;line-height:1.45;color:inherit"
_TABLE = "border-collapse:collapse;margin:0.35em 0;background:transparent;color:inherit"
_CELL = "padding:0.1em 0.9em 0.1em 0;background:transparent;color:inherit;border:0;vertical-align:top"
_LINE = f"border-bottom:1px solid currentColor;border-color:{_FAINT}"
_WIDTH, _HEIGHT, _MOST_POINTS = 220, 44, 200


def card(title: str, rows: Mapping[str, object], *, picture: str = "", notes: Iterable[str] = ()) -> str:
    """A title, lines of name and value, a picture made by this module, and notes.

    >>> print(card("Run", {"steps": 3, "where": "<memory>", "note": None}).count("<tr"))
    2
    >>> "&lt;memory&gt;" in card("Run", {"where": "<memory>"})
    True
    """
    lines = "".join(
        f'<tr style="background:transparent"><td style="{_CELL};text-align:left;opacity:0.7;white-space:nowrap">'
        f'{escape(name)}</td><td style="{_CELL};text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
        if value not in (None, "")
    )
    body = f'<table style="{_TABLE}"><tbody>{lines}</tbody></table>' if lines else ""
    below = "".join(f'<div style="opacity:0.8;max-width:60em">{escape(note)}</div>' for note in notes)
    return f'<div class="poprisk" style="{_BLOCK}"><strong>{escape(title)}</strong>{body}{picture}{below}</div>'


def table(columns: Mapping[str, str], rows: Iterable[Sequence[object]]) -> str:
    """A table of text; numbers are rounded and stand to the right.

    >>> html = table({"loss": "at the end"}, [[0.123456], [True]])
    >>> "0.123<" in html, "yes<" in html, 'title="at the end"' in html
    (True, True, True)
    """
    head = "".join(
        f'<th style="{_CELL};{_LINE};text-align:right;font-weight:600" title="{escape(words)}">{escape(name)}</th>'
        for name, words in columns.items()
    )
    body = "".join(
        '<tr style="background:transparent">'
        + "".join(f'<td style="{_CELL};text-align:right">{escape(short(value))}</td>' for value in row)
        + "</tr>"
        for row in rows
    )
    top = f'<thead><tr style="background:transparent">{head}</tr></thead>'
    return f'<table style="{_TABLE}">{top}<tbody>{body}</tbody></table>'


def sparkline(values: Sequence[float], label: str) -> str:
    """A line without axes over the finite ones of some values, in the colour of the text; empty for fewer than two.

    >>> sparkline([1.0], "loss")
    ''
    >>> sparkline([1.0, float("nan"), 0.5], "loss").count("<polyline")
    1
    """
    points = [(i, v) for i, v in enumerate(values) if math.isfinite(v)]
    if len(points) < 2:
        return ""
    points = [points[round(i * (len(points) - 1) / (_MOST_POINTS - 1))] for i in range(_MOST_POINTS)]
    points = list(dict.fromkeys(points))
    low, high = min(v for _, v in points), max(v for _, v in points)
    span, last = high - low or 1.0, len(values) - 1
    spots = " ".join(
        f"{2 + (_WIDTH - 4) * i / last:.1f},{2 + (_HEIGHT - 4) * (high - v) / span:.1f}" for i, v in points
    )
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" style="display:block;background:transparent">'
        f"<title>{escape(label)}</title>"
        f'<polyline points="{spots}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )


def bar(share: float, words: str) -> str:
    """How far something is, with words beside it.

    >>> "width:25.0%" in bar(0.25, "step 5 of 20")
    True
    """
    share = min(max(share, 0.0), 1.0)
    return (
        f'<div class="poprisk" style="{_BLOCK};white-space:nowrap" role="progressbar" aria-valuemin="0" '
        f'aria-valuemax="100" aria-valuenow="{100 * share:.0f}"><span style="display:inline-block;width:12em;'
        f"height:0.75em;margin-right:0.8em;border:1px solid currentColor;border-color:{_FAINT};border-radius:3px;"
        f'vertical-align:-0.05em"><span style="display:block;height:100%;width:{100 * share:.1f}%;'
        f'background:currentColor;opacity:0.55"></span></span>{escape(words)}</div>'
    )


def short(value: object) -> str:
    """A value as a few characters: three digits of a number, yes or no.

    >>> short(0.012345), short(7), short(False), short(float("nan"))
    ('0.0123', '7', 'no', 'nan')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
