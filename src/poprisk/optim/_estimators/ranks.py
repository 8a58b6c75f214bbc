r"""The variance of a gradient that is averaged over processes: each process brings samples of its own.

Under DDP and FSDP2 the average over R ranks is one collective per bucket. A second one of the same size brings what the
ranks differ by; the gradient itself is reduced exactly as without a source.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from poprisk.errors import DataError
from poprisk.optim._estimators.rank_ddp import AllReduce
from poprisk.optim._estimators.rank_fsdp import ReduceScatters, over_replicas
from poprisk.optim._estimators.samples import Source, Tally, check_cleared, gradient_ratio, rescale, used_here
from poprisk.optim._shards import as_part_of, local_part


class RankVariance(Source):
    r"""The variance of the global mean gradient, each rank's gradient being a sample (of ranks and micro-batches).

    Let :math:`x_{rj}` be the gradient of micro-batch j on rank r. ``.grad`` ends as the mean over ranks of the sum over
    micro-batches, :math:`G = \sum_{rj} y_{rj}` with :math:`y_{rj} = x_{rj}/R`. For K = R k independent samples of one
    size its variance is estimated without bias, with K - 1 degrees of freedom, by

    .. math:: \frac{K}{K-1} \sum_{rj} (y_{rj} - \bar y)^2

    which is what :class:`poprisk.MicrobatchVariance` gives in one process over the same K micro-batches. No large
    squares are subtracted, so it is as exact where the noise is far below the signal: under DDP the squared deviations
    from the mean are added up once the mean is there; under FSDP2 every rank's part comes to the rank that owns it.

    It costs a second collective of the gradients' size, in float32 (FSDP2: in the dtype of the reduction), and one
    buffer of that size until the step, two with micro-batches or shards. A uniform rescaling of ``.grad`` afterwards
    (clipping, ``GradScaler.unscale_``) rescales the variance by the square of the factor. Every rank must see batches
    of one size; a parameter that had no part in a sample counts as zero there. Give every rank data of its own: the
    same batch on two ranks is not two samples.

    - **DDP**: micro-batches under ``no_sync()`` are R k samples (hooks note how they differ as they arrive); without
      ``no_sync()`` as well. It uses the model's only communication hook.
    - **FSDP2** (``fully_shard``; also with replication, HSDP): every reduction brings R samples, so gradient
      accumulation gives R k of them, also with ``set_requires_all_reduce(False)``. With
      ``set_requires_gradient_sync(False)`` a rank's accumulated gradient is one sample: R of them, still without bias.
      After ``set_gradient_divide_factor``, y is x over that factor and not over R.

    After a skipped step, clear the gradients with ``zero_grad()`` (or call :meth:`reset`). Do not use
    ``set_to_none=False`` there under FSDP2: gradients filled with zeros look like a step that continues.

    With one rank and one micro-batch there is no variance: the optimizer uses the stream. The paper's
    :math:`\Sigma_B/(b-1)` is over the examples of one batch; this is the same variance, estimated from K group means,
    equal to it for groups of one example.

    Args:
        model: A ``DistributedDataParallel`` model, or the root module given to ``fully_shard``. Hooks stay until
            ``close()``, or the end of a ``with`` block.

    Raises:
        DataError: the model is neither, or already has another source or communication hook, or variances are requested
            for the parameters of another model.
        GradientError: gradients were not cleared before the first micro-batch of a step, or parameters are
            also split by tensor parallelism.

    >>> import torch.distributed as dist
    >>> from torch.distributed import HashStore
    >>> dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    >>> with RankVariance(model) as source:
    ...     for x in (1.0, 3.0):  # here one rank; with four, torchrun starts this script four times
    ...         (model(torch.full((1, 1), x)) / 2).sum().backward()
    ...     print(source.variances(list(model.parameters())))  # the mean of 1 and 3 has variance 1
    [tensor([[1.]])]
    >>> dist.destroy_process_group()
    """

    def __init__(self, model: nn.Module) -> None:
        self._tallies: dict[Tensor, Tally] = {}
        self._closed = False
        model = getattr(model, "_orig_mod", model)  # what torch.compile was given
        sharded = [m for m in model.modules() if hasattr(m, "set_custom_reduce_scatter")]
        if not isinstance(model, DistributedDataParallel) and not sharded:
            raise DataError(
                f"RankVariance needs a DistributedDataParallel model or one that fully_shard was applied to, got "
                f"{type(model).__name__}: wrap it first (FSDP1 is not supported), or, in one process, use "
                "MicrobatchVariance"
            )
        _refuse_a_second(model)
        if isinstance(model, DistributedDataParallel):
            self._transport: AllReduce | ReduceScatters = AllReduce(self, model)
        else:
            self._transport = ReduceScatters(self, sharded)
        self._known = set(model.parameters())
        _SOURCES.update(dict.fromkeys([model, *sharded], weakref.ref(self)))

    def variances(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The variance of each averaged gradient, once; None for what was not averaged, or from one sample only."""
        if parameters and self._known.isdisjoint(parameters):
            raise DataError(
                f"RankVariance was asked for {len(parameters)} parameters, none of which belongs to its model: give "
                "the optimizer the parameters of the model that the source was made of, after that model was wrapped"
            )
        tallies = {p: tally for p, tally in self._tallies.items() if p.grad is not None}
        self.reset()
        check_cleared(tally.leftover for tally in tallies.values())
        samples = max((tally.samples for tally in tallies.values()), default=0)
        if samples < 2:
            return [None] * len(parameters)
        with torch.no_grad():
            return [_variance(p, tallies[p], samples) if p in tallies else None for p in parameters]

    def reset(self) -> None:
        """Discards the samples seen so far."""
        self._tallies = {}
        self._transport.reset()

    def close(self) -> None:
        """Removes the hooks from the model; gradients are averaged as before."""
        self._closed = True
        self._transport.close()
        self.reset()


_SOURCES: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[RankVariance]]" = weakref.WeakKeyDictionary()
"""The last source made of a model."""


def _refuse_a_second(model: nn.Module) -> None:
    """Two sources of one model would take each other's messages."""
    for module in model.modules():
        source = _SOURCES[module]() if module in _SOURCES else None
        if source is not None and not source._closed:
            raise DataError(
                f"this {type(module).__name__} has a RankVariance already, and there can be one at a time: share it, "
                "or close() it first (a with block does)"
            )


def _variance(p: Tensor, tally: Tally, samples: int) -> Tensor | None:
    r"""K/(K-1) Σ (y - G/K)², where K also counts the samples a parameter had no part in.

    From the N parts about another center c = G/n it is Σ (y - c)² + G² (2/n - N/n² - 1/K), whose last term is 0 for
    N = n = K.
    """
    assert p.grad is not None
    if tally.spread is None or tally.norm is None:
        return None
    grad = local_part(p.grad)
    used_here(tally.spread, tally.total)  # made on the stream of the reduction
    spread = tally.spread.to(grad.device)  # FSDP2 may have moved the gradient to the host
    ratio = gradient_ratio(grad, tally.norm.to(grad.device))
    G = grad.to(spread.dtype)
    if tally.total is not None:
        spread = over_replicas(p, tally, spread, G / ratio)
    n, present = tally.samples, tally.present
    zeros = 2 / n - present / n**2 - 1 / samples
    if isinstance(zeros, Tensor):
        zeros = zeros.to(grad.device, spread.dtype)
    variance = (rescale(spread, ratio) + zeros * G * G).mul_(samples / (samples - 1)).clamp_(min=0)
    return variance if p.grad is grad else as_part_of(p, variance)
