"""A tile made by itself is the block of the kernel, the same bits whatever was made before, within its limit."""

import pytest
import torch
from kernel_models import MODELS, make, naive_jacobian
from torch.testing import assert_close

from poprisk.errors import HyperparameterError
from poprisk.operators._kernels.method import Method
from poprisk.operators._kernels.plan import plan_tiles
from poprisk.operators._kernels.precision import Precision
from poprisk.operators._kernels.tiles import TileMaker

METHODS = [Method.JACOBIAN_CONTRACTION, Method.LAYER_FACTORS, Method.VECTOR_PRODUCTS]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_a_tile_is_the_block_of_the_naive_kernel(name, method):
    model, w, x = make(name, n=5)
    M = torch.linspace(0.5, 2.0, model.size, dtype=torch.float64)
    J = naive_jacobian(model, x)
    K, p = (J * M) @ J.T, J.shape[0] // 5
    maker = TileMaker(model, w, x, method, chunk=2, preconditioner=M)
    first, second = maker.side(x[:3]), maker.side(x[3:])
    assert_close(maker.block(first, second), K[: 3 * p, 3 * p :], rtol=1e-10, atol=1e-10)
    diagonal = maker.block(first, first)
    assert_close(diagonal, K[: 3 * p, : 3 * p], rtol=1e-10, atol=1e-10)
    assert torch.equal(diagonal, diagonal.T)


@pytest.mark.parametrize("method", METHODS)
def test_the_bits_do_not_depend_on_what_was_made_before(method):
    model, w, x = make("convolutions", n=6)
    one, two = (TileMaker(model, w, x[:1], method, chunk=2) for _ in range(2))
    kept = one.side(x[:3])
    for part in (x[3:], x[:3], x[1:4]):
        one.block(kept, one.side(part))
    assert torch.equal(one.block(kept, one.side(x[3:])), two.block(two.side(x[:3].clone()), two.side(x[3:].clone())))


def test_tiles_shrink_with_the_limit_and_count_within_it():
    model, w, x = make("multilayer", n=400)
    sides = []
    for memory in (2**26, 2**22, 2**19, 2**16):
        plan = plan_tiles(model, w, x, memory=memory, copies=2, separate=True)
        assert plan.bytes <= memory
        assert 1 <= plan.chunk <= plan.rows == plan.columns
        assert plan.method is not Method.AUTO
        sides.append(plan.rows)
    assert sides == sorted(sides, reverse=True)
    assert len(set(sides)) > 2
    assert plan_tiles(model, w, x, memory=2**30, side=30, separate=True).rows == 30
    assert plan_tiles(model, w, x[:4], memory=2**30, separate=True).rows == 4
    assert plan_tiles(model, w, x[:4], x, memory=2**30, separate=True).rows > 4


def test_on_a_gpu_the_rows_of_rounded_tiles_are_held_and_columns_go_past_them():
    """Unless the kernel is symmetric: then a side serves as rows and as columns."""
    model, w, x = make("multilayer", n=5000)
    options = {"precision": Precision.FLOAT16, "separate": True, "device": torch.device("cuda")}
    cross, own = (plan_tiles(model, w, x, others, memory=2**40, **options) for others in (x[:4000], None))
    assert cross.rows > 2 * cross.columns
    assert cross.rows % cross.chunk == cross.columns % cross.chunk == 0
    assert own.rows == own.columns
    assert plan_tiles(model, w, x, x, memory=2**40, side=7, **options).rows == 7
    small = plan_tiles(model, w, x, x, memory=2**26, **options)
    assert small.bytes <= 2**26
    assert small.rows == small.columns < cross.columns


@pytest.mark.parametrize("method", METHODS)
def test_too_little_memory_is_refused(method):
    model, w, x = make("multilayer", n=4)
    with pytest.raises(HyperparameterError, match="memory=10 bytes is too little"):
        plan_tiles(model, w, x, method=method, memory=10, separate=True)
    with pytest.raises(HyperparameterError, match="needs a method other than"):
        TileMaker(model, w, x, Method.AUTO, chunk=1)
