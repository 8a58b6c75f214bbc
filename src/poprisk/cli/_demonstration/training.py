"""Training of a stacked ensemble, with one parameter group per learning rate and separate batches for each seed."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim import Optimizer

from poprisk.cli._demonstration.networks import StackedMLP, member_losses
from poprisk.errors import DataError, HyperparameterError


class StackedTraining:
    """The training of an ensemble: :meth:`advance` takes steps, :meth:`predictions` evaluates the current weights.

    Args:
        network: The members; group g uses the optimizer's parameter group g.
        optimizer: Any torch optimizer over :func:`learning_rate_groups`.
        inputs: Training inputs of each seed.
        labels: Training labels of each seed.
        batches: Indices of the examples of each step, e.g. :func:`epoch_batches`.
    """

    def __init__(
        self,
        network: StackedMLP,
        optimizer: Optimizer,
        inputs: Float[Tensor, "seeds examples pixels"],
        labels: Int[Tensor, "seeds examples"],
        batches: Iterator[Int[Tensor, "seeds batch"]],
    ) -> None:
        self.network, self.optimizer = network, optimizer
        self.inputs, self.labels, self.batches = inputs, labels, batches
        self.step = 0
        self._seed_index = torch.arange(len(inputs)).unsqueeze(1)

    def advance(self, steps: int) -> None:
        """Take a number of optimizer steps with every member."""
        for _ in range(steps):
            index = (self._seed_index, next(self.batches))
            self.optimizer.zero_grad()
            member_losses(self.network(self.inputs[index]), self.labels[index]).sum().backward()
            self.optimizer.step()
            self.step += 1

    @torch.no_grad()
    def predictions(self, inputs: Float[Tensor, "seeds examples pixels"]) -> Int[Tensor, "groups seeds examples"]:
        """The class that each member predicts for each example."""
        return self.network(inputs).argmax(-1)


def learning_rate_groups(network: StackedMLP, learning_rates: Sequence[float]) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: one learning rate for each group of members.

    Raises:
        HyperparameterError: The number of learning rates differs from the number of groups.
    """
    groups = network.group_parameters()
    if len(groups) != len(learning_rates):
        raise HyperparameterError(
            f"expected one learning rate for each of the {len(groups)} groups, got {len(learning_rates)}"
        )
    return [{"params": leaves, "lr": lr} for leaves, lr in zip(groups, learning_rates, strict=True)]


def evaluation_steps(steps: int, evaluations: int) -> list[int]:
    """Evenly spaced steps at which to evaluate, including the last one; at most one evaluation per step.

    >>> evaluation_steps(10, 4)
    [2, 5, 8, 10]
    """
    count = min(evaluations, steps)
    return [round(steps * (i + 1) / count) for i in range(count)]


def epoch_batches(
    num_examples: int, batch_size: int, seeds: Sequence[int], device: torch.device | None = None
) -> Iterator[Int[Tensor, "seeds batch"]]:
    """Endless batches of indices, in a separate order for each seed; an incomplete last batch of an epoch is dropped.

    Raises:
        DataError: The batch is empty or larger than the data.
    """
    if not 1 <= batch_size <= num_examples:
        raise DataError(f"batch_size must lie between 1 and the {num_examples} training examples, got {batch_size}")
    return _shuffled(num_examples, batch_size, seeds, device)


def _shuffled(
    num_examples: int, batch_size: int, seeds: Sequence[int], device: torch.device | None
) -> Iterator[Tensor]:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    while True:
        order = torch.stack([torch.randperm(num_examples, generator=g) for g in generators]).to(device)
        for start in range(0, num_examples - batch_size + 1, batch_size):
            yield order[:, start : start + batch_size]
