"""Numbers and lines of generated pages: how a mean, a small number, a list and a paragraph are written."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WIDTH = 120


def wrapped(text: str, indent: str = "") -> str:
    """Lines of at most 120 characters, as in the pages written by hand."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def bullets(texts: Iterable[str]) -> str:
    """A list, one item each.

    >>> print(bullets(["one", "two"]))
    - one
    - two
    """
    return "\n".join(wrapped(f"- {text}", indent="  ") for text in texts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table, its first columns words and the others numbers.

    Args:
        head: Names of the columns.
        rows: The cells.
        words: How many columns are words.

    >>> print(table(["", "a"], [["x", "1"]]))
    |  | a |
    | --- | --: |
    | x | 1 |
    """
    lines = [head, ["---"] * words + ["--:"] * (len(head) - words), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(mean: Mapping[str, Any], digits: int) -> str:
    """A saved mean with its standard error, where it has one.

    >>> spread({"value": 0.5, "standard_error": 0.01}, 2)
    '0.50 ± 0.01'
    """
    value, error = f"{mean['value']:.{digits}f}", mean["standard_error"]
    return value if error is None else f"{value} ± {error:.{digits}f}"


def short(value: float) -> str:
    """Two digits, or one and an exponent where it is small or large.

    >>> short(0.123), short(0.00012), short(41234.0)
    ('0.12', '1e-4', '4e4')
    """
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def power(value: float) -> str:
    r"""For a figure: a number as a power of ten.

    >>> power(20000.0)
    '$2\\times 10^{4}$'
    """
    mantissa, exponent = f"{value:.0e}".split("e")
    return rf"${mantissa}\times 10^{{{int(exponent)}}}$"


def seeds_words(count: int) -> str:
    """What the numbers are means of.

    >>> seeds_words(1), seeds_words(3)
    ('one seed', '3 seeds, mean ± standard error')
    """
    return "one seed" if count == 1 else f"{count} seeds, mean ± standard error"


def one_or_range(values: Iterable[int]) -> str:
    """A count that may differ between seeds.

    >>> one_or_range([3, 3]), one_or_range([3, 5, 4])
    ('3', '3 to 5')
    """
    low, high = min(found := list(values)), max(found)
    return str(low) if low == high else f"{low} to {high}"


def processor_minutes(runs: Iterable[Mapping[str, Any]]) -> str:
    """What all runs took together.

    >>> processor_minutes([{"processor_seconds": 60}, {"processor_seconds": 30}])
    '1.5'
    """
    return f"{sum(run['processor_seconds'] for run in runs) / 60:.1f}"


def scaled(mean: Mapping[str, Any] | None, scale: float = 1.0, digits: int = 1) -> str:
    """A saved mean with its standard error, in other units; a dash where there is none.

    >>> scaled({"value": 0.5, "standard_error": 0.01}, 100), scaled(None)
    ('50.0 ± 1.0', '–')
    """
    if mean is None:
        return "–"
    error = mean["standard_error"]
    value = f"{scale * mean['value']:.{digits}f}"
    return value if error is None else f"{value} ± {scale * error:.{digits}f}"


def power_of_ten(value: float) -> str:
    """A learning rate with one digit and an exponent.

    >>> power_of_ten(0.06), power_of_ten(1e-4)
    ('6e-2', '1e-4')
    """
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
