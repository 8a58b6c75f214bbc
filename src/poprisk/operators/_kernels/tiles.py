r"""A kernel in tiles, so that the work on it stays within a memory limit.

The plan states its own peak: the features of two tiles (or of all examples, where they fit), the blocks being
multiplied, and what differentiation holds while features are made, a few examples at a time.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from poprisk._core.autodiff import Inputs, slices, take_examples
from poprisk.errors import HyperparameterError
from poprisk.operators._kernels.features import Features, Recipe, contract

# Rows of a tile when memory is plentiful: enough for fast matrix products, few enough to skip most mirrored tiles.
_TILE_ROWS = 512
# Differentiating more examples than fill this many bytes at once is no faster; a GPU wants hundreds in each launch.
_CHUNK_BYTES = {"cpu": 2**27, "cuda": 5 * 2**32}
# Where the system does not tell how much memory is free.
_FALLBACK_MEMORY = 2**32

# The features of some examples, a few at a time.
MakeFeatures = Callable[[Inputs, int], Features]


@dataclass(frozen=True, eq=False)
class Tile:
    """One block of a kernel."""

    rows: slice
    """Where it stands, in outputs (i·p + j)."""
    columns: slice
    block: Tensor
    bound: float | None = None
    r"""On :math:`|\Delta K_{ij}| / \sqrt{K_{ii} K_{jj}}`, where products were made in lower precision."""


@dataclass(frozen=True)
class TilePlan:
    """How the examples are cut."""

    side: int
    """Examples along one side of a tile."""
    chunk: int
    """Examples differentiated at a time."""
    keep: bool
    """Whether the features of all examples are kept, so that each is made once."""
    bytes: int
    """Peak of memory in use by the work and the result, as estimated."""


def plan_tiles(
    recipe: Recipe,
    n: int,
    others: int | None,
    itemsize: int,
    memory: int,
    *,
    result: int = 0,
    device: torch.device | None = None,
) -> TilePlan:
    """The plan that makes features fewest times within a memory limit.

    Args:
        recipe: How features are made.
        n: Examples along the rows.
        others: Examples along the columns; None for a symmetric kernel.
        itemsize: Bytes of a number.
        memory: Limit in bytes.
        result: Bytes of the result, held all along.
        device: Where it is done; default: the CPU.

    Raises:
        HyperparameterError: not even a tile of one example by one fits; the message says what would.
    """
    preferred = max(1, ceil(_TILE_ROWS / recipe.structure.p))
    longest = max(n, others or 0)

    def fitting(side: int, keep: bool) -> TilePlan | None:
        side = min(side, longest)
        chunk = min(side, max(1, chunk_bytes(device) // max(1, itemsize * features_work(recipe))))
        while True:
            kept = n + (others or 0) if keep else 2 * side
            total = result + itemsize * _peak(recipe, kept, side, chunk)
            if total <= memory:
                return TilePlan(side, chunk, keep, total)
            if chunk == 1:
                return None
            chunk = ceil(chunk / 2)

    for keep, largest in ((True, preferred), (False, longest)):
        side = largest
        while side >= 1:
            plan = fitting(side, keep)
            if plan is not None:
                return plan
            side = side // 2
    least = result + itemsize * _peak(recipe, 2, 1, 1)
    raise HyperparameterError(
        f"memory={memory} bytes is too little: {least} bytes are the smallest that work here, {result} of them for the "
        "result; raise the limit, stream kernel_tiles, or use kernel_operator"
    )


def least_bytes(recipe: Recipe, itemsize: int) -> int:
    """Memory for tiles of one example by one, without the result."""
    return itemsize * _peak(recipe, 2, 1, 1)


def chunk_bytes(device: torch.device | None) -> int:
    """What the work on examples that are differentiated together may take.

    >>> chunk_bytes(torch.device("cpu")) < chunk_bytes(torch.device("cuda"))
    True
    """
    return _CHUNK_BYTES.get("cpu" if device is None else device.type, _CHUNK_BYTES["cpu"])


def features_work(recipe: Recipe) -> int:
    """Numbers held per example while features are made."""
    s = recipe.structure
    by_output = sum(layer.positions * layer.outputs for layer in s.layers)
    patches = sum(layer.positions * layer.inputs for layer in recipe.unfolded if layer.positions > 1)
    # Each of the p backward passes holds about as many numbers as the forward pass kept; results are copied once.
    return (s.p + 2) * s.held + 2 * s.p * by_output + 2 * patches + 2 * s.p * recipe.row_length + recipe.factor_length


def _peak(recipe: Recipe, kept: int, side: int, chunk: int) -> int:
    p = recipe.structure.p
    positions = max((layer.positions for layer in recipe.factored), default=1)
    products = (p * positions) ** 2 * side if positions > 1 else (p * side) ** 2
    feature = p * recipe.row_length + recipe.factor_length
    contracting = 2 * products + (p * side) ** 2 + (positions * side) ** 2
    return kept * feature + max(contracting, chunk * features_work(recipe)) + (p * side) ** 2


def free_memory(device: torch.device) -> int:
    """Half of the memory that is free on a device now: the limit where none is given."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    known = [room for room in (_available(), _left_to_the_group()) if room is not None]
    return min(known) // 2 if known else _FALLBACK_MEMORY


def _available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """What the system can give without swapping, file caches that it would drop included."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


# A container's limit and what it has taken of it, in the second and the first version of control groups.
_GROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def _left_to_the_group(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container may still take; file caches count as taken there, and those not in use are added again."""
    for limit, used in _GROUPS:
        try:
            allowed = int((root / limit).read_text())  # "max" stands for no limit, a ValueError
            return max(0, allowed - int((root / used).read_text()) + _caches((root / used).parent / "memory.stat"))
        except (OSError, ValueError):
            continue
    return None


def _caches(stat: Path) -> int:
    """File caches of a group that are not in use."""
    try:
        found = re.search(r"^(?:total_)?inactive_file (\d+)", stat.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def symmetric_tiles(make: MakeFeatures, plan: TilePlan, inputs: Inputs, n: int, p: int) -> Iterator[Tile]:
    """The tiles on and above the diagonal, each computed once; those on it are symmetric to the last bit."""
    parts = list(slices(n, plan.side))
    everything = make(inputs, plan.chunk) if plan.keep else None

    def features(part: slice) -> Features:
        return everything.take(part) if everything is not None else make(take_examples(inputs, part), plan.chunk)

    for i, first in enumerate(parts):
        left = features(first)
        for j, second in enumerate(parts[i:], start=i):
            block = contract(left, left if i == j else features(second))
            if i == j:
                block = block.triu() + block.triu(1).T
            yield Tile(_outputs(first, p), _outputs(second, p), block)


def rectangular_tiles(
    make: MakeFeatures, plan: TilePlan, inputs: Inputs, others: Inputs, counts: tuple[int, int], p: int
) -> Iterator[Tile]:
    """All tiles, row by row."""
    kept = (make(inputs, plan.chunk), make(others, plan.chunk)) if plan.keep else None
    for first in slices(counts[0], plan.side):
        left = kept[0].take(first) if kept else make(take_examples(inputs, first), plan.chunk)
        for second in slices(counts[1], plan.side):
            right = kept[1].take(second) if kept else make(take_examples(others, second), plan.chunk)
            yield Tile(_outputs(first, p), _outputs(second, p), contract(left, right))


def _outputs(examples: slice, p: int) -> slice:
    return slice(examples.start * p, examples.stop * p)
