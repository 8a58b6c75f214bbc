"""Text that may come from a file or from a person's task, made safe for a terminal."""


def printable(text: str) -> str:
    r"""The text without characters that a terminal would obey; line breaks and tabs stay.

    >>> printable("a\x1b[31mb\u202ec\nd")
    'a?[31mb?c\nd'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def one_line(text: str) -> str:
    r"""The same on one line.

    >>> one_line("a\n  b\x07")
    'a b?'
    """
    return " ".join(printable(text).split())
