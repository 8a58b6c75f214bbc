r"""The held-back losses of every moment that was measured: which is best, and what its risk is after choosing."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.seeds import generator_for

Metric = Literal["accuracy", "loss", "probability"]
_COLDEST, _HOTTEST, _HALVINGS = -6.0, 6.0, 24
"""Logarithms of the smallest and the largest factor of logits that are tried, and in how many steps."""
_LATER = 0.25
"""Standard errors of the paired difference by which the loss of a later moment may be above the least one."""
_RESAMPLES = 400
FEWEST_HELD = 10
"""Held-back examples below which their spread says too little."""
_NEAR = 1.01
"""Standard errors of the least error rate within which other moments are compared by their loss. Where no example is
got wrong, the error is that of one mistake, which does not decide."""


@dataclass(frozen=True)
class Moment:
    """One measurement: which weights, when, and what they scored on every held-back example."""

    step: int
    tail: float | None
    """Share of the steps that the averaged weights cover; None for the weights themselves."""
    losses: Float[Tensor, "held"]
    scores: Float[Tensor, "held"]
    """What the choice is made by, smaller is better: errors (0 or 1), 1 - probability of the label, or the losses."""
    calibrated: Float[Tensor, "held"] | None = None
    """The losses at the temperature that suits these weights best, where there are classes (:func:`calibrated`)."""

    @property
    def decided_by(self) -> Float[Tensor, "held"]:
        """The losses that decide between moments of about the same accuracy."""
        losses = (self.losses if self.calibrated is None else self.calibrated).double()
        return losses if bool(losses.isfinite().all()) else torch.full_like(losses, math.inf)

    @property
    def counts_errors(self) -> bool:
        """Whether scores are errors, not losses."""
        errors = bool(((self.scores == 0) | (self.scores == 1)).all())
        return errors and not torch.equal(self.scores, self.losses)


class HeldCurve:
    """All measurements of a training, and the choice among them.

    Args:
        plain: Choose the least mean score. By default, where scores are errors, the choice is among the moments whose
            error rate is within a standard error of the least, because the accuracy on a small block is too coarse to
            decide alone: the moment with the least calibrated loss, or a later one whose loss is about the same. The
            loss itself decides badly, since it rises when a network becomes too sure of itself, whatever its accuracy
            does (Berta, Holzmüller, Jordan and Bach, 2025).
    """

    def __init__(self, plain: bool = False) -> None:
        self.moments: list[Moment] = []
        self.plain = plain
        self.best: Moment | None = None
        """The measurement chosen so far, None before the first."""
        self._leader: Moment | None = None
        self._least = math.inf
        self._bending = True

    def add(self, moment: Moment) -> bool:
        """Append a measurement; True if it is chosen over those before it."""
        self._least = min(self._least, _rank(moment)[0])
        better = self.best is None or self._beats(moment, self.best)
        self.moments.append(moment)
        if better:
            self.best = moment
        self._bending = self._is_bending()
        return better

    def is_bending(self) -> bool:
        """Whether the curve is neither clearly falling nor clearly past its minimum, so that the choice is near."""
        return self._bending

    def _beats(self, new: Moment, old: Moment) -> bool:
        if self.plain or not (new.counts_errors and old.counts_errors):
            return _rank(new) < _rank(old)
        limit = self._least + _NEAR * _error_of_rate(self._least, len(new.scores))
        leader = old if self._leader is None else self._leader
        if _rank(new)[0] > limit:
            return False
        if _rank(leader)[0] > limit or new.decided_by.mean() < leader.decided_by.mean():
            self._leader = new
            return True
        return _rank(old)[0] > limit or _paired(new.decided_by - leader.decided_by) <= _LATER

    def _is_bending(self) -> bool:
        own = [each for each in self.moments if each.tail == self.moments[-1].tail]
        if len(own) < 3 or self.best is None:
            return True
        falling = _paired(own[-1].scores - own[-2].scores) < -2
        past = _paired(own[-1].scores - self.best.scores) > 4
        return not (falling or past)

    def chosen_risk(self) -> tuple[float, float, float]:
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
        if count < FEWEST_HELD:
            return plain, math.nan, plain
        drawn = torch.randint(count, (_RESAMPLES, count), generator=generator_for(0, "resamples"))
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
        if self.plain or not all(each.counts_errors for each in self.moments):
            return (mean_scores + 1e-9 * mean_losses).argmin(1)
        decided = torch.stack([each.decided_by for each in self.moments])
        means = weights @ decided.T / count
        limits = mean_scores.cummin(1).values
        limits = limits + _NEAR * (limits * (1 - limits)).clamp(min=(1 - 1 / count) / count).div(count).sqrt()
        rows, chosen = torch.arange(len(weights)), torch.zeros(len(weights), dtype=torch.long)
        leader = chosen
        for new in range(1, len(losses)):
            near, limit = mean_scores[:, new] <= limits[:, new], limits[:, new]
            gap = means[:, new] - means[rows, leader]
            leads = near & ((mean_scores[rows, leader] > limit) | (gap < 0))
            squares = (weights * (decided[new] - decided[leader]).square()).sum(1) / count
            error = ((squares - gap.square()).clamp(min=0) / max(count - 1, 1)).sqrt()
            keeps = near & ((mean_scores[rows, chosen] > limit) | (gap <= _LATER * error))
            leader, chosen = torch.where(leads, new, leader), torch.where(leads | keeps, new, chosen)
        return chosen

    def state(self) -> dict[str, Any]:
        """Plain numbers and tensors."""
        return {
            "steps": [each.step for each in self.moments],
            "tails": [each.tail for each in self.moments],
            "losses": _stacked([each.losses for each in self.moments]),
            "scores": _stacked([each.scores for each in self.moments]),
            "calibrated": _stacked([each.calibrated for each in self.moments if each.calibrated is not None]),
        }

    def packed(self) -> str:
        """The state as text: one value whatever its size, as ``torch.distributed.checkpoint`` needs it."""
        state = self.state()
        numbers = {name: state[name].numpy().tobytes().hex() for name in ("losses", "scores", "calibrated")}
        return json.dumps({**state, **numbers})

    def restore(self, text: str) -> None:
        """Go on from :meth:`packed`."""
        state = json.loads(text)
        steps = state["steps"]
        losses, scores = (_unpacked(state[name], len(steps)) for name in ("losses", "scores"))
        calibrated = _unpacked(state["calibrated"], len(steps)) if state.get("calibrated") else [None] * len(steps)
        self.moments, self.best, self._leader, self._least, self._bending = [], None, None, math.inf, True
        for row in zip(steps, state["tails"], losses, scores, calibrated, strict=True):
            self.add(Moment(*row))


def held_error(value: float, error: float, unseen: float, count: int) -> float:
    r"""A standard error that holds for few losses with a long tail, so that two (or 2.5) of them cover the risk.

    The mean of few losses and their spread are small together, when the block happens to miss the tail. The error
    contains what one unseen bad example would add and Student's factor for the number of losses, and is as wide as the
    upper side of an interval for the logarithm of the risk,
    :math:`\frac{v}{2.5}(e^{2.5 c} - 1)` with the relative error c.

    ``error`` is the plain standard error of the mean loss, ``unseen`` what one more bad example would add to it.
    """
    free = max(count - 1, 1)
    wide = math.hypot(error, unseen) * (1 + 1.25 / free + 1.53 / free**2)
    if not (value > 0 and math.isfinite(wide)):
        return wide
    return value * math.expm1(min(2.5 * wide / value, 50.0)) / 2.5


def _rank(moment: Moment) -> tuple[float, float]:
    score, loss = float(moment.scores.double().mean()), float(moment.losses.double().mean())
    return (score if math.isfinite(score) else math.inf, loss if math.isfinite(loss) else math.inf)


def _error_of_rate(rate: float, count: int) -> float:
    """The standard error of a rate of errors; of a single error where there are none."""
    return math.sqrt(max(rate * (1 - rate), (1 - 1 / count) / count) / count)


def calibrated(logits: Float[Tensor, "held classes"], targets: Int[Tensor, "held"]) -> Float[Tensor, "held"]:
    r"""Cross-entropy of each example with all logits multiplied by the one factor that makes its mean least.

    What is left is what the network cannot tell apart; how sure it is of itself no longer counts. Examples whose target
    is no class count as 0.

    >>> logits = torch.tensor([[9.0, 0.0], [9.0, 0.0], [9.0, 0.0], [9.0, 0.0]])
    >>> calibrated(logits, torch.tensor([0, 0, 0, 1])).mean()  # right in three of four cases: the entropy of 1/4
    tensor(0.5623)
    """
    known = (targets >= 0) & (targets < logits.shape[1])
    z, y = logits.double(), targets.where(known, 0)
    z = z - z.amax(1, keepdim=True)
    own, counted = z.gather(1, y.unsqueeze(1)).squeeze(1), known.double()

    def losses(log_factor: Tensor) -> Tensor:
        factor = log_factor.exp()
        return ((z * factor).logsumexp(1) - own * factor) * counted

    low, high = z.new_tensor(_COLDEST), z.new_tensor(_HOTTEST)
    for _ in range(_HALVINGS):  # the mean is convex in the factor, so that its slope changes its sign once
        middle = (low + high) / 2
        factor = middle.exp()
        slope = (((z * factor).softmax(1) * z).sum(1) - own) @ counted
        low, high = (low, middle) if slope > 0 else (middle, high)
    return losses((low + high) / 2).to(logits.dtype if logits.dtype == torch.float64 else torch.float32)


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
