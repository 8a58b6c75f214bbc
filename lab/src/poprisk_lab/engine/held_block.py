"""Examples that a member never trains on: a share of each stream, drawn for each seed, on which it is measured."""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.seeds import stream
from poprisk.errors import HyperparameterError
from poprisk_lab.engine.task import Cohort, ErrorCounting, StackedBatch, StackedTask, StackedWeights

HELD_LOSS, HELD_ERROR = "held loss", "held error"
HALF = "half "
"""Prefix of what is measured on every other example of the block."""
_CHUNK = 1024
"""Maximum number of held examples of a member in one evaluation."""


class HeldBlock:
    """A share of the examples of each stream; their copies are neither kept nor measured.

    Args:
        task: The task; the block depends on its streams only.
        seeds: The distinct seeds.
        share: Share of the examples, between 0 and 1.
        device: Device of the indices.

    Attributes:
        kept: Indices that remain for training, for each stream and seed.
        held: Indices that are held back, for each stream and seed.

    Raises:
        HyperparameterError: the share is not between 0 and 1, or leaves fewer examples than a batch.
    """

    def __init__(self, task: StackedTask, seeds: Sequence[int], share: float, device: torch.device) -> None:
        if not 0 < share < 1:
            raise HyperparameterError(f"the share of examples to hold back must lie between 0 and 1, got {share}")
        self.kept: dict[str, Int[Tensor, "seeds kept"]] = {}
        self.held: dict[str, Int[Tensor, "seeds held"]] = {}
        for name, (count, size) in task.streams.items():
            copies = getattr(task, "copies", 1)
            distinct = count // copies
            number = max(2, round(share * distinct))
            if (distinct - number) * copies < size:
                raise HyperparameterError(
                    f"holding back {number} of the {distinct} examples of {name!r} leaves less than a batch of {size}: "
                    "use a smaller share"
                )
            generators = [torch.Generator().manual_seed(stream(seed, f"held:{name}")) for seed in seeds]
            order = torch.stack([torch.randperm(distinct, generator=generator) for generator in generators])
            self.held[name] = order[:, :number].to(device)
            rest = order[:, number:]
            self.kept[name] = torch.cat([rest + distinct * k for k in range(copies)], 1).to(device)

    def mapped(self, name: str, batches: Iterator[Int[Tensor, "seeds batch"]]) -> Iterator[Int[Tensor, "seeds batch"]]:
        """Batches of positions among the kept examples, as indices of the stream."""
        return (self.kept[name].gather(1, batch) for batch in batches)

    def measure(
        self, cohort: Cohort, weights: StackedWeights, seed_index: Int[Tensor, "members"]
    ) -> dict[str, Float[Tensor, "members"]]:
        """Loss and, for a classification task, error of each member on its block and on every other example of it."""
        asked = {HELD_LOSS: cohort.losses}
        if isinstance(cohort, ErrorCounting):
            asked[HELD_ERROR] = cohort.errors
        halves = [{name: held[seed_index, k::2] for name, held in self.held.items()} for k in (0, 1)]
        counts = [next(iter(half.values())).shape[1] for half in halves]
        values: dict[str, Tensor] = {}
        for name, ask in asked.items():
            first, second = (_mean(ask, weights, half) for half in halves)
            values[HALF + name] = first
            values[name] = (first * counts[0] + second * counts[1]) / sum(counts)
        return values


def _mean(
    ask: Callable[[StackedWeights, StackedBatch], Tensor], weights: StackedWeights, batch: StackedBatch
) -> Float[Tensor, "members"]:
    """The mean over the examples, in chunks; several streams, which need not be equally long, are evaluated at once."""
    if len(batch) > 1:
        return ask(weights, batch)
    ((name, index),) = batch.items()
    chunks = index.split(_CHUNK, 1)
    return torch.stack([ask(weights, {name: part}) * part.shape[1] for part in chunks]).sum(0) / index.shape[1]
