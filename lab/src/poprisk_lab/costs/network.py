r"""A network as the cost models see it: layers that map each of T positions by one matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from poprisk.errors import DataError


@dataclass(frozen=True)
class LayerSize:
    """One matrix, used once at each of its positions."""

    inputs: int
    outputs: int
    positions: int = 1
    """1 in a plain network, the pixels of a convolution, the tokens of a text."""
    bias: bool = True

    @property
    def weights(self) -> int:
        """Number of weights in the matrix and its bias."""
        return self.inputs * self.outputs + self.bias * self.outputs

    @property
    def flops(self) -> float:
        r""":math:`2\,T\,\mathrm{in}\cdot\mathrm{out}`, of a forward pass of one example."""
        return 2.0 * self.positions * self.inputs * self.outputs


@dataclass(frozen=True)
class Network:
    r"""Layers one after the other, with something cheap between them.

    With f the operations of a forward pass of one example and :math:`f_1` those of its first layer, whose inputs need
    no derivative: a pull-back of a vector takes :math:`2f - f_1`, a push-forward as many, a gradient with its forward
    pass :math:`3f - f_1`.

    >>> network = Network.perceptron([4, 8, 2])
    >>> network.weights, network.forward_flops, network.derivative_flops
    (58, 96.0, 128.0)
    """

    layers: tuple[LayerSize, ...]
    """In order; the last one's outputs at one position are the network's."""
    outputs: int
    """Numbers that an example's prediction has, p."""

    @staticmethod
    def perceptron(sizes: Sequence[int]) -> "Network":
        """Linear layers with biases between these widths.

        Raises:
            DataError: fewer than two widths.
        """
        if len(sizes) < 2:
            raise DataError(f"a network needs inputs and outputs, got the widths {list(sizes)}: give at least two")
        return Network(tuple(LayerSize(a, b) for a, b in pairwise(sizes)), sizes[-1])

    @staticmethod
    def of_square_layers(weights: float, positions: int, depth: int, outputs: int) -> "Network":
        """A stand-in for larger networks: about this many weights in equal layers, each used at every position.

        Raises:
            DataError: a count below 1.

        >>> Network.of_square_layers(1e6, positions=10, depth=4, outputs=1).weights
        1000000
        """
        if min(weights, positions, depth, outputs) < 1:
            raise DataError(f"counts must be at least 1, got {weights}, {positions}, {depth} and {outputs}")
        width = max(1, round((weights / depth) ** 0.5))
        return Network((LayerSize(width, width, positions, bias=False),) * depth, outputs)

    @property
    def weights(self) -> int:
        """All of them, d."""
        return sum(layer.weights for layer in self.layers)

    @property
    def forward_flops(self) -> float:
        """Flops of a forward pass for one example, f."""
        return sum(layer.flops for layer in self.layers)

    @property
    def first_flops(self) -> float:
        """Flops of the first layer for one example."""
        return self.layers[0].flops

    @property
    def derivative_flops(self) -> float:
        """Flops of one vector-Jacobian or Jacobian-vector product for one example, without the forward pass."""
        return 2 * self.forward_flops - self.first_flops

    @property
    def gradient_flops(self) -> float:
        """Flops of the gradient of one example's loss, including the forward pass."""
        return self.forward_flops + self.derivative_flops

    @property
    def activations(self) -> int:
        """Numbers that the layers give for one example."""
        return sum(layer.positions * layer.outputs for layer in self.layers)
