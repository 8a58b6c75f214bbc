"""Numbers and advice in words, the same on every page and in every command."""

import math
import re

from poprisk.risk import Estimate


def as_command(advice: str) -> str:
    """Advice that names options of Python functions, in terms of the command line.

    >>> as_command("Use population_risk(run, retrain_budget=10), which allows 10-fold cross-validation.")
    'Use --retrain 10, which allows 10-fold cross-validation'
    >>> as_command('use tier="exact"')
    'use --tier exact'
    """
    advice = advice.removesuffix(' For the weights at the last step: population_risk(run, weights="last").')
    shorter = re.sub(r"population_risk\(run, retrain_budget=(\d+)\)", r"--retrain \1", advice)
    shorter = re.sub(r"audit\(run, retrain_budget=(\d+)\)", r"--retrain \1", shorter)
    return shorter.replace('tier="exact"', "--tier exact").removesuffix(".")


def size_of(risk: Estimate) -> str:
    """Value and standard error, rounded to what is known, as everywhere."""
    return str(risk).partition(" (")[0]


def percent(share: float) -> str:
    """A share in percent, with one decimal if it is small; a multiple beyond 200%, where percents mislead.

    >>> percent(0.1234), percent(0.0123), percent(1.5), percent(86.81)
    ('12%', '1.2%', '150%', '87 times')
    """
    if abs(share) > 2:
        return f"{share:.2g} times" if abs(share) < 100 else f"{share:.0f} times"
    return f"{100 * share:.0f}%" if abs(share) >= 0.1 else f"{100 * share:.1f}%"


def share_words(share: float, error: float) -> str:
    """A share with its standard error, if that is known and not below half a percent.

    >>> share_words(0.98, 0.23), share_words(0.5, math.nan), share_words(-0.001, 0.05), share_words(0.15, 0.002)
    ('98 ± 23%', '50%', '0 ± 5%', '15%')
    """
    size = round(100 * share)
    return f"{size} ± {100 * error:.0f}%" if error >= 0.005 and math.isfinite(error) else f"{size}%"
