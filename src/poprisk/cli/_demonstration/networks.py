"""Many trainings of a small network as one stacked computation, for all learning rates and seeds."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from poprisk.errors import HyperparameterError


@dataclass(frozen=True)
class MLPShape:
    """Sizes of a fully connected ReLU network."""

    inputs: int
    width: int
    depth: int
    outputs: int

    @property
    def layers(self) -> list[tuple[int, int]]:
        """(fan in, fan out) of each affine layer; ``depth`` counts the hidden ones."""
        sizes = [self.inputs, *[self.width] * self.depth, self.outputs]
        return list(pairwise(sizes))


class StackedMLP(nn.Module):
    """``num_groups`` x ``len(seeds)`` networks in batched matrix products, with separate parameters for each group.

    Each group has its own hyper-parameters (a learning rate). The initial weights of member (g, s) depend only on
    ``seeds[s]``, so groups, and ensembles with the same seeds, are paired.

    Args:
        shape: Sizes of each network.
        seeds: Seeds for the initial weights.
        num_groups: Number of groups.
        dtype: Data type of the weights.
    """

    def __init__(
        self, shape: MLPShape, seeds: tuple[int, ...], num_groups: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        if not seeds or num_groups < 1:
            raise HyperparameterError(f"an ensemble needs a seed and a group, got {len(seeds)} and {num_groups}")
        self.shape, self.seeds, self.num_groups = shape, seeds, num_groups
        members = [initial_weights(shape, seed, dtype) for seed in seeds]
        stacked = [torch.stack(layer) for layer in zip(*members, strict=True)]
        self.leaves = nn.ModuleList(
            nn.ParameterList(nn.Parameter(leaf.clone()) for leaf in stacked) for _ in range(num_groups)
        )

    def group_parameters(self) -> list[list[nn.Parameter]]:
        """The parameters of each group: weights [seeds, out, in] and biases [seeds, 1, out], alternating."""
        return [list(group.parameters()) for group in self.leaves]

    def forward(self, inputs: Float[Tensor, "seeds batch inputs"]) -> Float[Tensor, "groups seeds batch outputs"]:
        """Logits of all members; member (g, s) gets the inputs of seed s."""
        layers = [torch.cat(leaves) for leaves in zip(*self.group_parameters(), strict=True)]
        hidden = inputs.expand(self.num_groups, *inputs.shape).flatten(0, 1)
        for index in range(0, len(layers), 2):
            weight, bias = layers[index : index + 2]
            hidden = torch.baddbmm(bias, hidden if index == 0 else hidden.relu(), weight.mT)
        return hidden.unflatten(0, (self.num_groups, len(self.seeds)))


def initial_weights(shape: MLPShape, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One member's weights [out, in] and biases [1, out], uniform within ±1/√(fan in) as in ``torch.nn.Linear``."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for fan_in, fan_out in shape.layers:
        for size in ((fan_out, fan_in), (1, fan_out)):
            uniform = torch.rand(size, generator=generator, dtype=torch.float64)
            tensors.append(((2 * uniform - 1) / math.sqrt(fan_in)).to(dtype))
    return tensors


def plain_network(shape: MLPShape, seed: int) -> nn.Sequential:
    """One member by itself, with its initial weights.

    >>> sum(p.numel() for p in plain_network(MLPShape(64, 8, 1, 10), 0).parameters())
    610
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in shape.layers:
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    network = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for p, value in zip(network.parameters(), initial_weights(shape, seed), strict=True):
            p.copy_(value.reshape(p.shape))
    return network


def member_losses(
    logits: Float[Tensor, "groups seeds batch classes"], labels: Int[Tensor, "seeds batch"]
) -> Float[Tensor, "groups seeds"]:
    """Mean cross-entropy of each member; the gradient of their sum is each member's own gradient."""
    log_probability = logits.log_softmax(-1)
    index = labels.expand(logits.shape[0], *labels.shape).unsqueeze(-1)
    return -log_probability.gather(-1, index).squeeze(-1).mean(-1)
