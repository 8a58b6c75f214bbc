"""What the cost models say of sizes that were not measured: larger models, a million examples, many GPUs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from poprisk_lab.costs.cost import OperationCost
from poprisk_lab.costs.kernels import (
    factor_tile,
    jacobian_tile,
    kept_as_factors,
    kernel_product,
    lanczos,
    rounded_product,
    rounded_rows,
)
from poprisk_lab.costs.machine import Fit, Machine
from poprisk_lab.costs.network import Network
from poprisk_lab.costs.page.tables import Measured
from poprisk_lab.costs.training import StateBytes, optimizer_step, rank_variance, sharded_messages, training_step
from poprisk_lab.costs.trajectories import adjoint, retraining

NVLINK, NETWORK = 450e9, 50e9
"""Bytes per second that one GPU sends: NVLink 4 of an H200 (900 GB/s in both directions, NVIDIA's data sheet), and one
400 Gb/s port for each GPU between machines. Assumed, never measured here."""
GPUS_IN_A_MACHINE = 8
TOKENS = 16_384
"""Tokens on one GPU in a training step."""
STATES_SHARE = 0.5
"""Share of a GPU's memory that weights, gradients and states may take; the rest is for activations."""
WORK_SHARE = 0.6
"""Share of a GPU's memory that analyses may fill."""
MANY = 64
"""GPUs of the larger machine that is asked about."""
EXAMPLES = 10**6
QUERIES, FOLDS, PRODUCTS = 1000, 10, 100
SUBSAMPLE = 20_000
ASSUMED_MEMORY = 16e9
"""Bytes, where the machine did not say."""
DISK = 100e12
"""Bytes on disk that a kernel may take."""
PATIENCE = 86_400.0
"""Seconds, a day: what takes longer counts as out of reach."""
# Rows that a kernel holds while columns pass, and examples differentiated at a time, as poprisk.operators plans them.
_HELD, _PASSING, _CHUNK = 3840, 1024, 128
_JOB_OUTPUTS, _JOB_CHUNK = 512, 64
# Numbers that a forward pass computes for each number that a layer gives: normalization and activation come after it.
_COMPUTED = 3

LAYOUTS = {
    "AdamW, float32": StateBytes(s=0),
    "PopRiskAdamW, float32": StateBytes(),
    "PopRiskAdamW, v and s in bfloat16": StateBytes(v=2, s=2),
}
"""What each weight has."""


@dataclass(frozen=True)
class Stand:
    """A network to predict for: equal square layers, each used at every position."""

    name: str
    network: Network

    @staticmethod
    def of(name: str, weights: float, positions: int, depth: int, outputs: int = 1) -> "Stand":
        """A network with about this many weights."""
        return Stand(name, Network.of_square_layers(weights, positions, depth, outputs))


RESNET = Stand.of("ResNet-18's size", 11.2e6, 50, 18)
RESNET_TEN = Stand.of("ResNet-18's size, 10 outputs", 11.2e6, 50, 18, 10)
BILLION = Stand.of("1 B weights, 1,024 tokens", 1e9, 1024, 24)
LARGE = Stand.of("70 B weights, 1,024 tokens", 70e9, 1024, 80)
SMALL = Stand("1 M weights, perceptron", Network.perceptron([784, 700, 600, 10]))


@dataclass(frozen=True)
class Predictor:
    """One machine with what each operation reaches on it."""

    machine: Machine
    fits: Mapping[str, Fit]
    largest: Mapping[str, float]
    """Work of the largest measured size, in seconds at the machine's own speed."""

    @staticmethod
    def of(measured: Measured) -> "Predictor":
        """From a stored benchmark."""
        machine, operations = measured.machine, measured.operations
        largest = {
            name: max(machine.seconds(point.cost) for point in (each.base, *each.points))
            for name, each in operations.items()
        }
        return Predictor(machine, {name: each.fit for name, each in operations.items()}, largest)

    @property
    def memory(self) -> float:
        """Bytes."""
        return self.machine.memory_bytes or ASSUMED_MEMORY

    def seconds(self, operation: str, cost: OperationCost) -> float:
        """On one machine."""
        return self.fits[operation].seconds(self.machine, cost)

    def beyond(self, operation: str, cost: OperationCost) -> float:
        """How many times the largest measured work this is."""
        return self.machine.seconds(cost) / self.largest[operation]

    def has(self, *operations: str) -> bool:
        """Whether all of them were measured."""
        return all(name in self.fits for name in operations)


@dataclass(frozen=True)
class OptimizerAtScale:
    """A training step of a model that is sharded over some GPUs."""

    least: int
    """GPUs that its weights, gradients and states need."""
    held: float
    """Bytes on each GPU of those asked about."""
    step: float
    """Seconds of the optimizer."""
    training: float
    """Seconds of forward and backward pass."""
    beyond: float


def optimizer_at_scale(predictor: Predictor, weights: float, states: StateBytes, ranks: int) -> OptimizerAtScale:
    """One optimizer step beside the training step it ends."""
    room = STATES_SHARE * predictor.memory
    cost = optimizer_step(weights, states, ranks=ranks)
    passes = training_step(weights, TOKENS)
    return OptimizerAtScale(
        ceil(weights * states.held / room),
        cost.bytes_held,
        predictor.seconds("optimizer_step" if states.s or not predictor.has("adamw_step") else "adamw_step", cost),
        predictor.seconds("training_step", passes),
        predictor.beyond("optimizer_step", cost),
    )


@dataclass(frozen=True)
class Messages:
    """What is sent in a step by each rank."""

    own: float
    """Bytes of FSDP2 itself."""
    extra: float
    """Bytes of the variance from ranks."""
    rate: float
    """Bytes per second, assumed."""
    squares: float
    """Seconds to square gradients, at the measured speed of memory."""


def messages(predictor: Predictor, weights: float, ranks: int) -> Messages:
    """Messages of a step with the variance across ranks."""
    extra = rank_variance(weights, ranks)
    rate = NVLINK if ranks <= GPUS_IN_A_MACHINE else NETWORK
    squares = extra.bytes_moved / predictor.machine.bytes_per_second
    return Messages(sharded_messages(weights, ranks).bytes_sent, extra.bytes_sent, rate, squares)


@dataclass(frozen=True)
class WholeKernel:
    """A kernel of all pairs of examples."""

    rows: float
    """Seconds to make rows of the Jacobian, again for every block of rows held."""
    products: float
    """Seconds to multiply them, or of whole tiles."""
    disk: float
    """Bytes, the upper half."""
    held: int
    """Examples whose rows are held, or along the side of a tile."""
    beyond: float

    @property
    def seconds(self) -> float:
        """On one GPU."""
        return self.rows + self.products


def whole_kernel(predictor: Predictor, network: Network, n: float, *, symmetric: bool = True) -> WholeKernel | None:
    """All pairs of n examples from rounded rows; None where not even one example's rows fit.

    Args:
        predictor: The machine.
        network: The model.
        n: Examples.
        symmetric: Whether only the upper half is made; GPUs that have some of the rows each make all columns.
    """
    p, d = network.outputs, network.weights
    room = WORK_SHARE * predictor.memory / (2.0 * d * p)  # examples whose rounded rows fit
    held = min(n, _HELD / p, room * _HELD / (_HELD + _PASSING))
    if held < 1:
        return None
    passing = max(1.0, min(n, _PASSING / p, room - held))
    half = 2 if symmetric else 1
    made = n + n * (ceil(n / held) - (half - 1)) / half
    sizes = (network.forward_flops, network.first_flops, _COMPUTED * network.activations, d)
    chunk = max(1.0, min(_CHUNK, held))
    rows = rounded_rows(*sizes, examples=chunk, outputs=p).repeated(made / chunk)
    tile = rounded_product(held * p, passing * p, d)
    tiles = tile.repeated(max(1.0, n * n / (half * held * passing)))
    beyond = max(predictor.beyond("convolution_rows", rows), predictor.beyond("rounded_product", tiles))
    seconds = predictor.seconds("convolution_rows", rows), predictor.seconds("rounded_product", tiles)
    return WholeKernel(*seconds, 2.0 * (n * p) ** 2, int(held), beyond)


def kernel_by_jobs(predictor: Predictor, network: Network, n: float) -> WholeKernel | None:
    """The upper half in float32 tiles that are each made by themselves; None where not even a tile of one fits."""
    side = min(n, max(1, _JOB_OUTPUTS // network.outputs))
    room = WORK_SHARE * predictor.memory
    while jacobian_tile(network, side, side, chunks=2 * ceil(side / _JOB_CHUNK)).bytes_held > room:
        if side < 2:
            return None
        side /= 2
    options = {"jacobian_tile": jacobian_tile(network, side, side, chunks=2 * ceil(side / _JOB_CHUNK))}
    if all(kept_as_factors(layer, network.outputs) for layer in network.layers):
        options["factor_tile"] = factor_tile(network, side, side)
    operation = min(options, key=lambda name: predictor.seconds(name, options[name]))
    tiles = options[operation].repeated(max(1.0, (n / side) ** 2 / 2))
    disk = 2.0 * (n * network.outputs) ** 2
    return WholeKernel(0.0, predictor.seconds(operation, tiles), disk, int(side), predictor.beyond(operation, tiles))


@dataclass(frozen=True)
class Products:
    """Products with a kernel that is not formed."""

    seconds: float
    """On one GPU."""
    block: int
    """Columns at a time."""
    beyond: float


def kernel_products(predictor: Predictor, network: Network, n: float, count: int = PRODUCTS) -> Products | None:
    """So many columns, with the basis of a Lanczos process; None where weights and one direction do not fit."""
    d = network.weights
    block = int((WORK_SHARE * predictor.memory / 4 - d) // (2 * d))
    if block < 1:
        return None
    block = min(block, count)
    cost = lanczos(kernel_product(network, n, block), n * network.outputs, count, block=block)
    return Products(predictor.seconds("kernel_product", cost), block, predictor.beyond("kernel_product", cost))


@dataclass(frozen=True)
class Through:
    """Queries, or members, through a run."""

    seconds: float
    """On one GPU."""
    held: float
    """Bytes, for all of them at once."""
    turns: int
    """In which they have to be taken."""
    beyond: float
    fits: bool
    """Whether one of them fits in the memory."""


def queries_through(predictor: Predictor, network: Network, steps: float, batch: float) -> Through:
    """The influence of all examples on a thousand queries."""
    return _through(
        predictor, "adjoint", lambda count: adjoint(network, steps=steps, batch=batch, queries=count), QUERIES
    )


def members_through(predictor: Predictor, network: Network, steps: float, batch: float) -> Through:
    """K-fold."""
    return _through(
        predictor, "retraining", lambda count: retraining(network, steps=steps, batch=batch, members=count), FOLDS
    )


def _through(
    predictor: Predictor, operation: str, cost_of_count: Callable[[float], OperationCost], count: int
) -> Through:
    whole, one = cost_of_count(count), cost_of_count(1)
    room = WORK_SHARE * predictor.memory
    turns = min(count, ceil(whole.bytes_held / room))
    part = cost_of_count(ceil(count / turns)).repeated(turns)
    return Through(
        predictor.seconds(operation, part),
        whole.bytes_held,
        turns,
        predictor.beyond(operation, part),
        one.bytes_held <= room,
    )
