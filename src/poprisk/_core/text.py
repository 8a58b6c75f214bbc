"""Text that may come from a file, from a person's task or from torch, made fit to be shown."""


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


def first_line(error: BaseException) -> str:
    """The first line of an error, or the reason in plain words where torch.func asks to report a model to PyTorch."""
    if "a Tensor in some data-dependent control flow" in str(error):
        return "the model decides by its values in Python (data-dependent control flow), which torch.func cannot follow"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
