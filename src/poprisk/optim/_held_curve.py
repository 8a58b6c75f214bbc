r"""The held-back losses of every moment that was measured: which is best, and what its risk is after choosing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

Metric = Literal["accuracy", "loss", "probability"]
_RESAMPLES = 400
_FEWEST = 10
"""Held-back examples below which their spread says too little."""


@dataclass(frozen=True)
class Moment:
    """One measurement: which weights, when, and what they scored on every held-back example."""

    step: int
    tail: float | None
    """Share of the steps that the averaged weights cover; None for the weights themselves."""
    losses: Float[Tensor, "held"]
    scores: Float[Tensor, "held"]
    """What the choice is made by, smaller is better: errors (0 or 1), 1 - probability of the label, or the losses."""


class HeldCurve:
    """All measurements of a training, and the choice among them."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def add(self, moment: Moment) -> bool:
        """Append a measurement; True if it is the best so far. Equal scores are decided by the loss."""
        better = self.best is None or _rank(moment) < _rank(self.best)
        self.moments.append(moment)
        return better

    @property
    def best(self) -> Moment | None:
        """The measurement with the least mean score, None before the first."""
        return min(self.moments, key=_rank) if self.moments else None

    def is_bending(self) -> bool:
        """Whether the curve is neither clearly falling nor clearly past its minimum, so that the choice is near."""
        best = self.best
        if best is None:
            return True
        own = [each for each in self.moments if each.tail == self.moments[-1].tail]
        if len(own) < 3:
            return True
        falling = _paired(own[-1].scores - own[-2].scores) < -2
        past = _paired(own[-1].scores - best.scores) > 4
        return not (falling or past)

    def chosen_risk(self, seed: int = 0) -> tuple[float, float, float]:
        r"""The risk of the chosen moment, corrected for having chosen it on the same examples, and two errors.

        The least of many noisy numbers is too small. The correction repeats the choice (bootstrap bias correction,
        Tsamardinos, Greasidou and Borboudakis, 2018): resample the held-back examples, choose by the resample, and
        score the choice on the examples that the resample left out.

        Returns:
            Corrected risk, its standard error, and the uncorrected minimum.
        """
        best = self.best
        if best is None:
            return math.nan, math.nan, math.nan
        losses = torch.stack([each.losses for each in self.moments]).double()
        scores = torch.stack([each.scores for each in self.moments]).double()
        plain, count = float(best.losses.double().mean()), losses.shape[1]
        if count < _FEWEST:
            return plain, math.nan, plain
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(count, (_RESAMPLES, count), generator=generator)
        weights = torch.zeros(_RESAMPLES, count, dtype=torch.float64)
        weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
        chosen = (weights @ scores.T + 1e-9 * (weights @ losses.T)).argmin(1)
        left_out = (weights == 0).double()
        size = left_out.sum(1).clamp(min=1)
        fresh = (left_out * losses[chosen]).sum(1) / size
        value = float(fresh.mean())
        # The resampled minimum moves with the examples and with the choice.
        spread = float(best.losses.double().std()) / math.sqrt(count)
        moved = float(((weights @ losses.T) / count).gather(1, chosen.unsqueeze(1)).std())
        return value, max(spread, moved), plain

    def state(self) -> dict[str, Any]:
        """Plain numbers and tensors."""
        return {
            "steps": [each.step for each in self.moments],
            "tails": [each.tail for each in self.moments],
            "losses": _stacked([each.losses for each in self.moments]),
            "scores": _stacked([each.scores for each in self.moments]),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`."""
        rows = zip(state["steps"], state["tails"], state["losses"], state["scores"], strict=True)
        self.moments = [Moment(int(step), tail, losses.cpu(), scores.cpu()) for step, tail, losses, scores in rows]


def _rank(moment: Moment) -> tuple[float, float]:
    score, loss = float(moment.scores.double().mean()), float(moment.losses.double().mean())
    return (score if math.isfinite(score) else math.inf, loss if math.isfinite(loss) else math.inf)


def _paired(differences: Tensor) -> float:
    """The mean difference in units of its standard error."""
    x = differences.double()
    error = float(x.std()) / math.sqrt(len(x)) if len(x) > 1 else 0.0
    return float(x.mean()) / error if error > 0 else 0.0


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows)) if rows else torch.zeros(0, 0)
