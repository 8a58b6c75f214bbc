"""Which of several runs is best, as rules: measured values with their errors in, sentences out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from poprisk.report._drawing.svg_chart import number
from poprisk.report._drawing.wording import size_of
from poprisk.risk import Estimate

CLEAR = 2.0
"""Standard errors by which the best run must be ahead of the next."""


@dataclass(frozen=True)
class Entry:
    """What the rules look at in one run; what is not known is None."""

    name: str
    risk: Estimate | None = None
    """Population risk of the weights to use."""
    test_loss: Estimate | None = None
    """Test loss of the same weights."""
    accuracy: float | None = None
    """Test accuracy of the same weights."""


def verdict(runs: Sequence[Entry], *, same_data: bool, same_test: bool) -> list[str]:
    """Which run is best, in a sentence or more.

    Args:
        runs: The runs.
        same_data: Whether they were trained on the same examples and labels, so that their risks are of the same data.
        same_test: Whether they have the same test set.

    >>> runs = [Entry("a", Estimate(1.0, 0.1)), Entry("b", Estimate(2.0, 0.1))]
    >>> verdict(runs, same_data=True, same_test=False)
    ['a is best on new data: its expected loss is 1.00 ± 0.10, that of b 2.00 ± 0.10.']
    """
    risks = [(run.name, run.risk) for run in runs if run.risk is not None and run.risk.valid]
    tested = [(run.name, run.test_loss) for run in runs if run.test_loss is not None]
    lines = []
    if same_data and len(risks) == len(runs):
        lines.append(_best(risks, "on new data", "expected loss"))
    elif not same_data:
        lines.append(
            "The runs were trained on different examples or labels: their population risks are about different data, "
            "and do not rank them."
        )
    else:
        unknown = ", ".join(run.name for run in runs if run.risk is None or not run.risk.valid)
        lines.append(f"The runs cannot be ranked by their loss on new data, which is not known for {unknown}.")
    if same_test and len(tested) == len(runs):
        lines.append(_best(tested, "on the test set", "test loss"))
        right = [(run.accuracy, run.name) for run in runs if run.accuracy is not None]
        if len(right) == len(runs):
            shown = ", ".join(f"{name} {100 * accuracy:.1f}%" for accuracy, name in sorted(right, reverse=True))
            lines.append(f"Test accuracy: {shown}.")
    elif tested and not same_test:
        lines.append("The runs have different test sets, which do not rank them either.")
    return lines


def _best(found: Sequence[tuple[str, Estimate]], where: str, what: str) -> str:
    (first, low), (second, high), *_ = sorted(found, key=lambda each: float(each[1].value))
    errors = [float(each.standard_error) for each in (low, high)]
    ahead = float(high.value) - float(low.value)
    sizes = [_size(each) for each in (low, high)]
    if ahead > CLEAR * math.hypot(*errors):
        return f"{first} is best {where}: its {what} is {sizes[0]}, that of {second} {sizes[1]}."
    return (
        f"No run is clearly best {where}: {first} has the lowest {what}, {sizes[0]}, but that of {second}, {sizes[1]}, "
        "is within two standard errors."
    )


def _size(risk: Estimate) -> str:
    return size_of(risk) if float(risk.standard_error) > 0 else number(float(risk.value))
