"""How many examples and how many columns to work on at a time, so that a product stays within a memory limit."""

from collections.abc import Iterator
from math import ceil

# Numbers held by one block of a product, at most: 512 MiB. Larger blocks are no faster.
BLOCK_BYTES = 2**29
# Below this many examples the matrix products inside are too thin to be fast; columns are split before.
FEW_EXAMPLES = 128
# On a CPU a tangent is made and used once: blocks that stay in its cache are up to twice as fast.
CACHE_BYTES = 2**24


def plan_blocks(
    examples: int, columns: int, per_example: int, per_column: int, itemsize: int, chunk_size: int | None = None
) -> tuple[int, int]:
    r"""Examples and columns per block, with ``columns · (examples · per_example + per_column)`` numbers held.

    Splitting the examples repeats nothing, splitting the columns repeats the forward pass: so all columns stay together
    while a block has many examples.

    >>> plan_blocks(1000, 20, per_example=1_000, per_column=80_000, itemsize=4)
    (1000, 20)
    >>> plan_blocks(1000, 20, per_example=50_000, per_column=80_000, itemsize=4)
    (132, 20)
    """
    room = BLOCK_BYTES // itemsize
    rows = chunk_size
    if rows is None:
        fit = (room // columns - per_column) // max(1, per_example)
        alone = max(1, (room - per_column) // max(1, per_example))
        rows = max(fit, min(FEW_EXAMPLES, alone))
    rows = min(max(1, rows), examples)
    width = min(columns, max(1, room // (rows * per_example + per_column)))
    return rows, width


def cache_rows(columns: int, per_example: int, per_column: int, itemsize: int) -> int:
    r"""Examples per block whose tangents stay in a CPU's cache, but enough to be worth a pass over the weights.

    >>> cache_rows(20, per_example=4_000, per_column=12_000, itemsize=4)  # a convolution: large maps, few weights
    64
    >>> cache_rows(20, per_example=1_100, per_column=170_000, itemsize=4)  # a dense network: many weights
    618
    """
    fit = CACHE_BYTES // (itemsize * max(1, columns) * max(1, per_example))
    return max(fit, 4 * per_column // max(1, per_example), FEW_EXAMPLES // 2)


def slices(total: int, size: int) -> Iterator[slice]:
    """Consecutive slices of nearly equal length, none longer than ``size``.

    >>> list(slices(5, 4))
    [slice(0, 3, None), slice(3, 5, None)]
    """
    even = ceil(total / max(1, ceil(total / size)))
    return (slice(start, min(start + even, total)) for start in range(0, total, max(1, even)))
