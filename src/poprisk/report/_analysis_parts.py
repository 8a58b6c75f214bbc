"""What some parts of a run's analysis are made of: plain values, which can be kept."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LossCurves:
    """Losses of the network as it was before some steps, over all examples."""

    steps: list[int]
    train: list[float]
    test: list[float] | None
    """On ``problem.test``."""
    test_accuracy: list[float] | None
    test_error: float | None
    """Standard error of the last test loss."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Memorization:
    r"""The share of the drop of training loss that new data do not see.

    .. math:: \frac{R(w_T) - \hat L_S(w_T)}{\hat L_S(w_0) - \hat L_S(w_T)}

    The first weights have seen no example, so that all of the drop would be seen if nothing were memorized.
    """

    share: float
    standard_error: float
    source: str
    """Where the risk R is from: "estimated population risk", or "test set", as far as that is drawn alike."""


@dataclass(frozen=True)
class KernelCurve:
    """How far the tangent kernel of some training examples had moved, relative to its first norm."""

    steps: list[int]
    drift: list[float]
    examples: int


@dataclass(frozen=True)
class Neighbours:
    """Training examples that did most to one example's loss, and the change predicted for their removal."""

    supports: list[tuple[int, float]]
    """Without these its loss would be higher."""
    opposes: list[tuple[int, float]]
    """Without these its loss would be lower."""
