"""Whether this is a notebook, and durations in words."""

import sys


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: Jupyter, VS Code, Colab and others that speak its protocol.

    IPython in a terminal is not a notebook, and if IPython was never imported there is no kernel.

    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


def time_left(seconds: float) -> str:
    """The time left in words.

    >>> time_left(7.2), time_left(400.0)
    ('about 7 s left', 'about 7 min left')
    """
    return f"about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """A duration in words.

    >>> duration(45), duration(600), duration(36000)
    ('45 s', '10 min', '10 h')
    """
    if seconds >= 6000:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"
