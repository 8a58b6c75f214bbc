r"""How much the mean gradient of a noise channel owes to the examples it was trained on, by real retraining.

A direction without signal has no population gradient. The training gradient along it is a mean of n terms that would be
independent of the weights, and of size :math:`1/\sqrt n`, if the weights did not know the examples. How much they know
is measured by training again with two examples replaced (Thm. ``minibatch_coherence``, Eq. ``replace_two_stability``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, take_examples
from poprisk._core.estimate import Estimate
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators import Bound
from poprisk_lab.theory.power_law import power_law_exponent

Train = Callable[[Inputs, Tensor], Float[Tensor, "d"]]
"""From training inputs and targets to flat weights."""
Draw = Callable[[int, torch.Generator], tuple[Inputs, Tensor]]
"""Draws a number of fresh examples of the population, independent of all others."""
Projector = Bool[Tensor, "d"] | Float[Tensor, "r d"]
"""Π as a choice of weights, or as orthonormal rows that span its range."""

# Standard errors by which an estimate may exceed what bounds its expectation.
_SIGMAS = 3.0


@dataclass(frozen=True, eq=False)
class NoiseMean:
    """Mean gradient of a channel at one training-set size, and what bounds it."""

    size: int
    """n."""
    noise_mean: Estimate
    r""":math:`\mathbb E \|\Pi \mu_k\|^2`."""
    second_moment: Estimate
    r""":math:`V_k`: the mean of :math:`\|\Pi \nabla \ell\|^2`, on trained or on replaced examples, whichever is
    larger."""
    defect: Estimate
    r""":math:`\varepsilon_{k,n}`."""
    channel_mean: Estimate
    r""":math:`\mathbb E \|\Pi \nabla L_{\mathcal D}(w_k)\|^2`, without bias from fresh examples: the bound's premise is
    that it is 0."""
    bound: Bound
    r""":math:`\mathbb E \|\Pi \mu_k\|^2 \le V_k/n + 2 \sqrt{V_k}\, \varepsilon_{k,n} + \varepsilon_{k,n}^2`, with three
    standard errors of the left side as ``rounding``."""
    bound_with_mean: Bound
    """The same plus the channel mean: true of every channel."""


@dataclass(frozen=True, eq=False)
class NoiseMeanSweep:
    """The same over training-set sizes."""

    cells: tuple[NoiseMean, ...]
    noise_mean_exponent: Estimate
    r"""Exponent of :math:`\mathbb E \|\Pi \mu_k\|^2` in n: -1 on a noise channel, 0 on a signal channel."""
    defect_exponent: Estimate
    r"""Exponent of :math:`\varepsilon_{k,n}` in n: -1 is the stability that the paper assumes."""


def weight_mask(model: FlatModel, chosen: Mapping[str, Any]) -> Bool[Tensor, "d"]:
    """The channel of some weights: a mask over the flat vector.

    Args:
        model: Model with these weights.
        chosen: Parameter names, each with an index into the parameter, ``...`` for all of it.

    Raises:
        DataError: no such parameter, or nothing chosen.

    >>> model = FlatModel(torch.nn.Linear(3, 1), "squared")
    >>> weight_mask(model, {"weight": (slice(None), slice(1, None))})
    tensor([False,  True,  True, False])
    """
    unknown = [name for name in chosen if name not in model.parameters]
    if unknown:
        raise DataError(f"no trainable parameter {unknown[0]!r}: expected some of {', '.join(model.parameters)}")
    pieces = []
    for name, p in model.parameters.items():
        piece = torch.zeros(p.shape, dtype=torch.bool, device=p.device)
        if name in chosen:
            piece[chosen[name]] = True
        pieces.append(piece.reshape(-1))
    mask = torch.cat(pieces)
    if not bool(mask.any()):
        raise DataError(f"a channel needs at least one weight, got none from {dict(chosen)}")
    return mask


def replace_two(
    train: Train,
    draw: Draw,
    model: FlatModel,
    size: int,
    projector: Projector,
    *,
    replicates: int = 20,
    pairs: int = 1,
    fresh: int = 64,
    generator: torch.Generator | None = None,
) -> NoiseMean:
    r"""Both sides of the noise-mean bound, Eq. ``exchange_noise_mean``, by training with and without two examples.

    .. math::
       \varepsilon_{k,n}^2 = \mathbb E \|\Pi \nabla \ell(w_k(S), Z_i) - \Pi \nabla \ell(w_k^{(ij)}, Z_i)\|^2, \qquad
       \mathbb E \|\Pi \mu_k\|^2 \le \frac{V_k}n + 2 \sqrt{V_k}\, \varepsilon_{k,n} + \varepsilon_{k,n}^2

    Each replicate draws a training set S, trains on it, and trains again for every pair with two examples replaced by
    fresh draws. Costs ``replicates * (1 + pairs)`` trainings.

    Args:
        train: Trains on the examples given, from the same initialization and with the same seeds every time: what is
            random in it besides the examples makes the defect larger (the bound still holds).
        draw: Draws fresh examples.
        model: Network and loss as functions of flat weights, those that ``train`` returns.
        size: Training-set size n, at least 2.
        projector: Projector Π.
        replicates: Number of training sets, at least 2 for an error.
        pairs: Number of replaced pairs in each.
        fresh: Fresh examples for the channel mean of each, at least 2.
        generator: Generator for training sets and pairs; by default one with a fixed seed.

    Raises:
        HyperparameterError: numbers out of range.
        DataError: a projector of another size, without orthonormal rows, or weights of another size.

    Differs from the paper: the mean over random pairs in place of the supremum (the proof needs no more, and for a
    training that treats all examples alike the two are one); both second moments that the proof needs, at
    :math:`w_k(S)` and at :math:`w_k^{(ij)}`. The premise that the population gradient along the channel vanishes must
    hold at the *trained* weights. Features independent of the label fulfil it at the start only: under squared loss
    their population gradient is proportional to the weights that they have been given. ``channel_mean`` measures it,
    and ``bound_with_mean`` needs no premise.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False), "squared")
    >>> def draw(count, generator):
    ...     return torch.ones(count, 1), torch.randn(count, 1, generator=generator)
    >>> untrained = replace_two(lambda x, y: torch.zeros(1), draw, model, 8, torch.ones(1, dtype=torch.bool))
    >>> untrained.defect.value, untrained.bound.right == untrained.second_moment.value / 8
    (0.0, True)
    """
    if min(size, replicates, fresh) < 2 or pairs < 1:
        raise HyperparameterError(
            "size, replicates and fresh must be at least 2 and pairs at least 1, got "
            f"{size}, {replicates}, {fresh} and {pairs}"
        )
    project = _projection(projector, model.size)
    generator = generator or torch.Generator().manual_seed(0)
    rows = [_replicate(train, draw, model, size, project, pairs, fresh, generator) for _ in range(replicates)]
    cost = replicates * (1 + pairs)
    columns = torch.tensor(rows, dtype=torch.float64).T
    noise_mean, trained, replaced, squared_defect, channel_mean = (_mean(column, cost) for column in columns)
    V = max((trained, replaced), key=lambda moment: float(moment.value))
    defect = _root(squared_defect)
    v, e, m = float(V.value), float(defect.value), float(channel_mean.value)
    right = v / size + 2 * v**0.5 * e + e**2
    about = ("eq:exchange_noise_mean", "discrete", float(noise_mean.value))
    by_chance = _SIGMAS * float(noise_mean.standard_error)
    return NoiseMean(
        size=size,
        noise_mean=noise_mean,
        second_moment=V,
        defect=defect,
        channel_mean=channel_mean,
        bound=Bound("noise mean", *about, right, by_chance),
        bound_with_mean=Bound("noise mean, any channel", *about, right + max(m, 0.0) * (size - 1) / size, by_chance),
    )


def noise_mean_sweep(
    train: Train,
    draw: Draw,
    model: FlatModel,
    sizes: Sequence[int],
    projector: Projector,
    *,
    replicates: int = 20,
    pairs: int = 1,
    fresh: int = 64,
    generator: torch.Generator | None = None,
) -> NoiseMeanSweep:
    r""":func:`replace_two` over training-set sizes, with the fitted exponents in n.

    Args:
        train: As in :func:`replace_two`.
        draw: Draws fresh examples.
        model: Network and loss.
        sizes: At least two different training-set sizes n.
        projector: Projector Π.
        replicates: Number of training sets of each size.
        pairs: Number of replaced pairs in each.
        fresh: Fresh examples for the channel mean of each, at least 2.
        generator: Generator for training sets and pairs; by default one with a fixed seed.

    Raises:
        HyperparameterError: numbers out of range.
        DataError: sizes that are all the same, or what :func:`replace_two` refuses.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False), "squared")
    >>> def draw(count, generator):
    ...     return torch.ones(count, 1), torch.randn(count, 1, generator=generator)
    >>> everything = torch.ones(1, dtype=torch.bool)
    >>> sweep = noise_mean_sweep(lambda x, y: torch.zeros(1), draw, model, [4, 64], everything, replicates=200)
    >>> abs(sweep.noise_mean_exponent.value + 1) < 3 * sweep.noise_mean_exponent.standard_error
    True
    """
    if len(set(sizes)) < 2:
        raise DataError(f"a sweep needs at least two different training-set sizes, got {list(sizes)}")
    generator = generator or torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"replicates": replicates, "pairs": pairs, "fresh": fresh, "generator": generator}
    cells = tuple(replace_two(train, draw, model, n, projector, **options) for n in sizes)
    return NoiseMeanSweep(
        cells=cells,
        noise_mean_exponent=power_law_exponent(sizes, [cell.noise_mean for cell in cells]),
        defect_exponent=power_law_exponent(sizes, [cell.defect for cell in cells]),
    )


def _replicate(
    train: Train,
    draw: Draw,
    model: FlatModel,
    n: int,
    project: Callable[[Tensor], Tensor],
    pairs: int,
    fresh: int,
    generator: torch.Generator,
) -> list[float]:
    """One training set: ‖Πμ‖², the two second moments, the squared defect, and the channel mean."""
    inputs, targets = draw(n, generator)
    w = _trained(train, model, inputs, targets)
    own = project(model.per_example_gradients(w, inputs, targets))
    elsewhere = project(model.per_example_gradients(w, *draw(fresh, generator)))
    products = elsewhere.sum(0).square().sum() - elsewhere.square().sum()  # over all pairs of different examples
    replaced, defects = [], []
    for _ in range(pairs):
        pair = torch.randperm(n, generator=generator)[:2]
        w_ij = _trained(train, model, *_with_replaced(inputs, targets, pair, *draw(2, generator)))
        # The pair is fresh for these weights: nothing they were trained on depends on it.
        unseen = project(model.per_example_gradients(w_ij, take_examples(inputs, pair), targets[pair]))
        replaced.append(unseen.square().sum().item() / 2)
        defects.append((own[pair] - unseen).square().sum().item() / 2)
    return [
        own.mean(0).square().sum().item(),
        own.square().sum().item() / n,
        sum(replaced) / pairs,
        sum(defects) / pairs,
        products.item() / (fresh * (fresh - 1)),
    ]


def _trained(train: Train, model: FlatModel, inputs: Inputs, targets: Tensor) -> Tensor:
    w = train(inputs, targets)
    if w.shape != (model.size,):
        raise DataError(f"train must return flat weights [{model.size}] of the model, got shape {list(w.shape)}")
    return w.detach()


def _with_replaced(
    inputs: Inputs, targets: Tensor, rows: Tensor, new_inputs: Inputs, new_targets: Tensor
) -> tuple[Inputs, Tensor]:
    def exchange(old: Tensor, new: Tensor) -> Tensor:
        return old.index_copy(0, rows.to(old.device), new)

    if isinstance(inputs, tuple):
        return tuple(exchange(old, new) for old, new in zip(inputs, new_inputs, strict=True)), exchange(
            targets, new_targets
        )
    assert isinstance(new_inputs, Tensor)
    return exchange(inputs, new_inputs), exchange(targets, new_targets)


def _projection(projector: Tensor, d: int) -> Callable[[Tensor], Tensor]:
    if projector.dtype == torch.bool and projector.shape == (d,):
        return lambda rows: rows[:, projector]
    if projector.dim() != 2 or projector.shape[1] != d or not projector.is_floating_point():
        raise DataError(
            f"the projector must be a mask [{d}] or orthonormal rows [r, {d}], got {projector.dtype} of shape "
            f"{list(projector.shape)}: weight_mask makes a mask"
        )
    off = (projector @ projector.T - torch.eye(len(projector), dtype=projector.dtype, device=projector.device)).abs()
    if off.max().item() > 1e3 * torch.finfo(projector.dtype).eps:
        raise DataError(f"the projector's rows must be orthonormal, got products off by {off.max():.2g}: use their QR")
    return lambda rows: rows @ projector.T.to(rows)


def _mean(values: Tensor, cost: int) -> Estimate:
    return Estimate(values.mean().item(), values.std().item() / math.sqrt(len(values)), cost=cost)


def _root(square: Estimate) -> Estimate:
    value = math.sqrt(float(square.value))
    error = float(square.standard_error) / (2 * value) if value else 0.0
    return Estimate(value, error, cost=square.cost)
