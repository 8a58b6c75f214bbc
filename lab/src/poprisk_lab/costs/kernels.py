r"""What tangent kernels cost: a tile by each method, a product that forms none.

n and n' examples, p outputs each, N = n p, d weights, f operations of a forward pass, :math:`f_1` those of the first
layer, A activations of an example. Numbers have 4 bytes. How often memory is passed over was counted operation by
operation (``tests/scaling``).
"""

from math import ceil

from poprisk_lab.costs.cost import OperationCost
from poprisk_lab.costs.network import LayerSize, Network

_NUMBER = 4
_HALF = 2
# Columns of a panel of rounded rows: poprisk.operators._kernels.rounded.PANEL.
_PANEL = 16384
# Reading or writing a number costs as much as this many operations in a product: PASS_FLOPS of the kernels' features.
_PASS_FLOPS = 32
# A product with a Jacobian is cut into blocks of this many bytes, with at least this many examples.
BLOCK_BYTES, _FEW_EXAMPLES = 2**29, 128
# Numbers that a column holds for each that a layer gives: what goes into an activation, and what comes out.
_TWICE = 2


def product_blocks(network: Network, examples: float, columns: float) -> tuple[int, int]:
    r"""Into how many stretches of examples and of columns a product with the Jacobian is cut.

    Columns hold :math:`k (n (2A + \mathrm{in}) + d)` numbers; where these are more than 512 MiB examples are cut first,
    down to 128 at a time, then columns. Every stretch of examples passes over all k d numbers again, every stretch of
    columns runs the forward pass again.

    >>> product_blocks(Network.perceptron([512, 1024, 1024, 4]), 4096, 16)
    (3, 1)
    >>> product_blocks(Network.perceptron([512, 1024, 1024, 4]), 4096, 64)
    (32, 2)
    """
    room, d, held = BLOCK_BYTES // _NUMBER, network.weights, held_by(network)
    alone = max(1, (room - d) // held)
    rows = max((room // columns - d) // held, min(_FEW_EXAMPLES, alone))
    rows = min(max(1, rows), examples)
    width = min(columns, max(1, room // (rows * held + d)))
    return ceil(examples / rows), ceil(columns / width)


def kept_as_factors(layer: LayerSize, outputs: int) -> bool:
    r"""Whether outer products are cheaper for a layer than rows of its Jacobian, by operations for a pair of outputs.

    .. math:: T^2 \big(2\,\mathrm{out} + 2\,\mathrm{in}/p^2 + 32\big) < 2\,\mathrm{in}\cdot\mathrm{out}

    >>> kept_as_factors(LayerSize(512, 512), 1), kept_as_factors(LayerSize(512, 512, positions=64), 1)
    (True, False)
    """
    return layer.positions**2 * (2 * layer.outputs + 2 * layer.inputs / outputs**2 + _PASS_FLOPS) < 2 * layer.weights


def held_by(network: Network) -> int:
    """Numbers that one column holds of one example."""
    first = network.layers[0]
    return _TWICE * network.activations + first.positions * first.inputs


def jacobian_tile(network: Network, rows: float, columns: float, *, chunks: float = 2) -> OperationCost:
    r"""A tile from rows of the Jacobian.

    .. math:: \text{flops} = (n + n') \big(f + p\,(2f - f_1)\big) + 2 N N' d, \qquad
              \text{moved} = 4 \big(4 (N + N')\, d + 10 (N + N')\, A + N N'\big)

    Assumes that both sides are differentiated for this tile alone; more tiles of one side share them.

    Args:
        network: The model.
        rows: n examples.
        columns: n' examples.
        chunks: Stretches of examples that are differentiated at a time.
    """
    p, d = network.outputs, network.weights
    sides, pairs = (rows + columns) * p, rows * columns * p**2
    made = (rows + columns) * (network.forward_flops + p * network.derivative_flops)
    moved = _NUMBER * (4 * sides * d + 10 * sides * network.activations + pairs + 5 * d)
    # Beside the rows of both sides: derivatives of the stretch that is differentiated, and copies of them.
    held = _NUMBER * (sides * d + pairs + 3 * sides / chunks * d)
    return OperationCost(flops=made + 2 * pairs * d, bytes_moved=moved, bytes_held=held, launches=chunks)


def factor_tile(network: Network, rows: float, columns: float, *, chunks: float = 2) -> OperationCost:
    r"""A tile from the outer products of L layers that are each used once.

    .. math:: \text{flops} = (n + n') \big(f + p\,(f - f_1)\big)
              + \sum_{\text{layers}} T^2 \big(2 N N'\,\mathrm{out} + 2 n n'\,\mathrm{in}\big), \qquad
              \text{moved} = 4 \big((4L + 1) N N' + 4 L\, n n' + 4 (N + N') A + 13 (n + n') A\big)

    Assumes that every layer is cheaper as factors (:func:`kept_as_factors`); one that is not adds its rows.
    """
    p = network.outputs
    pairs, sides = rows * columns, rows + columns
    products = sum(
        layer.positions**2 * pairs * (2 * p**2 * layer.outputs + 2 * layer.inputs) for layer in network.layers
    )
    made = sides * (network.forward_flops + p * (network.forward_flops - network.first_flops))
    passes = sum(4 * layer.positions**2 for layer in network.layers)
    moved = (passes + 1) * pairs * p**2 + passes * pairs + (4 * p + 13) * sides * network.activations
    signals = sum(layer.positions * (layer.inputs + p * layer.outputs) for layer in network.layers)
    held = _NUMBER * (sides * signals + 2 * pairs * p**2 + pairs)
    moved = _NUMBER * (moved + 8 * network.weights)
    return OperationCost(flops=made + products, bytes_moved=moved, bytes_held=held, launches=chunks)


def product_tile(network: Network, rows: float, columns: float) -> OperationCost:
    r"""A tile by vector products: each column example's Jacobian, pushed through all row examples.

    .. math:: \text{flops} = n' \Big[f + p\,(2f - f_1) + n \big(p\,(2f - f_1) + f + f_1\big)\Big], \qquad
              \text{moved} = 4 n' \big((4.5 p + 8.5\, c\, p + 3)\, d + 9 (p + 1)\, n A\big)

    One column example at a time, c stretches of row examples (:func:`product_blocks`); no term is the product of d and
    the number of pairs.
    """
    stretches, _ = product_blocks(network, rows, network.outputs)
    p, d, a = network.outputs, network.weights, network.activations
    made = network.forward_flops + p * network.derivative_flops
    pushed = rows * (p * network.derivative_flops + network.forward_flops + network.first_flops)
    moved = _NUMBER * columns * (((4.5 + 8.5 * stretches) * p + 3) * d + 9 * (p + 1) * rows * a)
    held = _NUMBER * (3 * p * d + rows * columns * p**2) + min(BLOCK_BYTES, _NUMBER * p * rows * held_by(network))
    launches = columns * (1 + stretches) / 2
    return OperationCost(flops=columns * (made + pushed), bytes_moved=moved, bytes_held=held, launches=launches)


def rounded_rows(
    forward_flops: float,
    first_flops: float,
    activations: float,
    weights: float,
    *,
    examples: float,
    outputs: float = 1,
    chunks: float = 1,
) -> OperationCost:
    r"""Rows of the Jacobian of a network with convolutions, computed in float32, divided by their norms and rounded.

    .. math:: \text{flops} = n \big(f + p\,(2f - f_1)\big), \qquad
              \text{moved} \approx 4 \big(16\, n p A + 4\, n p d\big) + 2\, n p d

    A here is every number that a forward pass computes, normalizations and activations included.

    Args:
        forward_flops: f.
        first_flops: f₁.
        activations: A.
        weights: d, the length of a row.
        examples: n.
        outputs: p.
        chunks: Stretches of examples that are differentiated at a time.
    """
    rows = examples * outputs
    flops = examples * (forward_flops + outputs * (2 * forward_flops - first_flops))
    moved = _NUMBER * (16 * rows * activations + 4 * rows * weights + 25 * weights) + _HALF * rows * weights
    return OperationCost(flops=flops, bytes_moved=moved, bytes_held=_HALF * rows * weights, launches=chunks)


def rounded_product(rows: float, columns: float, row_length: float) -> OperationCost:
    r"""The product of two sets of rounded rows, panel by panel, in half precision with float32 sums.

    .. math:: \text{half flops} = 2 N N' r, \qquad
              \text{moved} = 2 r (N + N') + 8 N N' \lceil r / 16384 \rceil
    """
    panels = max(1.0, -(-row_length // _PANEL))
    moved = _HALF * row_length * (rows + columns) + 2 * _NUMBER * rows * columns * panels
    held = _HALF * row_length * (rows + columns) + _NUMBER * rows * columns
    return OperationCost(half_flops=2 * rows * columns * row_length, bytes_moved=moved, bytes_held=held, launches=1)


def kernel_product(network: Network, examples: float, columns: float) -> OperationCost:
    r"""The kernel times k columns, never formed: one pull-back and one push-forward of each.

    .. math:: \text{flops} = n \big[2 k (2f - f_1) + c' (2f + f_1)\big], \qquad
              \text{moved} = 4 \big(17\, c\, k d + 15\, k n A + 5 d + 14\, c' n A\big)

    in c stretches of examples and c' of columns (:func:`product_blocks`).
    """
    d, a = network.weights, network.activations
    rows, widths = product_blocks(network, examples, columns)
    forward = widths * (2 * network.forward_flops + network.first_flops)
    flops = examples * (2 * columns * network.derivative_flops + forward)
    moved = _NUMBER * (17 * rows * columns * d + 15 * columns * examples * a + 5 * d + 14 * widths * examples * a)
    held = _NUMBER * (columns * d + 2 * columns * examples * network.outputs) + BLOCK_BYTES
    return OperationCost(flops=flops, bytes_moved=moved, bytes_held=held, launches=rows * widths)


def lanczos(product: OperationCost, size: float, products: float, *, block: float = 1) -> OperationCost:
    r"""Leading eigenpairs from k products of an operator on N numbers, with full orthogonalization.

    .. math:: \text{cost} = \frac{k}{c}\,\text{product of } c \text{ columns} + 4 N k^2 \text{ flops}

    Args:
        product: Cost of the product with a block of columns.
        size: N.
        products: k columns in all.
        block: c, columns in a block.
    """
    basis = OperationCost(
        flops=4 * size * products**2,
        bytes_moved=_NUMBER * 2 * size * products**2 / max(1.0, block),
        bytes_held=product.bytes_held + _NUMBER * size * products,
    )
    return product.repeated(products / block) + basis
