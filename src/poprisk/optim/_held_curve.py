r"""The held-back losses of every moment that was measured: which is best, and what its risk is after choosing."""

import json
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
_CLEAR = 1.01
"""Standard errors of a paired difference from which one measurement is taken to score better than another. A single
example that is got right makes a difference of exactly 1, and does not decide."""


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
    """All measurements of a training, and the choice among them.

    Args:
        plain: Choose the least mean score. By default a measurement replaces the chosen one if its score is lower by
            more than a standard error of the paired difference, or about the same with a lower loss: the accuracy on a
            small block is too coarse to decide alone, and on a large block it chooses better than the loss.
    """

    def __init__(self, plain: bool = False) -> None:
        self.moments: list[Moment] = []
        self.plain = plain
        self._best: Moment | None = None
        self._bending = True

    def add(self, moment: Moment) -> bool:
        """Append a measurement; True if it is chosen over those before it."""
        better = self._best is None or self._beats(moment, self._best)
        self.moments.append(moment)
        if better:
            self._best = moment
        self._bending = self._is_bending()
        return better

    @property
    def best(self) -> Moment | None:
        """The measurement chosen so far, None before the first."""
        return self._best

    def is_bending(self) -> bool:
        """Whether the curve is neither clearly falling nor clearly past its minimum, so that the choice is near."""
        return self._bending

    def _beats(self, new: Moment, old: Moment) -> bool:
        if self.plain or not math.isfinite(_rank(new)[0] + _rank(old)[0]):
            return _rank(new) < _rank(old)
        difference = _paired(new.scores - old.scores)
        return difference < -_CLEAR or (difference <= _CLEAR and _rank(new)[1] < _rank(old)[1])

    def _is_bending(self) -> bool:
        own = [each for each in self.moments if each.tail == self.moments[-1].tail]
        if len(own) < 3 or self._best is None:
            return True
        falling = _paired(own[-1].scores - own[-2].scores) < -2
        past = _paired(own[-1].scores - self._best.scores) > 4
        return not (falling or past)

    def chosen_risk(self, seed: int = 0) -> tuple[float, float, float]:
        r"""The risk of the chosen moment, corrected for having chosen it on the same examples, and two errors.

        The least of many noisy numbers is too small. The correction repeats the choice (bootstrap bias correction,
        Tsamardinos, Greasidou and Borboudakis, 2018): resample the held-back examples, choose by the resample, and
        compare that choice with the chosen moment on the examples that the resample left out.

        Returns:
            Corrected risk, its standard error, and the uncorrected risk of the chosen moment.
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
        chosen = self._chosen_by(weights, losses, scores)
        left_out = (weights == 0).double()
        size = left_out.sum(1).clamp(min=1)
        excess = (left_out * (losses[chosen] - best.losses.double())).sum(1) / size
        value = plain + float(excess.mean())
        # The resampled minimum moves with the examples and with the choice.
        spread = float(best.losses.double().std()) / math.sqrt(count)
        moved = float(((weights @ losses.T) / count).gather(1, chosen.unsqueeze(1)).std())
        return value, max(spread, moved), plain

    def _chosen_by(self, weights: Tensor, losses: Tensor, scores: Tensor) -> Tensor:
        """The moment that each resample of the examples chooses, by the rule of :meth:`add`."""
        count = losses.shape[1]
        mean_losses, mean_scores = weights @ losses.T / count, weights @ scores.T / count
        if self.plain:
            return (mean_scores + 1e-9 * mean_losses).argmin(1)
        rows, chosen = torch.arange(len(weights)), torch.zeros(len(weights), dtype=torch.long)
        for new in range(1, len(losses)):
            difference = mean_scores[:, new] - mean_scores[rows, chosen]
            squares = (weights * (scores[new] - scores[chosen]).square()).sum(1) / count
            clear = _CLEAR * ((squares - difference.square()).clamp(min=0) / max(count - 1, 1)).sqrt()
            lower = mean_losses[:, new] < mean_losses[rows, chosen]
            chosen = torch.where((difference < -clear) | ((difference <= clear) & lower), new, chosen)
        return chosen

    def state(self) -> dict[str, Any]:
        """Plain numbers and tensors."""
        return {
            "steps": [each.step for each in self.moments],
            "tails": [each.tail for each in self.moments],
            "losses": _stacked([each.losses for each in self.moments]),
            "scores": _stacked([each.scores for each in self.moments]),
        }

    def packed(self) -> str:
        """The state as text: one value whatever its size, as ``torch.distributed.checkpoint`` needs it."""
        state = self.state()
        numbers = {name: state[name].numpy().tobytes().hex() for name in ("losses", "scores")}
        return json.dumps({**state, **numbers})

    def restore(self, text: str) -> None:
        """Go on from :meth:`packed`."""
        state = json.loads(text)
        steps = state["steps"]
        losses, scores = (_unpacked(state[name], len(steps)) for name in ("losses", "scores"))
        self.moments, self._best, self._bending = [], None, True
        for row in zip(steps, state["tails"], losses, scores, strict=True):
            self.add(Moment(*row))


def _rank(moment: Moment) -> tuple[float, float]:
    score, loss = float(moment.scores.double().mean()), float(moment.losses.double().mean())
    return (score if math.isfinite(score) else math.inf, loss if math.isfinite(loss) else math.inf)


def _paired(differences: Tensor) -> float:
    """The mean difference in units of its standard error."""
    x = differences.double()
    mean, error = float(x.mean()), float(x.std()) / math.sqrt(len(x)) if len(x) > 1 else 0.0
    if error > 0:
        return mean / error
    return math.copysign(math.inf, mean) if mean else 0.0


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows)).float() if rows else torch.zeros(0, 0)


def _unpacked(text: str, count: int) -> list[Tensor]:
    data = bytearray.fromhex(text)
    return list(torch.frombuffer(data, dtype=torch.float32).reshape(count, -1)) if count else []
