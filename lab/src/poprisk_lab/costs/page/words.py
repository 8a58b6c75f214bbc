"""How the page on scaling writes numbers: durations, bytes and counts in units a person can read."""

_SPANS = ((1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min"), (3 * 86400.0, 3600.0, "h"))
_DAY, _YEAR = 86400.0, 365.25 * 86400.0
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_COUNTS = ("", " k", " M", " G", " T", " P", " E", " Z")


def duration(seconds: float) -> str:
    """Two digits and a unit.

    >>> duration(0.0123), duration(45.0), duration(5400.0), duration(864000.0), duration(4e9)
    ('12 ms', '45 s', '90 min', '10 days', '130 years')
    """
    if seconds < 1e-3:
        return f"{two_digits(seconds / 1e-6)} µs"
    for below, unit, name in _SPANS:
        if seconds < below:
            return f"{two_digits(seconds / unit)} {name}"
    if seconds < 2 * _YEAR:
        return f"{two_digits(seconds / _DAY)} days"
    return f"{two_digits(seconds / _YEAR)} years"


def byte_count(count: float) -> str:
    """Decimal units.

    >>> byte_count(12e9), byte_count(500.0), byte_count(4e12)
    ('12 GB', '500 B', '4.0 TB')
    """
    value, unit = _scaled(count, _BYTES)
    return f"{two_digits(value)} {unit}"


def count_words(count: float) -> str:
    """With a letter for thousands.

    >>> count_words(1e6), count_words(7e10), count_words(640)
    ('1.0 M', '70 G', '640')
    """
    value, unit = _scaled(count, _COUNTS)
    return f"{two_digits(value)}{unit}"


def power_words(count: float) -> str:
    """A power of ten where it is one.

    >>> power_words(1e6), power_words(250)
    ('10⁶', '250')
    """
    digits = f"{count:.0f}"
    if len(digits) > 3 and digits.rstrip("0") == "1":
        return "10" + str(len(digits) - 1).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{count:,.0f}"


def two_digits(value: float) -> str:
    """Without an exponent, two significant digits at least.

    >>> two_digits(0.0312), two_digits(3.14), two_digits(27.2), two_digits(1234.0)
    ('0.031', '3.1', '27', '1,200')
    """
    if value >= 100:
        step = 10 ** (len(f"{value:.0f}") - 2)
        return f"{round(value / step) * step:,.0f}"
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2g}"


def _scaled(count: float, units: tuple[str, ...]) -> tuple[float, str]:
    place = 0
    while count >= 999.5 and place < len(units) - 1:
        count, place = count / 1000, place + 1
    return count, units[place]
