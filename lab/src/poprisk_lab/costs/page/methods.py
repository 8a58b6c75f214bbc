"""Which method to use when: the cheapest that fits, by weights, examples and outputs, and where methods cross."""

from collections.abc import Callable
from dataclasses import dataclass

from poprisk_lab.costs.kernels import factor_tile, jacobian_tile, product_tile
from poprisk_lab.costs.network import Network
from poprisk_lab.costs.page.predictions import (
    DISK,
    MANY,
    PATIENCE,
    WORK_SHARE,
    Predictor,
    kernel_by_jobs,
    kernel_products,
    whole_kernel,
)
from poprisk_lab.costs.page.words import duration, power_words
from poprisk_lab.pages.wording import table

WEIGHTS = (10**6, 10**7, 10**8, 10**9)
COUNTS = (10**3, 10**4, 10**5, 10**6)
OUTPUTS = (1, 10)
POSITIONS, DEPTH = 50, 18
"""Positions and layers of the networks: about as many operations for each weight as in a ResNet-18."""
NEEDED = ("convolution_rows", "rounded_product", "kernel_product", "jacobian_tile", "factor_tile")
"""Operations whose speed the choice follows from."""

CALLS = {
    "dense": "`rounded_kernel(model, w, inputs)`, on one GPU; `train_kernel(…)` where every digit counts",
    "disk tiles": "`JobPlan(store).train_kernel(run, steps)`, `run_jobs(store)` on all GPUs, `open_matrix`",
    "rounded tiles": '`kernel_tiles(model, w, inputs[part], inputs, precision="float16")`, on every GPU its part',
    "products": "`top_eigenpairs(K, k)` with `K = kernel_operator(model, w, inputs)`, on one GPU; a sketch: `K @ X`",
    "subsample": "`rounded_kernel(model, w, inputs[chosen])`: as many examples as another method allows",
}
"""What to call, by method."""


@dataclass(frozen=True)
class Choice:
    """The method for one network and number of examples."""

    method: str
    seconds: float
    """On one GPU, or on many where the method is for them."""

    @property
    def words(self) -> str:
        """For a table."""
        return self.method if self.method == "subsample" else f"{self.method}, {duration(self.seconds)}"


def network_of(weights: float, outputs: int) -> Network:
    """The family of the tables."""
    return Network.of_square_layers(weights, POSITIONS, DEPTH, outputs)


def choose(predictor: Predictor, network: Network, n: float) -> Choice:
    """The first that fits in memory, disk and a day: whole kernels come first, they answer every question."""
    whole, products = whole_kernel(predictor, network, n), kernel_products(predictor, network, n)
    jobs, parts = kernel_by_jobs(predictor, network, n), whole_kernel(predictor, network, n, symmetric=False)
    in_memory = 4.0 * (n * network.outputs) ** 2 <= WORK_SHARE * predictor.memory / 2
    if whole is not None and in_memory and whole.seconds <= PATIENCE:
        return Choice("dense", whole.seconds)
    if jobs is not None and jobs.disk <= DISK and jobs.seconds / MANY <= PATIENCE:
        return Choice("disk tiles", jobs.seconds / MANY)
    if parts is not None and 2 * parts.disk <= DISK and parts.seconds / MANY <= PATIENCE:
        return Choice("rounded tiles", parts.seconds / MANY)
    if products is not None and products.seconds <= PATIENCE:
        return Choice("products", products.seconds)
    return Choice("subsample", float("nan"))


def methods_table(predictor: Predictor) -> str:
    """Rows are networks, columns numbers of examples."""
    head = ["weights", "outputs", *(f"n = {power_words(n)}" for n in COUNTS), "products cheaper from n ="]
    rows = []
    for weights in WEIGHTS:
        for outputs in OUTPUTS:
            network = network_of(weights, outputs)
            cells = [choose(predictor, network, n).words for n in COUNTS]
            rows.append([power_words(weights), str(outputs), *cells, _crossing(predictor, network)])
    return table(head, rows)


def calls_table() -> str:
    """What each word of the table stands for."""
    lines = [["method", "call"], ["---"] * 2, *([name, call] for name, call in CALLS.items())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tile_methods_table(predictor: Predictor) -> str:
    """By which method a float32 tile is cheapest, at each number of positions, and where products win."""
    head = ["positions T", "width", "1 output", "10 outputs", "100 outputs", "vector products from p ="]
    rows = []
    for positions, width in ((1, 1024), (1, 8192), (16, 1024), (64, 1024), (1024, 1024)):
        cells = [_cheapest_tile(predictor, positions, width, p) for p in (1, 10, 100)]
        crossing = first_true(lambda p, t=positions, w=width: _cheapest_tile(predictor, t, w, p) == "vector products")
        rows.append([str(positions), f"{width:,}", *cells, power_words(crossing) if crossing else "never"])
    return table(head, rows)


def first_true(holds: Callable[[int], bool], largest: int = 10**7) -> int | None:
    """The smallest number for which it holds, where it holds for all larger ones; None above the largest.

    >>> first_true(lambda n: n >= 37), first_true(lambda n: False)
    (37, None)
    """
    high = 1
    while not holds(high):
        if high >= largest:
            return None
        high = min(largest, 2 * high)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _crossing(predictor: Predictor, network: Network) -> str:
    """The number of examples from which products are cheaper than the whole kernel."""

    def cheaper(n: int) -> bool:
        whole, products = whole_kernel(predictor, network, n), kernel_products(predictor, network, n)
        return products is not None and (whole is None or products.seconds < whole.seconds)

    found = first_true(cheaper)
    if found is None:
        return "never"
    step = 10 ** max(0, len(str(found)) - 2)
    return f"{round(found / step) * step:,}"


def _cheapest_tile(predictor: Predictor, positions: int, width: int, outputs: int) -> str:
    """Of 256 by 256 examples, launches apart."""
    network = Network.of_square_layers(4 * width**2, positions, 4, outputs)
    sides = (network, 256, 256)
    costs = {"rows": ("jacobian_tile", jacobian_tile(*sides)), "factors": ("factor_tile", factor_tile(*sides))}
    costs["vector products"] = ("product_tile", product_tile(*sides))

    def work(method: str) -> float:
        operation, cost = costs[method]
        return predictor.machine.seconds(cost) / predictor.fits[operation].share

    return min(costs, key=work)
