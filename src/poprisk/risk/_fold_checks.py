r"""Whether models trained without a part of the examples stand for the model of the run.

Fold models scatter about the run's model. If each were this model plus a small change of its own, two of them would be
:math:`\sqrt 2` times as far apart as each is from it; if training were chaotic, all distances would be alike. Where the
run's model is further from them than they are from each other, or its outputs are much larger or smaller, the missing
examples made another model, as at the interpolation peak. Training inputs do not show this, because all models fit
them: the models are compared on inputs whose features are drawn from the training examples one by one.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from poprisk._core.autodiff import Inputs, parts_of
from poprisk._core.seeds import generator_for
from poprisk.risk._duplicates import duplicate_groups

_PROBES, _NUMBERS = 256, 2**22
"""Largest number of such inputs, and of numbers in them."""
_SAME = 1e-3
"""Distance between models, relative to the spread of the outputs, up to which they are the same model."""
MOST_MEMBERS = 10
"""Models that are compared."""


@dataclass(frozen=True)
class FoldChecks:
    """What speaks against held-out losses as the risk of the run's model; numbers are NaN if not known."""

    distance: float = math.nan
    """Median distance of the run's model from the others, relative to that between two of the others."""
    size: float = math.nan
    """Standard deviation of its outputs, relative to the median of the others."""
    kept_loss: float = math.nan
    """Mean loss of the models on examples that they were trained on."""
    own_loss: float = math.nan
    """Mean loss of the run's model on the same examples."""
    twins: float = 0.0
    """Share of held-out examples whose inputs were also among those trained on."""

    @property
    def lag(self) -> float:
        """How much worse the models fit their own examples than the run does, at the end of equal trainings: a bias."""
        return max(self.kept_loss - self.own_loss, 0.0) if math.isfinite(self.kept_loss - self.own_loss) else 0.0


def probe_inputs(inputs: Inputs, seed: int = 0) -> Inputs:
    """Inputs off the training examples: each feature is that of a training example drawn for it alone.

    >>> probe_inputs(torch.tensor([[1.0, 10.0], [2.0, 20.0]])).shape
    torch.Size([8, 2])
    """
    generator = generator_for(seed, "probe inputs")

    def mixed(x: Tensor) -> Tensor:
        flat = x.reshape(len(x), -1)
        rows = max(8, min(_PROBES, len(x), _NUMBERS // max(1, flat.shape[1])))
        index = torch.randint(len(x), (rows, flat.shape[1]), generator=generator).to(x.device)
        return flat.gather(0, index).reshape(rows, *x.shape[1:])

    found = tuple(mixed(x) for x in parts_of(inputs))
    shortest = min(len(x) for x in found)
    return tuple(x[:shortest] for x in found) if isinstance(inputs, tuple) else found[0]


def compared(own: Float[Tensor, "probes *out"], others: Float[Tensor, "members probes *out"]) -> tuple[float, float]:
    """``distance`` and ``size`` of :class:`FoldChecks`.

    >>> others = torch.eye(4).unsqueeze(2)
    >>> [round(x, 3) for x in compared(others.mean(0), others)]  # in the middle of models that differ
    [0.612, 0.0]
    """
    f, each = own.double().flatten(), others.double().flatten(1)
    if len(each) < 2 or not bool(f.isfinite().all()) or not bool(each.isfinite().all()):
        return math.nan, math.nan
    apart, away = torch.pdist(each).median().item(), (each - f).norm(dim=1).median().item()
    spread, usual = f.std().item(), each.std(1).median().item()
    if away <= _SAME * math.sqrt(len(f)) * max(spread, usual):
        return math.nan, 1.0
    return away / apart if apart > 0 else math.inf, spread / usual if usual > 0 else math.inf


def twin_share(
    inputs: Inputs, example: Int[Tensor, "evaluations"], left_out: Bool[Tensor, "members n"], member: Tensor
) -> float:
    """Share of held-out evaluations for which an example with equal inputs was trained on."""
    groups = duplicate_groups(inputs)
    sizes = torch.bincount(groups)
    if int(sizes.max()) == 1 or not len(example):
        return 0.0
    out = torch.zeros(len(left_out), len(sizes), dtype=torch.long)
    out.scatter_add_(1, groups.expand_as(left_out), left_out.long())
    return float((out[member, groups[example]] < sizes[groups[example]]).double().mean())
